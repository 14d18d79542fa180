"""The GComp paper's figures about gradients and codes, drawn from gradient files: numbers, plots, command."""
