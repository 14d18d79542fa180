"""GComp: near-lossless ring all-reduce (Li et al., SoCC 2024)."""
