"""What `one-bit` and `two-bit` share: they suit the optimizer where their user does not choose.

Adam divides by the root of a running mean of squares: values far below their message's scale drown in its noise. So beside
an optimizer of Adam's family a scale serves few values, and the first steps are plain: measured in docs/results/lossy.md.
Beside others all is as published.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, ClassVar

from gradwire.codecs.quantised import Quantised
from gradwire.core.session import Session
from gradwire.schemes.plain_first import ADAM_WARMUP_STEPS, is_beside_adam
from gradwire.schemes.quantised import QuantisedDirect
from gradwire.schemes.selection import ByName

ADAM_SCALE_VALUES = 64


class FewBits(QuantisedDirect):
    """See `QuantisedDirect`.

    Args:
        make_codec: the quantiser with so many values to a scale; None for one scale a message.
        may_group: whether it can have more than one scale a message.
        warmup_steps: the first steps of the training, which are reduced plainly. None: 50 beside Adam and its kin, else 0.
        scale_values: values to a scale, or "message" for one scale a message. None: 64 beside Adam and its kin, else
            "message".
    """

    published: ClassVar[Mapping[str, Any]] = MappingProxyType({"warmup_steps": 0, "scale_values": "message"})
    plain_beside_adam = ADAM_WARMUP_STEPS

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
        self._asked_values = "message" if scale_values == "none" else scale_values
        codec = make_codec(self._scale_values(beside_adam=False))
        super().__init__(codec, error_feedback, pull, chunk_elements, warmup_steps, select)

    def _scale_values(self, beside_adam: bool) -> Any:
        if self._asked_values is None:
            return ADAM_SCALE_VALUES if beside_adam and self._may_group else None
        return None if self._asked_values == "message" else self._asked_values

    def bind(self, session: Session) -> None:
        """As every scheme's; options that were left out are chosen by the optimizer. Raises: InvalidArgument."""
        self.codec = self._payload = self._make_codec(self._scale_values(is_beside_adam(session)))
        super().bind(session)

    def _chosen_by_optimizer(self) -> dict[str, Any]:
        return {**super()._chosen_by_optimizer(), "scale_values": self.codec.scale_values or "message"}
