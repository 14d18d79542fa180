"""Replay: real gradients of a large shape, fed to DDP's hooks in backward order, with computation emulated by waiting.

A model of one autograd node a layer. Its forward pass waits; its backward pass waits and hands the layer's captured
gradients to DDP, whose reducer, buckets and hooks then run as ever. Communication and codecs are real; the computation
is not, and every result carries `emulated: true`.

When not to use this: to learn anything about a loss. The gradients are the same at every step.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from gradwire import checks
from gradwire.errors import InvalidArgument
from gradwire.telemetry.stopwatch import Stopwatch
from gradwire_lab.workloads.base import Batch, Workload
from gradwire_lab.workloads.calibration import reference_calibration
from gradwire_lab.workloads.capture import Capture, open_or_capture

# A call of hooks that takes longer has waited for something.
_WAIT_S = 0.5e-3


class _Clock(Stopwatch):
    """When the emulated accelerator is done with what it was given.

    Waits aim at that moment and not at a duration: like a CUDA launch, the accelerator's work goes on while the host
    is busy in a hook, and `time.sleep`'s lateness (about 60 us) does not add up over hundreds of layers.
    """

    due_s = 0.0

    def restart(self) -> None:
        """The forward pass begins."""
        self.begin()
        self.due_s = 0.0

    def wait(self, duration_s: float) -> None:
        self.due_s += duration_s
        left_s = self.due_s - self.elapsed_s
        if left_s > 0:
            time.sleep(left_s)  # releases the interpreter: the communication lane runs meanwhile

    def follow_host(self, started_s: float) -> None:
        """The host has been at something since `started_s`; if that was a wait, the accelerator could not go on either."""
        now_s = self.elapsed_s
        if now_s - started_s > _WAIT_S:
            self.due_s = max(self.due_s, now_s)


@dataclass(frozen=True)
class _Layer:
    """One layer of the chain: its waits in seconds, its parameters with their gradients, and the modules that hold them."""

    forward_s: float
    backward_s: float
    parameters: list[nn.Parameter]
    gradients: list[Tensor]
    holders: list[nn.Module]

    def hand_over(self) -> list[Tensor]:
        """The captured gradients as tensors that autograd takes over instead of copying, as it does with computed ones.

        DDP copies them into its buckets, of which `.grad` is a view from then on (`ReplayWorkload.ddp_options`; without
        these options DDP would write means over the captured values). In `no_sync` the captured memory is still `.grad`
        when more is to be added to it: then it is copied first.
        """
        for parameter, gradient in zip(self.parameters, self.gradients, strict=True):
            if parameter.grad is not None and parameter.grad.data_ptr() == gradient.data_ptr():
                parameter.grad = parameter.grad.clone()
        return [gradient.detach() for gradient in self.gradients]


class _Holder(nn.Module):
    """Holds a layer's parameters under their names; called when the layer begins, as the real module would be."""

    def forward(self, x: Tensor) -> Tensor:
        return x


class _ReplayLayer(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, layer: _Layer, clock: _Clock, *parameters: Tensor) -> Tensor:
        clock.wait(layer.forward_s)
        ctx.layer, ctx.clock = layer, clock
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        ctx.clock.wait(ctx.layer.backward_s)
        return (grad, None, None, *ctx.layer.hand_over())


class ReplayModel(nn.Module):
    """The captured shape under its own parameter names; calling it returns the captured loss as a 0-d tensor."""

    def __init__(self, capture: Capture, part: int, step_s: float) -> None:
        super().__init__()
        self._clock = _Clock()
        self._loss, gradients, parameters = capture.losses[part], capture.values[part], capture.values[-1]
        sizes = [math.prod(shape) for shape in capture.shapes.values()]
        tensors: dict[str, nn.Parameter] = {}
        views: dict[str, Tensor] = {}
        # In the order of the real model's named_parameters(), which decides DDP's buckets.
        for (name, shape), own, gradient in zip(
            capture.shapes.items(), parameters.split(sizes), gradients.split(sizes), strict=True
        ):
            tensors[name], views[name] = nn.Parameter(own.view(*shape)), gradient.view(*shape)
            *path, leaf = name.split(".")
            owner: nn.Module = self
            for word in path:
                if word not in owner._modules:
                    owner.add_module(word, _Holder())
                owner = owner.get_submodule(word)
            owner.register_parameter(leaf, tensors[name])
        scale = step_s / capture.step_s if capture.step_s > 0 else 0.0
        self.layers: Sequence[_Layer] = [  # in the order of the forward pass
            _Layer(
                layer.forward_s * scale,
                layer.backward_s * scale,
                [tensors[name] for name in layer.names],
                [views[name] for name in layer.names],
                [self.get_submodule(path) for path in dict.fromkeys(n.rpartition(".")[0] for n in layer.names) if path],
            )
            for layer in capture.layers
        ]

    def occupy(self, duration_s: float) -> None:
        """The emulated accelerator did something else for so long: what it has still to compute begins later."""
        self._clock.due_s += duration_s

    def forward(self, inputs: Tensor) -> Tensor:
        self._clock.restart()
        x = torch.tensor(self._loss)
        for layer in self.layers:
            started_s = self._clock.elapsed_s
            for holder in layer.holders:
                x = holder(x)  # a scheme that steps block by block waits here for the layer's parameters
            self._clock.follow_host(started_s)
            x = _ReplayLayer.apply(x, layer, self._clock, *layer.parameters)
        return x


