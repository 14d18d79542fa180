"""Benchmarks: codecs, all-reduce, training and the sweep over all of them. Not part of the public interface."""
