"""GComp's importance bytes where parameters and moments lie: torch operations, and one byte a value for the host."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from gradwire.core.bucket import Bucket

__all__ = ["window_of", "write_importance"]

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


def window_of(
    bucket: Bucket,
    write_window: Callable[..., None],
    parameters: Sequence[Tensor],
    offsets: Sequence[int],
    loss_scale: float,
) -> Callable[[int, int], Tensor]:
    """The importance of values `start` to `end` of a device bucket, in host memory; computed once, on the device.

    Args:
        write_window: as `QuantisationMetric.write_window`.
        parameters, offsets: as they lie in what is encoded.
    Raises: OutOfMemory.
    """
    assert bucket.staged is not None
    device, n_elements = bucket.staged.on_device.device, bucket.n_elements

    def compute() -> Tensor:
        out = torch.zeros(n_elements, dtype=torch.uint8, device=device)
        write_window(parameters, offsets, 0, out, loss_scale, bucket.buffer.dtype)
        return out

    on_host = bucket.staged.compute(compute)
    return lambda start, end: on_host[start:end]
