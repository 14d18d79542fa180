"""Kernels of gradwire's own on NVIDIA GPUs: their source, their compiler, their driver, and codecs made of them."""
