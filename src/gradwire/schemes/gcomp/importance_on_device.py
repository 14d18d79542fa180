"""GComp's importance bytes where parameters and moments lie: torch operations, and one byte a value for the host."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["write_importance"]

# As native/gcomp/importance.hpp has them.
_LOWEST_CODE = 348
_INFINITY = 0x7F800000


def write_importance(
    theta: Tensor, second_moment: Tensor | None, first_moment: Tensor | None, a: float, b: float, c: float, out: Tensor
) -> None:
    """out (n,) uint8 = the bytes of `_native.importance` for (n,) float32 operands, all on one device; enqueues only.

    Every product and sum is an operation of its own, and so rounded on its own: as in the kernel for CPUs.
    """
    factor: Tensor | float = b if second_moment is None else second_moment.sqrt().mul_(a).add_(b)
    scale = theta * factor
    if first_moment is not None:
        scale.add_(first_moment * c)
    magnitude = scale.view(torch.int32).bitwise_and_(0x7FFFFFFF)
    code = (magnitude >> 21).sub_(_LOWEST_CODE).clamp_(0, 255)
    code.masked_fill_(magnitude > _INFINITY, 0)
    if second_moment is not None:
        code.masked_fill_(second_moment.view(torch.int32) <= 0, 0)  # on the bits: subnormals count
    out.copy_(code)
