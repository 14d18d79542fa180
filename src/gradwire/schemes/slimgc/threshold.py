"""SlimGC's communication threshold: from which size on a gradient is worth compressing (Bai et al., 2025, section 3.3).

A table of (size, raw time, compressed time, codec time) gives a benefit for every size and one threshold: the smallest
size above which compression wins at *every* size. The benefit need not rise with the size, so the first size that wins,
which the paper takes, would not do. The live scheme and the simulator both call this; every function is pure.
"""

import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from gradwire.errors import InvalidArgument

# The threshold where compression never pays: larger than any tensor, and still an exact int64 and float64.
NEVER = 1 << 62

# "fit": where the fitted lines cross; "measured": the smallest size in the table from which on all sizes win.
METHODS = ("fit", "measured")


@dataclass(frozen=True)
class SizeTimes:
    """The costs of one size, in seconds.

    Raises: InvalidArgument (a size that is not positive, a time that is negative, not finite or, raw, zero).
    """

    size_bytes: int  # of the tensor, uncompressed
    raw_s: float  # t_c, its communication in full precision
    compressed_s: float  # t_c^q, its communication compressed, without the codec
    codec_s: float  # t_p^q, encoding and decoding, both ends, as far as communication does not hide it

    def __post_init__(self) -> None:
        if isinstance(self.size_bytes, bool) or not isinstance(self.size_bytes, int) or self.size_bytes < 1:
            raise InvalidArgument(f"size_bytes is a positive whole number, not {self.size_bytes!r}")
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
        """The line with alpha, beta >= 0 and the least sum of squared *relative* errors.

        Relative, because sizes span five decades: the start-up cost, which decides, must not drown in the noise of the
        largest transfer. One size alone says nothing of the start: it gives a line through the origin.

        Args:
            sizes_bytes, times_s: at least one, positive and not negative.
        """
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
    """The communication threshold table (Fig. 6) and what follows from it.

    Args:
        rows: one of each size, in any order.
    Raises: InvalidArgument (no rows).
    """

    def __init__(self, rows: Iterable[SizeTimes]) -> None:
        self.rows = tuple(sorted(rows, key=lambda row: row.size_bytes))
        if not self.rows:
            raise InvalidArgument("a threshold table needs at least one measurement")

    @property
    def raw(self) -> LinearCost:
        """alpha + beta x size of the raw communication."""
        return self._fit("raw_s")

    @property
    def compressed(self) -> LinearCost:
        """alpha + beta x size of the compressed communication, codec included."""
        return self._fit("total_compressed_s")

    def _fit(self, name: str) -> LinearCost:
        return LinearCost.fit([row.size_bytes for row in self.rows], [getattr(row, name) for row in self.rows])

    def threshold_bytes(self, method: str = "fit") -> int:
        """The smallest size from which on compression wins at every size; NEVER if it does not at the largest.

        Args:
            method: "fit" compares the fitted lines and so also judges sizes that were not measured; "measured" takes a
                size of the table, as the paper does.
        """
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
    """A threshold given by a user: a whole number of bytes from 0 (compress everything) to NEVER (nothing).

    Raises: InvalidArgument.
    """
    if (
        isinstance(threshold_bytes, bool)
        or not isinstance(threshold_bytes, int | float)
        or not 0 <= threshold_bytes <= NEVER  # which NaN and infinity are not
        or threshold_bytes != int(threshold_bytes)
    ):
        raise InvalidArgument(
            f"threshold_bytes is a whole number from 0 (compress everything) to {NEVER} (nothing), not {threshold_bytes!r}"
        )
    return int(threshold_bytes)


def has_drifted(reference_s: float, current_s: float, factor: float) -> bool:
    """Return whether a step's communication has become `factor` times slower or faster than when the table was measured.

    Args:
        reference_s, current_s: of a typical step, then and now, of the rank that waits least for others. factor: above 1.
    """
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
