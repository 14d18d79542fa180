"""Tells before a run what to expect: measured on the user's own model and network, predicted for others."""
