"""Every reduction works on these: buckets, residuals, the session, host copies of device buckets. No algorithm.

May use: wire, telemetry. Used by: schemes, doors, stepping.
"""
