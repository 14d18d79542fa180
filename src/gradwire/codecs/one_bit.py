"""The codec `one-bit`: the sign of every value, and one or two scales for all of them (Seide et al., Interspeech 2014)."""

from __future__ import annotations

from typing import Any

from gradwire.checks import choice as check_choice
from gradwire.codecs.quantised import Quantised, check_scale_values
from gradwire.codecs.tensors import check_positive
from gradwire.errors import InvalidArgument

_RULES = {"fixed": 0, "mean": 1, "two-means": 2}


class OneBit(Quantised):
    """Values from zero up (and -0.0) decode to +scale, values below zero to -scale. 1/32 of float32.

    Fused form for error feedback: `encode_with_residual(gradient, residual, out, step)`, which is
    residual += gradient; encode(residual); residual -= decoded, in one sweep.

    Args:
        scale: "mean": the mean magnitude, so that the sum of magnitudes is kept; "two-means": the mean of the values
            from zero up for the one sign, of those below for the other, which is the smallest squared error that one
            bit can have; "fixed": `threshold` for every message, as in SlimGC's experiments.
        threshold: only with "fixed"; 0.5 if not given, which is in units of a gradient *summed* over the batch: with a
            mean loss, divide it by the batch size.
        scale_values: values to a scale, 64, 128, ..., 4096; None for one scale a message. A scale is then rounded to
            bfloat16, so that 64 values take 1.25 bits each, 512 take 1.03, and belongs to values of one tensor (`cuts`).
    Raises: InvalidArgument.
    When not to use this: without error feedback; every value decodes to the same magnitude, zeros included.
    """

    name = "one-bit"
    _kind = 0
    _per_word = 32
    _has_kernels = True

    def __init__(self, scale: str = "mean", threshold: float | None = None, scale_values: int | None = None) -> None:
        super().__init__()
        check_choice("scale", scale, _RULES)
        if threshold is not None and scale != "fixed":
            raise InvalidArgument(f'threshold={threshold} means nothing with scale="{scale}": use scale="fixed"')
        if scale_values is not None and scale == "fixed":
            raise InvalidArgument('scale_values means nothing with scale="fixed", which is one for all values')
        self.scale = scale
        self.scale_values = check_scale_values(scale_values)
        self._block = self.scale_values or 0
        self.threshold = check_positive("threshold", 0.5 if threshold is None else threshold)
        self._rule = _RULES[scale]
        self._parameter = self.threshold if scale == "fixed" else 0.0

    @property
    def configuration(self) -> dict[str, Any]:
        return {"scale": self.scale, "threshold": self.threshold, **super().configuration}
