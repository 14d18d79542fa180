"""The codec `two-bit`: +t, 0 or -t for every value, by a threshold t (SlimGC's 2-bit quantiser, that of MXNet).

With `levels=4` nothing decodes to zero: a value becomes the nearest of four levels, whose squared error for normally
distributed values is the least that two bits can have (Max 1960): 0.12 of their square, where three levels leave 0.35.
"""

from __future__ import annotations

from typing import Any

from gradwire.codecs.quantised import TWO_SCALES, Quantised, check_scale_values
from gradwire.codecs.tensors import check_positive
from gradwire.errors import InvalidArgument

# Of a threshold that is also what values decode to, in units of the mean magnitude: the squared error is least at sqrt(2)
# for a Laplace distribution and at 1.1 for a Gaussian; 1.25 is 1.2 % and 2.6 % above the least.
DEFAULT_THRESHOLD = 1.25
PAPER_THRESHOLD = 0.5


class TwoBit(Quantised):
    """Values >= t decode to t, values <= -t to -t, others to 0. 1/16 of float32.

    Fused form for error feedback: `encode_with_residual(gradient, residual, out, step)`, which is
    residual += gradient; encode(residual); residual -= decoded, in one sweep.

    Args:
        threshold: t; relative, 1.25 if not given; absolute, 0.5 as in the paper, which is in units of a gradient
            *summed* over the batch (with a mean loss, divide it by the batch size).
        relative: t is in units of each message's mean magnitude. The default, because an absolute threshold that does
            not fit the gradient's scale sends either nothing or noise, and that scale changes in the course of training.
        scale_values: values to a mean magnitude, 64, 128, ..., 4096; None for one threshold a message. A threshold is
            then rounded to bfloat16 and belongs to values of one tensor (`cuts`).
        levels: 3 (+t, 0, -t), or 4: +-0.5675 and +-1.893 mean magnitudes, with `scale_values` only and without a
            threshold.
    Raises: InvalidArgument.
    When not to use this: without error feedback; values below the threshold would never be sent.
    """

    name = "two-bit"
    _kind = 1
    _has_kernels = True

    def __init__(
        self,
        threshold: float | None = None,
        relative: bool = True,
        scale_values: int | None = None,
        levels: int = 3,
    ) -> None:
        super().__init__()
        if levels not in (3, 4):
            raise InvalidArgument(f"levels is 3 or 4, not {levels!r}")
        if levels == 4 and (threshold is not None or not relative or scale_values is None):
            raise InvalidArgument(
                "levels=4 is for scale_values=64, 128, ..., 4096, whose mean magnitudes it follows: leave threshold and "
                "relative out"
            )
        default = DEFAULT_THRESHOLD if relative else PAPER_THRESHOLD
        self.threshold = check_positive("threshold", default if threshold is None else threshold)
        self.relative = bool(relative)
        if scale_values is not None and not relative:
            raise InvalidArgument(
                "scale_values means nothing with relative=False, whose threshold is one for all values"
            )
        self.scale_values = check_scale_values(scale_values)
        self._block = self.scale_values or 0
        self.levels = levels
        self._rule = TWO_SCALES if levels == 4 else 1 if self.relative else 0
        self._parameter = self.threshold

    @property
    def configuration(self) -> dict[str, Any]:
        levels = {"levels": self.levels} if self.levels == 4 else {}
        return {"threshold": self.threshold, "relative": self.relative, **super().configuration, **levels}
