"""Parameters that a rank did not use in a step: which they are, and their residuals, which wait."""

from __future__ import annotations

import hashlib

import torch

from gradwire.core.bucket import Bucket


class Withheld:
    """The residuals of parameters that this rank did not use in this step: they wait.

    If no rank used a parameter, DDP throws its result away, and a residual sent for it would be lost.
    """

    def __init__(self, spans: list[tuple[int, int]], is_used: list[bool], residual: torch.Tensor | None) -> None:
        """Takes them out of `residual` (n,) until `put_back`."""
        self._kept: dict[int, tuple[int, int, torch.Tensor]] = {}
        if residual is None:
            return
        for place, ((start, end), used) in enumerate(zip(spans, is_used, strict=True)):
            if not used:
                self._kept[place] = start, end, residual[start:end].clone()
                residual[start:end] = 0

    def put_back(self, residual: torch.Tensor | None) -> None:
        """As it was before."""
        for start, end, values in self._kept.values():
            assert residual is not None
            residual[start:end] = values

    def keep(self, new_residual: torch.Tensor, used_by_any: list[bool], sent: tuple[int, int] | None = None) -> None:
        """Let them stand in `new_residual` (n,) as they were, and beside them what messages left out of nothing.

        Args:
            used_by_any: for each parameter, whether its result will be used at all; if not, nothing is added.
            sent: the elements of which this rank's message counted although it did not use them; all, if not given.
        """
        for place, (start, end, values) in self._kept.items():
            first, last = (start, end) if sent is None else (max(start, sent[0]), min(end, sent[1]))
            if used_by_any[place] and first < last:
                values[first - start : last - start] += new_residual[first:last]
            new_residual[start:end] = values


def bucket_spans(bucket: Bucket) -> list[tuple[int, int]]:
    """Where each parameter lies in the bucket: (start, end)."""
    return [
        (offset, offset + parameter.numel())
        for parameter, offset in zip(bucket.parameters, bucket.offsets, strict=True)
    ]


def holds_nonzero(gradient: torch.Tensor) -> bool:
    """Whether the parameter of this gradient was used."""
    # A used parameter shows at its first values, and spares the sweep. The norm allocates nothing, as any() would.
    return any(
        part.numel() > 0 and float(torch.linalg.vector_norm(part, float("inf"))) != 0
        for part in (gradient[:64], gradient)
    )


def stream_of(bucket: Bucket, rank: int, *place: object) -> int:
    """64 bits to draw by, different for every step, bucket, rank and place in it."""
    text = repr((bucket.step, bucket.index, rank, *place))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")
