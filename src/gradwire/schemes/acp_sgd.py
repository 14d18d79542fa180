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

from typing import Any

import torch

from gradwire.errors import InvalidArgument
from gradwire.schemes.low_rank.base import LowRank
from gradwire.schemes.low_rank.fusion import Work
from gradwire.schemes.low_rank.matrices import Group, draw_factor, orthogonalise, redraw_zero_factors


class AcpSgd(LowRank):
    """Mean over the ranks, in low rank, one factor a step. Options: see LowRank."""

    name = "acp-sgd"

    _is_step_for_p = True

    def _compress(self, works: list[Work], is_last: bool) -> None:
        cap_bytes = self._cap_bytes("p" if self._is_step_for_p else "q")
        loss_scale = self.session.loss_scale()
        for work in works:
            with work.bucket.record.timing("encode"):
                self._send_uncompressed_part(work, cap_bytes)
                for group in work.plan.groups:
                    group.correct(work.bucket, self.session.feedback, loss_scale)
                    if self._is_step_for_p:
                        torch.bmm(group.q, group.corrected.mT, out=group.p)
                    else:
                        torch.bmm(group.p, group.corrected, out=group.q)
                    self._send_factors(work, self._outgoing(group), cap_bytes)
                work.is_sent = True
                if is_last and work is works[-1]:
                    self._fusion.flush()
                if self.error_feedback:
                    for group in work.plan.groups:
                        group.subtract_product(
                            self.session.feedback
                        )  # with the local factor, while its sum is under way
        if is_last:
            self._fusion.finish_all()

    def _on_arrival(self, work: Work) -> None:
        if not work.is_finite:
            self._unfinite.append(work)
            return
        with work.bucket.record.timing("decode"):
            for group in work.plan.groups:
                group.write_product(work.bucket.buffer)
        self._finish(work)

    def _incoming(self, group: Group) -> torch.Tensor:
        return group.q if self._is_step_for_p else group.p

    def _outgoing(self, group: Group) -> torch.Tensor:
        return group.p if self._is_step_for_p else group.q

    def _commit_factors(self, group: Group, step: int) -> None:
        factors = self._outgoing(group)
        if self.reuse:
            redraw_zero_factors(factors, group.keys, self.seed, step + 1)
        else:
            for factor, key in zip(factors, group.keys, strict=True):
                factor.copy_(draw_factor(self.seed, key, step + 1, *factor.shape))
        orthogonalise(factors)
        group.commit_factors(factors)

    def _end_of_commit(self) -> None:
        self._is_step_for_p = not self._is_step_for_p

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "is_step_for_p": self._is_step_for_p}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self._is_step_for_p = state["is_step_for_p"]

    def _sides_in(self, state: dict[str, Any]) -> str:
        if not isinstance(state.get("is_step_for_p"), bool):
            raise InvalidArgument(
                "this is not the state of scheme acp-sgd: it lacks is_step_for_p; "
                "pass what attachment.state_dict() returned"
            )
        return "q" if state["is_step_for_p"] else "p"
