"""Capture real gradients of a workload once, into one file that all ranks map into their memory.

PATH.pt holds the gradients and then the parameters, each all elements in the order of the model's `named_parameters()`, their
shapes, and the layers in the order of their forward pass: the names of their parameters, and the seconds that each took.
"""

from __future__ import annotations

import fcntl
import math
import os
import pickle
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from gradwire.errors import CorruptMessage, IncompatibleVersion, InvalidArgument
from gradwire.telemetry.stopwatch import Stopwatch
from gradwire_lab.workloads.base import Workload

_FORMAT = 3

# A step's time is the quickest of several: the first one warms caches up, and other work may disturb any. A large model,
# whose step takes seconds, is scaled to a reference accelerator anyway.
_N_TIMED_STEPS = 4
_LARGE_ELEMENTS = 20_000_000


@dataclass(frozen=True)
class CapturedLayer:
    """The parameters whose gradients arrive together, by name, and what computing them took on the capturing machine."""

    names: Sequence[str]
    forward_s: float
    backward_s: float


@dataclass(frozen=True)
class Capture:
    """What PATH.pt holds. `layers` are in forward order; backward runs through them from the last to the first.

    Attributes:
        shapes: of the parameters, in the order of the file.
        losses: of each gradient.
        values: (n_captures + 1, n) float32: the gradients, then the parameters; read from the file, they are its pages,
            which ranks on one machine share until one of them writes to its own.
        source: how the gradients came about, for the records of a run.
    """

    workload: str
    shapes: Mapping[str, Sequence[int]]
    layers: Sequence[CapturedLayer]
    losses: Sequence[float]
    values: Tensor
    source: str

    @property
    def n_captures(self) -> int:
        """How many gradients there are."""
        return len(self.losses)

    @property
    def step_s(self) -> float:
        """Seconds of forward and backward on the capturing machine."""
        return sum(layer.forward_s + layer.backward_s for layer in self.layers)


def open_or_capture(path: Path, workload: Workload, n_captures: int, seed: int) -> Capture:
    """The capture at `path`, made first when it is not there; other processes that want it too wait meanwhile.

    Raises: InvalidArgument (a capture of another workload or size), CorruptMessage, IncompatibleVersion.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    # One process captures, since a large model fits into memory once, not once per rank.
    with open(path.with_name(path.name + ".lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (file := path.with_name(path.name + ".pt")).exists():
            partial = path.with_name(f"{path.name}.pt.{os.getpid()}")
            torch.save({"format": _FORMAT, **vars(capture(workload, n_captures, seed))}, partial)
            partial.replace(file)
    found = read_capture(file)
    with torch.device("meta"):
        expected = shapes_of(workload.make_model())
    if list(found.shapes.items()) != list(expected.items()):
        raise InvalidArgument(
            f"{file} is a capture of another shape than {workload.name} with these options: delete it or name another with "
            "capture=..."
        )
    if found.workload != workload.name or found.n_captures != n_captures:
        raise InvalidArgument(
            f"{file} is a capture of {found.workload} x {found.n_captures}, not of {workload.name} x "
            f"{n_captures}: delete it or name another with capture=..."
        )
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
    with _LayerTimes(model) as times:
        for index in range(n_captures if n_elements > _LARGE_ELEMENTS else max(n_captures, _N_TIMED_STEPS)):
            model.zero_grad(set_to_none=True)
            batch = workload.batch_at(0, index % n_captures, n_captures, workload.batch_size, seed)
            times.restart()
            loss = workload.loss(model, batch)
            times.note_backward()
            loss.backward()
            timed.append(times.layers())
            if index < n_captures:
                losses.append(float(loss.detach()))
                _fill(values[index], [torch.zeros_like(p) if p.grad is None else p.grad for p in parameters])
    _fill(values[-1], parameters)
    layers = min(timed, key=lambda layers: sum(layer.forward_s + layer.backward_s for layer in layers))
    source = f"captured here, batch {workload.batch_size}, {workload.data} data"
    plain: Any = [asdict(layer) for layer in layers]  # as it lies in the file
    return Capture(workload.name, shapes_of(model), plain, losses, values, source)


def _fill(row: Tensor, tensors: Sequence[Tensor]) -> None:
    for part, tensor in zip(row.split([one.numel() for one in tensors]), tensors, strict=True):
        part.copy_(tensor.detach().reshape(-1))


def shapes_of(model: nn.Module) -> dict[str, list[int]]:
    """{name: shape} of the parameters, in order."""
    return {name: list(parameter.shape) for name, parameter in model.named_parameters()}


class _LayerTimes:
    """Times a model's layers: forward by module, backward by the moments at which gradients are complete.

    Parameters of one module whose gradients arrive one after the other are one layer.
    """

    def __init__(self, model: nn.Module) -> None:
        self._names = {parameter: name for name, parameter in model.named_parameters()}
        self._owners = {p: module for module in model.modules() for p in module.parameters(recurse=False)}
        self._arrivals: list[tuple[nn.Parameter, float]] = []
        self._forward_s: dict[nn.Module, float] = {}
        self._watch = Stopwatch()
        self._last_s = self._backward_began_s = 0.0
        self._hooks: list[Any] = []

    def __enter__(self) -> _LayerTimes:
        self._hooks = [p.register_post_accumulate_grad_hook(self._note_gradient) for p in self._names]
        self._hooks += [module.register_forward_hook(self._note_forward) for module in set(self._owners.values())]
        return self

    def __exit__(self, *error: Any) -> None:
        for hook in self._hooks:
            hook.remove()

    def restart(self) -> None:
        """The forward pass begins."""
        self._arrivals.clear()
        self._forward_s.clear()
        self._watch.begin()
        self._last_s = 0.0

    def note_backward(self) -> None:
        """The backward pass begins."""
        self._backward_began_s = self._watch.elapsed_s

    def layers(self) -> list[CapturedLayer]:
        """The layers of the step that has just ended, in forward order; parameters without a gradient come first."""
        arrived = {parameter for parameter, _ in self._arrivals}
        unused = [(parameter, 0.0) for parameter in self._names if parameter not in arrived]
        groups: list[tuple[nn.Module, list[str], list[float]]] = []
        previous_s = self._backward_began_s
        for parameter, arrived_s in self._arrivals + unused:
            if not groups or groups[-1][0] is not self._owners[parameter]:
                groups.append((self._owners[parameter], [], []))
            groups[-1][1].append(self._names[parameter])
            groups[-1][2].append(max(0.0, arrived_s - previous_s))
            previous_s = max(previous_s, arrived_s)
        # A module in two groups pays for its forward pass once.
        return [
            CapturedLayer(names, self._forward_s.pop(module, 0.0), sum(backward_s))
            for module, names, backward_s in reversed(groups)
        ]

    def _note_gradient(self, parameter: nn.Parameter) -> None:
        self._arrivals.append((parameter, self._watch.elapsed_s))

    def _note_forward(self, module: nn.Module, *_: Any) -> None:
        now_s = self._watch.elapsed_s
        self._forward_s[module] = self._forward_s.get(module, 0.0) + now_s - self._last_s
        self._last_s = now_s
