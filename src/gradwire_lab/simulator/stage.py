"""What is simulated, but for the scheme: the network, how long workers compute in a round, and their failures."""

import dataclasses
import itertools
import math
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

from gradwire import checks
from gradwire.errors import InvalidArgument
from gradwire.schemes.auto.costs import LinkCost, connection_rate
from gradwire_lab.simulator.workloads import WorkloadTimes

JITTERS = ("common", "per-worker", "stragglers", "none")
# Both of the paper's distributions have a mean of 1.5 s; a factor is a time over that.
_MEAN_S = 1.5

Trace = tuple[tuple[float, float], ...]  # (seconds from the start, bits a second from then on)
_HOPELESS = 100.0  # failures in the time of a stretch between two checkpoints


class Jitter(ABC):
    """Factors by which a round's computation is longer than the workload says: one draw a round for all workers, or for each.

    Rounds and workers draw from the seed independently, so that schemes meet the same rounds.
    """

    def __init__(self, is_common: bool, seed: int = 0) -> None:
        if seed < 0:
            raise InvalidArgument(f"seed={seed}: expected 0 or more")
        self.is_common, self.seed = is_common, seed

    def factors(self, round_number: int, n_workers: int) -> np.ndarray:
        """(n_workers,) float64; (1,) if the draw is common."""
        return self._draw(np.random.default_rng([self.seed, round_number]), 1 if self.is_common else n_workers)

    @abstractmethod
    def _draw(self, generator: np.random.Generator, n: int) -> np.ndarray: ...


class Uniform(Jitter):
    """U[1 - spread, 1 + spread]; the paper's spread is 0.1, and 0 is no jitter at all."""

    def __init__(self, spread: float = 0.1, is_common: bool = True, seed: int = 0) -> None:
        if not 0 <= spread < 1:
            raise InvalidArgument(f"spread={spread}: expected 0 to below 1")
        super().__init__(is_common or spread == 0, seed)
        self.spread = spread

    def _draw(self, generator: np.random.Generator, n: int) -> np.ndarray:
        return generator.uniform(1 - self.spread, 1 + self.spread, n)


class Stragglers(Jitter):
    """The paper's Fig. 8: [1.33, 2.67] s with a long tail and a mean of 1.5 s, each worker its own draw.

    The paper gives range and mean and not the shape. Here 1.33 s plus a log-normal excess, cut off (drawn again) at the end of
    the range; its median follows from the mean. `sigma` is how long the tail is: docs/simulator.md shows what it changes.
    """

    low_s, high_s = 1.33, 2.67

    def __init__(self, sigma: float = 1.5, seed: int = 0) -> None:
        if not 0.05 <= sigma <= 3:
            raise InvalidArgument(f"sigma={sigma}: expected 0.05 to 3")
        super().__init__(is_common=False, seed=seed)
        self.sigma, self._mu = sigma, self._find_mu(sigma)

    def _draw(self, generator: np.random.Generator, n: int) -> np.ndarray:
        widest = self.high_s - self.low_s
        excess = generator.lognormal(self._mu, self.sigma, n)
        while (outside := excess > widest).any():
            excess[outside] = generator.lognormal(self._mu, self.sigma, int(outside.sum()))
        return (self.low_s + excess) / _MEAN_S

    def _find_mu(self, sigma: float) -> float:
        """The mu at which the mean of the cut-off excess is what is left of 1.5 s."""
        low, high = -12.0, 6.0
        for _ in range(60):  # bisection: the mean grows with mu
            mu = (low + high) / 2
            cut = (math.log(self.high_s - self.low_s) - mu) / sigma
            below = _normal_cdf(cut)
            mean_s = math.exp(mu + sigma**2 / 2) * _normal_cdf(cut - sigma) / below if below > 0 else 0.0
            low, high = (mu, high) if mean_s < _MEAN_S - self.low_s else (low, mu)
        return (low + high) / 2


def jitter_by_name(kind: str, sigma: float = 1.5, seed: int = 0) -> Jitter:
    """One of `JITTERS`; `sigma`: of "stragglers". Raises: InvalidArgument."""
    if kind == "stragglers":
        return Stragglers(sigma, seed)
    if kind not in JITTERS:
        raise InvalidArgument(f"no jitter is called {kind!r}; there are: {', '.join(JITTERS)}")
    return Uniform(0.0 if kind == "none" else 0.1, is_common=kind != "per-worker", seed=seed)


def _normal_cdf(x: float) -> float:
    return 0.5 * math.erfc(-x / math.sqrt(2))


@dataclass(frozen=True)
class Failures:
    """Workers that fail, all of which then go back to the last checkpoint."""

    mtbf_s: float  # mean time between two failures of one worker
    restart_s: float  # until training goes on from a checkpoint
    checkpoint_s: float  # to write one
    # of training between two checkpoints; None: what costs least, sqrt(2 checkpoint_s mtbf_s / workers) (Young, 1974)
    every_s: float | None = None

    def __post_init__(self) -> None:
        for name in ("restart_s", "checkpoint_s"):
            checks.finite(name, getattr(self, name), 0)
        for name, value in (("mtbf_s", self.mtbf_s), ("every_s", self.every_s)):
            if value is not None and not 0 < value < math.inf:
                raise InvalidArgument(f"{name}={value}: expected more than 0")

    def lost_share(self, n_workers: int) -> float:
        """The share of the time that is not training: checkpoints, restarts, and what is computed again (Daly, 2006)."""
        rate = n_workers / self.mtbf_s
        every_s = self.every_s or max(math.sqrt(2 * self.checkpoint_s / rate), 1e-3)
        # Failures come at any time, also while restarting; a stretch is done when none has come in all of it.
        exponent = rate * (every_s + self.checkpoint_s)
        if exponent + rate * self.restart_s > _HOPELESS:
            return 1.0
        return max(0.0, 1 - every_s * rate / (math.exp(rate * self.restart_s) * math.expm1(exponent)))


