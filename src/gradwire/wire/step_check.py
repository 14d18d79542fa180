"""The in-band check of schemes whose gradients are summed by the backend, where no message has a header to carry facts.

After each step every rank adds a few numbers to one small all-reduce, which runs in the background and is read a step
later. It can only say that ranks differ, not which: then all ranks, which read the same numbers, run the full exchange.
"""

from __future__ import annotations

from typing import NoReturn

import torch
import torch.distributed as dist

from gradwire.errors import PeerLost, RankMismatch
from gradwire.telemetry.recorder import BucketRecord
from gradwire.wire.communicator import Communicator, ring_bytes
from gradwire.wire.preamble import Preamble, compare_preambles


class StepCheck:
    """Compares step, layout and configuration of all ranks, one step behind; used on the lane."""

    def __init__(self, communicator: Communicator) -> None:
        self._communicator = communicator
        # The largest of x and of -x over the ranks: ranks agree where the two are each other's negative.
        self._extremes = torch.zeros((2, 3), dtype=torch.int64, device="cpu")
        self._smallest = torch.zeros(3, dtype=torch.int64, device="cpu")
        self._pending: torch.futures.Future | None = None
        self._mine: Preamble | None = None
        self._factors = 0

    def start(self, mine: Preamble, record: BucketRecord, factors: int = 0) -> None:
        """Read the last step's check, then start this step's. `factors`: 32 bits of the factors that ranks hold alike.

        Raises: RankMismatch, PeerLost.
        """
        if self._communicator.world_size == 1:
            return
        self._read(record)
        for index, fact in enumerate((mine.step, mine.layout ^ factors, mine.configuration)):
            self._extremes[0, index], self._extremes[1, index] = fact, -fact
        self._mine, self._factors = mine, factors
        self._pending = self._communicator.start_all_reduce(self._extremes, dist.ReduceOp.MAX)
        n_bytes = ring_bytes(self._extremes.numel() * self._extremes.element_size(), self._communicator.world_size)
        record.count_exchanged(n_bytes)

    def fail_early(self) -> None:
        """Have the group fail as soon as a peer is lost to the check under way: for steps in which no host waits for it."""

        def look(pending: torch.futures.Future) -> None:
            try:
                self._communicator.finish(pending)
            except PeerLost as error:
                self._communicator.fail(error)

        if self._pending is not None:
            self._pending.add_done_callback(look)

    def _read(self, record: BucketRecord) -> None:
        if self._pending is None or self._mine is None:
            return
        self._communicator.finish(self._pending)
        self._pending = None
        torch.neg(self._extremes[1], out=self._smallest)
        if not torch.equal(self._extremes[0], self._smallest):
            compare_preambles(self._communicator, self._mine, record)
            name_other_factors(self._communicator, self._mine, self._factors)


def name_other_factors(communicator: Communicator, mine: Preamble, factors: int) -> NoReturn:
    """Once all else was found to be equal; every rank calls it. `factors`: 32 bits of them. Raises: RankMismatch."""
    held = communicator.all_gather(torch.tensor([factors], dtype=torch.int64, device="cpu")).view(-1).tolist()
    listing = ", ".join(f"rank {rank}: {bits:08x}" for rank, bits in enumerate(held))
    raise RankMismatch(
        f"ranks hold different factors before bucket {mine.bucket} of step {mine.step} ({listing}). What to do: "
        "resume every rank from the same checkpoint; if this is no resumed run, report it with the machines' types."
    )
