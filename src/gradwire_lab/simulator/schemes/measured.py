"""What gradwire's schemes were measured to send and to compute: measured.json, made by `gradwire bench run simulator-sizes`.

A measurement holds for its world size. What grows with the number of ranks, and how, is fitted to the bytes measured at
several: as a ring's 2 (N-1)/N of something, or as the N-1 copies of an all-gather.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gradwire import schemes as live
from gradwire.errors import CorruptMessage, IncompatibleVersion, InvalidArgument
from gradwire.exchange.ring import Ring
from gradwire.schemes.auto.costs import CodecCost
from gradwire.schemes.auto.fidelity import NEVER, row_of

TABLE = Path(__file__).with_name("measured.json")
FORMAT = 1

# Whose sums run on while the next bucket is compressed, besides those that `auto` has rows for.
_SUMS = ("plain", "power-sgd-overlap")

_SHAPES = {"ring": lambda n_ranks: 2 * (n_ranks - 1) / n_ranks, "gather": lambda n_ranks: float(n_ranks - 1)}


@dataclass(frozen=True)
class Measurement:
    """One scheme on one workload at one world size, means over ranks and steps.

    Attributes:
        sent_bytes, encode_s, decode_s: of a rank in a step; encode holds whatever is not decoding (importance, tables).
    """

    ranks: int
    n_values: int
    sent_bytes: float
    encode_s: float
    decode_s: float
    commit: str = ""
    date: str = ""


@dataclass(frozen=True)
class Fit:
    """How measurements of one scheme go on to other world sizes.

    Attributes:
        shape: "ring" or "gather".
        sent_bits_per_value: what the shape multiplies.
        error: the largest relative error of the bytes, at the measured world sizes.
    """

    shape: str
    sent_bits_per_value: float
    encode_s_per_value: float
    decode_s_per_value: float
    error: float

    def codec(self, n_workers: int) -> CodecCost:
        """What a value takes among `n_workers`: encoded once whatever their number, decoded as often as it arrives."""
        return CodecCost(
            self.encode_s_per_value if n_workers > 1 else 0.0,
            self.decode_s_per_value * _SHAPES[self.shape](n_workers),
            self.sent_bits_per_value,
        )

    def shape_of(self, scheme: str) -> str:
        """How `scheme` communicates, as its bytes grow."""
        shape = shape_of(scheme)
        return "gather" if self.shape == "gather" else "sum" if shape == "gather" else shape


def shape_of(scheme: str) -> str:
    """How `scheme` goes about its buckets, one of `costs.SHAPES`; this is how its code is, and no measurement."""
    if scheme in _SUMS or scheme not in live.names():
        return "sum"
    # What sends its messages through a ring of frames encodes, sends and decodes side by side, chunk by chunk.
    if isinstance(getattr(live.by_name(scheme), "collective", None), Ring):
        return "ring"
    return "quantised" if scheme in NEVER else row_of(scheme).shape


def fit(measurements: Sequence[Measurement]) -> Fit:
    """The shape that fits the bytes best, and the codec's times at the smallest world, where cores are least contended.

    Raises: InvalidArgument (nothing measured with more than one rank).
    """
    useful = [one for one in measurements if one.ranks > 1]
    if not useful:
        raise InvalidArgument("a scheme's size needs a measurement with at least 2 ranks")
    smallest = min(useful, key=lambda one: one.ranks)

    def fit_as(shape: str) -> Fit:
        factor_of = _SHAPES[shape]
        per_value = [8 * one.sent_bytes / one.n_values / factor_of(one.ranks) for one in useful]
        bits = sum(per_value) / len(per_value)
        error = max(abs(value / bits - 1) for value in per_value) if bits else 0.0
        encode_s, decode_s = smallest.encode_s / smallest.n_values, smallest.decode_s / smallest.n_values
        return Fit(shape, bits, encode_s, decode_s / factor_of(smallest.ranks), error)

    return min(map(fit_as, _SHAPES), key=lambda found: found.error)


def to_text(content: Mapping[str, Any]) -> str:
    """A table's content as its file: JSON, a line a measurement."""
    text = json.dumps(content, indent=1, allow_nan=False)
    return re.sub(r'\{\s*"ranks"[^{}]*\}', lambda found: " ".join(found.group().split()), text) + "\n"


class MeasuredTable:
    """The measurements of one file, by workload and scheme."""

    def __init__(self, content: Mapping[str, Any]) -> None:
        self._content = content

    @classmethod
    def load(cls, path: Path = TABLE) -> MeasuredTable:
        """Raises: InvalidArgument (cannot be read), CorruptMessage (is no such table), IncompatibleVersion."""
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
        except OSError as error:
            raise InvalidArgument(f"cannot read the measured sizes in {path}: {error.strerror}") from error
        except ValueError as error:
            raise CorruptMessage(f"{path} is not a table of measured sizes: {error}") from error
        if not isinstance(content, dict) or not isinstance(content.get("workloads"), dict):
            raise CorruptMessage(f"{path} is not a table of measured sizes: it names no workloads")
        if content.get("format") != FORMAT:
            raise IncompatibleVersion(f"{path}: format {content.get('format')}, this gradwire reads {FORMAT}")
        return cls(content)

    def workloads(self) -> list[str]:
        """What was measured."""
        return sorted(self._content["workloads"])

    def schemes(self, workload: str) -> list[str]:
        """Which schemes were measured on `workload`."""
        return sorted(self._content["workloads"].get(workload, {}).get("schemes", {}))

    def fit(self, scheme: str, workload: str) -> Fit:
        """Raises: InvalidArgument (not measured; the message says how to)."""
        rows = self._content["workloads"].get(workload, {}).get("schemes", {}).get(scheme)
        if rows is None:
            raise InvalidArgument(
                f"scheme {scheme!r} was not measured on {workload!r}; there are: {', '.join(self.schemes(workload))}. "
                "`gradwire bench run simulator-sizes` measures what is missing"
            )
        try:
            return fit([Measurement(**row) for row in rows])
        except TypeError as error:
            raise CorruptMessage(f"the measured sizes of {scheme!r} are not whole: {error}") from error