@dataclass(frozen=True)
class Setting:
    """What is simulated, but for the scheme."""

    workload: WorkloadTimes
    n_workers: int
    rate_bps: float  # of every worker's link, both ways
    rates_bps: tuple[float, ...] | None = None  # of each worker's, instead
    trace: Trace | None = None  # of all links, or of those of `traced_workers`
    traced_workers: tuple[int, ...] | None = None
    jitter: Jitter = field(default_factory=Uniform)
    racks: int | tuple[int, ...] = 1  # or sites: a two-level tree instead of one switch (`Topology`)
    core_bps: float | tuple[float, ...] | None = None
    latency_s: float = 0.0  # from a sender to a receiver, paid by every message that somebody waits for
    core_latency_s: float | None = None  # what it is more between racks, over TCP connections with such losses
    loss: float = 0.0
    streams: int = 1
    at_once: int = 1  # asynchronous collectives under way at a time: one for each stream of NCCL, or thread of Gloo
    speeds: tuple[float, ...] | None = None  # of each worker; 2 is twice as fast as the workload says
    failures: Failures | None = None  # as lost time
    shares_groups: bool = True  # workers that are alike are simulated once; False lists them singly, for tests

    def __post_init__(self) -> None:
        checks.count("n_workers", self.n_workers)
        checks.count("at_once", self.at_once)
        for what, several in (("rates", self.rates_bps), ("speeds", self.speeds)):
            if several is not None and len(several) != self.n_workers:
                raise InvalidArgument(f"{len(several)} {what} for {self.n_workers} workers")
        for speed in self.speeds or ():
            if not 0 < speed < math.inf:
                raise InvalidArgument(f"a speed of {speed}: expected more than 0")
        for rate_bps in self.rates_bps or (self.rate_bps,):
            if not 0 < rate_bps < math.inf:
                raise InvalidArgument(f"a link rate of {rate_bps} bits a second: expected more than 0")
        for name in ("latency_s", "core_latency_s"):
            checks.finite(name, getattr(self, name) or 0.0, 0)
        self.connection_bps  # noqa: B018 (refuses what is wrong)
        for worker in self.traced_workers or ():
            if not 0 <= worker < self.n_workers:
                raise InvalidArgument(f"a trace for worker {worker}: there are workers 0 to {self.n_workers - 1}")

    @property
    def is_one_rack(self) -> bool:
        return self.racks == 1 or (isinstance(self.racks, tuple) and len(self.racks) == 1)

    @property
    def connection_bps(self) -> float:
        """What the connections of two workers in different racks carry. Raises: InvalidArgument (a loss without latency)."""
        if self.core_latency_s is not None:
            return 8 * connection_rate(2 * self.core_latency_s, self.loss, self.streams)
        if self.loss or self.streams != 1:
            raise InvalidArgument("loss and streams are those of paths between racks: give core_latency_s with them")
        return math.inf

    @cached_property
    def link(self) -> LinkCost:
        """The library's: of a rank's link, with what a hop takes between the workers that are farthest apart."""
        rate = min(self.rates_bps or (self.rate_bps,)) / 8
        link = LinkCost(rate, self.latency_s, self.latency_s, 0.0, self.latency_s, at_once=self.at_once)
        return link if self.is_one_rack else link.over(2 * (self.core_latency_s or 0.0), self.loss, self.streams)

    def of_workers(self, n: int) -> "Setting":
        """The first `n` of them, or of equal workers in one rack as many as one likes. Raises: InvalidArgument."""
        checks.count("n_workers", n)
        rates, speeds, sizes = self.rates_bps, self.speeds, self.racks
        if n > self.n_workers:
            if not self.is_one_rack or len(set(rates or ())) > 1 or len(set(speeds or ())) > 1:
                raise InvalidArgument(f"{n} workers of {self.n_workers}: only those that are all alike can grow")
            rates, speeds = rates and rates[:1] * n, speeds and speeds[:1] * n
        if not isinstance(sizes, int):
            ends = [0, *itertools.accumulate(sizes[:-1]), max(n, self.n_workers)]
            sizes = tuple(min(end, n) - start for start, end in itertools.pairwise(ends) if start < n)
        core_bps = self.core_bps
        if isinstance(core_bps, tuple) and isinstance(sizes, tuple):
            core_bps = core_bps[: len(sizes)] if len(sizes) > 1 else None
        return self.replace(
            n_workers=n, rates_bps=rates and rates[:n], speeds=speeds and speeds[:n], racks=sizes, core_bps=core_bps
        )

    def replace(self, **changes: Any) -> "Setting":
        return dataclasses.replace(self, **changes)
