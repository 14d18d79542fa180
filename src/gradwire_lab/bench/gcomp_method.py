"""GComp's codec in `bench codec`: levels from the optimizer's state inside the timed encode, judged by the paper's rule."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import torch

from gradwire.codecs.gcomp import GCompCodec, describe
from gradwire.codecs.huffman import HuffmanTable
from gradwire.errors import InvalidArgument
from gradwire.schemes.gcomp.importance import QuantisationMetric
from gradwire_lab.bench.codec_methods import CodecMethod
from gradwire_lab.bench.exponents import entropy_bits, exponent_histogram
from gradwire_lab.bench.level_rule import allowed_scale, dropped_bits
from gradwire_lab.bench.live_optimizer import make_optimizer
from gradwire_lab.workloads.gradients import FloatArray, GradientFile

_MANTISSA_BITS = {torch.float32: 23, torch.bfloat16: 7, torch.float16: 10}
_DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in _MANTISSA_BITS}


class GCompMethod(CodecMethod):
    """GComp or truncate; by default its messages of format 2, and with `format=1` truncating ones, as published.

    `table=fitted` (the default) encodes with the table of this gradient's own exponents, as training does once its
    table was refreshed; making a table is no part of the encoder. `table=prior` is the built-in table of a first step.
    `dtype=bfloat16` or `float16`: gradient, parameter and optimizer state are rounded to that dtype, and speeds count
    its bytes. Without optimizer state in the file importance "paper" has nothing to read: "none" takes its place, or with a cap
    "uniform".
    """

    codec: GCompCodec

    def __init__(self, name: str, options: dict[str, Any], file: GradientFile, n_threads: int) -> None:
        options_given, options = options, dict(options)
        table, dtype_name = options.pop("table", "fitted"), options.pop("dtype", "float32")
        if table not in ("fitted", "prior"):
            raise InvalidArgument(f"table={table}: expected fitted or prior")
        if dtype_name not in _DTYPES:
            raise InvalidArgument(f"dtype={dtype_name}: expected {', '.join(_DTYPES)}")
        dtype = _DTYPES[dtype_name]
        if name == "gcomp" and "importance" not in options:
            stand_in = "uniform" if "bits" in options else "none"
            options["importance"] = "paper" if file.state is not None else stand_in
        elif options.get("importance") == "paper" and file.state is None:
            raise InvalidArgument(f'{file.path}: importance "paper" needs the optimizer\'s state, but {file.missing}')
        if options.get("format") == 1:
            if dtype is not torch.float32:
                raise InvalidArgument(f"dtype={dtype_name} is measured with format=2")
            if name == "gcomp":
                options.setdefault("rounding", "truncate")
        super().__init__(name, options, _rounded_file(file, dtype), n_threads, dtype)
        self.importance = self.codec.importance + (f" {self.codec.bits}" if self.codec.bits is not None else "")
        self.setting = f"{self.importance}, format {self.codec.format}, {table} table"
        if dtype is not torch.float32:
            self.setting += f", {dtype_name}"
        if "importance" in options_given:
            self.importance = ""  # the name says it already
        if table == "fitted":
            counts = torch.from_numpy(exponent_histogram(self.file.gradient))
            self.codec.use_table(HuffmanTable.from_histogram(counts))
        self._importance_bytes: torch.Tensor | None = None
        if self.codec.importance == "paper":
            assert self.file.state is not None
            optimizer = make_optimizer(self.file.state, dtype=dtype)
            self._parameter: torch.Tensor = optimizer.param_groups[0]["params"][0]
            self._metric = QuantisationMetric(optimizer, world_size=1)
            self._importance_bytes = torch.empty(file.gradient.size, dtype=torch.uint8)
        by_distance = self.codec.format == 2 or self.codec.rounding == "nearest"
        self.guarantee = {
            "paper": "distance by the rule" if by_distance else "level rule",
            "none": "bits",
            "uniform": "rounding",
        }.get(self.codec.importance, "truncation")
        self._judge = self._make_judge(by_distance)

    def encode(self) -> None:
        if self._importance_bytes is not None:
            self._metric.write_importance([self._parameter], [0], self._importance_bytes)
        self.encoded_bytes = int(self.codec.encode(self.gradient, self._message, self._importance_bytes))

    def decode(self) -> None:
        self.codec.decode(self.message(), self._values, self._importance_bytes)

    def exponent_bits(self) -> float | None:
        return float(describe(self.message())["exponent_bits"])

    def bound_bytes(self) -> float:
        """Exponents at their entropy over the whole gradient; levels, signs and mantissas at the bits chosen for them."""
        parts = describe(self.message())
        exponent_bits = entropy_bits(exponent_histogram(self.file.gradient)) * self.file.gradient.size
        return exponent_bits / 8 + float(parts["level_bytes"] + parts["mantissa_bytes"])

    def _make_judge(self, by_distance: bool) -> Any:
        """A function of the decoded float32 words (n,): which are wrong, zeros, subnormals, Inf and NaN aside."""
        values, codec = self.file.gradient, self.codec
        words, n_mantissa = values.view(np.uint32), _MANTISSA_BITS[self.gradient.dtype]
        if codec.importance == "uniform":
            assert codec.bits is not None
            # As integers, floats of one sign are in order and evenly spaced within a binade: a carry into the exponent
            # is the next value like any other.
            most = 1 << 23 - codec.bits >> 1
            return lambda decoded: np.abs(words.astype(np.int64) - decoded.astype(np.int64)) > most
        scale: np.ndarray | None = None
        if codec.importance == "paper":
            assert self.file.state is not None
            total, slack = allowed_scale(self.file.state)
            scale = total + slack
        if scale is not None and by_distance:
            # Format 2 drops bits worth less than half of what the levels of format 1 may; the nearest is half as far.
            rounds = codec.rounding == "nearest"
            allowed = np.ldexp(scale, -n_mantissa - (codec.format == 2) - rounds)
            if codec.bits is not None:
                allowed = np.maximum(allowed, np.ldexp(np.abs(values.astype(np.float64)), -codec.bits - rounds))
            return lambda decoded: ~_is_near(values, decoded.view(np.float32), allowed)
        if scale is not None:
            may_change: np.ndarray = dropped_bits(values, scale)
        else:
            may_change = np.asarray(0 if codec.bits is None else codec.bits + 23 - n_mantissa)
        mask = may_change.astype(np.uint32)
        return lambda decoded: ((words ^ decoded) >> mask != 0) | ((words ^ decoded) & decoded != 0)

    def verify(self) -> None:
        values, decoded = self.file.gradient.view(np.uint32), self.decoded().view(np.uint32)
        exponent = values >> 23 & 0xFF
        is_wrong = np.where(exponent == 0, decoded != 0, self._judge(decoded))  # zeros and subnormals become +0
        is_special = exponent == 0xFF
        self.complain(np.where(is_special, values != decoded, is_wrong))


def _is_near(values: FloatArray, decoded: FloatArray, allowed: np.ndarray) -> np.ndarray:
    """Whether each decoded value has its sign, and is no further off than `allowed` says."""
    with np.errstate(invalid="ignore", over="ignore"):
        distance = np.abs(values.astype(np.float64) - decoded.astype(np.float64))
        return (distance <= allowed) & (np.sign(values) == np.sign(decoded))


def _rounded_file(file: GradientFile, dtype: torch.dtype) -> GradientFile:
    """What the file would hold in `dtype`, still as float32."""
    if dtype is torch.float32:
        return file

    def rounded(values: FloatArray) -> FloatArray:
        return torch.from_numpy(values).to(dtype).float().numpy()

    state = file.state
    if state is not None:
        arrays = {name: rounded(array) for name, array in state.arrays.items()}
        state = replace(state, parameter=rounded(state.parameter), arrays=arrays)
    return replace(file, gradient=rounded(file.gradient), state=state)
