"""One rank's end of the group: the communication thread ("lane"), what ranks agree on, and how failure is told.

May use: telemetry. Used by: core, exchange, schemes, doors.
"""
