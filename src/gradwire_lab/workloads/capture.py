"""Capture real gradients of a workload once, into one flat float32 file that all ranks map into their memory.

A capture is two files: PATH.f32, `n_captures` gradients and then the parameters, each all elements in the order of the
model's `named_parameters()`, little-endian float32; and PATH.json, the shapes of the parameters in this order, and the
layers in the order of their forward pass: the names of their parameters, and the seconds that each took.
"""

from __future__ import annotations

import fcntl
import json
import math
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from gradwire.errors import CorruptMessage, IncompatibleVersion, InvalidArgument
from gradwire.telemetry.stopwatch import Stopwatch
from gradwire_lab.results.records import write_text
from gradwire_lab.workloads.base import Workload

_FORMAT = 2

# A step's time is the quickest of several: the first one warms caches up, and other work may disturb any. A large model,
# whose step takes seconds, is scaled to a reference accelerator anyway.
_N_TIMED_STEPS = 4
_LARGE_ELEMENTS = 20_000_000

Floats = npt.NDArray[np.float32]


@dataclass(frozen=True)
class CapturedLayer:
    """The parameters whose gradients arrive together, by name, and what computing them took on the capturing machine."""

    names: Sequence[str]
    forward_s: float
    backward_s: float


@dataclass(frozen=True)
class Capture:
    """What PATH.json holds. `layers` are in forward order; backward runs through them from the last to the first.

    Attributes:
        shapes: of the parameters, in the order of the file.
        source: how the gradients came about, for the records of a run.
    """

    workload: str
    shapes: Mapping[str, Sequence[int]]
    layers: Sequence[CapturedLayer]
    losses: Sequence[float]
    source: str

    @property
    def n_captures(self) -> int:
        """How many gradients there are."""
        return len(self.losses)

    @property
    def n_elements(self) -> int:
        """Of one gradient."""
        return sum(map(math.prod, self.shapes.values()))

    @property
    def step_s(self) -> float:
        """Seconds of forward and backward on the capturing machine."""
        return sum(layer.forward_s + layer.backward_s for layer in self.layers)


