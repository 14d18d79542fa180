"""gradwire: gradient compression for PyTorch data-parallel training."""
