"""Staging by itself, on a device that is as late as it can be: what it gives is right, and each planted fault is seen."""

import math
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import late
import pytest
import torch
from torch import Tensor

import gradwire
from gradwire.core import staging
from gradwire.core.bucket import Bucket, slot_of
from gradwire.core.session import LossScale
from gradwire.core.staging import StagedBucket, Staging
from gradwire.schemes.gcomp.importance import QuantisationMetric
from gradwire.wire.device_wire import ResidentBucket
from ranks import on_ranks

N = 1_000
LATE_US = 30_000


def _take_what_is_in_use(self: Any, n_elements: int, dtype: torch.dtype) -> Tensor:
    if not self._memory.numel():
        self.reserve(1 << 16)
    return self._memory[: n_elements * dtype.itemsize].view(dtype)


def complete_elsewhere(self: StagedBucket | ResidentBucket, reduced: torch.futures.Future) -> None:
    reduced.set_result(self.on_device)


FAULTS = {
    "missing wait": lambda: mock.patch.object(staging._Device, "_follow_caller"),
    "early free": lambda: mock.patch.object(staging._Device, "take", _take_what_is_in_use),
    "wrong stream": lambda: mock.patch.object(StagedBucket, "complete", complete_elsewhere),
    "missing record_stream": lambda: mock.patch.object(torch.Tensor, "record_stream"),
    "host read too soon": lambda: mock.patch.object(StagedBucket, "wait_for_all"),
}


def gradient(device: torch.device, factor: float) -> Tensor:
    """(N,) that appears on the device late, in its current stream's turn."""
    return torch.arange(1.0, N + 1, device=device) * factor


def go_there_and_back(staging: Staging, device: torch.device) -> bool:
    """Two buckets to the host, where they become tenfold, and back; whether both sides saw the right values."""
    buffers = [gradient(device, 1.0), gradient(device, 2.0)]
    futures: list[Any] = [torch.futures.Future(devices=[device]) for _ in buffers]
    staged = [staging.stage(index, buffer, [(0, N)]) for index, buffer in enumerate(buffers)]
    arrived = []

    def reduce() -> None:
        for bucket in staged:
            bucket.wait_for_all()
        for bucket, future in zip(staged, futures, strict=True):
            arrived.append(bucket.on_host.clone())
            bucket.on_host.mul_(10)
            bucket.send_back()
            bucket.complete(future)

    lane = threading.Thread(target=reduce)
    lane.start()
    lane.join()
    for future in futures:
        future.wait()
    expected = [torch.arange(1.0, N + 1) * factor for factor in (1.0, 2.0, 10.0, 20.0)]
    return all(map(torch.equal, [*arrived, *((buffer + 0).cpu() for buffer in buffers)], expected))


def let_go_at_once(staging: Staging, device: torch.device) -> bool:
    """The device's buffer is freed while it is still being copied."""
    buffer = gradient(device, 1.0)
    torch.accelerator.synchronize(device)
    staged = staging.stage(0, buffer, [(0, N)])
    on_host, arrival = staged.on_host, staged._arrivals[0]
    del staged, buffer
    torch.accelerator.current_stream(device).synchronize()
    arrival.wait()
    return torch.equal(on_host, torch.arange(1.0, N + 1))


def is_right(functions: Any, device: torch.device) -> bool:
    """With the training's stream late, with gradwire's, and with both."""
    right = True
    for late_training, late_copies in ((LATE_US, 0), (0, LATE_US), (LATE_US, LATE_US)):
        staging = Staging([torch.nn.Parameter(torch.empty(N, device=device)) for _ in range(2)])
        functions.set_stream_lateness_us(device.index, 0, late_training)
        functions.set_stream_lateness_us(device.index, staging._device(device).stream.stream_id, late_copies)
        for _ in range(2):
            right &= go_there_and_back(staging, device)
        right &= let_go_at_once(staging, device)
    functions.set_stream_lateness_us(device.index, 0, 0)
    return right


@on_ranks(1)
def test_every_planted_fault_is_seen(rank: int, world_size: int, library: Path) -> None:
    functions = late.load(library)
    device = torch.device("late", 0)
    assert is_right(functions, device)
    for name, fault in FAULTS.items():
        with fault():
            assert not is_right(functions, device), f"{name} went unseen"
    assert is_right(functions, device)


