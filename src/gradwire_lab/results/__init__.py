"""Measured results as data: records by machine and experiment, and tables, plots and pages made from them."""
