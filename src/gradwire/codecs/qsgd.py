"""The codec `qsgd`: levels between zero and the norm of a block, rounded by chance (Alistarh et al., NeurIPS 2017)."""

from __future__ import annotations

from gradwire.checks import choice as check_choice
from gradwire.codecs.quantised import Quantised
from gradwire.codecs.tensors import check_seed
from gradwire.errors import InvalidArgument

_BLOCKS = tuple(128 << i for i in range(6))


class Qsgd(Quantised):
    """x becomes norm x sign(x) x l / levels, where l is |x| / norm x levels rounded up or down by chance: right on average.

    Every block has its own Euclidean norm; a block of norm zero (below 2^-100) decodes to zeros. With up to 7 levels
    and the sign a value takes 4 bits, with more 8: 0.133 or 0.258 of float32 at 512 values a block.

    Args:
        levels: 1 to 127; 7 in the comparison of SlimGC.
        block: values to a norm: 128, 256, ..., 4096. Smaller blocks have smaller norms and so smaller errors.
        seed: of the rounding.
    Raises: InvalidArgument.
    When not to use this: at levels 7 where one-bit or two-bit with error feedback converges: they send less.
    """

    name = "qsgd"
    _kind = 3
    draws = True
    _has_kernels = True
    feeds_back = False

    def __init__(self, levels: int = 7, block: int = 512, seed: int = 0) -> None:
        super().__init__()
        if isinstance(levels, bool) or not isinstance(levels, int) or not 1 <= levels <= 127:
            raise InvalidArgument(f"levels must be an integer from 1 to 127, got {levels!r}")
        check_choice("block", block, _BLOCKS)
        self.levels = self._levels = levels
        self.block = self._block = block
        self.seed = check_seed(seed)
