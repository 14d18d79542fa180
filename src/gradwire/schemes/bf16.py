"""The scheme `bf16`: gradients rounded to bfloat16, summed by the backend, and put back: PyTorch's bf16_compress_hook.

Half the bytes of float32 for next to no processor time. A bfloat16 keeps 8 bits of a value and float32's whole range,
so no scale is needed and nothing overflows. The backend rounds every partial sum, so errors grow slowly with the ranks.

When not to use this: where the mean must be DDP's; with more ranks than about 64, whose sums lose the smaller half of
their bits.
"""

from __future__ import annotations

from typing import ClassVar

import torch

from gradwire.schemes.plain import Plain


class Bf16(Plain):
    """Mean of bfloat16 values. Inf and NaN travel as they are, so a GradScaler sees them; half precisions keep theirs."""

    name = "bf16"
    takes_any_gradient = False
    wire_dtype: ClassVar[torch.dtype | None] = torch.bfloat16
