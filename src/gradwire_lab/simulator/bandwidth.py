"""Link rates that change during a run: a list of (second, rate), or a file of them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

from gradwire.errors import InvalidArgument
from gradwire_lab.ranks.netlab.rate import parse_rate

_MOST_BPS = 10**13

Trace = tuple[tuple[float, float], ...]


def make_trace(steps: Sequence[tuple[float, float]]) -> Trace:
    """(seconds since the start, bits a second from then on), sorted and checked.

    Raises: InvalidArgument (nothing in it, a time that is negative or not after the one before, a rate that is not above 0).
    """
    if not steps:
        raise InvalidArgument("a bandwidth trace needs at least one line: seconds,rate")
    before_s = -math.inf
    for at_s, rate_bps in steps:
        if not math.isfinite(at_s) or at_s < 0:
            raise InvalidArgument(f"a bandwidth trace has a time of {at_s} s; times count from the start, 0 or more")
        if at_s <= before_s:
            raise InvalidArgument(f"a bandwidth trace goes from {before_s} s to {at_s} s; times must grow")
        if not (math.isfinite(rate_bps) and rate_bps > 0):
            raise InvalidArgument(f"a bandwidth trace has a rate of {rate_bps} bits a second; rates are above 0")
        before_s = at_s
    return tuple((float(at_s), float(rate_bps)) for at_s, rate_bps in steps)


def parse_trace(text: str) -> Trace:
    """`0=2.5gbit,60=1gbit` or the name of a file with lines `seconds,rate` (# begins a comment).

    Raises: InvalidArgument.
    """
    if "=" in text:
        pairs = [part.split("=", 1) for part in text.split(",")]
        return make_trace([_read_step(pair, text) for pair in pairs])
    try:
        content = Path(text).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidArgument(f"cannot read the bandwidth trace {text}: {error}") from error
    lines = [line.split("#", 1)[0].strip() for line in content.splitlines()]
    return make_trace([_read_step(line.replace(",", " ").split(), line) for line in lines if line])


def _read_step(words: Sequence[str], text: str) -> tuple[float, float]:
    try:
        at, rate = words
        at_s = float(at)
    except ValueError as error:
        raise InvalidArgument(f"{text!r}: expected seconds and a rate, such as 60,1gbit or 60=1gbit") from error
    return at_s, parse_link_rate(rate)


def parse_link_rate(rate: str | float) -> float:
    """Bits a second of a simulated link, up to 10 Tb/s. Raises: InvalidArgument (none: a simulated link has a rate)."""
    rate_bps = parse_rate(rate, _MOST_BPS)
    if rate_bps is None:
        raise InvalidArgument(f"{rate!r}: a simulated link needs a rate; 'none' is not one")
    return float(rate_bps)
