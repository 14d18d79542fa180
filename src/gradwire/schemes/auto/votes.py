"""What ranks tell each other of their steps: a few whole numbers on a background all-reduce, of which the largest count.

The slowest rank's time is everybody's, and of the waiting the smallest: who waits least waits for the network, the others for
that rank.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator

import torch
import torch.distributed as dist

from gradwire.errors import RankMismatch
from gradwire.schemes.auto.profile import density_of
from gradwire.wire.communicator import Communicator
from gradwire.wire.link_probe import probe_transfer_us

_BATCH = 5  # steps that share a vote while nothing is tried


class Polls:
    """The votes of one rank: what its steps took goes out, what all agreed on comes back some steps later, in order."""

    def __init__(self, communicator: Communicator) -> None:
        self._communicator = communicator
        self._ballot = Ballot()
        self._pending: deque[Vote] = deque()
        self._transfer_us = 0
        self._has_looked = False

    def add(self, step: int, took_us: int, waited_us: int, fell_back: bool, gradients: Iterable[torch.Tensor | None], *,
            at_once: bool, probe: bool, reconsider: bool) -> bool:  # fmt: skip
        """Put a step to the vote, at once or with the next ones; whether it is on its way. On the training thread.

        Args:
            took_us, waited_us: of the step. fell_back: it says nothing of its scheme.
            gradients: looked at for zeros in the first vote, and with a probe.
            probe: measure the link before it. reconsider: ask all ranks to think again. Both only if it goes at once.
        """
        looks = probe or not self._has_looked
        self._ballot.add(took_us, waited_us, fell_back)
        if not at_once and not looks and self._ballot.n_steps < _BATCH:
            return False
        if probe:
            self._communicator.submit(self._probe)
        density = density_of(gradients) if looks else None
        self._has_looked = True
        vote, self._ballot = self._ballot.close(step, reconsider, density), Ballot()
        vote.started = self._communicator.submit(self._start, vote)
        self._pending.append(vote)
        return True

    def _probe(self) -> None:
        self._transfer_us = probe_transfer_us(self._communicator)

    def _start(self, vote: Vote) -> torch.futures.Future:
        vote.set_transfer(self._transfer_us)
        self._transfer_us = 0
        return self._communicator.start_all_reduce(vote.numbers, dist.ReduceOp.MAX)

    def next_before(self, step: int) -> Vote | None:
        """The oldest vote, if it is of steps before `step`: waits for it. Raises: RankMismatch, PeerLost."""
        if not self._pending or self._pending[0].last_step >= step:
            return None
        communicator, vote = self._communicator, self._pending.popleft()
        communicator.finish(vote.started.wait())
        if not vote.ranks_agree:
            raise communicator.fail(
                RankMismatch(
                    f"rank {communicator.rank} is at step {vote.last_step}, another is elsewhere: call backward equally often "
                    "on all ranks, and resume all of them from the same checkpoint"
                )
            )
        return vote

    def forget(self) -> None:
        """Wait for what is under way, and take no notice of it. Raises: PeerLost."""
        for vote in self._pending:
            self._communicator.finish(vote.started.wait())
        self._pending.clear()
        self._ballot, self._has_looked = Ballot(), False


class Ballot:
    """This rank's numbers of some steps, not yet sent."""

    def __init__(self) -> None:
        self._rows: list[int] = []

    @property
    def n_steps(self) -> int:
        return len(self._rows) // 3

    def add(self, took_us: int, waited_us: int, fell_back: bool) -> None:
        """One more step: how long it took, how much of it waited, whether it says nothing of its scheme."""
        self._rows += [took_us, -waited_us, int(fell_back)]

    def close(self, last_step: int, reconsider: bool, density: float | None = None) -> Vote:
        """The vote on these steps, the last of which is `last_step`."""
        permille = 0 if density is None else 1 + round(1000 * density)
        head = [last_step, -last_step, int(reconsider), 0, permille]
        return Vote(last_step, torch.tensor([*head, *self._rows], dtype=torch.int64))


class Vote:
    """`numbers` is this rank's until the maximum over the ranks is in it.

    Attributes:
        numbers: (5 + 3 n,) int64: last step and its negative, flags, a probe's microseconds, 1 + permille of values that are
            not zero, and three of each step.
        started: the lane's future of the all-reduce's future.
    """

    started: torch.futures.Future

    def __init__(self, last_step: int, numbers: torch.Tensor) -> None:
        self.last_step, self.numbers = last_step, numbers

    def set_transfer(self, transfer_us: int) -> None:
        """What a probe of the link took here; before the vote is sent."""
        self.numbers[3] = transfer_us

    @property
    def ranks_agree(self) -> bool:
        """Whether all ranks voted on the same steps."""
        return bool(self.numbers[0] == -self.numbers[1])

    @property
    def reconsider(self) -> bool:
        return bool(self.numbers[2])

    @property
    def transfer_us(self) -> int:
        """The slowest rank's probe; 0 if there was none."""
        return int(self.numbers[3])

    @property
    def density(self) -> float | None:
        """The largest of all ranks' shares of values that are not zero; None: nobody looked."""
        return (int(self.numbers[4]) - 1) / 1000 if self.numbers[4] else None

    def steps(self) -> Iterator[tuple[int, int, int, bool]]:
        """(step, took_us, waited_us, fell_back), in order."""
        rows = self.numbers[5:].view(-1, 3).tolist()
        for index, (took_us, waited_us, fell_back) in enumerate(rows):
            yield self.last_step - len(rows) + 1 + index, took_us, -waited_us, bool(fell_back)
