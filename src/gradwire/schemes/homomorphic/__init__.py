"""The scheme `homomorphic`: sketches that sum without being decompressed, recovered without loss."""
