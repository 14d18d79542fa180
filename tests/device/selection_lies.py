"""Elements that no rank sends, and what adding them has to do: say so, and write nothing outside."""

from __future__ import annotations

import contextlib
from typing import NamedTuple

import torch
from torch import Tensor

from gradwire.codecs.selection import OUTSIDE, add_elements
from gradwire.gpu.kernels import Kernels, using


class Lie(NamedTuple):
    indices: list[int]
    n_taken: int | None = None
    n_elements: int = 90


LIES = {
    "an index past the end": Lie([3, 7, 90]),
    "a negative index": Lie([-1, 3, 7]),
    "an index far outside": Lie([3, 1 << 30]),
    "the least index": Lie([-(1 << 31)]),
    "an index twice": Lie([3, 7, 7]),
    "indices that fall": Lie([3, 9, 7]),
    "more than there is room for": Lie([3, 7, 9], 4),
    "a negative number": Lie([3, 7, 9], -1),
    "an index for no values": Lie([0], 1, 0),
}


def is_refused(kernels: Kernels | None, lie: Lie, sums: Tensor) -> None:
    """Add it to `sums` (n,) float32, on the CPU without kernels. Raises: AssertionError (it was not reported)."""
    indices = torch.tensor(lie.indices, dtype=torch.int32)
    error = torch.zeros(1, dtype=torch.int32)
    n_taken = None if lie.n_taken is None else torch.tensor([lie.n_taken], dtype=torch.int32)
    with contextlib.nullcontext() if kernels is None else using(kernels):
        add_elements(indices, torch.ones(len(lie.indices)), sums, error, n_taken)
    assert int(error) == OUTSIDE
