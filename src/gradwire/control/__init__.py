"""SlimGC's threshold: a pure control law, called by the live scheme and by the simulator alike."""
