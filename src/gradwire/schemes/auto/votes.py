"""The numbers that ranks tell each other of their steps: a few integers on a background all-reduce, of which the largest count.

The slowest rank's time is everybody's, and of the waiting the smallest: who waits least waits for the network, the others for
that rank.
"""

from collections import deque
from collections.abc import Callable, Iterable
from typing import NamedTuple

import torch
import torch.distributed as dist

from gradwire.errors import RankMismatch
from gradwire.schemes.auto.costs import look_for_zeros
from gradwire.telemetry.stopwatch import Lap
from gradwire.wire.communicator import Communicator
from gradwire.wire.link_probe import probe_transfer_us
from gradwire.wire.wire import Wire

_BATCH = 5  # steps that share a vote while nothing is tried
_N_PROBES = 3  # in steps on end, until a slower link is believed
_CHANGED = 250  # permille


class Vote(NamedTuple):
    """The largest numbers of all ranks, of some steps."""

    last_step: int  # of those voted on
    reconsider: bool  # any rank asks to think again
    transfer_us: int  # the slowest rank's probe; 0 if there was none
    density: float | None  # the largest share of values that are not zero; None: nobody looked
    steps: list[tuple[int, int, int, bool]]  # (step, took_us, waited_us, fell_back), in order


class Polls:
    """The votes of one rank: what its steps took goes out, what all agreed on comes back some steps later, in order."""

    def __init__(self, communicator: Communicator) -> None:
        self._communicator = communicator
        self._rows: list[tuple[Lap, bool]] = []  # of each step that is not on its way yet
        self._pending: deque[tuple[int, torch.futures.Future]] = deque()  # last step; of the all-reduce and its numbers
        self._has_looked = False

    def add(self, step: int, lap: Lap, fell_back: bool, gradients: Iterable[torch.Tensor | None], *,
            at_once: bool, probe: Wire | None, reconsider: bool) -> bool:  # fmt: skip
        """Put a step to the vote, at once or with the next ones; return whether it is on its way. On the training thread.

        Args:
            lap: of the step. fell_back: it says nothing of its scheme.
            gradients: looked at for zeros in the first vote, and with a probe.
            probe: measure this wire's link before it. reconsider: ask all ranks to think again. Both only if it goes at once.
        """
        looks = probe is not None or not self._has_looked
        self._rows.append((lap, fell_back))
        if not at_once and not looks and len(self._rows) < _BATCH:
            return False
        density = look_for_zeros(gradients) if looks else None
        started = self._communicator.submit(self._start, step, reconsider, density, self._rows, probe)
        self._rows, self._has_looked = [], True
        self._pending.append((step, started))
        return True

    def _start(
        self, step: int, reconsider: bool, density: Callable[[], float] | None, laps: list[tuple[Lap, bool]],
        probe: Wire | None,
    ) -> tuple[torch.futures.Future, torch.Tensor]:  # fmt: skip
        """Write (5 + 3 n,) int64, what is to be the least with its sign changed, and begin their maximum.

        On the lane, which waits for the end of steps that a device is still at; then probe a link.
        """
        rows = [(*lap.read(), fell_back) for lap, fell_back in laps]
        permille = 0 if density is None else 1 + round(1000 * density())
        numbers = [step, -step, int(reconsider), 0 if probe is None else probe_transfer_us(probe), permille]
        for took_ns, waited_ns, fell_back in rows:
            numbers += [took_ns // 1000, -(waited_ns // 1000), int(fell_back)]
        largest = torch.tensor(numbers, dtype=torch.int64, device="cpu")
        return self._communicator.start_all_reduce(largest, dist.ReduceOp.MAX), largest

    def next_before(self, step: int) -> Vote | None:
        """The oldest vote, if it is of steps before `step`: waits for it. Raises: RankMismatch, PeerLost."""
        if not self._pending or self._pending[0][0] >= step:
            return None
        communicator, (mine, started) = self._communicator, self._pending.popleft()
        under_way, largest = started.wait()
        communicator.finish(under_way)
        last_step, minus_first, reconsider, transfer_us, permille, *rows = largest.tolist()
        if last_step != -minus_first:  # of the first rank and of the last
            raise communicator.fail(
                RankMismatch(
                    f"rank {communicator.rank} is at step {mine}, another is elsewhere: call backward equally often "
                    "on all ranks, and resume all of them from the same checkpoint"
                )
            )
        columns = zip(rows[::3], rows[1::3], rows[2::3], strict=True)
        steps = [
            (step, took_us, -waited_us, bool(fell_back))
            for step, (took_us, waited_us, fell_back) in enumerate(columns, mine - len(rows) // 3 + 1)
        ]
        return Vote(mine, bool(reconsider), transfer_us, (permille - 1) / 1000 if permille else None, steps)

    def forget(self) -> None:
        """Wait for what is under way, and take no notice of it. Raises: PeerLost."""
        for _, started in self._pending:
            self._communicator.finish(started.wait()[0])
        self._pending.clear()
        self._rows, self._has_looked = [], False


class LinkProbes:
    """Says which steps are followed by a probe of the link, and whether probes have found another one. Alike on all ranks.

    Other traffic only slows a probe: the fastest counts, and a slower link is looked at again.
    """

    def __init__(self) -> None:
        self._n_to_come = 0
        self._transfers_us: list[int] = []

    def ask(self, is_urgent: bool) -> None:
        """Probe after the next step; if it is urgent, after the next ones, whatever the first says."""
        self._n_to_come = _N_PROBES if is_urgent else 1

    def take(self) -> bool:
        """Return whether this step is followed by a probe; asked once a step."""
        is_due = self._n_to_come > 0
        self._n_to_come -= is_due
        return is_due

    def found(self, transfer_us: int, old: float, rate_of: Callable[[int], float]) -> int | None:
        """What a transfer takes over another link than that of rate `old`, if the slowest rank's one says that it is another.

        `rate_of`: of a link over which a transfer takes so many microseconds.
        """
        self._transfers_us.append(transfer_us)
        fastest_us = min(self._transfers_us)
        new = rate_of(fastest_us)
        is_slower = (old - new) * 1000 > _CHANGED * old
        if is_slower and len(self._transfers_us) < _N_PROBES:
            self._n_to_come = max(1, self._n_to_come)
            return None
        self._transfers_us.clear()
        return fastest_us if abs(new - old) * 1000 > _CHANGED * old else None

    def forget(self) -> None:
        """Nothing is to come, and what came does not count."""
        self._n_to_come = 0
        self._transfers_us.clear()
