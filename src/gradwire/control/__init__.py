"""Control laws: pure functions of what was observed, called by the live schemes and by the simulator alike.

No I/O and no clock: times are arguments, in seconds on any clock of the caller's that does not run backwards.
"""
