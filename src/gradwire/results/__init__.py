"""Measured results as flat records: written so that nothing measured is lost, and shown. Knows only records.

May use: errors only. Used by: the benchmarks, the simulator, the commands.
"""
