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
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from gradwire.errors import CorruptMessage, IncompatibleVersion, InvalidArgument
from gradwire.workloads.base import Workload

_FORMAT = 1


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
    """Run `n_captures` real steps without an update and write their gradients; the last step gives the times."""
    model = workload.build_model(seed)
    names = {parameter: name for name, parameter in model.named_parameters()}
    n_elements = sum(parameter.numel() for parameter in names)
    data = _Part(path, n_elements, n_captures + 1)
    losses = []
    arrivals: list[tuple[nn.Parameter, float]] = []
    forward_s: dict[nn.Module, float] = {}
    hooks: list[Any] = [
        parameter.register_post_accumulate_grad_hook(lambda p: arrivals.append((p, time.perf_counter())))
        for parameter in names
    ]
    last_s = 0.0

    def count_forward(module: nn.Module, *_: Any) -> None:
        nonlocal last_s
        now_s = time.perf_counter()
        forward_s[module] = forward_s.get(module, 0.0) + now_s - last_s
        last_s = now_s

    owners = {p: module for module in model.modules() for p in module.parameters(recurse=False)}
    hooks += [module.register_forward_hook(count_forward) for module in set(owners.values())]
    for index in range(n_captures):
        model.zero_grad(set_to_none=True)
        arrivals.clear()
        forward_s.clear()
        batch = workload.batch_at(0, index, n_captures, workload.batch_size, seed)
        last_s = time.perf_counter()
        loss = workload.loss(model, batch)
        backward_began_s = time.perf_counter()
        loss.backward()
        losses.append(float(loss.detach()))
        data.write(index, [torch.zeros_like(p) if p.grad is None else p.grad for p in names])
    data.write(n_captures, [p.detach() for p in names])
    for hook in hooks:
        hook.remove()

    offsets = _offsets(model)
    groups: list[tuple[nn.Module, list[nn.Parameter], float]] = []
    previous_s = backward_began_s
    unused = [(p, previous_s) for p in names if p not in {parameter for parameter, _ in arrivals}]
    for parameter, arrived_s in arrivals + unused:
        took_s = max(0.0, arrived_s - previous_s)
        previous_s = max(previous_s, arrived_s)
        if groups and groups[-1][0] is owners[parameter]:
            groups[-1][1].append(parameter)
            groups[-1] = (*groups[-1][:2], groups[-1][2] + took_s)
        else:
            groups.append((owners[parameter], [parameter], took_s))
    layers = []
    for module, parameters, backward_s in reversed(groups):
        captured = tuple(CapturedParameter(names[p], tuple(p.shape), offsets[names[p]]) for p in parameters)
        # A module in two groups pays for its forward pass once.
        layers.append(CapturedLayer(captured, forward_s.pop(module, 0.0), backward_s))
    source = f"captured here, batch {workload.batch_size}, {workload.data} data"
    data.commit(Capture(workload.name, tuple(layers), n_elements, n_captures, tuple(losses), source))


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