class ReplayWorkload(Workload):
    """Another workload's shape, replayed.

    Args:
        shape: the workload whose gradients are replayed.
        capture: path of the capture without its suffix; default: `$XDG_CACHE_HOME/gradwire/NAME-...`. Made at first use.
        n_captures: different gradients; rank r replays number r modulo n_captures.
        step_ms: forward and backward of one step; default: the reference accelerator's (calibration.py), else what
            the capture took here.
        update: let the optimizer change the parameters. By default its step does nothing, because the gradients never
            change, and so that all ranks on a machine share one copy of the parameters.
        seed: of the captured model and batch.
    """

    compute = "emulate"
    data = "replay"

    def __init__(
        self,
        *,
        shape: Workload,
        capture: str | None = None,
        n_captures: int = 2,
        step_ms: float | None = None,
        update: bool = False,
        seed: int = 0,
        **options: Any,
    ) -> None:
        super().__init__(name=shape.name, **options)
        checks.count("n_captures", n_captures)
        if step_ms is not None and not step_ms >= 0:
            raise InvalidArgument(f"step_ms={step_ms}: expected a time of 0 or more")
        self._shape, self._update = shape, update
        self.stands_for = shape.stands_for
        cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        default = cache / "gradwire" / f"{shape.name}-batch{shape.batch_size}-seed{seed}-x{n_captures}"
        self._capture = open_or_capture(Path(capture).expanduser() if capture else default, shape, n_captures, seed)
        reference = reference_calibration(shape.name)
        if step_ms is not None:
            self.step_s, self.calibration = step_ms / 1e3, "step_ms given by the user"
        elif reference is not None:
            self.step_s, self.calibration = reference.step_s, reference.origin
            self.batch_size = reference.batch_size
        else:
            self.step_s, self.calibration = self._capture.step_s, "as measured on the capturing machine"

    def make_model(self) -> nn.Module:
        return self.make_rank_model(int(os.environ.get("RANK", "0")))

    def make_rank_model(self, rank: int) -> nn.Module:
        """The model that replays the gradients of `rank`."""
        return ReplayModel(self._capture, rank % self._capture.n_captures, self.step_s)

    def build_optimizer(self, model: nn.Module) -> Optimizer:
        optimizer = super().build_optimizer(model)
        if not self._update:
            # A step without gradients changes nothing, and everything else that hangs on the optimizer (its exact
            # type, step hooks, schedulers) sees a normal step.
            optimizer.register_step_pre_hook(_drop_gradients)
        return optimizer

    def batch_at(self, step: int, rank: int, world_size: int, batch_size: int, seed: int) -> Batch:
        return torch.zeros(1), torch.zeros(1)

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        out: Tensor = model(batch[0])
        return out

    def ddp_options(self) -> dict[str, Any]:
        # No broadcast at the start (the ranks map the same parameters, and writing to them would copy them), and
        # gradients as views of the buckets: one copy of the gradient a rank instead of two, and the captured one stays
        # as it is.
        return {"init_sync": False, "gradient_as_bucket_view": True}

    def describe(self) -> dict[str, Any]:
        return {
            **super().describe(),
            "calibration": self.calibration,
            "emulated_step_s": self.step_s,
            "gradients": self._capture.source,
        }


# What `replay_by_name` keeps for the replay; all other options are the workload's whose shape it takes.
_REPLAY_OPTIONS = ("capture", "n_captures", "step_ms", "update", "seed", "weight_decay")


def replay_by_name(
    name: str, *, optimizer: str | None = None, learning_rate: float | None = None, **options: Any
) -> ReplayWorkload:
    """The replay of workload `name`; options that are not the replay's go to the workload whose shape it takes."""
    from gradwire_lab.workloads import by_name

    own = {option: options.pop(option) for option in _REPLAY_OPTIONS if option in options}
    shape = by_name(name, **options)
    rate = learning_rate if learning_rate is not None else shape.learning_rate
    return ReplayWorkload(shape=shape, optimizer=optimizer or shape.optimizer, learning_rate=rate, **own)


def _drop_gradients(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    optimizer.zero_grad(set_to_none=True)
