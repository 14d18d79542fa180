"""Link rates as people write them: "1gbit", "2.5gbit", "none", or a number of bits per second."""

from __future__ import annotations

import math
import re

from gradwire.errors import InvalidArgument

__all__ = ["MAX_RATE_BPS", "MIN_RATE_BPS", "format_rate", "parse_rate"]

# tc's units for bits. Its "bps" means bytes per second, everyone else's means bits: neither is taken.
_UNITS = {"bit": 1, "kbit": 10**3, "mbit": 10**6, "gbit": 10**9, "tbit": 10**12}

MIN_RATE_BPS = 10_000  # a full frame (9,014 B) would take 7 s below this: TCP gives up before it learns the rate
MAX_RATE_BPS = 32_000_000_000  # the kernel's 32-bit byte rate ends at 34.3 Gb/s; faster is "none"


def parse_rate(rate: str | int | float | None, most_bps: int = MAX_RATE_BPS) -> int | None:
    """Bits per second of `rate`; None for None and "none" (a link that is not shaped).

    Args:
        rate: "10kbit" to "32gbit" with any decimal fraction ("2.5gbit"), "none", or bits per second as a number.
        most_bps: instead of 32 Gb/s, where no kernel has to shape it.
    Raises: InvalidArgument.
    """
    if rate is None or (isinstance(rate, str) and rate.strip().lower() == "none"):
        return None
    if isinstance(rate, str):
        match = re.fullmatch(r"(\d+(?:\.\d*)?|\.\d+)\s*([a-z]*)", rate.strip().lower())
        if match is None or (match[2] or "bit") not in _UNITS:
            raise InvalidArgument(f"{rate!r} is no rate: write 100mbit, 2.5gbit, none, or a number of bits per second")
        rate_bps = float(match[1]) * _UNITS[match[2] or "bit"]
    elif isinstance(rate, bool) or not isinstance(rate, int | float):
        raise InvalidArgument(f"{rate!r} is no rate: write 100mbit, 2.5gbit, none, or a number of bits per second")
    else:
        rate_bps = float(rate)
    if not math.isfinite(rate_bps) or not MIN_RATE_BPS <= rate_bps <= most_bps:
        raise InvalidArgument(
            f"a rate of {rate} is outside 10kbit to {format_rate(most_bps)}; a link without a limit is 'none'"
        )
    return round(rate_bps)


def format_rate(rate_bps: int | None) -> str:
    """`rate_bps` as `parse_rate` reads it: "1gbit", "2.5gbit", "none"."""
    if rate_bps is None:
        return "none"
    for unit in ("tbit", "gbit", "mbit", "kbit"):
        if rate_bps >= _UNITS[unit]:
            return f"{rate_bps / _UNITS[unit]:.10g}{unit}"
    return f"{rate_bps}bit"
