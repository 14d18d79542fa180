"""A network of namespaces on one machine: ranks with shaped links between them, to measure and to break."""

from gradwire.netlab.lab import LinkCounters, Netlab
from gradwire.netlab.rate import format_rate, parse_rate

__all__ = ["LinkCounters", "Netlab", "format_rate", "parse_rate"]
