"""What a scheme is given to work with."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch

from gradwire.core.feedback import Feedback
from gradwire.core.slot import Slot
from gradwire.telemetry.recorder import Recorder
from gradwire.wire.communicator import Communicator
from gradwire.wire.wire import Wire


@dataclass(frozen=True)
class Session:
    """One connection of a scheme to a training run.

    Attributes:
        communicator: the ranks and the lane.
        wire: its collectives, in host memory or on the device of the buckets.
        recorder: where bytes and times go.
        optimizer: the user's, read live and never changed; None if gradwire was not given it.
        slots: what is reduced, by name; read live, as named tensors are added at first sight. Empty if gradwire was not
            told names.
        loss_scale: what the loss, and so every gradient, is multiplied by now (AMP); 1.0 without a scaler.
        module_ref: of the DDP model, which is not kept alive: it goes when its user lets go of it.
        has_scaler: whether there is a GradScaler.
        feedback: what the scheme at work has not sent yet.
    """

    communicator: Communicator
    wire: Wire
    recorder: Recorder
    optimizer: torch.optim.Optimizer | None
    slots: Mapping[str, Slot]
    loss_scale: Callable[[], float]
    module_ref: Callable[[], torch.nn.Module | None] = lambda: None
    has_scaler: bool = False
    feedback: Feedback = field(default_factory=Feedback)

    @property
    def module(self) -> torch.nn.Module | None:
        """The DDP model; None if gradwire was not given it."""
        return self.module_ref()

    @property
    def names(self) -> dict[torch.Tensor, str]:
        """Each parameter with its name."""
        return {slot.parameter: name for name, slot in self.slots.items() if slot.parameter is not None}
