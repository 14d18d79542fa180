"""How many bits the ranks' processors have time for: a ceiling that grows by addition and falls by multiplication.

AQGB (Luo et al., FGCS 2025) fills the network and takes bytes to cost nothing else. Where ranks share cores, encoding,
adding and copying them takes time away from the training itself. The sign of it is threads that could run and wait for a
core, which the operating system counts. Unlike a longer step it needs no reference and says what the cause is: a slow
network, or another rank, lets threads sleep instead.

The paper has no such bound. Times are arguments, in seconds; all ranks use the lowest of their ceilings.
"""

from __future__ import annotations

from gradwire.control.checks import finite, share, whole
from gradwire.control.quantisation import WORD_BITS

# Two ranks of the small GPT with a core each, few bits: 0.26 to 0.37, for their communication's threads must wait for the
# training's core. There 12 bits a value took 172 ms a step and 4 took 123. Ranks with cores to spare are far below it.
DEFAULT_MAX_CONTENTION = 0.25
_INCREASE_BITS = 2
_DECREASE = 2
# Of what was seen before, the share that a new round leaves: single rounds jump, three of them do not.
_KEPT = 0.5


class BitCeiling:
    """How many bits of a value are sent at most.

    It begins at the floor and doubles every round until contention is met, so that nothing is overrun in the first rounds;
    from then on it halves where contention is above `max_contention`, and rises by two bits where it is not.
    """

    def __init__(
        self, floor_bits: int, most_bits: int = WORD_BITS, max_contention: float = DEFAULT_MAX_CONTENTION
    ) -> None:
        """Raises: InvalidArgument (bits out of range, max_contention not in (0, 1]; with 1 nothing is ever too much)."""
        self._most_bits = whole("most_bits", most_bits, 1, WORD_BITS)
        self._floor_bits = whole("floor_bits", floor_bits, 1, most_bits)
        self._max_contention = share("max_contention", max_contention)
        self._contention: float | None = None
        self._has_met = False
        self._is_settling = False
        self.bits = floor_bits

    @property
    def contention(self) -> float:
        """Of the time in which threads could run, the share that they waited for a core; 0 as long as nothing is known."""
        return self._contention or 0.0

    def observe(self, running_s: float, waiting_s: float, agreed_bits: int) -> None:
        """One round, that was sent with at most `agreed_bits`, the lowest ceiling of all ranks.

        Args:
            running_s, waiting_s: how long threads of this rank ran, and waited for a core although they could run.
        Raises: InvalidArgument (negative or not finite).
        """
        running_s, waiting_s = finite("running_s", running_s, 0), finite("waiting_s", waiting_s, 0)
        if running_s + waiting_s > 0:
            seen = waiting_s / (running_s + waiting_s)
            self._contention = seen if self._contention is None else _KEPT * self._contention + (1 - _KEPT) * seen
        # From what was really sent: a rank that saw no contention must not run away from those that did.
        bits = min(self.bits, whole("agreed_bits", agreed_bits, 1, WORD_BITS))
        if bits < self.bits:
            self._has_met = True
        if self._is_settling:  # what was sent before the last decrease is still in this round
            self._is_settling = False
        elif self.contention > self._max_contention:
            self._has_met = self._is_settling = True
            bits = max(self._floor_bits, bits // _DECREASE)
        else:
            bits = min(self._most_bits, bits + _INCREASE_BITS if self._has_met else _DECREASE * bits)
        self.bits = max(self._floor_bits, bits)
