"""Ranks as processes on one machine: started, watched, and put behind shaped links. Knows nothing of compression."""
