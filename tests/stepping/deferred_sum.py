"""The plainest scheme that owns the step: the backend's sum, taken as DDP takes it."""

from __future__ import annotations

import torch

from gradwire.schemes.deferred import DeferredScheme, OpenBlock


class DeferredSum(DeferredScheme):
    name = "deferred-sum"

    def _start_block(self, slot: OpenBlock) -> torch.futures.Future:
        communicator = self.session.communicator

        def reduce() -> None:
            slot.gradient.mul_(1.0 / communicator.world_size)
            communicator.all_reduce(slot.gradient)

        return communicator.submit(reduce)