def open_or_capture(path: Path, workload: Workload, n_captures: int, seed: int, source: str | None) -> Capture:
    """The capture at `path`, made first when it is not there; other processes that want it too wait meanwhile.

    Raises: InvalidArgument (a capture of another workload or size), CorruptMessage, IncompatibleVersion.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    # One process captures, since a large model fits into memory once, not once per rank.
    with open(path.with_name(path.name + ".lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not path.with_name(path.name + ".json").exists():
            if source is None:
                write_capture(path, workload, n_captures, seed)
            else:
                write_tiled(path, workload, Path(source), n_captures)
    capture = read_capture(path)
    with torch.device("meta"):
        expected = {name: list(p.shape) for name, p in workload.make_model().named_parameters()}
    found, remedy = capture.shapes, "delete it or name another with capture=..."
    if list(found.items()) != list(expected.items()):
        different = sorted(name for name in found.keys() | expected.keys() if found.get(name) != expected.get(name))
        raise InvalidArgument(
            f"{path}.json is a capture of another shape than {workload.name} with these options "
            f"({len(different)} parameters differ{f', {different[0]} first' if different else ''}): {remedy}"
        )
    if capture.workload != workload.name or capture.n_captures != n_captures:
        raise InvalidArgument(
            f"{path}.json is a capture of {capture.workload} x {capture.n_captures}, not of {workload.name} x "
            f"{n_captures}: {remedy}"
        )
    return capture


def read_capture(path: Path) -> Capture:
    """The description in PATH.json, checked against the size of PATH.f32."""
    description, data = (path.with_name(path.name + suffix) for suffix in (".json", ".f32"))
    try:
        content = json.loads(description.read_text())
        version = content.pop("format")
        if version != _FORMAT:
            raise IncompatibleVersion(f"{description}: format {version}, this gradwire reads {_FORMAT}; delete it")
        capture = Capture(**content | {"layers": [CapturedLayer(**layer) for layer in content["layers"]]})
        named = sorted(name for layer in capture.layers for name in layer.names)
        n_bytes = 4 * capture.n_elements * (capture.n_captures + 1)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CorruptMessage(f"{description}: not a capture ({type(error).__name__}: {error}); delete it") from error
    if named != sorted(capture.shapes):
        raise CorruptMessage(f"{description}: its layers do not hold every parameter once; delete it")
    if not data.is_file() or data.stat().st_size != n_bytes:
        raise CorruptMessage(f"{data}: expected {n_bytes} bytes; delete {description} and capture again")
    return capture


def write_capture(path: Path, workload: Workload, n_captures: int, seed: int) -> None:
    """Run real steps without an update, write their gradients, and time the layers."""
    model = workload.build_model(seed)
    parameters = list(model.parameters())
    n_elements = sum(parameter.numel() for parameter in parameters)
    n_steps = n_captures if n_elements > _LARGE_ELEMENTS else max(n_captures, _N_TIMED_STEPS)
    losses: list[float] = []
    timed: list[list[CapturedLayer]] = []

    def run_steps() -> Iterator[Iterable[Floats]]:
        with _LayerTimes(model) as times:
            for index in range(n_steps):
                model.zero_grad(set_to_none=True)
                batch = workload.batch_at(0, index % n_captures, n_captures, workload.batch_size, seed)
                times.restart()
                loss = workload.loss(model, batch)
                times.note_backward()
                loss.backward()
                timed.append(times.layers())
                if index < n_captures:
                    losses.append(float(loss.detach()))
                    yield (_as_array(torch.zeros_like(p) if p.grad is None else p.grad) for p in parameters)
        yield map(_as_array, parameters)

    _write_data(path, run_steps())
    layers = min(timed, key=lambda layers: sum(layer.forward_s + layer.backward_s for layer in layers))
    source = f"captured here, batch {workload.batch_size}, {workload.data} data"
    _write_description(path, Capture(workload.name, _shapes(model), layers, losses, source))


def write_tiled(path: Path, workload: Workload, source: Path, n_captures: int) -> None:
    """Fill the workload's shape with the `gradient` and `parameter` of an .npz file, over and over; no model is run.

    Each capture begins at another place of the file's gradient, so that ranks differ. The layers' times are shares by
    parameter count that sum to one second, backward twice forward; a calibration scales them.
    """
    try:
        with np.load(source, allow_pickle=False) as arrays:
            gradient, parameter = (np.asarray(arrays[key], np.float32).ravel() for key in ("gradient", "parameter"))
    except (OSError, ValueError, KeyError) as error:
        raise InvalidArgument(f"source={str(source)!r}: not an .npz with gradient and parameter ({error})") from error
    if gradient.size == 0 or gradient.size != parameter.size:
        raise InvalidArgument(f"source={str(source)!r}: {gradient.size} gradients, {parameter.size} parameters")
    with torch.device("meta"):
        shapes = _shapes(workload.make_model())
    n_elements = sum(map(math.prod, shapes.values()))
    shares = {name: math.prod(shape) / n_elements for name, shape in shapes.items()}
    layers = [CapturedLayer([name], share / 3, share * 2 / 3) for name, share in shares.items()]
    tiles = [np.roll(gradient, -(index * gradient.size // n_captures)) for index in range(n_captures)]
    firsts = range(0, n_elements, gradient.size)
    _write_data(path, ([tile[: n_elements - first] for first in firsts] for tile in (*tiles, parameter)))
    _write_description(path, Capture(workload.name, shapes, layers, [0.0] * n_captures, f"tiled from {source.name}"))


def _write_data(path: Path, parts: Iterable[Iterable[Floats]]) -> None:
    """PATH.f32, under another name until it is whole."""
    data = path.with_name(f"{path.name}.f32.{os.getpid()}")
    with data.open("wb") as file:
        for part in parts:
            for values in part:
                file.write(np.ascontiguousarray(values, "<f4").data)
    data.replace(path.with_name(path.name + ".f32"))


def _write_description(path: Path, capture: Capture) -> None:
    """PATH.json, which comes last: where it is, the data is whole."""
    write_text(path.with_name(path.name + ".json"), json.dumps({"format": _FORMAT, **asdict(capture)}, indent=1))


def map_part(path: Path, capture: Capture, part: int) -> Floats:
    """(n_elements,) float32: gradient `part`, or with part = n_captures the parameters.

    Mapped copy-on-write: ranks on one machine share the pages until one of them writes to its own.
    """
    n = capture.n_elements
    return np.memmap(path.with_name(path.name + ".f32"), dtype="<f4", mode="c", offset=4 * part * n, shape=(n,))


def _as_array(tensor: torch.Tensor) -> Floats:
    return tensor.detach().float().numpy()


def _shapes(model: nn.Module) -> dict[str, list[int]]:
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
