"""A discrete-event simulator of data-parallel training: what a scheme would do at scales that nobody here has.

The model and its limits: docs/simulator.md.
"""
