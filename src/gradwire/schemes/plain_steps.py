"""The first steps of a training, which some schemes reduce plainly, and what else they choose beside Adam.

Adam divides by the root of a running mean of squares, in which what a coarse scheme does to its first steps stays for
hundreds: measured in docs/results/lossy.md.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from gradwire.checks import count as check_count
from gradwire.core.session import Session

if TYPE_CHECKING:
    from gradwire.schemes.base import Scheme

_log = logging.getLogger(__name__)

# By scheme and option: its value as published, and beside Adam, its kin and what is not known, where the user leaves it out.
BESIDE_ADAM: dict[str, dict[str, tuple[Any, Any]]] = {
    "acp-sgd": {"start_step": (0, 100)},
    "one-bit": {"warmup_steps": (0, 50), "scale_values": ("message", 64)},
    "slimgc": {"codec": ("one-bit", "several"), "plain_steps": (0, 50)},
    "top-k": {"warmup_steps": (0, 50)},
    "two-bit": {"warmup_steps": (0, 50), "scale_values": ("message", 64), "levels": (3, 4)},
}


class PlainSteps:
    """How many first steps of a training are reduced plainly, as `option` of `scheme` says; None: the optimizer chooses."""

    def __init__(self, scheme: str, option: str = "warmup_steps", asked: int | None = 0) -> None:
        self._scheme, self.option = scheme, option
        self._asked = None if asked is None else check_count(option, asked, at_least=0)
        self.n = self._asked or 0  # how many; if the optimizer chooses, once bound
        self.last = -1  # the step that was begun last

    def bind(self, session: Session) -> None:
        """Choose by the optimizer what was left out; before ranks compare the configuration."""
        self.last = -1
        self.n = self._asked or 0
        if self._asked is None and is_beside_adam(session):
            self.n = BESIDE_ADAM.get(self._scheme, {}).get(self.option, (0, 0))[1]

    def tell(self, scheme: Scheme) -> None:
        """Log how many there are; and on rank 0, if the optimizer has chosen that, all options that it may choose."""
        if scheme.settling_steps:
            _log.info("gradwire %s: steps before %d are reduced plainly", self._scheme, scheme.settling_steps)
        if self.n and self._asked is None and scheme.session.communicator.rank == 0:
            published = {option: value for option, (value, _) in BESIDE_ADAM[self._scheme].items()}
            chosen = {option: scheme.configuration.get(option, value) for option, value in published.items()}
            _log.warning(
                "gradwire %s beside %s: %s (as published: %s). Its loss stays above plain's even so (docs/results/lossy.md): "
                'one-bit-adam is nearer, and scheme="auto" with fidelity="close" keeps the loss',
                self._scheme, scheme.session.optimizers, _as_text(chosen), _as_text(published),
            )  # fmt: skip

    def tell_unused(self, scheme: Scheme) -> None:
        """Log, when a training ends, that it was over before anything was compressed."""
        if 0 <= self.last < scheme.settling_steps and not scheme.is_settled:
            _log.warning(
                "gradwire %s: nothing was compressed: the last step was %d, and those before %d are plain; lower %s",
                self._scheme, self.last, scheme.settling_steps, self.option,
            )  # fmt: skip


def is_beside_adam(session: Session) -> bool:
    """Return whether one of the session's optimizers divides by a moment of the gradient, or may: all but SGD count."""
    return bool(session.optimizers.families() - {"sgd"})


def _as_text(options: dict[str, Any]) -> str:
    quoted = {name: f'"{value}"' if isinstance(value, str) else value for name, value in options.items()}
    return ", ".join(f"{name}={value}" for name, value in quoted.items())
