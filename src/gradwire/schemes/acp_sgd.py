"""The scheme `acp-sgd`: alternate compressed Power-SGD (Zhang et al., ICDCS 2023, algorithms 1 and 2).

In every step each gradient matrix M is compressed into one of two factors, P and Q by turns, and only that one is
summed. With E what compression has left out so far:

    a step for P:  Q <- orthogonal(Q);  P <- (M + E) Q;    E <- (M + E) - P Q^T;  sum P;  gradient = mean(P) Q^T
    a step for Q:  P <- orthogonal(P);  Q <- (M + E)^T P;  E <- (M + E) - P Q^T;  sum Q;  gradient = P mean(Q)^T

What comes in was summed one step ago, and is made orthogonal right then, while nobody waits. So a bucket needs one
product before its sum, and the sum blocks nothing.

When not to use this: where the network is faster than the products (rates below about 1 % of the model's own), for
models of few or small matrices, or where every step's gradient has to be exact.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from gradwire.schemes.low_rank.base import LowRank
from gradwire.schemes.low_rank.factors import orthogonalise, redraw_factors
from gradwire.schemes.low_rank.fusion import Work


class AcpSgd(LowRank):
    """Mean over the ranks, in low rank, one factor a step. Options: see LowRank.

    Beside Adam its first 100 steps are plain: that takes off a third of what it loses there. Power-SGD loses too little.
    """

    name = "acp-sgd"

    takes_turns = True

    def steps(self, work: Work) -> Iterator[None]:
        groups, turn = work.plan.groups, self.turn
        self.fusion.send(work, work.dense, turn)
        for group in groups:
            group.correct(work.bucket.buffer, work.wire, work.loss_scale)
            if turn == "p":
                factors = torch.bmm(group.q, group.corrected.mT, out=group.p)
            else:
                factors = torch.bmm(group.p, group.corrected, out=group.q)
            factors.copy_(factors.to(self.wire_dtype))  # what is sent of them
            self.fusion.send(work, factors, turn)
        if work.bucket.is_last:
            self.fusion.flush()
        if self.error_feedback:
            for group in groups:  # with this rank's own factor, while its sum is under way
                group.subtract_product()
        yield
        for group in groups:
            group.write_product(work.bucket.buffer, group.p, group.q)
        yield
        for group in groups:
            factors = group.p if turn == "p" else group.q
            redraw_factors(factors, group.keys, self.seed, work.bucket.step + 1, only_zero=self.reuse)
            orthogonalise(factors)
