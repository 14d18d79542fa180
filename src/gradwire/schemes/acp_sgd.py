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

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, ClassVar

import torch

from gradwire.core.bucket import Bucket
from gradwire.core.checkpoint import not_the_state
from gradwire.schemes.low_rank.base import LowRank
from gradwire.schemes.low_rank.fusion import Work
from gradwire.schemes.low_rank.matrices import MatrixGroup


class AcpSgd(LowRank):
    """Mean over the ranks, in low rank, one factor a step. Options: see LowRank.

    Beside Adam its first 100 steps are plain: that takes off a third of what it loses there. Power-SGD loses too little.
    """

    name = "acp-sgd"
    published: ClassVar[Mapping[str, Any]] = MappingProxyType({"start_step": 0})
    plain_beside_adam = 100
    behind_plain = "0.04"
    incoming_is_orthogonal = True

    _is_step_for_p = True

    def _compress(self, works: list[Work], is_last: bool) -> None:
        cap_bytes = self._cap_bytes("p" if self._is_step_for_p else "q")
        loss_scale = self.session.loss_scale()
        for work in works:
            with work.bucket.record.timing("encode"):
                self._send_uncompressed_part(work, cap_bytes)
                for group in work.plan.groups:
                    group.correct(work.bucket, self.session.feedback, loss_scale)
                    sent = group.project_to_p() if self._is_step_for_p else group.project_to_q(group.q)
                    self._send_factors(work, sent, cap_bytes)
                work.is_sent = True
                if is_last and work is works[-1]:
                    self._fusion.flush()
                if self.error_feedback:
                    for group in work.plan.groups:  # with the local factor, while its sum is under way
                        group.subtract_product(self.session.feedback)
        if is_last:
            self._fusion.finish_all()

    def _write(self, group: MatrixGroup, bucket: Bucket) -> None:
        group.write_product(bucket.buffer)

    def _incoming(self, group: MatrixGroup) -> torch.Tensor:
        return group.q if self._is_step_for_p else group.p

    def _next_factors(self, group: MatrixGroup) -> torch.Tensor:
        return group.p if self._is_step_for_p else group.q

    def _end_of_commit(self) -> None:
        self._is_step_for_p = not self._is_step_for_p

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "is_step_for_p": self._is_step_for_p}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self._is_step_for_p = state["is_step_for_p"]

    def _sides_in(self, state: dict[str, Any]) -> str:
        if not isinstance(state.get("is_step_for_p"), bool):
            raise not_the_state("scheme acp-sgd", "it lacks is_step_for_p")
        return "q" if state["is_step_for_p"] else "p"
