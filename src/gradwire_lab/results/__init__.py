"""Measured results as data: records by machine and experiment, and tables, plots and pages made from them.

Knows only records and what an experiment says of itself (`experiment.py`). May use: errors only. Used by: the benchmarks,
the report, the simulator, the commands.
"""
