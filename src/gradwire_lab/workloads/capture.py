"""Capture real gradients of a workload once, into one flat float32 file that all ranks map into their memory.

A capture is two files: PATH.f32, `n_captures` gradients and then the parameters, each all elements in the order of the
model's `named_parameters()`, little-endian float32; and PATH.json, the layers in the order of their forward pass with
the seconds that each took, and the names, shapes and offsets of their parameters.
"""

from __future__ import annotations

import fcntl
import json
import math
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from gradwire.errors import CorruptMessage, IncompatibleVersion, InvalidArgument
from gradwire.telemetry.stopwatch import Stopwatch
from gradwire_lab.workloads.base import Workload

_FORMAT = 1

# A step's time is the quickest of several: the first one warms caches up, and other work may disturb any. A large model,
# whose step takes seconds, is scaled to a reference accelerator anyway.
_N_TIMED_STEPS = 4
_LARGE_ELEMENTS = 20_000_000


@dataclass(frozen=True)
class CapturedParameter:
    """One parameter: its name and shape, and where its elements begin in each of the file's parts."""

    name: str
    shape: tuple[int, ...]
    offset: int


@dataclass(frozen=True)
class CapturedLayer:
    """The parameters whose gradients arrive together, and what computing them took on the capturing machine."""

    parameters: tuple[CapturedParameter, ...]
    forward_s: float
    backward_s: float


@dataclass(frozen=True)
class Capture:
    """What PATH.json holds. `layers` are in forward order; backward runs through them from the last to the first.

    Attributes:
        source: how the gradients came about, for the records of a run.
    """

    workload: str
    layers: tuple[CapturedLayer, ...]
    n_elements: int
    n_captures: int
    losses: tuple[float, ...]
    source: str

    @property
    def step_s(self) -> float:
        """Seconds of forward and backward on the capturing machine."""
        return _step_s(self.layers)


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
        expected = {name: tuple(p.shape) for name, p in workload.make_model().named_parameters()}
    found = {p.name: p.shape for layer in capture.layers for p in layer.parameters}
    if found != expected:
        different = sorted(name for name in found.keys() | expected.keys() if found.get(name) != expected.get(name))
        raise InvalidArgument(
            f"{path}.json is a capture of another shape than {workload.name} with these options "
            f"({len(different)} parameters differ, {different[0]} first): delete it or name another with capture=..."
        )
    if capture.workload != workload.name or capture.n_captures != n_captures:
        raise InvalidArgument(
            f"{path}.json is a capture of {capture.workload} x {capture.n_captures}, not of {workload.name} x "
            f"{n_captures}: delete it or name another with capture=..."
        )
    return capture


def read_capture(path: Path) -> Capture:
    """The description in PATH.json, checked against itself and the size of PATH.f32."""
    description = path.with_name(path.name + ".json")
    try:
        content = json.loads(description.read_text())
        if content["format"] != _FORMAT:
            raise IncompatibleVersion(f"{description}: format {content['format']}, this gradwire reads {_FORMAT}")
        layers = tuple(
            CapturedLayer(
                tuple(CapturedParameter(p["name"], tuple(p["shape"]), p["offset"]) for p in layer["parameters"]),
                float(layer["forward_s"]),
                float(layer["backward_s"]),
            )
            for layer in content["layers"]
        )
        capture = Capture(
            content["workload"], layers, content["n_elements"], content["n_captures"],
            tuple(map(float, content["losses"])), content["source"],
        )  # fmt: skip
        spans = sorted((p.offset, math.prod(p.shape)) for layer in layers for p in layer.parameters)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CorruptMessage(f"{description}: not a capture ({type(error).__name__}: {error}); delete it") from error
    end = 0
    for offset, n_elements in spans:
        if offset != end:
            raise CorruptMessage(f"{description}: parameters overlap or leave a gap at element {offset}; delete it")
        end += n_elements
    n_bytes = 4 * capture.n_elements * (capture.n_captures + 1)
    data = path.with_name(path.name + ".f32")
    if end != capture.n_elements or not data.is_file() or data.stat().st_size != n_bytes:
        raise CorruptMessage(f"{data}: expected {n_bytes} bytes; delete {description} and capture again")
    return capture


