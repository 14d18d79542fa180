"""What is known of one step while its blocks are under way."""

from __future__ import annotations

import torch

from gradwire.schemes.deferred import OpenBlock
from gradwire.telemetry.recorder import BucketRecord


class Round:
    """One step under way: what waits to be sent, what was sent of it, and who waits for it."""

    def __init__(self, step: int, n_blocks: int, world_size: int, records: list[BucketRecord | None]) -> None:
        self.step, self.n_blocks, self.records = step, n_blocks, records
        self.n_appeared = self.n_summed = 0
        self.unsent: list[OpenBlock] = []  # in the order in which they appeared
        self.awaited: dict[int, torch.futures.Future] = {}  # of blocks that appeared and are not summed yet
        self.sent_bits = [0] * n_blocks  # of a value of each block
        self.n_open = [world_size] * n_blocks  # ranks that may still send of each block
        self.ended = [False] * n_blocks  # own blocks of which nothing follows
        self.ending: list[int] = []  # those of which the next head says so

    @property
    def is_complete(self) -> bool:
        return self.n_summed == self.n_blocks

    @property
    def has_all(self) -> bool:
        return self.n_appeared == self.n_blocks

    def give_up(self) -> list[torch.futures.Future]:
        """Nobody is to be told of the blocks that are missing any more; what was awaited until now."""
        waiting, self.awaited = list(self.awaited.values()), {}
        return waiting
