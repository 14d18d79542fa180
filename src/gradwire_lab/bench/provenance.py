"""Where and with what a run was measured: machine, versions, commit, the load beside it, the network."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from gradwire.telemetry.environment import describe_environment
from gradwire_lab.results.sources import source_hash

_KEPT = ("commit", "date", "cpu", "n_cores", "os", "python", "torch", "network")


def code_state() -> str:
    """A digest of everything that can change a measured number: the packages' Python and the built core."""
    return source_hash("gradwire_lab.bench.measures.trainings")


def describe_run() -> dict[str, Any]:
    """The fields that every record of a run carries, beside the digest of what it depends on."""
    environment = describe_environment()
    return {key: environment[key] for key in _KEPT}


class Load:
    """What else the machine did: used as a context around a run.

    Attributes:
        before: the load average of the minute before.
        during: cores that other processes kept busy, in the mean over the run; None where the kernel does not tell.
    """

    def __enter__(self) -> Load:
        self.before = os.getloadavg()[0]
        self.during: float | None = None
        self._started = _clock(), _busy_s(), _own_s()
        return self

    def __exit__(self, *_: object) -> None:
        (began, busy, own), (ended, busy_now, own_now) = self._started, (_clock(), _busy_s(), _own_s())
        if busy is not None and busy_now is not None and ended > began:
            others = max(0.0, (busy_now - busy) - (own_now - own)) / (ended - began)
            self.during = min(others, float(os.cpu_count() or 1))  # the kernel counts in ticks


def _clock() -> float:
    return os.times().elapsed


def _busy_s() -> float | None:
    """Seconds that all cores of the machine have worked, for anyone."""
    try:
        words = Path("/proc/stat").read_text(encoding="ascii").split("\n", 1)[0].split()[1:]
    except OSError:
        return None
    user, nice, system, _idle, _iowait, irq, softirq = map(int, words[:7])
    return (user + nice + system + irq + softirq) / os.sysconf("SC_CLK_TCK")


def _own_s() -> float:
    """Of these, this process's and its ended children's."""
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


def check_network(n_ranks: int, rate: str) -> float | None:
    """What a plain all-reduce gets through links set to `rate`, as a share of it; None on links that are not shaped."""
    from gradwire.errors import Unsupported
    from gradwire_lab.ranks.netlab.check import measure_rate

    try:
        return 1 + measure_rate(n_ranks, rate, seconds=0.3, repeats=3).deviation
    except Unsupported:  # no right to shape: the records say `loopback` themselves
        return None