def write_capture(path: Path, workload: Workload, n_captures: int, seed: int) -> None:
    """Run real steps without an update, write their gradients, and time the layers."""
    model = workload.build_model(seed)
    names = {parameter: name for name, parameter in model.named_parameters()}
    n_elements = sum(parameter.numel() for parameter in names)
    data = _Part(path, n_elements, n_captures + 1)
    losses = []
    quickest: tuple[CapturedLayer, ...] | None = None
    with _LayerTimes(model) as stopwatch:
        n_steps = n_captures if n_elements > _LARGE_ELEMENTS else max(n_captures, _N_TIMED_STEPS)
        for index in range(n_steps):
            model.zero_grad(set_to_none=True)
            batch = workload.batch_at(0, index % n_captures, n_captures, workload.batch_size, seed)
            stopwatch.restart()
            loss = workload.loss(model, batch)
            stopwatch.note_backward()
            loss.backward()
            layers = stopwatch.layers()
            if quickest is None or _step_s(layers) < _step_s(quickest):
                quickest = layers
            if index < n_captures:
                losses.append(float(loss.detach()))
                data.write(index, [torch.zeros_like(p) if p.grad is None else p.grad for p in names])
    assert quickest is not None
    data.write(n_captures, [p.detach() for p in names])
    source = f"captured here, batch {workload.batch_size}, {workload.data} data"
    data.commit(Capture(workload.name, quickest, n_elements, n_captures, tuple(losses), source))


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
        model = workload.make_model()
    offsets = _offsets(model)
    n_elements = sum(p.numel() for p in model.parameters())
    data = _Part(path, n_elements, n_captures + 1)
    for index in range(n_captures):
        data.fill(index, np.roll(gradient, -(index * gradient.size // n_captures)))
    data.fill(n_captures, parameter)
    layers = tuple(
        CapturedLayer(
            (CapturedParameter(name, tuple(p.shape), offsets[name]),),
            p.numel() / n_elements / 3,
            p.numel() / n_elements * 2 / 3,
        )
        for name, p in model.named_parameters()
    )
    data.commit(
        Capture(workload.name, layers, n_elements, n_captures, (0.0,) * n_captures, f"tiled from {source.name}")
    )


def map_part(path: Path, capture: Capture, part: int) -> np.ndarray:
    """(n_elements,) float32: gradient `part`, or with part = n_captures the parameters.

    Mapped copy-on-write: ranks on one machine share the pages until one of them writes to its own.
    """
    data = path.with_name(path.name + ".f32")
    offset = 4 * part * capture.n_elements
    return np.memmap(data, dtype="<f4", mode="c", offset=offset, shape=(capture.n_elements,))


def _step_s(layers: tuple[CapturedLayer, ...]) -> float:
    return sum(layer.forward_s + layer.backward_s for layer in layers)


class _LayerTimes:
    """Times a model's layers: forward by module, backward by the moments at which gradients are complete.

    Parameters of one module whose gradients arrive one after the other are one layer.
    """

    def __init__(self, model: nn.Module) -> None:
        self._names = {parameter: name for name, parameter in model.named_parameters()}
        self._offsets = _offsets(model)
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

    def layers(self) -> tuple[CapturedLayer, ...]:
        """The layers of the step that has just ended, in forward order; parameters without a gradient come first."""
        arrived = {parameter for parameter, _ in self._arrivals}
        unused = [(parameter, 0.0) for parameter in self._names if parameter not in arrived]
        groups: list[tuple[nn.Module, list[nn.Parameter], list[float]]] = []
        previous_s = self._backward_began_s
        for parameter, arrived_s in self._arrivals + unused:
            if not groups or groups[-1][0] is not self._owners[parameter]:
                groups.append((self._owners[parameter], [], []))
            groups[-1][1].append(parameter)
            groups[-1][2].append(max(0.0, arrived_s - previous_s))
            previous_s = max(previous_s, arrived_s)
        return tuple(
            CapturedLayer(
                tuple(
                    CapturedParameter(self._names[p], tuple(p.shape), self._offsets[self._names[p]]) for p in parameters
                ),
                self._forward_s.pop(module, 0.0),  # a module in two groups pays for its forward pass once
                sum(backward_s),
            )
            for module, parameters, backward_s in reversed(groups)
        )

    def _note_gradient(self, parameter: nn.Parameter) -> None:
        self._arrivals.append((parameter, self._watch.elapsed_s))

    def _note_forward(self, module: nn.Module, *_: Any) -> None:
        now_s = self._watch.elapsed_s
        self._forward_s[module] = self._forward_s.get(module, 0.0) + now_s - self._last_s
        self._last_s = now_s


def _offsets(model: nn.Module) -> dict[str, int]:
    offsets, end = {}, 0
    for name, parameter in model.named_parameters():
        offsets[name] = end
        end += parameter.numel()
    return offsets


class _Part:
    """PATH.f32 while it is being written, under another name until it is whole."""

    def __init__(self, path: Path, n_elements: int, n_parts: int) -> None:
        self._path, self._n_elements = path, n_elements
        self._data = path.with_name(f"{path.name}.f32.{os.getpid()}")
        self._file = open(self._data, "wb")  # noqa: SIM115 - closed by commit
        self._file.truncate(4 * n_elements * n_parts)

    def write(self, part: int, tensors: list[torch.Tensor]) -> None:
        self._file.seek(4 * part * self._n_elements)
        for tensor in tensors:
            self._file.write(np.ascontiguousarray(tensor.detach().float().numpy(), "<f4").data)

    def fill(self, part: int, tile: np.ndarray) -> None:
        self._file.seek(4 * part * self._n_elements)
        tile = np.ascontiguousarray(tile, "<f4")
        for first in range(0, self._n_elements, tile.size):
            self._file.write(tile[: self._n_elements - first].data)

    def commit(self, capture: Capture) -> None:
        self._file.close()
        self._data.replace(self._path.with_name(self._path.name + ".f32"))
        description = self._path.with_name(f"{self._path.name}.json.{os.getpid()}")
        description.write_text(json.dumps({"format": _FORMAT, **asdict(capture)}, indent=1))
        # The description comes last: where it is, the data is whole.
        description.replace(self._path.with_name(self._path.name + ".json"))
