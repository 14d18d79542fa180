"""The first steps of a training, which some schemes reduce plainly: how many they are, and what the log says of them.

Adam divides by the root of a running mean of squares. What a coarse scheme does to its first steps stays in there for
hundreds. So schemes that lose much there begin plainly beside an optimizer of Adam's family, unless their user chooses:
measured in docs/results/lossy.md. Beside others all is as published, without plain steps.
"""

from __future__ import annotations

import logging
from typing import Any, ClassVar

from gradwire.core.bucket import Bucket
from gradwire.core.session import Session
from gradwire.errors import InvalidArgument
from gradwire.schemes.auto.fidelity import family_of_optimizer
from gradwire.schemes.base import Scheme

ADAM_WARMUP_STEPS = 50

_log = logging.getLogger(__name__)


class PlainFirst(Scheme):
    """A scheme whose first steps may be as without gradwire. Its `__init__` calls `_ask_plain_steps`.

    Attributes:
        n_plain_steps: the first steps of the training, which are reduced plainly. If the optimizer chooses: once bound.
    """

    # The option that says how many these are ...
    settled_by: ClassVar[str] = "warmup_steps"
    # ... what it is beside Adam and its kin where it is left out, and what a small GPT loses nevertheless, in nats.
    plain_beside_adam: ClassVar[int] = 0
    behind_plain: ClassVar[str] = ""

    _last_step = -1

    def _ask_plain_steps(self, steps: int | None) -> None:
        """None: the optimizer chooses. Raises: InvalidArgument (no count)."""
        self._asked_steps = None if steps is None else check_steps(self.settled_by, steps)
        self.n_plain_steps = self._asked_steps or 0

    @property
    def settling_steps(self) -> int:
        """Steps that are reduced plainly."""
        return self.n_plain_steps

    @property
    def is_settled(self) -> bool:
        """Whether the next step is compressed."""
        return self._last_step + 1 >= self.n_plain_steps

    def bind(self, session: Session) -> None:
        """As every scheme's; the optimizer chooses what was left out, and the log has it. Raises: InvalidArgument."""
        self._last_step = -1
        is_chosen = self._asked_steps is None and is_beside_adam(session)
        self.n_plain_steps = self.plain_beside_adam if is_chosen else self._asked_steps or 0
        super().bind(session)
        if self.settling_steps:
            _log.info("gradwire %s: steps before %d are reduced plainly", self.name, self.settling_steps)
        if is_chosen and self.plain_beside_adam and session.communicator.rank == 0:
            chosen = self._chosen_by_optimizer()
            _log.warning(
                "gradwire %s beside %s: %s (as published: %s). A small GPT still ended %s nats higher than plain after "
                '500 steps; one-bit-adam is nearer, and scheme="auto" with fidelity="close" keeps the loss',
                self.name, type(session.optimizer).__name__, _as_text(chosen),
                _as_text({name: self.published[name] for name in chosen}), self.behind_plain,
            )  # fmt: skip

    def _chosen_by_optimizer(self) -> dict[str, Any]:
        """What it has chosen beside Adam, by option."""
        return {self.settled_by: self.n_plain_steps}

    def begin_step(self, step: int) -> None:
        super().begin_step(step)
        self._last_step = step

    def _is_plain(self, bucket: Bucket) -> bool:
        return bucket.step < self.n_plain_steps

    def close(self) -> None:
        """As every scheme's; tells of a training that was over before anything was compressed."""
        if 0 <= self._last_step < self.settling_steps and not self.is_settled:
            _log.warning(
                "gradwire %s: nothing was compressed: the last step was %d, and those before %d are plain; lower %s",
                self.name, self._last_step, self.settling_steps, self.settled_by,
            )  # fmt: skip
        super().close()


def is_beside_adam(session: Session) -> bool:
    """Whether the optimizer, where the session has one, divides by a moment of the gradient."""
    return session.optimizer is not None and family_of_optimizer(session.optimizer) == "adam"


def check_steps(name: str, steps: Any) -> int:
    """A count of steps, from 0. Raises: InvalidArgument."""
    if isinstance(steps, bool) or not isinstance(steps, int) or steps < 0:
        raise InvalidArgument(f"{name} must be a count, got {steps!r}")
    return steps


def _as_text(options: dict[str, Any]) -> str:
    return ", ".join(
        f'{name}="{value}"' if isinstance(value, str) else f"{name}={value}" for name, value in options.items()
    )
