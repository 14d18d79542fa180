"""SlimGC's communication threshold: from which size on a gradient is worth compressing (Bai et al., 2025, section 3.3).

A table of (size, raw time, compressed time, codec time) gives a benefit for every size and one threshold: the smallest
size above which compression wins at *every* size. The benefit need not rise with the size, so the first size that wins,
which the paper takes, would not do. Of several codecs each tensor gets one (`choose`). The live scheme and the simulator
both call this; every function is pure.
"""

import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from gradwire.checks import count as check_count
from gradwire.errors import InvalidArgument

# The threshold where compression never pays: larger than any tensor, and still an exact int64 and float64.
NEVER = 1 << 62

# "fit": where the fitted lines cross; "measured": the smallest size in the table from which on all sizes win.
METHODS = ("fit", "measured")

# Of the time that communication adds uncompressed: what a coarser choice has to save, and twice that to take another's place.
MARGIN = 0.1


@dataclass(frozen=True)
class SizeTimes:
    """The costs of one size, in seconds. Raises: InvalidArgument (a time that is negative or not finite or, raw, zero)."""

    size_bytes: int  # of the tensor, uncompressed
    raw_s: float  # t_c, its communication in full precision
    compressed_s: float  # t_c^q, its communication compressed, without the codec
    codec_s: float  # t_p^q, encoding and decoding, both ends, as far as communication does not hide it

    def __post_init__(self) -> None:
        check_count("size_bytes", self.size_bytes)
        for name in ("raw_s", "compressed_s", "codec_s"):
            value = getattr(self, name)
            if not isinstance(value, int | float) or isinstance(value, bool) or not math.isfinite(value) or value < 0:
                raise InvalidArgument(
                    f"{name} of {self.size_bytes} bytes is a time of 0 or more seconds, not {value!r}"
                )
        if self.raw_s == 0:
            raise InvalidArgument(
                f"raw_s of {self.size_bytes} bytes is 0: what takes no time cannot be compared; measure it again"
            )

    @property
    def total_compressed_s(self) -> float:
        """t^q: the compressed communication with its codec."""
        return self.compressed_s + self.codec_s

    @property
    def benefit(self) -> float:
        """t_c / (t_c^q + t_p^q): above 1 compression wins."""
        return self.raw_s / self.total_compressed_s if self.total_compressed_s else math.inf


@dataclass(frozen=True)
class LinearCost:
    """alpha + beta x size: what starting a transfer costs, and each byte (of the uncompressed tensor) after that."""

    alpha_s: float
    beta_s_per_byte: float

    @classmethod
    def fit(cls, sizes_bytes: Sequence[float], times_s: Sequence[float]) -> "LinearCost":
        """The line with alpha, beta >= 0 and the least sum of squared *relative* errors. Relative, because sizes span
        five decades: the start-up cost, which decides, must not drown in the noise of the largest transfer. One size
        alone says nothing of the start: it gives a line through the origin."""
        # Weights 1/t^2 make the errors relative; a time of 0 gets the weight of the smallest time there is.
        floor_s = min((t for t in times_s if t > 0), default=1.0)
        points = [(s, t, 1 / max(t, floor_s) ** 2) for s, t in zip(sizes_bytes, times_s, strict=True)]
        weight = math.fsum(w for _, _, w in points)
        mean_size = math.fsum(w * s for s, _, w in points) / weight
        mean_time = math.fsum(w * t for _, t, w in points) / weight
        spread = math.fsum(w * (s - mean_size) ** 2 for s, _, w in points)
        if spread <= 1e-12 * weight * mean_size**2:
            return cls(0.0, mean_time / mean_size)
        beta = math.fsum(w * (s - mean_size) * (t - mean_time) for s, t, w in points) / spread
        alpha = mean_time - beta * mean_size
        if beta < 0:
            return cls(mean_time, 0.0)
        if alpha < 0:
            return cls(0.0, math.fsum(w * s * t for s, t, w in points) / math.fsum(w * s * s for s, _, w in points))
        return cls(alpha, beta)


