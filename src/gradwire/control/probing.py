"""When the link is probed: at once where something has changed, else as seldom as it costs little. Pure, as `racing.py` is."""

from __future__ import annotations

from gradwire.control.race import Limits

_NEVER = 1 << 62


class Probing:
    """The next step after which the link is probed.

    Attributes:
        took_us: the last probe, on the slowest rank.
    """

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._next, self.took_us = _NEVER, 0

    def is_at(self, step: int) -> bool:
        """Whether the link is probed after `step`."""
        return step == self._next

    def is_due(self, step: int) -> bool:
        """Whether `step` is that one, or the probe fell into a race."""
        return self._next <= step

    def at(self, step: int) -> None:
        """Probe after `step`."""
        self._next = step

    def later(self, step: int, step_us: int) -> None:
        """Probe again as soon after `step` as probes cost no more than they may, where a step takes `step_us`."""
        self._next = step + max(
            self._limits.probe_every, self.took_us * 1000 // (self._limits.probing * max(1, step_us))
        )

    def never(self) -> None:
        """Nothing is hidden: a faster network shows by itself."""
        self._next = _NEVER
