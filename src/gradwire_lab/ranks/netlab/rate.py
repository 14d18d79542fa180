"""Links as people write them: a rate ("1gbit", "2.5gbit", "none", or bits per second), and behind it the way that they go.

"100mbit/delay=20ms/loss=0.05%" is a line of 100 Mb/s whose packets take 20 ms to every other rank, and of which 0.05 % are
lost. Besides: `down=RATE` (the other direction's), `jitter=TIME`, and of the whole lab `sites=2x2` (two sites of two ranks)
with `site-delay=TIME`, which is added between sites.
"""

import math
import re
from dataclasses import dataclass
from typing import Any

from gradwire.errors import InvalidArgument

# tc's units for bits. Its "bps" means bytes per second, everyone else's means bits: neither is taken.
_UNITS = {"bit": 1, "kbit": 10**3, "mbit": 10**6, "gbit": 10**9, "tbit": 10**12}

MIN_RATE_BPS = 10_000  # a full frame (9,014 B) would take 7 s below this: TCP gives up before it learns the rate
MAX_RATE_BPS = 32_000_000_000  # the kernel's 32-bit byte rate ends at 34.3 Gb/s; faster is "none"


def parse_rate(rate: str | int | float | None, most_bps: int = MAX_RATE_BPS) -> int | None:
    """Bits per second of "10kbit" to "32gbit", or to `most_bps` where no kernel has to shape it. Raises:
    InvalidArgument. None for None and "none" (a link that is not shaped)."""
    if isinstance(rate, str):
        head, _, way = rate.partition("/")
        rate = head if "=" in way else rate  # of a link
    if rate is None or (isinstance(rate, str) and rate.strip().lower() == "none"):
        return None
    match = isinstance(rate, str) and re.fullmatch(r"(\d+(?:\.\d*)?|\.\d+)\s*([a-z]*)", rate.strip().lower())
    if match and (match[2] or "bit") in _UNITS:
        rate_bps = float(match[1]) * _UNITS[match[2] or "bit"]
    elif isinstance(rate, bool | str) or not isinstance(rate, int | float):
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


@dataclass(frozen=True)
class LabLink:
    """One rank's (node's) line."""

    rate_bps: int | None  # from the rank; None: no limit
    down_bps: int | None  # to it
    delay_s: float = 0.0  # one way to a rank with the same line; of the way between two, half is each one's
    jitter_s: float = 0.0
    loss: float = 0.0  # share of the packets that it sends
    site: int = 0
    site_delay_s: float = 0.0  # ranks of different sites are so much farther from each other

    @property
    def is_distant(self) -> bool:
        """Whether it needs more than a token bucket."""
        return self.down_bps != self.rate_bps or any((self.delay_s, self.jitter_s, self.loss, self.site_delay_s))


_FORM = "write RATE/delay=20ms/jitter=1ms/loss=0.05%/down=RATE/sites=2x2/site-delay=40ms, each where it is needed"


def parse_link(text: str | int | float | None, number: int = 0, n_links: int = 1) -> LabLink:
    """The line of rank (node) `number` of `n_links`. Raises: InvalidArgument."""
    rate_bps = down_bps = parse_rate(text)
    found: dict[str, float] = {}
    for word in str(text).split("/")[1:]:
        name, _, value = word.partition("=")
        if name == "down":
            down_bps = parse_rate(value)
        elif name == "loss":
            found["loss"] = parse_share(value)
        elif name == "sites":
            found["site"] = number // _ranks_per_site(value, n_links)
        elif name in ("delay", "jitter", "site-delay"):
            found[f"{name.replace('-', '_')}_s"] = parse_time(value)
        else:
            raise InvalidArgument(f"{text!r}: {word!r} is nothing that a link has: {_FORM}")
    return LabLink(rate_bps, down_bps, **found)  # type: ignore[arg-type]  # site is whole


def with_way(given: Any, rate: str) -> str:
    """`rate`, one or several with commas, and what `given` has of delay, jitter, loss, sites and site_delay: as links."""
    names = ("delay", "jitter", "loss", "sites", "site_delay")
    words = [f"{name.replace('_', '-')}={text}" for name in names if (text := getattr(given, name, None))]
    return ",".join("/".join([one, *words]) for one in rate.split(","))


def parse_time(text: str) -> float:
    """Seconds of "20ms", "300us" or "0.1s"; at most 10 s. Raises: InvalidArgument."""
    match = re.fullmatch(r"(\d+(?:\.\d*)?|\.\d+)(us|ms|s)", text.strip())
    seconds = float(match[1]) * {"us": 1e-6, "ms": 1e-3, "s": 1.0}[match[2]] if match else math.nan
    if not 0 <= seconds <= 10:
        raise InvalidArgument(f"{text!r} is no time up to 10 s: write 20ms, 300us or 0.1s")
    return seconds


def parse_share(text: str) -> float:
    """The share that "0.05%" is; below 100 %. Raises: InvalidArgument."""
    match = re.fullmatch(r"(\d+(?:\.\d*)?|\.\d+)%", text.strip())
    if match is None or float(match[1]) >= 100:
        raise InvalidArgument(f"{text!r} is no share of packets: write 0.05%, below 100%")
    return float(match[1]) / 100


def _ranks_per_site(text: str, n_ranks: int) -> int:
    match = re.fullmatch(r"([1-9]\d*)x([1-9]\d*)", text)
    if match is None or int(match[1]) * int(match[2]) != n_ranks:
        raise InvalidArgument(
            f"sites={text}: write SITESxRANKS, such as 2x2, which make {n_ranks} ranks (nodes) in all"
        )
    return int(match[2])
