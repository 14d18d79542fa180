"""Schemes that only a paper's baseline or an experiment needs; in host memory alone. `import gradwire_lab` registers them."""
