"""A network of namespaces on one machine: ranks with shaped links between them, to measure and to break."""

from gradwire_lab.ranks.netlab.lab import LinkCounters, Netlab
from gradwire_lab.ranks.netlab.rate import format_rate, parse_rate

__all__ = ["LinkCounters", "Netlab", "format_rate", "parse_rate"]
