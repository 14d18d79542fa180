"""The aggregating switch as a process: on a host of its own in a lab, or on loopback."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Mapping, Sequence

from gradwire_lab.ranks.netlab.rate import MAX_RATE_BPS
from gradwire_lab.ranks.supervisor import RankSet

__all__ = ["SWITCH_PORT", "SWITCH_VARIABLE", "SwitchHost", "switch_rate_bps"]

SWITCH_VARIABLE = "GRADWIRE_SWITCH"
SWITCH_PORT = 4790


def switch_rate_bps(rates_bps: Sequence[int | None]) -> int | None:
    """The rate of the switch's link: what all ranks' links carry together, so that it is never the narrowest."""
    if any(rate is None for rate in rates_bps):
        return None
    total = sum(rate for rate in rates_bps if rate is not None)
    return total if total <= MAX_RATE_BPS else None


class SwitchHost:
    """A running `gradwire switch`.

    Args:
        address: where the ranks find it, and where it listens.
        namespaces: descriptors to enter first; none on loopback.
        env: variables on top of this process's environment.
    """

    def __init__(
        self,
        address: str,
        port: int = SWITCH_PORT,
        namespaces: Sequence[int] = (),
        env: Mapping[str, str] | None = None,
    ) -> None:
        self.address = f"{address}:{port}"
        self.lines: list[str] = []  # what it said: where it listens, and at the end its counters
        self._process = RankSet(on_line=lambda rank, line: self.lines.append(line))
        command = [sys.executable, "-m", "gradwire", "switch", "--address", address, "--port", str(port)]
        self._process.start(command, {**os.environ, **(env or {})}, namespaces)

    def send_signal(self, number: int) -> None:
        """SIGKILL for a switch that dies, SIGSTOP for one that falls silent."""
        self._process.send_signal(0, number)

    def close(self) -> None:
        """End it, and wait for what it says at the end. The second time does nothing."""
        self._process.end(signal.SIGTERM)
