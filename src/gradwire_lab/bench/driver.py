"""The one driver of `bench allreduce`, `train` and `regret`, on a rank: warm up, take turns, time, count, gather, record.

A benchmark makes `RankMethod`s and says what a record of them holds; whose turn it is, what is counted in a turn, which links
it runs on, and where records go is done here. The launcher's side is `launching.py`.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import math
import os
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from gradwire import schemes
from gradwire_lab.bench.launching import change_links, write_results
from gradwire_lab.ranks.netlab.rate import format_rate, parse_rate
from gradwire_lab.ranks.network import Network, current_network
from gradwire_lab.results.records import RecordLog

Turn = dict[str, float]


class RankMethod(ABC):
    """What is measured: every rank makes the same ones, and each call is collective.

    Attributes:
        name, options: of its spec.
        times: what each step took so far.
    """

    name: str
    options: dict[str, Any]
    times: list[Any]

    @abstractmethod
    def step(self) -> None:
        """One reduction, or one step of training, whose time goes into `times`."""

    def finish_turn(self) -> None:
        """What was put off is done before the next method's turn."""

    @abstractmethod
    def stats(self) -> dict[str, float]:
        """Its counts so far, such as `sent_bytes`; a turn's are the differences."""

    def close(self) -> None:
        """Let go of everything."""


def make_scheme(name: str, options: dict[str, Any]) -> schemes.Scheme:
    """A scheme of the registry, or "two-level" around the one that its option `scheme` names. Raises: InvalidArgument."""
    if name != "two-level":
        return schemes.by_name(name, **schemes.as_published(name, options))
    inner = str(options.get("scheme", "plain"))
    rest = {key: value for key, value in options.items() if key != "scheme"}
    return schemes.TwoLevel(inner, **schemes.as_published(inner, rest))


@contextlib.contextmanager
def as_rank() -> Iterator[None]:
    """Inside, this process is a rank of Gloo's default group."""
    dist.init_process_group("gloo")
    try:
        yield
    finally:
        dist.destroy_process_group()


def take_turn(method: RankMethod, n_steps: int) -> Turn:
    """Run steps, all ranks starting together, and count what they took on this rank.

    Returns: `started_s` and `ended_s` (`time.perf_counter`); `cpu_s` of all threads of this rank, and of the kernel on their
        behalf; `kernel_bytes`, NaN where the kernel cannot tell; and what the method's own stats have grown by.
    """
    dist.barrier()
    stats, kernel = method.stats(), sent_by_kernel()
    started_s, cpu_s = time.perf_counter(), time.process_time()
    for _ in range(n_steps):
        method.step()
    method.finish_turn()
    turn = {"started_s": started_s, "ended_s": time.perf_counter(), "cpu_s": time.process_time() - cpu_s}
    dist.barrier()  # now everything sent has arrived, so the kernel has counted it
    turn |= {name: value - stats[name] for name, value in method.stats().items()}
    return turn | {"kernel_bytes": sent_by_kernel() - kernel}


def sent_by_kernel() -> float:
    """Bytes that this rank's interface (GLOO_SOCKET_IFNAME) has sent since it came up, headers included.

    The check on what gradwire counts itself. NaN where the kernel cannot tell: no such variable, not Linux, or loopback,
    which carries every rank's traffic. In a lab each rank has a network namespace, hence an interface, of its own.
    """
    interface = os.environ.get("GLOO_SOCKET_IFNAME", "lo")
    with contextlib.suppress(OSError):
        for line in Path("/proc/net/dev").read_text(encoding="ascii").splitlines():
            name, _, columns = line.partition(":")
            if name.strip() == interface != "lo":
                return float(columns.split()[8])  # 8 columns received, then bytes sent
    return math.nan


# ---- what all ranks measured, as one: collective, and the same on every rank


def mean_over_ranks(values: Sequence[float]) -> list[float]:
    """Of each value, the mean over the ranks."""
    summed = torch.tensor(values, dtype=torch.float64)
    dist.all_reduce(summed)
    return (summed / dist.get_world_size()).tolist()


def largest_over_ranks(values: Sequence[float]) -> list[float]:
    """Of each value, the largest of any rank: of seconds, the slowest one's."""
    found = torch.tensor(values, dtype=torch.float64)
    dist.all_reduce(found, op=dist.ReduceOp.MAX)
    return found.tolist()


# ---- the links phase by phase, and records


class Links:
    """The links as the launcher made them, and as `--then` changes them: `networks`, one for each phase."""

    def __init__(self, args: argparse.Namespace) -> None:
        first = current_network()
        later = [tuple(parse_rate(word) for word in rates.split(",")) for rates in args.then]
        self.networks = [first, *(dataclasses.replace(first, rates_bps=rates) for rates in later)]
        self._log = args.log
        self._rates = [rates_of(first), *args.then]
        self._now, self._n_changes = self._rates[0], 0

    def enter(self, phase: int) -> None:
        """Change the links to what they are in this phase. Collective. Raises: GradwireError."""
        if self._rates[phase] == self._now:
            return
        if dist.get_rank() == 0:
            change_links(self._log, self._n_changes, self._rates[phase])
        self._now, self._n_changes = self._rates[phase], self._n_changes + 1
        dist.barrier()


def rates_of(network: Network) -> str:
    """The links' rates as `--rate` takes them: one for all, or one a rank."""
    words = [format_rate(rate) for rate in network.rates_bps]
    return ",".join(words[:1] if len(set(words)) == 1 else words)


class Records:
    """The records of a run so far, `all`, which rank 0 writes as they come: to its launcher, or `--json` and `--csv`."""

    def __init__(self, args: argparse.Namespace) -> None:
        self._args = args
        self.all: list[dict[str, Any]] = []

    def add(self, records: Sequence[dict[str, Any]]) -> None:
        """Raises: GradwireError (they cannot be written)."""
        self.all += records
        if dist.get_rank() == 0 and self._args.log:
            RecordLog(self._args.log).append(records)
        elif dist.get_rank() == 0:
            write_results(self._args, self.all)
