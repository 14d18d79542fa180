"""A network of namespaces on one machine: ranks with shaped links between them, to measure and to break."""

from gradwire.ranks.netlab.lab import LinkCounters, Netlab
from gradwire.ranks.netlab.rate import format_rate, parse_rate

__all__ = ["LinkCounters", "Netlab", "format_rate", "parse_rate"]
