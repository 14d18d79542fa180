"""Control laws: pure functions of what was observed, called by the live schemes and by the simulator alike.

No I/O and no clock: times are arguments, in seconds on any clock of the caller's that does not run backwards.
"""
"""Pure control laws: what a scheme decides from numbers. No clocks, no I/O: times are arguments."""
