"""Captions: on which network, machine and data a record was measured, in words."""

from collections.abc import Mapping, Sequence
from typing import Any


def describe_network(fields: Mapping[str, Any]) -> str:
    """For captions: how the network of a run or record came about, e.g. `shaped to 1 Gb/s (netlab)`."""
    kind, _, rates = str(fields.get("network") or "").partition(" ")
    rate_bps = fields.get("rate_bps")
    text = kind or "network not recorded"
    if kind == "netlab":
        words = [word for word in rates.split(",") if word] or [str(rate_bps or "none")]
        rates_bps = {"none": None} | {word: float(word) for word in words if word.replace(".", "", 1).isdigit()}
        named = [format_rate(rates_bps[word]) for word in words if word in rates_bps]
        different = " / ".join(dict.fromkeys(named))
        text = "unshaped test network (netlab)" if different == "unshaped" else f"shaped to {different} (netlab)"
    elif kind == "loopback":
        text = "loopback, unshaped"
    elif rate_bps:
        text = f"{format_rate(rate_bps)} ({text})"
    return text + (", computation emulated" if is_emulated(fields) else "")


def describe_networks(sources: Sequence[Mapping[str, Any]]) -> str:
    """`describe_network` of several, those of the test network together: `shaped to 100 Mb/s, 1 Gb/s (netlab)`."""
    different = list(dict.fromkeys(describe_network(source) for source in sources))
    shaped = [text for text in different if text.startswith("shaped to ") and text.endswith(" (netlab)")]
    rates = [text.removeprefix("shaped to ").removesuffix(" (netlab)") for text in shaped]
    joined = [f"shaped to {', '.join(rates)} (netlab)"] if shaped else []
    return "; ".join(joined + [text for text in different if text not in shaped])


def describe_machine(environment: Mapping[str, Any]) -> str:
    """For captions: `AMD EPYC, 2 cores`."""
    n_cores = environment.get("n_cores")
    return str(environment.get("cpu") or "machine not recorded") + (f", {n_cores} cores" if n_cores else "")


def describe_data(fields: Mapping[str, Any]) -> str:
    """For captions: the workload, and what it was fed, e.g. `resnet50 on inputs of the right shape only`."""
    known = {"real": "real data", "shape-only": "inputs of the right shape only, timing counts and loss does not"}
    data = fields.get("data")
    workload = str(fields.get("workload") or "workload not recorded")
    return f"{workload} on {known.get(str(data), data)}" if data else workload


def is_emulated(fields: Mapping[str, Any]) -> bool:
    """Whether the run put calibrated waits in place of forward and backward."""
    return fields.get("compute") == "emulate" or bool(fields.get("emulated"))


def format_rate(rate_bps: float | None) -> str:
    """`100 Mb/s`, `1 Gb/s`; `unshaped` for None."""
    if rate_bps is None:
        return "unshaped"
    for unit, name in ((1e9, "Gb/s"), (1e6, "Mb/s"), (1e3, "kb/s")):
        if rate_bps >= unit:
            return f"{rate_bps / unit:.4g} {name}"
    return f"{rate_bps:.4g} b/s"


def format_bytes(n_bytes: int) -> str:
    """1024 as "1 KiB", 25,000,000 as "25 MB": in the largest unit that divides it, else in bytes."""
    for unit, size in (("MiB", 1 << 20), ("KiB", 1 << 10), ("MB", 10**6), ("kB", 10**3)):
        if n_bytes % size == 0:
            return f"{n_bytes // size} {unit}"
    return f"{n_bytes:,} bytes"


def duration(seconds: float) -> str:
    """`50 s`, `12 min`, `3.4 h`."""
    if seconds < 100:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 6000 else f"{seconds / 3600:.1f} h"
