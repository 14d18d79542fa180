"""The schemes `power-sgd` and `power-sgd-overlap` (Vogels et al., NeurIPS 2019), which acp-sgd is measured against.

With E what compression has left out so far, every step, for every gradient matrix M:

    P <- (M + E) Q;  P <- orthogonal(mean(P));  Q <- mean((M + E)^T P);  gradient = P Q^T;  E <- (M + E) - gradient

Two sums, the second of which waits for the first: Q cannot be computed before P has been summed.

When not to use these: acp-sgd sends half as much and waits for nothing. The error is taken against the aggregated
product, as published: where ranks see different data each rank's own E grows, though the mean of them does not.
"""

from __future__ import annotations

from typing import Any

import torch

from gradwire.core.bucket import Bucket
from gradwire.schemes.low_rank.base import LowRank
from gradwire.schemes.low_rank.factors import orthogonalise
from gradwire.schemes.low_rank.fusion import Work
from gradwire.schemes.low_rank.matrices import MatrixGroup


class PowerSgd(LowRank):
    """Mean over the ranks, in low rank; everything is compressed and sent after the backward pass, packed.

    Options: see LowRank, but for `overlap`, which is what `power-sgd-overlap` is for; `buffer_mb` is inf by default.
    """

    name = "power-sgd"
    incoming_is_orthogonal = False

    def __init__(self, rank: int = 4, buffer_mb: float = float("inf"), **options: Any) -> None:
        if "overlap" in options:
            raise TypeError("overlap is the difference between power-sgd and power-sgd-overlap; choose one of them")
        super().__init__(rank=rank, buffer_mb=buffer_mb, overlap=type(self) is PowerSgdOverlap, **options)

    def _compress(self, works: list[Work], is_last: bool) -> None:
        """Packed: all of P, then all of Q."""
        for work in works:
            self._send_p(work)
        self._fusion.flush()
        for work in works:
            self._fusion.finish_for(work)
            self._send_q(work)
        self._fusion.flush()
        self._fusion.finish_all()

    def _send_p(self, work: Work) -> None:
        with work.bucket.record.timing("encode"):
            cap_bytes, loss_scale = self._cap_bytes("p"), self.session.loss_scale()
            self._send_uncompressed_part(work, cap_bytes)
            for group in work.plan.groups:
                group.correct(work.bucket, self.session.feedback, loss_scale)
                self._send_factors(work, group.project_to_p(), cap_bytes)

    def _send_q(self, work: Work) -> None:
        """All ranks skip a bucket whose first sum was not finite."""
        work.is_sent = True
        if not work.is_finite or not work.plan.groups:
            self._on_arrival(work)
            return
        with work.bucket.record.timing("encode"):
            for group in work.plan.groups:
                orthogonalise(group.p)
                self._send_factors(work, group.project_to_q(group.new_q), self._cap_bytes("q"))

    def _write(self, group: MatrixGroup, bucket: Bucket) -> None:
        group.write_product(bucket.buffer, group.new_q)
        if self.error_feedback:
            group.subtract_result(bucket.buffer, self.session.feedback)

    def _incoming(self, group: MatrixGroup) -> torch.Tensor:
        return group.q

    def _next_factors(self, group: MatrixGroup) -> torch.Tensor:
        """Q as it was summed."""
        group.q, group.new_q = group.new_q, group.q
        return group.q


class PowerSgdOverlap(PowerSgd):
    """Power-SGD bucket by bucket inside the backward pass: what PyTorch's own powerSGD_hook does.

    The second sum of a bucket starts when the next bucket has come, so that all ranks keep one order of sums.
    """

    name = "power-sgd-overlap"

    _previous: Work | None = None

    def _begin_on_lane(self) -> None:
        super()._begin_on_lane()
        self._previous = None

    def _compress(self, works: list[Work], is_last: bool) -> None:
        for work in works:
            self._send_p(work)
            self._fusion.flush()
            if self._previous is not None:
                self._turn_to_q(self._previous)
            self._previous = work
        if is_last and self._previous is not None:
            self._turn_to_q(self._previous)
            self._previous = None
            self._fusion.finish_all()

    def _turn_to_q(self, work: Work) -> None:
        self._fusion.finish_for(work)
        self._send_q(work)
        self._fusion.flush()
