"""What every reduction works on: buckets, residuals, the session, host copies of device buckets. Plain parts, no algorithm.

May use: wire, telemetry. Used by: schemes, doors, stepping.
"""
