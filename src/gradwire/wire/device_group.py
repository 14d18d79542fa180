"""Collectives between the ranks' devices, by the backend that torch has for them (NCCL), in a group of gradwire's own.

The group is apart from DDP's, so that the two never interleave. A collective is enqueued on the current stream and waits
for nothing; ranks issue them in one order, that of their lanes.

As the Communicator's, the group is made without `dist.new_group`: that gives a second group over the same ranks the first
one's place in the store, where what the first has left leads to connections that are gone.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from gradwire.errors import Unsupported
from gradwire.wire.communicator import Communicator


class DeviceGroup:
    """The ranks of a communicator, each with one device. Collective to make.

    Raises: Unsupported (torch has no backend for this device here).
    """

    def __init__(self, communicator: Communicator, device: torch.device) -> None:
        self._is_broken = False
        self._group = _make_backend(communicator, device)
        communicator.break_together(self)

    def sum(self, values: torch.Tensor) -> None:
        """Replace `values` by their sum over all ranks."""
        self.start_reduce(values)()

    def start_reduce(self, values: torch.Tensor, op: Any = dist.ReduceOp.SUM) -> Callable[[], None]:
        """Start to reduce `values` over all ranks; the current stream goes on until it waits by the result."""
        options = dist.AllreduceOptions()
        options.reduceOp = dist.ReduceOp(op)
        wait: Callable[[], None] = self._group.allreduce([values], options).wait  # which has the current stream wait
        return wait

    def all_to_all(self, received: torch.Tensor, sent: torch.Tensor) -> None:
        """Row i of every rank's `sent` (world, n) goes to rank i, into its `received` (world, n), by sender."""
        self._group.alltoall_base(received, sent, [], []).wait()

    def exchange(self, received: Sequence[torch.Tensor], sent: Sequence[torch.Tensor]) -> None:
        """`sent[i]` (n,) goes to rank i, from whom `received[i]` comes, both exactly as long as the other end has them.

        One of each for every rank, this one too; empty: nothing goes there.
        """
        self._group.alltoall(list(received), list(sent)).wait()

    def all_gather(self, gathered: torch.Tensor, values: torch.Tensor) -> None:
        """Every rank's `values` (n,) into `gathered` (world, n), by rank."""
        self._group._allgather_base(gathered.view(-1), values).wait()

    def break_off(self) -> None:
        """End what is under way, on the device too: a peer has failed, and would be waited for."""
        self._is_broken = True
        with contextlib.suppress(Exception):  # it may be broken already
            self._group.abort()

    def close(self, stream: torch.Stream) -> None:
        """Let go of the connections, when `stream` has done with them; at once, if they are broken."""
        if not self._is_broken:
            stream.synchronize()
            self._group.shutdown()


def _make_backend(communicator: Communicator, device: torch.device) -> Any:  # torch's annotations lack its collectives
    name = dist.Backend.default_device_backend_map.get(device.type, "")
    place = communicator.store_for("device"), communicator.rank, communicator.world_size
    timeout = timedelta(seconds=communicator.timeout_s)
    if name == dist.Backend.NCCL and dist.is_nccl_available():
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = timeout
        return dist.ProcessGroupNCCL(*place, options)
    plugin = dist.Backend._plugins.get(name.upper())
    if plugin is None or plugin.extended_api:
        raise Unsupported(
            f"torch has no collectives between devices of type {device.type!r} that gradwire knows: leave placement out, and "
            "gradients travel through host memory"
        )
    return plugin.creator_fn(*place, timeout)
