"""The scheme `acp-sgd`: alternate compressed Power-SGD (Zhang et al., ICDCS 2023, algorithms 1, ACP-SGD's part, and 2).

Of every gradient matrix M one of two factors is summed, P and Q by turns. With E what compression has left out so far:

    a step for P:  Q <- orthogonal(Q);  P <- (M + E) Q;    E <- (M + E) - P Q^T;  sum P;  gradient = mean(P) Q^T
    a step for Q:  P <- orthogonal(P);  Q <- (M + E)^T P;  E <- (M + E) - P Q^T;  sum Q;  gradient = P mean(Q)^T

What comes in was summed one step ago, and is made orthogonal right then, while nobody waits.

When not to use this: where the network is faster than the products, for models of few or small matrices, or where every
step's gradient has to be exact.
"""

from collections.abc import Iterator
from typing import Any

import torch

from gradwire.schemes.low_rank import LowRank, Next, Options, Work
from gradwire.schemes.matrices import multiply, orthogonalise


def acp_sgd(**options: Any) -> LowRank:
    """Mean over the ranks, in low rank, one factor a step. Options: see `gradwire.schemes.low_rank.Options`. Beside
    all but SGD its first 100 steps are plain."""
    return LowRank("acp-sgd", steps_of, Options(**options), True)


def steps_of(scheme: LowRank, work: Work) -> Iterator[Next]:
    """Algorithm 2 for one bucket; factors are kept transposed."""
    groups, turn = work.plan.groups, scheme.turn
    for group in groups:
        if turn == "p":  # P <- (M + E) Q
            sent, other, total = group.p, group.q, group.total.mT
        else:  # Q <- (M + E)^T P
            sent, other, total = group.q, group.p, group.total
        torch.bmm(other, total, out=sent)
        sent.copy_(sent.to(scheme.wire_dtype))  # what of it is sent
        scheme.fusion.send(work, sent, turn)
    if work.bucket.is_last:
        scheme.fusion.flush()
    if scheme.error_feedback:
        for group in groups:  # with this rank's own factor, while its sum is under way
            multiply(scheme.kernels, group.p, group.q, group.total, subtract=True)  # E <- (M + E) - P Q^T
        scheme.keep_totals(work)
    yield "write"
    for group in groups:
        multiply(scheme.kernels, group.p, group.q, group.in_bucket(work.bucket.buffer))  # gradient = P Q^T
    yield "keep"
    for group in groups:
        factors = group.p if turn == "p" else group.q
        group.redraw(factors, scheme.options, work.bucket.step + 1)
        orthogonalise(scheme.kernels, factors)
