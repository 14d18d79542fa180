"""The scheme `auto`: gradwire chooses, step by step, and never slower than plain DDP."""