class ThresholdTable:
    """The communication threshold table (Fig. 6), its rows in any order, and what follows from it.

    Raises: InvalidArgument (no rows).
    """

    def __init__(self, rows: Iterable[SizeTimes]) -> None:
        self.rows = tuple(sorted(rows, key=lambda row: row.size_bytes))
        if not self.rows:
            raise InvalidArgument("a threshold table needs at least one measurement")
        sizes = [row.size_bytes for row in self.rows]
        self.raw = LinearCost.fit(sizes, [row.raw_s for row in self.rows])
        self.compressed = LinearCost.fit(sizes, [row.total_compressed_s for row in self.rows])

    def threshold_bytes(self, method: str = "fit") -> int:
        """The smallest size from which on compression wins at every size; NEVER if it does not at the largest. "fit"
        compares the fitted lines and so also judges sizes that were not measured; "measured" takes a size of the table,
        as the paper does."""
        if method == "measured" or len(self.rows) == 1:
            winning = itertools.takewhile(lambda row: row.benefit > 1, reversed(self.rows))
            return min((row.size_bytes for row in winning), default=NEVER)
        return crossing_bytes(self.raw, self.compressed)

    def as_rows(self) -> list[dict[str, float | int]]:
        """Fig. 6 as plain values: one record a size."""
        return [
            {**asdict(row), "total_compressed_s": row.total_compressed_s, "benefit": row.benefit} for row in self.rows
        ]

    @classmethod
    def from_rows(cls, rows: Iterable[dict[str, Any]]) -> "ThresholdTable":
        """The table of which `as_rows` gave these. Raises: InvalidArgument (a field that is missing or out of range)."""
        try:
            return cls(SizeTimes(r["size_bytes"], r["raw_s"], r["compressed_s"], r["codec_s"]) for r in rows)
        except (KeyError, TypeError) as error:
            raise InvalidArgument(
                f"a row of a threshold table holds size_bytes, raw_s, compressed_s and codec_s: {error}"
            ) from error


def crossing_bytes(raw: LinearCost, compressed: LinearCost) -> int:
    """The smallest whole size from which on `compressed` costs less than `raw` for good; NEVER if there is none."""
    saved_per_byte = raw.beta_s_per_byte - compressed.beta_s_per_byte
    paid_at_start = compressed.alpha_s - raw.alpha_s
    if saved_per_byte < 0 or (saved_per_byte == 0 and paid_at_start >= 0):
        return NEVER
    if paid_at_start < 0 or saved_per_byte == 0:
        return 0
    crossing = paid_at_start / saved_per_byte
    return NEVER if crossing >= NEVER else math.floor(crossing) + 1


def check_threshold(threshold_bytes: Any) -> int:
    """A threshold given by a user: a whole number of bytes from 0 (compress everything) to NEVER (nothing). Raises:
    InvalidArgument."""
    is_number = isinstance(threshold_bytes, int | float) and not isinstance(threshold_bytes, bool)
    if not is_number or not 0 <= threshold_bytes <= NEVER or threshold_bytes != int(threshold_bytes):
        raise InvalidArgument(
            f"threshold_bytes is a whole number from 0 (compress everything) to {NEVER} (nothing), not {threshold_bytes!r}"
        )
    return int(threshold_bytes)


def has_drifted(reference_s: float, current_s: float, factor: float) -> bool:
    """Return whether a step's communication has become `factor` times slower or faster than when the table was measured."""
    if reference_s == 0 or current_s == 0:
        return False  # nothing was communicated: nothing can be said
    return not 1 / factor <= current_s / reference_s <= factor


def log_spaced(sizes_bytes: Iterable[int], n_at_most: int) -> list[int]:
    """At most `n_at_most` (2 or more) of the distinct sizes, evenly spaced in logarithm from the smallest to the largest."""
    sizes = sorted(set(sizes_bytes))
    if len(sizes) <= n_at_most:
        return sizes
    step = math.log(sizes[-1] / sizes[0]) / (n_at_most - 1)
    wanted = [math.log(sizes[0]) + step * index for index in range(1, n_at_most - 1)]
    nearest = {min(sizes, key=lambda size: abs(math.log(size) - at)) for at in wanted}
    return sorted(nearest | {sizes[0], sizes[-1]})


