"""SlimGC (Bai et al., 2025): compression where it pays, off the training thread, and steps that do not wait for it."""

from gradwire.schemes.slimgc.scheme import SlimGC

__all__ = ["SlimGC"]
