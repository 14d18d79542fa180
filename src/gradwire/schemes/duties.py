"""What only a scheme that takes the optimizer's step itself, or measures before it settles, has to say."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, ClassVar


class OptionalDuties:
    """The rest of a scheme's life, with what holds for all schemes that only reduce. None of it is needed to write one."""

    # Whether it takes the optimizer's step itself (gradwire.stepping); it then needs the model and the optimizer.
    owns_step: bool = False

    # Whether it works with torch's Adam and AdamW only, inside DDP, whose momenta it exchanges.
    needs_adam: bool = False

    # What is published of the options that it would choose by the optimizer.
    published: ClassVar[Mapping[str, Any]] = MappingProxyType({})

    @property
    def settling_steps(self) -> int:
        """Steps from the first one until the scheme works as it will: it measures before."""
        return 0

    @property
    def is_settled(self) -> bool:
        """Whether what had to be measured first is measured; the same on all ranks between two steps."""
        return True

    def take_over(self) -> None:
        """Called once bound and alone: a scheme that owns the step puts itself before the optimizer. Raises: Unsupported."""

    def hand_over(self) -> None:
        """Called before another scheme takes its place, between two steps: return what ranks hold shards of. Collective."""

    def end_backward(self, step: int) -> int:
        """Called on the training thread when DDP has ended a backward pass.

        Returns: how long the training thread stood still for this scheme outside of the backward pass, in ns.
        """
        return 0

    def flush(self) -> None:
        """Take every optimizer step that was called for; only schemes that own the step have any outstanding."""

    def step_figures(self) -> dict[str, float]:
        """Figures of the last step that a training log keeps beside bytes and times; none by default."""
        return {}