# ---- a codec for every tensor among several, by the time that a step is longer for its communication

# Costs are lines through what was measured of each codec; what the backward pass hides costs nothing; and a coarser codec
# has to save more than a margin, because measured times are noisy and its loss is not.

Choice = tuple[int, ...]  # by tensor of one bucket: 0 for raw, else the place of its codec, from 1


@dataclass(frozen=True)
class BucketSizes:
    """One bucket: when the backward pass hands it over, and the bytes of its tensors, uncompressed."""

    ready_s: float
    tensor_bytes: tuple[int, ...]

    def seconds(self, choice: Choice, costs: Sequence[LinearCost]) -> float:
        """On the wire and in the codecs: tensors of one codec travel together, and each codec starts once."""
        sizes = [0] * len(costs)
        for n_bytes, codec in zip(self.tensor_bytes, choice, strict=True):
            sizes[codec] += n_bytes
        return sum(cost.alpha_s + cost.beta_s_per_byte * size for cost, size in zip(costs, sizes, strict=True) if size)

    def quickest(self, costs: Sequence[LinearCost]) -> Choice:
        """One codec for all tensors, or for each the quickest by itself."""
        codecs, each = range(len(costs)), [BucketSizes(0.0, (n_bytes,)) for n_bytes in self.tensor_bytes]
        by_tensor = tuple(_best([one.seconds((codec,), costs) for codec in codecs]) for one in each)
        choices = [tuple(codec if n_bytes else 0 for n_bytes in self.tensor_bytes) for codec in codecs] + [by_tensor]
        return choices[_best([self.seconds(choice, costs) for choice in choices])]


def exposed_s(buckets: Sequence[BucketSizes], choices: Sequence[Choice], costs: Sequence[LinearCost]) -> float:
    """Seconds from the end of the backward pass, when the last bucket is ready, to that of the communication."""
    done_s = 0.0
    for bucket, choice in zip(buckets, choices, strict=True):
        done_s = max(done_s, bucket.ready_s) + bucket.seconds(choice, costs)
    return done_s - buckets[-1].ready_s if buckets else 0.0


def choose(
    buckets: Sequence[BucketSizes], costs: Sequence[LinearCost], before: Sequence[Choice] | None = None
) -> tuple[Choice, ...]:
    """The finest codecs whose communication adds hardly more than the quickest's; `before`, if it is as good as these.
    `buckets` are in the order in which they are ready; `costs` are raw, then of the codecs from the finest to the
    coarsest, encoding and decoding included."""
    raw = tuple((0,) * len(bucket.tensor_bytes) for bucket in buckets)
    by_coarsest = [tuple(bucket.quickest(costs[: n + 1]) for bucket in buckets) for n in range(len(costs))]
    slack_s = MARGIN * exposed_s(buckets, raw, costs)
    least_s = min(exposed_s(buckets, choices, costs) for choices in by_coarsest)
    if before is not None and exposed_s(buckets, before, costs) <= least_s + 2 * slack_s:
        return tuple(before)
    chosen = list(next(one for one in by_coarsest if exposed_s(buckets, one, costs) <= least_s + slack_s))
    for place in range(len(buckets)):  # what comes first is hidden best: there finer ones cost nothing
        for finer in by_coarsest:
            tried = [*chosen[:place], finer[place], *chosen[place + 1 :]]
            if exposed_s(buckets, tried, costs) <= least_s + slack_s:
                chosen = tried
                break
    return tuple(chosen)


def _best(times_s: Sequence[float]) -> int:
    """The place of the least time; a later one only if it saves more than the margin."""
    best = 0
    for place, time_s in enumerate(times_s):
        best = place if time_s < (1 - MARGIN) * times_s[best] else best
    return best
