"""Ranks as processes on one machine: started, watched, and put behind shaped links. Knows nothing of compression.

May use: errors only. Used by: the commands and the benchmarks.
"""
