"""Replay: real gradients of a large shape, fed to DDP's hooks in backward order, with computation emulated by waiting.

A model of one autograd node a layer. Its forward pass waits; its backward pass waits and hands the layer's captured gradients
to DDP. Communication and codecs are real; the computation is not, and every result carries `emulated: true`. Gradients are
the same at every step: a loss means nothing.

All ranks map one file, PATH.pt: the gradients and then the parameters, all elements in the order of `named_parameters()`,
their shapes, and the layers in the order of their forward pass with their parameters' names and the seconds that each took.
"""

import fcntl
import functools
import math
import os
import pickle
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from gradwire import checks
from gradwire.errors import CorruptMessage, IncompatibleVersion, InvalidArgument
from gradwire.telemetry.stopwatch import Stopwatch
from gradwire_lab.workloads.base import Batch, Workload
from gradwire_lab.workloads.calibration import reference_calibration

_FORMAT = 3  # of a capture

# A step's time is the quickest of several: the first one warms caches up, and other work may disturb any. A large model,
# whose step takes seconds, is scaled to a reference accelerator anyway.
_N_TIMED_STEPS = 4
_LARGE_ELEMENTS = 20_000_000
# A call of hooks that takes longer has waited for something.
_WAIT_S = 0.5e-3


class _Clock(Stopwatch):
    """When the emulated accelerator is done with what it was given.

    Waits aim at that moment and not at a duration: like a CUDA launch, the accelerator's work goes on while the host
    is busy in a hook, and `time.sleep`'s lateness (about 60 us) does not add up over hundreds of layers.
    """

    due_s = 0.0

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

    def __init__(self, capture: "Capture", part: int, step_s: float) -> None:
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
                if word not in owner._modules:  # called when the layer begins, as the real module would be
                    owner.add_module(word, nn.Identity())
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
        self._clock.begin()
        self._clock.due_s = 0.0
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
        step_ms: forward and backward; default: the reference accelerator's (calibration.py), else what the capture took here.
        update: let the optimizer change the parameters; else all ranks on a machine share one copy of them.
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

    def make_model(self) -> ReplayModel:
        rank = int(os.environ.get("RANK", "0"))
        return ReplayModel(self._capture, rank % self._capture.n_captures, self.step_s)

    def build_optimizer(self, model: nn.Module) -> Optimizer:
        optimizer = super().build_optimizer(model)
        if not self._update:
            # A step without gradients changes nothing, and everything else that hangs on the optimizer (its exact
            # type, step hooks, schedulers) sees a normal step.
            optimizer.register_step_pre_hook(lambda optimizer, *_: optimizer.zero_grad(set_to_none=True))
        return optimizer

    def batch_at(self, step: int, rank: int, world_size: int, batch_size: int, seed: int) -> Batch:
        return torch.zeros(1), torch.zeros(1)

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        return model(batch[0])

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


# ---- the capture


@dataclass(frozen=True)
class CapturedLayer:
    """The parameters whose gradients arrive together, by name, and what computing them took on the capturing machine."""

    names: Sequence[str]
    forward_s: float
    backward_s: float


@dataclass(frozen=True)
class Capture:
    """What PATH.pt holds."""

    workload: str
    shapes: Mapping[str, Sequence[int]]  # of the parameters, in the order of the file
    layers: Sequence[CapturedLayer]  # in forward order
    losses: Sequence[float]  # of each gradient
    # (n_captures + 1, n) float32: the gradients, then the parameters; ranks share the file's pages until they write.
    values: Tensor
    source: str  # how the gradients came about, for the records of a run

    @property
    def n_captures(self) -> int:
        """How many gradients there are."""
        return len(self.losses)

    @property
    def step_s(self) -> float:
        """Seconds of forward and backward on the capturing machine."""
        return sum(layer.forward_s + layer.backward_s for layer in self.layers)


