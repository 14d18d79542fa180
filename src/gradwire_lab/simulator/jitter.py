"""How much longer or shorter than usual a worker computes in a round."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod

import numpy as np

from gradwire.errors import InvalidArgument

JITTERS = ("common", "per-worker", "stragglers", "none")
# Both of the paper's distributions have a mean of 1.5 s; a factor is a time over that.
_MEAN_S = 1.5


class Jitter(ABC):
    """Factors by which a round's computation is longer than the workload says.

    Args:
        is_common: one draw a round for all workers, or one for each.
        seed: rounds and workers draw from it independently, so that schemes meet the same rounds.
    """

    def __init__(self, is_common: bool, seed: int = 0) -> None:
        if seed < 0:
            raise InvalidArgument(f"seed={seed}: expected 0 or more")
        self.is_common, self.seed = is_common, seed

    def factors(self, round_number: int, n_workers: int) -> np.ndarray:
        """(n_workers,) float64; (1,) if the draw is common."""
        generator = np.random.default_rng([self.seed, round_number])
        return self._draw(generator, 1 if self.is_common else n_workers)

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
        self.sigma = sigma
        self._mu = self._find_mu()

    def _draw(self, generator: np.random.Generator, n: int) -> np.ndarray:
        widest = self.high_s - self.low_s
        excess = generator.lognormal(self._mu, self.sigma, n)
        while (outside := excess > widest).any():
            excess[outside] = generator.lognormal(self._mu, self.sigma, int(outside.sum()))
        return (self.low_s + excess) / _MEAN_S

    def _find_mu(self) -> float:
        """The mu at which the mean of the cut-off excess is what is left of 1.5 s."""
        low, high = -12.0, 6.0
        for _ in range(60):  # bisection: the mean grows with mu
            middle = (low + high) / 2
            if self._mean_excess_s(middle) < _MEAN_S - self.low_s:
                low = middle
            else:
                high = middle
        return (low + high) / 2

    def _mean_excess_s(self, mu: float) -> float:
        cut = (math.log(self.high_s - self.low_s) - mu) / self.sigma
        below = _normal_cdf(cut)
        return math.exp(mu + self.sigma**2 / 2) * _normal_cdf(cut - self.sigma) / below if below > 0 else 0.0


def jitter_by_name(kind: str, sigma: float = 1.5, seed: int = 0) -> Jitter:
    """One of `JITTERS`; `sigma`: of "stragglers". Raises: InvalidArgument."""
    if kind == "stragglers":
        return Stragglers(sigma, seed)
    if kind not in JITTERS:
        raise InvalidArgument(f"no jitter is called {kind!r}; there are: {', '.join(JITTERS)}")
    return Uniform(0.0 if kind == "none" else 0.1, is_common=kind != "per-worker", seed=seed)


def _normal_cdf(x: float) -> float:
    return 0.5 * math.erfc(-x / math.sqrt(2))
