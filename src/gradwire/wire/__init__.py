"""One rank's end of the group: the communication thread ("lane"), what ranks agree on, how they find each other and tell
of failure.

May use: telemetry. Used by: core, exchange, schemes, doors.
"""
