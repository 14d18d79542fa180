"""AQGB and its comparator with a fixed number of bits: every rank broadcasts its quantised gradients to all others."""
