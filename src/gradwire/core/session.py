"""The session: all that a scheme is given to work with."""

import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from gradwire.core.bucket import Slot
from gradwire.core.feedback import Feedback
from gradwire.core.optimizers import Optimizers
from gradwire.telemetry.recorder import Recorder
from gradwire.wire.communicator import Communicator
from gradwire.wire.device_wire import Reading
from gradwire.wire.wire import Wire


class LossScale:
    """The factor of the gradients of this backward pass (AMP), read so that no thread waits for the whole device."""

    def __init__(self, scaler: Any = None) -> None:
        self._scaler = scaler
        self._reading: Reading | None = None
        self._pinned: torch.Tensor | None = None

    def take(self, scaler: Any) -> float:
        """Read `scaler` from now on. Returns: its scale, which nobody had heard of."""
        self._scaler = scaler
        return float(scaler.get_scale())

    def note(self) -> None:
        """Start reading the scale, with the first bucket of a pass that comes from a device, on its stream."""
        # GradScaler has no public way to it but get_scale(), which waits for all that the device was given.
        scale: Any = getattr(self._scaler, "_scale", None)
        is_on_device = isinstance(scale, torch.Tensor) and scale.device.type != "cpu"
        self._reading = Reading(scale.detach(), self._pinned) if is_on_device else None
        self._pinned = self._reading.on_host if self._reading is not None else None

    def __call__(self) -> float:
        if self._scaler is None:
            return 1.0
        return float(self._scaler.get_scale() if self._reading is None else self._reading.wait())


@dataclass(frozen=True)
class Session:
    """One connection of a scheme to a training run."""

    communicator: Communicator  # the ranks and the lane
    wire: Wire  # its collectives, in host memory or on the device of the buckets
    recorder: Recorder  # where bytes and times go
    optimizers: Optimizers  # the user's, read live and never changed; none if gradwire was not given any
    slots: Mapping[str, Slot]  # what is reduced, by name; read live, as named tensors are added at first sight
    loss_scale: Callable[[], float]  # what the loss, and so every gradient, is multiplied by now (AMP)
    module_ref: weakref.ref[torch.nn.Module] | None = None  # of the DDP model, which goes when its user lets go of it
    has_scaler: bool = False  # whether there is a GradScaler
    feedback: Feedback = field(default_factory=Feedback)  # what the scheme at work has not sent yet
    device_wire: Wire | None = None  # beside `wire` in host memory, where it was left to the scheme which to use

    @property
    def module(self) -> torch.nn.Module | None:
        """The DDP model; None if gradwire was not given it."""
        return None if self.module_ref is None else self.module_ref()

    @property
    def names(self) -> dict[torch.Tensor, str]:
        return {slot.parameter: name for name, slot in self.slots.items() if slot.parameter is not None}
