"""The schemes `power-sgd` and `power-sgd-overlap` (Vogels et al., NeurIPS 2019), which acp-sgd is measured against.

With E what compression has left out so far, every step, for every gradient matrix M:

    P <- (M + E) Q;  P <- orthogonal(mean(P));  Q <- mean((M + E)^T P);  gradient = P Q^T;  E <- (M + E) - gradient

Two sums, the second of which waits for the first: Q cannot be computed before P has been summed.

When not to use these: acp-sgd sends half as much and waits for nothing. The error is taken against the aggregated
product, as published: where ranks see different data each rank's own E grows, though the mean of them does not.
"""

import math
from collections.abc import Iterator
from typing import Any

import torch

from gradwire.schemes.low_rank import LowRank, Next, Options, Work
from gradwire.schemes.matrices import multiply, orthogonalise


def power_sgd(rank: int = 4, buffer_mb: float = math.inf, **options: Any) -> LowRank:
    """Mean over the ranks, in low rank; everything is compressed and sent after the backward pass, packed.

    Options: see `gradwire.schemes.low_rank.Options`, but for `overlap`; `buffer_mb` is inf by default.
    """
    return _make("power-sgd", False, options | {"rank": rank, "buffer_mb": buffer_mb})


def power_sgd_overlap(rank: int = 4, buffer_mb: float = math.inf, **options: Any) -> LowRank:
    """Power-SGD bucket by bucket inside the backward pass: what PyTorch's own powerSGD_hook does."""
    return _make("power-sgd-overlap", True, options | {"rank": rank, "buffer_mb": buffer_mb})


def _make(name: str, overlap: bool, options: dict[str, Any]) -> LowRank:
    if "overlap" in options:
        raise TypeError("overlap is the difference between power-sgd and power-sgd-overlap; choose one of them")
    return LowRank(name, steps_of, Options(overlap=overlap, **options))


def steps_of(scheme: LowRank, work: Work) -> Iterator[Next]:
    """Algorithm 1 for one bucket, over all its matrices of one shape at a time; factors are kept transposed."""
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
