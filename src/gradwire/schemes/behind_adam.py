"""The frame of schemes that compress behind Adam's preconditioner: plain steps, until a parameter's variance is frozen."""

from __future__ import annotations

import contextlib
from typing import Any, ClassVar

import torch

from gradwire.control.checks import choice as check_choice
from gradwire.core.bucket import Bucket
from gradwire.core.session import Session
from gradwire.errors import InvalidArgument, Unsupported
from gradwire.exchange.patterns import Exchange
from gradwire.schemes.frozen_adam import FrozenAdam
from gradwire.schemes.on_device import Placed
from gradwire.schemes.plain_first import check_steps
from gradwire.schemes.selection import ByName, Names, Selection
from gradwire.schemes.selective import Selective

_CORRECTIONS = ("frozen", "running")


class BehindAdam(Placed, Selective):
    """See `Selective` for payload and exchange; a scheme says in `_fill` and `_take` what of its momenta it sends.

    On a device the momenta are where the optimizer keeps them, and both run there.

    Args:
        freeze_step: updates of a parameter, from its first gradient on, before its variance is frozen. A parameter that
            begins to train later travels plainly for so many updates of its own.
        correction: of the variance for its start at zero: "frozen" with it, so that the size of a step goes on as it was;
            "running", as Adam's own, by which steps grow to 1 / sqrt(1 - beta2^freeze_step) times theirs: what is
            published has no correction, and ends there.
    """

    needs_adam = True
    settled_by = "freeze_step"
    instead: ClassVar[str]  # what to take where there is no Adam

    def __init__(
        self, payload: Any, exchange: Exchange, freeze_step: int, correction: str, exempt: Names, only: Names
    ) -> None:
        self.freeze_step = check_steps("freeze_step", freeze_step)
        if self.freeze_step < 1:
            raise InvalidArgument("freeze_step must be at least 1: a variance that has seen nothing cannot be frozen")
        self.correction = check_choice("correction", correction, _CORRECTIONS)
        super().__init__(payload, exchange, error_feedback=True, select=ByName(exempt, only))
        self._adam: FrozenAdam | None = None

    @property
    def configuration(self) -> dict[str, Any]:
        shared = {
            "error_feedback": self.error_feedback, "freeze_step": self.freeze_step, "correction": self.correction
        }  # fmt: skip
        return shared | self.select.configuration

    @property
    def settling_steps(self) -> int:
        """Steps that are reduced plainly, unless the optimizer has taken them before."""
        return self.freeze_step

    @property
    def is_settled(self) -> bool:
        """Whether a variance is frozen."""
        return self._adam is not None and bool(self._adam.frozen_at)

    def bind(self, session: Session) -> None:
        """As every scheme's. Raises: Unsupported (an optimizer that is no Adam, or with options it cannot do)."""
        if session.module is None:
            raise Unsupported(f"{self.name} works inside DDP; behind other doors take {self.instead}")
        adam = FrozenAdam(
            session.optimizer, self.freeze_step, self.correction == "frozen", self.name, self.instead,
            torch.device("cpu") if session.site is None else session.site.device,
        )  # fmt: skip
        with contextlib.ExitStack() as undo:
            undo.callback(adam.close)
            super().bind(session)
            undo.pop_all()
        self._adam = adam

    @property
    def adam(self) -> FrozenAdam:
        """The user's optimizer, while bound."""
        assert self._adam is not None
        return self._adam

    def close(self) -> None:
        super().close()
        if self._adam is not None:
            self._adam.close()
            self._adam = None

    # ---- one bucket

    def _choose(self, bucket: Bucket) -> Selection:
        """Never as it lies: what is sent is not what lies in the bucket."""
        # All are asked, because to ask is to count.
        frozen = {slot: self.adam.is_frozen(slot) for slot in bucket.slots}
        return Selection(bucket, lambda slot, n_bytes: slot is not None and frozen[slot] and self.select(slot, n_bytes))

    def part_dtype(self, bucket: Bucket) -> torch.dtype:
        return torch.float32

    # ---- between steps

    def stats(self) -> dict[str, Any]:
        """Tensors whose variance is frozen, and buckets that were redone uncompressed."""
        return {**super().stats(), "n_frozen": len(self._adam.frozen_at) if self._adam is not None else 0}

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), **self.adam.state_by_name(self.session.slots)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Raises: InvalidArgument."""
        super().load_state_dict(state)
        self.adam.load_by_name(state, self.session.slots)
