"""What ranks tell each other of their steps: a few whole numbers on a background all-reduce, of which the largest count.

The slowest rank's time is everybody's, and of the waiting the smallest: who waits least waits for the network, the others for
that rank.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

_RECONSIDER = 1


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

    def close(self, last_step: int, reconsider: bool) -> Vote:
        """The vote on these steps, the last of which is `last_step`."""
        return Vote(
            last_step, torch.tensor([last_step, -last_step, int(reconsider), 0, *self._rows], dtype=torch.int64)
        )


class Vote:
    """`numbers` is this rank's until the maximum over the ranks is in it.

    Attributes:
        numbers: (4 + 3 n,) int64: last step and its negative, flags, a probe's microseconds, and three of each step.
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

    def steps(self) -> Iterator[tuple[int, int, int, bool]]:
        """(step, took_us, waited_us, fell_back), in order."""
        rows = self.numbers[4:].view(-1, 3).tolist()
        for index, (took_us, waited_us, fell_back) in enumerate(rows):
            yield self.last_step - len(rows) + 1 + index, took_us, -waited_us, bool(fell_back)
