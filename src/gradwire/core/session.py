"""What a scheme is given to work with."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from gradwire.telemetry.recorder import Recorder
from gradwire.wire.communicator import Communicator


@dataclass(frozen=True)
class Session:
    """One connection of a scheme to a training run.

    Attributes:
        communicator: the ranks and the lane.
        recorder: where bytes and times go.
        optimizer: the user's, read live and never changed; None if gradwire was not given it.
        names: parameter -> its name in the module; empty if gradwire was not given the module.
        loss_scale: what the loss, and so every gradient, is multiplied by now (AMP); 1.0 without a scaler.
        module: the DDP model; None if gradwire was not given it.
        has_scaler: whether there is a GradScaler.
    """

    communicator: Communicator
    recorder: Recorder
    optimizer: torch.optim.Optimizer | None
    names: Mapping[torch.Tensor, str]
    loss_scale: Callable[[], float]
    module: torch.nn.Module | None = None
    has_scaler: bool = False
