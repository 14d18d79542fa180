"""What `one-bit` and `two-bit` share: they suit the optimizer where their user does not choose.

Adam divides by the root of a running mean of squares. Noise of a few bits in its first steps stays in there for hundreds,
and values far below their message's scale drown in it. So beside an optimizer of Adam's family the first steps are plain,
and a scale serves few values: measured in docs/results/lossy.md. Beside others all is as published.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, ClassVar

from gradwire.codecs.quantised import Quantised
from gradwire.core.session import Session
from gradwire.schemes.auto.fidelity import family_of_optimizer
from gradwire.schemes.quantised import QuantisedDirect
from gradwire.schemes.selection import ByName
from gradwire.schemes.selective import check_steps

ADAM_WARMUP_STEPS, ADAM_SCALE_VALUES = 50, 512

_log = logging.getLogger(__name__)


class FewBits(QuantisedDirect):
    """See `QuantisedDirect`.

    Args:
        make_codec: the quantiser with so many values to a scale; None for one scale a message.
        may_group: whether it can have more than one scale a message.
        warmup_steps: the first steps of the training, which are reduced plainly. None: 50 beside Adam and its kin, else 0.
        scale_values: values to a scale, or "message" for one scale a message. None: 512 beside Adam and its kin, else
            "message".
    """

    published: ClassVar[Mapping[str, Any]] = MappingProxyType({"warmup_steps": 0, "scale_values": "message"})
    behind_plain: ClassVar[str]  # nats, docs/results/lossy.md

    def __init__(
        self,
        make_codec: Callable[[int | None], Quantised],
        may_group: bool,
        error_feedback: bool,
        pull: str,
        chunk_elements: int,
        warmup_steps: int | None,
        scale_values: int | str | None,
        select: ByName,
    ) -> None:
        self._make_codec, self._may_group = make_codec, may_group
        self._asked_steps = None if warmup_steps is None else check_steps("warmup_steps", warmup_steps)
        self._asked_values = "message" if scale_values == "none" else scale_values
        codec = make_codec(self._scale_values(beside_adam=False))
        super().__init__(codec, error_feedback, pull, chunk_elements, self._asked_steps or 0, select)

    def _scale_values(self, beside_adam: bool) -> Any:
        if self._asked_values is None:
            return ADAM_SCALE_VALUES if beside_adam and self._may_group else None
        return None if self._asked_values == "message" else self._asked_values

    def bind(self, session: Session) -> None:
        """As every scheme's; options that were left out are chosen by the optimizer. Raises: InvalidArgument."""
        beside_adam = session.optimizer is not None and family_of_optimizer(session.optimizer) == "adam"
        if self._asked_steps is None:
            self.warmup_steps = ADAM_WARMUP_STEPS if beside_adam else 0
        self.codec = self._payload = self._make_codec(self._scale_values(beside_adam))
        super().bind(session)
        if beside_adam and self._asked_steps is None and session.communicator.rank == 0:
            _log.warning(
                'gradwire %s beside %s: warmup_steps=%d, scale_values=%s (as published: 0, "message"). A small GPT still '
                "ended %s nats higher than plain after 500 steps; one-bit-adam is nearer, and "
                'scheme="auto" with fidelity="close" keeps the loss',
                self.name, type(session.optimizer).__name__, self.warmup_steps, self.codec.scale_values or '"message"',
                self.behind_plain,
            )  # fmt: skip
