"""What to expect before a run: measured on the user's own model and network, predicted for others."""