def open_or_capture(path: Path, workload: Workload, n_captures: int, seed: int) -> Capture:
    """The capture at `path`, made first if need be, once. Raises: InvalidArgument, CorruptMessage, IncompatibleVersion."""
    path.parent.mkdir(parents=True, exist_ok=True)
    # One process captures, since a large model fits into memory once, not once per rank.
    with open(path.with_name(path.name + ".lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (file := path.with_name(path.name + ".pt")).exists():
            partial = path.with_name(f"{path.name}.pt.{os.getpid()}")
            made = capture(workload, n_captures, seed)
            torch.save({"format": _FORMAT, **vars(made), "layers": [vars(layer) for layer in made.layers]}, partial)
            partial.replace(file)
    found = read_capture(file)
    with torch.device("meta"):
        expected = shapes_of(workload.make_model())
    held, wanted = f"{found.workload} x {found.n_captures}", f"{workload.name} x {n_captures}"
    wrong = f"{held}, not of {wanted}" if held != wanted else ""
    if list(found.shapes.items()) != list(expected.items()):
        wrong = f"another shape than {workload.name} with these options"
    if wrong:
        raise InvalidArgument(f"{file} is a capture of {wrong}: delete it or name another with capture=...")
    return found


def read_capture(file: Path) -> Capture:
    """What `file` holds, checked for its form. Raises: CorruptMessage, IncompatibleVersion."""
    try:
        content = torch.load(file, mmap=True, weights_only=True)
        version = content.pop("format")
        if version != _FORMAT:
            raise IncompatibleVersion(f"{file}: format {version}, this gradwire reads {_FORMAT}; delete it")
        found = Capture(**content | {"layers": [CapturedLayer(**layer) for layer in content["layers"]]})
        named = sorted(name for layer in found.layers for name in layer.names)
        n_elements = sum(map(math.prod, found.shapes.values()))
        is_whole = named == sorted(found.shapes) and found.values.shape == (found.n_captures + 1, n_elements)
    except (OSError, RuntimeError, ValueError, KeyError, TypeError, AttributeError, pickle.UnpicklingError) as error:
        raise CorruptMessage(f"{file}: not a capture ({type(error).__name__}: {error}); delete it") from error
    if not is_whole:
        raise CorruptMessage(f"{file}: its layers and values are not those of its shapes; delete it")
    return found


def capture(workload: Workload, n_captures: int, seed: int) -> Capture:
    """Run real steps without an update, keep their gradients, and time the layers."""
    model = workload.build_model(seed)
    parameters = list(model.parameters())
    n_elements = sum(parameter.numel() for parameter in parameters)
    values = torch.zeros(n_captures + 1, n_elements)
    losses: list[float] = []
    timed: list[list[CapturedLayer]] = []
    for index in range(n_captures if n_elements > _LARGE_ELEMENTS else max(n_captures, _N_TIMED_STEPS)):
        model.zero_grad(set_to_none=True)
        batch = workload.batch_at(0, index % n_captures, n_captures, workload.batch_size, seed)
        loss, layers = _take_timed_step(model, functools.partial(workload.loss, model, batch))
        timed.append(layers)
        if index < n_captures:
            losses.append(loss)
            gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in parameters]
            torch.cat([gradient.reshape(-1) for gradient in gradients], out=values[index])
    torch.cat([parameter.detach().reshape(-1) for parameter in parameters], out=values[-1])
    layers = min(timed, key=lambda layers: sum(layer.forward_s + layer.backward_s for layer in layers))
    source = f"captured here, batch {workload.batch_size}, {workload.data} data"
    return Capture(workload.name, shapes_of(model), layers, losses, values, source)


def shapes_of(model: nn.Module) -> dict[str, list[int]]:
    """{name: shape} of the parameters, in order."""
    return {name: list(parameter.shape) for name, parameter in model.named_parameters()}


def _take_timed_step(model: nn.Module, forward: Callable[[], Tensor]) -> tuple[float, list[CapturedLayer]]:
    """The loss, and the layers in forward order, those without a gradient first. A layer is the parameters of one
    module whose gradients arrive one after the other; that times the backward pass."""
    names = {parameter: name for name, parameter in model.named_parameters()}
    owners = {p: module for module in model.modules() for p in module.parameters(recurse=False)}
    arrivals: list[tuple[nn.Parameter, float]] = []
    forward_s = dict.fromkeys(owners.values(), 0.0)
    watch, last_s = Stopwatch(), 0.0

    def note_forward(module: nn.Module, *_: Any) -> None:
        nonlocal last_s
        now_s = watch.elapsed_s
        forward_s[module] += now_s - last_s
        last_s = now_s

    hooks = [p.register_post_accumulate_grad_hook(lambda p: arrivals.append((p, watch.elapsed_s))) for p in names]
    hooks += [module.register_forward_hook(note_forward) for module in forward_s]
    watch.begin()
    loss = forward()
    previous_s = watch.elapsed_s
    loss.backward()
    for hook in hooks:
        hook.remove()
    arrived = {parameter for parameter, _ in arrivals}
    groups: list[tuple[nn.Module, list[str], list[float]]] = []
    for parameter, arrived_s in arrivals + [(parameter, 0.0) for parameter in names if parameter not in arrived]:
        if not groups or groups[-1][0] is not owners[parameter]:
            groups.append((owners[parameter], [], []))
        groups[-1][1].append(names[parameter])
        groups[-1][2].append(max(0.0, arrived_s - previous_s))
        previous_s = max(previous_s, arrived_s)
    # A module in two groups pays for its forward pass once.
    layers = [
        CapturedLayer(own, forward_s.pop(module, 0.0), sum(backward_s)) for module, own, backward_s in groups[::-1]
    ]
    return float(loss.detach()), layers
