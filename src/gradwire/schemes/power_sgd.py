"""The schemes `power-sgd` and `power-sgd-overlap` (Vogels et al., NeurIPS 2019), which acp-sgd is measured against.

With E what compression has left out so far, every step, for every gradient matrix M:

    P <- (M + E) Q;  P <- orthogonal(mean(P));  Q <- mean((M + E)^T P);  gradient = P Q^T;  E <- (M + E) - gradient

Two sums, the second of which waits for the first: Q cannot be computed before P has been summed.

When not to use these: acp-sgd sends half as much and waits for nothing. The error is taken against the aggregated
product, as published: where ranks see different data each rank's own E grows, though the mean of them does not.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from gradwire.schemes.low_rank.base import LowRank
from gradwire.schemes.low_rank.factors import orthogonalise, redraw_factors
from gradwire.schemes.low_rank.fusion import Work


class PowerSgd(LowRank):
    """Mean over the ranks, in low rank; everything is compressed and sent after the backward pass, packed.

    Options: see LowRank, but for `overlap`, which is what `power-sgd-overlap` is for; `buffer_mb` is inf by default.
    """

    name = "power-sgd"
    n_waits = 2

    def __init__(self, rank: int = 4, buffer_mb: float = float("inf"), **options: Any) -> None:
        if "overlap" in options:
            raise TypeError("overlap is the difference between power-sgd and power-sgd-overlap; choose one of them")
        super().__init__(rank=rank, buffer_mb=buffer_mb, overlap=type(self) is PowerSgdOverlap, **options)

    def steps(self, work: Work) -> Iterator[None]:
        groups = work.plan.groups
        self.fusion.send(work, work.dense, "p")
        for group in groups:
            group.correct(work.bucket.buffer, work.wire, work.loss_scale)
            self.fusion.send(work, torch.bmm(group.q, group.corrected.mT, out=group.p), "p")
        yield
        for group in groups:
            orthogonalise(group.p)
            self.fusion.send(work, torch.bmm(group.p, group.corrected, out=group.new_q), "q")
        yield
        for group in groups:
            group.write_product(work.bucket.buffer, group.p, group.new_q)
            if self.error_feedback:
                group.subtract_result(work.bucket.buffer)
        yield
        for group in groups:
            group.q, group.new_q = group.new_q, group.q
            redraw_factors(group.q, group.keys, self.seed, work.bucket.step + 1, only_zero=self.reuse)


class PowerSgdOverlap(PowerSgd):
    """Power-SGD bucket by bucket inside the backward pass: what PyTorch's own powerSGD_hook does."""

    name = "power-sgd-overlap"
