"""The schemes `power-sgd` and `power-sgd-overlap` (Vogels et al., NeurIPS 2019), and `power-momentum`, the same iteration
behind the optimizer.

With E what compression has left out so far, every step, for every gradient matrix M:

    P <- (M + E) Q;  P <- orthogonal(mean(P));  Q <- mean((M + E)^T P);  gradient = P Q^T;  E <- (M + E) - gradient

When not to use the first two: acp-sgd sends half as much and waits for nothing. The error is taken against the aggregated
product, as published: where ranks see different data each rank's own E grows, though the mean of them does not.
"""

import math
from collections.abc import Iterator
from typing import Any

import torch

from gradwire.schemes.low_rank import LowRank, Next, Options, Work
from gradwire.schemes.matrices import multiply, orthogonalise
from gradwire.schemes.momenta import Momenta
from gradwire.schemes.selection import Names


def power_sgd(rank: int = 4, buffer_mb: float = math.inf, **options: Any) -> LowRank:
    """Mean over the ranks, in low rank; everything is compressed and sent after the backward pass, packed. Options: see
    `gradwire.schemes.low_rank.Options`, but for `overlap`; `buffer_mb` is inf by default."""
    return _make("power-sgd", False, options | {"rank": rank, "buffer_mb": buffer_mb})


def power_sgd_overlap(rank: int = 4, buffer_mb: float = math.inf, **options: Any) -> LowRank:
    """Power-SGD bucket by bucket inside the backward pass: what PyTorch's own powerSGD_hook does."""
    return _make("power-sgd-overlap", True, options | {"rank": rank, "buffer_mb": buffer_mb})


def _make(name: str, overlap: bool, options: dict[str, Any]) -> LowRank:
    if "overlap" in options:
        raise TypeError("overlap is the difference between power-sgd and power-sgd-overlap; choose one of them")
    return LowRank(name, steps_of, Options(overlap=overlap, **options))


def steps_of(scheme: LowRank, work: Work) -> Iterator[Next]:
    """Vogels et al., algorithm 1, for one bucket; factors are kept transposed."""
    groups, gradient = work.plan.groups, work.bucket.buffer
    for group in groups:
        scheme.fusion.send(work, torch.bmm(group.q, group.total.mT, out=group.p), "p")  # P <- (M + E) Q
    yield "send"
    for group in groups:
        orthogonalise(scheme.kernels, group.p)
        scheme.fusion.send(work, torch.bmm(group.p, group.total, out=group.new_q), "q")  # Q <- (M + E)^T P
    yield "write"
    for group in groups:
        matrices = group.in_bucket(gradient)
        multiply(scheme.kernels, group.p, group.new_q, matrices)  # gradient = P Q^T
        if scheme.error_feedback:
            for total, matrix in zip(group.total, matrices, strict=True):
                total.sub_(matrix)  # E <- (M + E) - gradient
    if scheme.error_feedback:
        scheme.keep_totals(work)
    yield "keep"
    for group in groups:
        group.q, group.new_q = group.new_q, group.q
        group.redraw(group.q, scheme.options, work.bucket.step + 1)


class PowerMomentum(LowRank):
    """Low rank of what gradients differ from the momentum that ranks share. Options: see `gradwire.schemes.low_rank.Options`.

    With m and b as in `momenta.py`, for every matrix:

        D <- M - m + b E;  P <- orthogonal(mean(D Q));  Q <- mean(D^T P);  E <- D - P Q^T;  gradient <- m + P Q^T

    Where Power-SGD hands Adam gradients of a rank, here they have all of the momentum. So embeddings are compressed too, and no
    step is plain. A residual decays as its momentum does, and by `feedback_decay` besides.

    When not to use this: where ranks use different parameters in a step; and under Muon where 0.03 nats count
    (docs/schemes.md): it brings all singular directions to one length, those too that low rank has left out.
    """

    needs_momenta = True

    def __init__(
        self,
        rank: int = 8,
        factor_dtype: str = "bfloat16",
        buffer_mb: float = math.inf,
        exempt: Names = (),
        **options: Any,
    ) -> None:
        chosen = Options(rank=rank, factor_dtype=factor_dtype, buffer_mb=buffer_mb, exempt=exempt, **options)
        super().__init__("power-momentum", steps_of, chosen, momenta=Momenta())
