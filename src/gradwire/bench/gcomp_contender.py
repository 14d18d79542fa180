"""GComp's codec in `bench codec`: levels from the optimizer's state inside the timed encode, judged by the paper's rule."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from gradwire.bench.contenders import CodecContender
from gradwire.bench.exponents import entropy_bits, exponent_histogram
from gradwire.bench.level_rule import allowed_scale, dropped_bits
from gradwire.bench.live_optimizer import make_optimizer
from gradwire.codecs.gcomp import GComp, describe
from gradwire.codecs.huffman import HuffmanTable
from gradwire.errors import InvalidArgument
from gradwire.schemes.gcomp.importance import QuantisationMetric
from gradwire.workloads.gradients import GradientFile

_MANTISSA_BITS = 23


class GCompContender(CodecContender):
    """GComp or truncate.

    `table=fitted` (the default) encodes with the table of this gradient's own exponents, as training does once its
    table was refreshed; making a table is no part of the encoder. `table=prior` is the built-in table of a first step.
    Without optimizer state in the file importance "paper" has nothing to read, and "none" takes its place.
    """

    codec: GComp

    def __init__(self, name: str, options: dict[str, Any], file: GradientFile, n_threads: int) -> None:
        options_given, options = options, dict(options)
        table = options.pop("table", "fitted")
        if table not in ("fitted", "prior"):
            raise InvalidArgument(f"table={table}: expected fitted or prior")
        if name == "gcomp" and "importance" not in options:
            options["importance"] = "paper" if file.state is not None else "none"
        elif options.get("importance") == "paper" and file.state is None:
            raise InvalidArgument(f'{file.path}: importance "paper" needs the optimizer\'s state, but {file.missing}')
        options.setdefault("format", 1)  # whose levels the rule below judges
        if name.endswith("gcomp"):
            options.setdefault("rounding", "truncate")
        super().__init__(name, options, file, n_threads)
        self.importance = self.codec.importance + (f" {self.codec.bits}" if self.codec.bits is not None else "")
        self.setting = f"{self.importance}, {table} table"
        if "importance" in options_given:
            self.importance = ""  # the name says it already
        if table == "fitted":
            self.codec.use_table(HuffmanTable.from_histogram(torch.from_numpy(exponent_histogram(file.gradient))))
        self._importance_bytes: torch.Tensor | None = None
        if self.codec.importance == "paper":
            assert file.state is not None
            optimizer = make_optimizer(file.state)
            self._parameter: torch.Tensor = optimizer.param_groups[0]["params"][0]
            self._metric = QuantisationMetric(optimizer, world_size=1)
            self._importance_bytes = torch.empty(file.gradient.size, dtype=torch.uint8)
        self.guarantee = {"paper": "level rule", "none": "bits", "uniform": "rounding"}.get(
            self.codec.importance, "truncation"
        )
        self._may_change = self._changeable_bits()

    def encode(self) -> None:
        if self._importance_bytes is not None:
            self._metric.write_importance([self._parameter], [0], self._importance_bytes)
        self.encoded_bytes = self.codec.encode(self.gradient, self._message, self._importance_bytes)

    def decode(self) -> None:
        self.codec.decode(self.message(), self._values, self._importance_bytes)

    def exponent_bits(self) -> float | None:
        return float(describe(self.message())["exponent_bits"])

    def bound_bytes(self) -> float:
        """Exponents at their entropy over the whole gradient; levels, signs and mantissas at the bits chosen for them."""
        parts = describe(self.message())
        exponent_bits = entropy_bits(exponent_histogram(self.file.gradient)) * self.file.gradient.size
        return exponent_bits / 8 + float(parts["level_bytes"] + parts["mantissa_bytes"])

    def _changeable_bits(self) -> np.ndarray | int:
        """How many low mantissa bits of each value the codec may clear; for "uniform" how many it rounds away."""
        if self.codec.importance == "paper":
            assert self.file.state is not None
            scale, slack = allowed_scale(self.file.state)
            return dropped_bits(self.file.gradient, scale + slack)
        if self.codec.bits is None:
            return 0
        return self.codec.bits if self.codec.importance == "truncate" else _MANTISSA_BITS - self.codec.bits

    def verify(self) -> None:
        values, decoded = self.file.gradient.view(np.uint32), self.decoded().view(np.uint32)
        exponent = values >> 23 & 0xFF
        if self.codec.importance == "uniform":
            # As integers, floats of one sign are in order and evenly spaced within a binade: a carry into the exponent
            # is the next value like any other.
            distance = np.abs(values.astype(np.int64) - decoded.astype(np.int64))
            is_wrong = distance > (1 << self._may_change >> 1)
        else:
            changed = values ^ decoded
            is_wrong = (changed >> np.asarray(self._may_change, np.uint32) != 0) | (changed & decoded != 0)
        is_wrong = np.where(exponent == 0, decoded != 0, is_wrong)  # zeros and subnormals become +0
        is_special = exponent == 0xFF
        self.complain(np.where(is_special, values != decoded, is_wrong))