@on_ranks(1)
def test_memory_is_pinned_once_and_its_end_is_said(rank: int, world_size: int, library: Path) -> None:
    functions = late.load(library)
    first, second = torch.device("late", 0), torch.device("late", 1)
    parameters = [torch.nn.Parameter(torch.empty(N, device=first)) for _ in range(2)]
    staging = Staging(parameters)
    pinned = functions.pinned_bytes()
    assert pinned >= 2 * 4 * N
    for _ in range(3):
        assert go_there_and_back(staging, first)
    assert functions.pinned_bytes() == pinned, "pinned once, when it attached"
    # A bucket that moves to another device, and comes back; one that has grown, and of another dtype.
    assert go_there_and_back(staging, second)
    assert go_there_and_back(staging, first)
    for n in (0, 1, 50_000):
        values = torch.ones(n, dtype=torch.bfloat16, device=first)
        for index in range(3):
            staged = staging.stage(index, values, [(0, n)])
            staged.wait_for_all()
            assert torch.equal(staged.on_host, torch.ones(n, dtype=torch.bfloat16))
    del staging, staged
    torch.accelerator.synchronize(first)
    assert functions.pinned_bytes() == 0, "all of it is given back"
    functions.set_limits(1 << 40, 4 * N)
    with pytest.raises(gradwire.errors.OutOfMemory, match="could not be pinned"):
        Staging(parameters)
    staging = Staging()
    assert isinstance(staging.stage(0, parameters[0].data[:100], [(0, 100)]), StagedBucket)
    with pytest.raises(gradwire.errors.OutOfMemory, match="could not be pinned"):
        staging.stage(1, parameters[0].data.double(), [(0, N)])
    functions.set_limits(functions.allocated_bytes(0), 1 << 40)
    staged = Staging().stage(0, parameters[0].data, [(0, N)])
    with pytest.raises(gradwire.errors.OutOfMemory, match="no memory left"):
        staged.compute(lambda: torch.empty(N, device=first))
    functions.set_limits(1 << 40, 1 << 40)
    with pytest.raises(gradwire.Unsupported, match="torch's accelerator"):
        Staging().stage(0, torch.empty(3, device="meta"), [(0, 3)])


@on_ranks(1)
def test_the_loss_scale_is_the_one_of_its_backward_pass(rank: int, world_size: int, library: Path) -> None:
    functions = late.load(library)
    device = torch.device("late", 0)
    functions.set_stream_lateness_us(0, 0, LATE_US)
    scaler = torch.amp.GradScaler("late", init_scale=1024.0)
    scale = LossScale(scaler)
    scaler.scale(torch.ones((), device=device))
    scaler._scale.mul_(4)  # type: ignore[union-attr]
    waits = functions.n_waits_here()
    scale.note()
    assert functions.n_waits_here() == waits
    scaler._scale.mul_(2)  # type: ignore[union-attr]  # of the next pass
    assert scale() == 4096.0
    assert LossScale()() == 1.0


OPTIMIZERS: list[Callable[[Any], torch.optim.Optimizer]] = [
    lambda p: torch.optim.SGD(p, lr=0.1, weight_decay=0.01),
    lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True),
    lambda p: torch.optim.Adagrad(p, lr=0.1),
    lambda p: torch.optim.RMSprop(p, lr=0.01),
    lambda p: torch.optim.RMSprop(p, lr=0.01, momentum=0.5, centered=True),
    lambda p: torch.optim.Adam(p, lr=0.01, amsgrad=True, weight_decay=0.1),
    lambda p: torch.optim.AdamW(p, lr=0.01),
]


@on_ranks(1)
def test_importance_computed_on_the_device_is_the_kernels(rank: int, world_size: int, library: Path) -> None:
    late.load(library)
    device = torch.device("late", 0)
    for make in OPTIMIZERS:
        found = []
        for place in (torch.device("cpu"), device):
            torch.manual_seed(0)
            values = torch.randn(5_000) * torch.logspace(-30, 10, 5_000)
            values[:6] = torch.tensor([math.nan, math.inf, -0.0, 0.0, 1e-42, -1e-42])
            parameters = [torch.nn.Parameter(values.to(place)), torch.nn.Parameter(torch.randn(7, 3).to(place).t())]
            unused = torch.nn.Parameter(torch.ones(5, device=place))
            optimizer = make([*parameters, unused])
            for _ in range(3):
                for parameter in parameters:
                    parameter.grad = torch.randn(parameter.shape).to(place)
                optimizer.step()
            parameters.append(unused)
            n = sum(p.numel() for p in parameters)
            metric = QuantisationMetric(optimizer, 3)
            if place == device:
                out = torch.empty(n, dtype=torch.uint8, device=device)
                found.append(metric.write_on_device([*map(slot_of, parameters)], [0, 5_000, 5_021], out, 8.0).cpu())
            else:
                found.append(torch.full((n,), 7, dtype=torch.uint8))
                metric.write_importance(parameters, [0, 5_000, 5_021], found[0], 8.0)
        assert torch.equal(*found), f"{optimizer}: {(found[0] != found[1]).sum()} bytes differ"
        assert found[0].unique().numel() > 20


def test_a_plain_tensor_of_a_device_is_refused() -> None:
    with pytest.raises(gradwire.Unsupported, match=r"gradient\.cpu"):
        Bucket(torch.empty(3, device="meta"))
