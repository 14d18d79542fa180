"""A Communicator of one rank that answers for all others: every collective, without a network, at once."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from gradwire.wire.communicator import Communicator, completed


class LoneRank(Communicator):
    """One rank in a world of `world_size` of which all others send what it sends; point to point is not to be had.

    For measuring what a scheme computes and not what it sends: sums are products with the world size.

    Args:
        world_size: how many ranks the scheme is to believe in. The real group has one, this process.
    """

    def __init__(self, world_size: int) -> None:
        super().__init__()
        self.world_size = world_size

    def all_reduce(self, tensor: torch.Tensor, op: Any = dist.ReduceOp.SUM) -> None:
        if op == dist.ReduceOp.SUM:
            tensor.mul_(self.world_size)

    def start_all_reduce(self, tensor: torch.Tensor, op: Any = dist.ReduceOp.SUM) -> torch.futures.Future:
        self.all_reduce(tensor, op)
        return completed([tensor])

    def all_gather(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.repeat(self.world_size, 1)
