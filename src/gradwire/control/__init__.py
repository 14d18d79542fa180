"""Pure control laws: what a scheme decides from numbers. No clocks, no I/O: times are arguments."""
