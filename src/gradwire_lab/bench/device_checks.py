"""What one machine with a device can show: every scheme and codec against the CPU's bits, and rates.

Device-neutral: any accelerator of torch's, so the tests run the same code on a device of their own.
"""

from __future__ import annotations

import functools
import itertools
import os
import re
import shutil
import statistics
import subprocess
import time
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from gradwire import codecs, schemes
from gradwire.core.bucket import slot_of
from gradwire.core.staging import Staging
from gradwire.doors.attachment import attach
from gradwire.errors import GradwireError
from gradwire.gpu.compiler import source_files
from gradwire.gpu.driver import CudaKernels
from gradwire.gpu.kernels import MAKERS, Kernels, kernels_on, using
from gradwire.gpu.launching import raise_error
from gradwire.schemes.base import Scheme
from gradwire.schemes.gcomp.importance import QuantisationMetric
from gradwire.schemes.low_rank import LowRank

_SHAPES = [(60, 20), (60,), (60, 60), (3,), (0,), (40_000,), (25, 4)]
_N_STEPS = 5
_LOW_RANK_OFF = 1e-4  # of parameters that five steps move by some 0.1
_TIMED_CALLS = 20  # between two looks at the clock, so that waiting for the device is a small part

# Codecs of each section of kernels. Their kernels' corner cases are tests (tests/device).
KERNELS = {
    "kernels": ("one-bit", "two-bit", "qsgd"),
    "gcomp kernels": ("gcomp",),
    "float kernels": ("truncated-float", "embedded-float"),
}

# Options under which a scheme's bits are the same in every run; all others have theirs by default.
_OPTIONS: dict[str, dict[str, Any]] = {
    "aqgb": {"floor": 0.125, "ceiling": 0.125},  # its bits follow the clock
    "auto": {"fidelity": ["gcomp"], "replay": [(2, "gcomp")]},  # its decisions do
    "gcomp": {"refresh_every": 3},
    "homomorphic": {"sparsifier": "top-k", "density": 0.05, "index": "bitmap"},  # its gradients are dense here
    "slimgc": {"threshold_bytes": 2_000},
}


class CheckFailed(GradwireError):
    """A device does not do what it has to; the message says which and where."""


def why_no_device() -> str | None:
    """None where torch has a device to work with, else the reason in words."""
    if not hasattr(torch, "accelerator"):
        return f"torch {torch.__version__} has no torch.accelerator: gradwire's device path needs torch 2.9 or newer"
    if torch.accelerator.is_available():
        return None
    if torch.version.cuda is None and torch.version.hip is None:
        return f"torch {torch.__version__} is a build for CPUs: install one with CUDA"
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES")
    if hidden is not None and hidden.strip() in ("", "-1"):
        return f"CUDA_VISIBLE_DEVICES={hidden!r} hides every GPU"
    try:
        torch.cuda.init()
    except (RuntimeError, AssertionError) as error:  # no driver, one that is too old, a device that does not answer
        return f"torch {torch.__version__} finds no GPU: {str(error).splitlines()[0]}"
    return f"torch {torch.__version__} sees no GPU"


def describe_devices(device: torch.device) -> dict[str, Any]:
    """Names, driver, libraries, and what hides or splits devices."""
    found: dict[str, Any] = {
        "type": device.type,
        "n_devices": torch.accelerator.device_count(),
        "visible": os.environ.get("CUDA_VISIBLE_DEVICES"),
        "cuda_of_torch": torch.version.cuda,
        "nvcc": shutil.which("nvcc"),
    }
    if device.type == "cuda":
        found["names"] = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
        found["capabilities"] = [torch.cuda.get_device_capability(i) for i in range(torch.cuda.device_count())]
        found["memory_bytes"] = torch.cuda.get_device_properties(device).total_memory
        found["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
        listing = ["nvidia-smi", "--query-gpu=name,driver_version,mig.mode.current,pci.bus_id", "--format=csv,noheader"]
        try:
            found["nvidia_smi"] = subprocess.run(listing, capture_output=True, text=True, timeout=30).stdout.split("\n")
        except (OSError, subprocess.SubprocessError) as error:
            found["nvidia_smi"] = f"did not run: {error}"
    return found


def measure_copies(device: torch.device, n_bytes: int = 64 << 20) -> dict[str, Any]:
    """GB/s of pinned memory to the device and back, each alone, and of a copy on the device (read plus write)."""
    host, back = (torch.empty(n_bytes, dtype=torch.uint8, pin_memory=True) for _ in range(2))
    there, other = (torch.empty(n_bytes, dtype=torch.uint8, device=device) for _ in range(2))
    host.random_()
    rates = {
        "to_device_gb_s": _gb_s(device, n_bytes, lambda: there.copy_(host, non_blocking=True)),
        "on_device_gb_s": _gb_s(device, 2 * n_bytes, lambda: other.copy_(there)),
        "to_host_gb_s": _gb_s(device, n_bytes, lambda: back.copy_(other, non_blocking=True)),
    }
    if not torch.equal(back, host):
        raise CheckFailed(f"{n_bytes} bytes came back from {device} as others")
    return rates


def _gb_s(device: torch.device, n_bytes: int, call: Callable[[], object]) -> float:
    times = []
    for _ in range(6):
        torch.accelerator.synchronize(device)
        started = time.perf_counter()
        for _ in range(_TIMED_CALLS):
            call()
        torch.accelerator.synchronize(device)
        times.append((time.perf_counter() - started) / _TIMED_CALLS)
    return n_bytes / statistics.median(times[1:]) / 1e9


def check_staging(device: torch.device, n_rounds: int = 20, busy_width: int = 1024) -> dict[str, Any]:
    """Buckets go to the host and back behind kernels that take long, many times, on one set of pinned memory.

    `busy_width`: 20 products of matrices of this width hold the stream up before each round.
    """
    n_elements = 1 << 20
    staging = Staging([nn.Parameter(torch.empty(n_elements, device=device)) for _ in range(3)])
    expected = torch.arange(float(n_elements)) % 1009
    busy = torch.ones(busy_width, busy_width, device=device)
    started = time.perf_counter()
    for number in range(n_rounds):
        for _ in range(20):
            busy = busy @ busy * 1e-3
        buffers = [expected.to(device) + (number + index) for index in range(3)]
        futures: list[torch.futures.Future] = [torch.futures.Future(devices=[device]) for _ in buffers]
        staged = [staging.stage(index, buffer, [(0, n_elements)]) for index, buffer in enumerate(buffers)]
        for index, (bucket, future) in enumerate(zip(staged, futures, strict=True)):
            bucket.wait_for_all()
            if not torch.equal(bucket.on_host, expected + (number + index)):
                raise CheckFailed(f"bucket {index} of round {number} was read on the host before it was there")
            bucket.on_host.mul_(2)
            bucket.send_back()
            bucket.complete(future)
        for index, (buffer, future) in enumerate(zip(buffers, futures, strict=True)):
            future.wait()
            if not torch.equal((buffer + 0).cpu(), 2 * (expected + (number + index))):
                raise CheckFailed(f"bucket {index} of round {number} was read on the device before it was back")
    return {"n_buckets": 3 * n_rounds, "seconds_a_round": (time.perf_counter() - started) / n_rounds}


def check_importance(device: torch.device) -> dict[str, Any]:
    """gcomp's importance, computed on the device, against the kernel for CPUs, byte by byte."""
    n_bytes = 0
    for n_elements in (1, 31, 4097, (1 << 20) + 3):
        made: list[Tensor] = []
        for place in (torch.device("cpu"), device):
            generator = torch.Generator().manual_seed(n_elements)
            values = torch.randn(n_elements, generator=generator) * torch.logspace(-30, 10, n_elements)
            parameter = nn.Parameter(values.to(place))
            optimizer = torch.optim.AdamW([parameter])
            moments = [torch.rand(n_elements, generator=generator) * 10.0**k for k in (-3, -9)]
            moments[1][::7] = 0
            state = {"exp_avg": moments[0].to(place), "exp_avg_sq": moments[1].to(place), "step": torch.tensor(3.0)}
            optimizer.state[parameter] = state
            metric = QuantisationMetric(optimizer, 3)
            if place == device:
                made.append(metric.bytes_on_device([slot_of(parameter)], device).cpu())
            else:
                made.append(torch.zeros(n_elements, dtype=torch.uint8))
                metric.write_importance([parameter], [0], made[0])
        n_different = int((made[0] != made[1]).sum())
        if n_different:
            raise CheckFailed(f"{n_different} of {n_elements} bytes of importance are others on {device}")
        n_bytes += n_elements
    return {"n_bytes_compared": n_bytes}


def find_kernels(device: torch.device) -> Kernels | dict[str, Any]:
    """The device's kernels, or what a section says of a device that has none. Raises: Unsupported (no NVRTC, ...)."""
    if device.type in MAKERS:
        return kernels_on(device)
    return {"status": "not run", "reason": f"kernels are for NVIDIA GPUs, and this is {device}"}


def check_kernels(kernels: Kernels, names: Iterable[str], sizes: Iterable[int] = (1_003, 1 << 24)) -> dict[str, Any]:
    """All kernels load and keep their registers; those of these codecs make the CPU's messages and values of gradients.

    Raises: CheckFailed.
    """
    found: dict[str, Any] = {"n_cases": 0}
    if isinstance(kernels, CudaKernels):
        found |= {"driver": kernels.driver, "architecture": kernels.architecture}
        text = b"".join(source_files().values()).decode()
        found["kernels"] = {name: kernels.resources(name) for name in re.findall(r"\bGW_KERNEL\((gw_\w+),", text)}
        spilt = [name for name, used in found["kernels"].items() if used["local_bytes"]]
        if spilt:
            raise CheckFailed(f"kernels that keep registers in memory: {', '.join(spilt)}")
    dtypes = (torch.float32, torch.bfloat16, torch.float16)
    for name, n, dtype in itertools.product(names, sizes, dtypes):
        codec: Any = codecs.by_name(name)
        generator = torch.Generator().manual_seed(n)
        values = (torch.randn(n, generator=generator) * torch.logspace(-4, 0, n)).to(dtype)
        importance = torch.randint(256, (n,), generator=generator, dtype=torch.uint8)
        message, wanted = torch.empty(codec.max_encoded_bytes(n, dtype), dtype=torch.uint8), torch.empty_like(values)
        n_bytes = int(codec.encode(values, message, importance))
        codec.decode(message[:n_bytes], wanted, importance)
        with using(kernels):
            sent, weights = values.to(kernels.device), importance.to(kernels.device)
            written, out = (
                torch.zeros(message.numel(), dtype=torch.uint8, device=kernels.device),
                torch.empty_like(sent),
            )
            n_written, error = (
                int(codec.encode(sent, written, weights)),
                torch.zeros_like(written[:4]).view(torch.int32),
            )
            whole = written[:n_written] if name == "gcomp" else written
            codec.decode(whole, out, weights, error=error)
        raise_error(int(error), name, kernels.device)
        if not torch.equal(written[:n_written].cpu(), message[:n_bytes]) or not torch.equal(out.cpu(), wanted):
            raise CheckFailed(f"{name}, {n} x {dtype}: another message or other values on {kernels.device}")
        found["n_cases"] += 1
    return found


def measure_kernels(kernels: Kernels, n_elements: int = 1 << 24) -> dict[str, Any]:
    """GB/s of float32 values that one-bit, two-bit and qsgd encode with error feedback, decode and add; beside a copy.

    Several inputs in turn, so that none is still in the cache.
    """
    device = kernels.device
    inputs = itertools.cycle([torch.randn(n_elements, device=device) for _ in range(4)])
    copied, residual, sums = (torch.zeros(n_elements, device=device) for _ in range(3))
    error = torch.zeros(1, dtype=torch.int32, device=device)
    calls: dict[str, Callable[[], object]] = {"copy": lambda: copied.copy_(next(inputs))}
    for name in KERNELS["kernels"]:
        codec: Any = codecs.by_name(name)
        message = torch.empty(codec.message_room(n_elements), dtype=torch.uint8, device=device)
        decode = functools.partial(codec.decode, message, sums, error=error)

        def encode(codec: Any = codec, message: Tensor = message) -> None:
            codec.encode_with_residual(next(inputs), residual, message)

        calls |= {
            f"{name} encode": encode,
            f"{name} decode": decode,
            f"{name} decode and add": functools.partial(decode, adds=True),
        }
    with using(kernels):
        rates = {name: _gb_s(device, 4 * n_elements, call) for name, call in calls.items()}
    raise_error(int(error), "a message", device)
    return {"n_elements": n_elements, "gb_s": rates}


class GivenGradients(nn.Module):
    """A model whose gradient is what it is given, exactly, on every kind of device."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(5)
        self.weights = nn.ParameterList([torch.randn(shape, generator=generator) for shape in _SHAPES])

    def forward(self, gradients: list[Tensor]) -> Tensor:
        return torch.stack(
            [(weight * gradient).sum() for weight, gradient in zip(self.weights, gradients, strict=True)]
        ).sum()


def train_with_given_gradients(
    scheme: Scheme, device: torch.device, group: Any = None, placement: str = "staged"
) -> Tensor:
    """(n,) on the CPU: the parameters after a few steps, which depend on `device` only if gradwire's means do.

    The learning rate is a power of two, so that the optimizer's step rounds once, wherever it runs.
    """
    model = GivenGradients().to(device)
    ddp = DistributedDataParallel(model, process_group=group, bucket_cap_mb=0.02)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=2.0**-7, foreach=False)
    attachment = attach(ddp, optimizer, scheme, timeout_s=60, placement=placement)
    for step in range(_N_STEPS):
        generator = torch.Generator().manual_seed(1_000 * dist.get_rank() + step)
        gradients = [torch.randn(shape, generator=generator).to(device) for shape in _SHAPES]
        optimizer.zero_grad()
        ddp(gradients).backward()
        optimizer.step()
    attachment.close()
    return torch.cat([parameter.detach().cpu().reshape(-1) for parameter in model.parameters()])


def _is_equal_on_all_ranks(found: Tensor) -> bool:
    by_rank = [torch.empty_like(found) for _ in range(dist.get_world_size())]
    dist.all_gather(by_rank, found)
    return all(torch.equal(other, found) for other in by_rank)


def check_schemes(
    device: torch.device,
    group: Any = None,
    note: Callable[[str], None] = print,
    placement: str = "staged",
) -> dict[str, Any]:
    """Every scheme on the device ends with the bits of its run on the CPU; in a rank, with the same on all of them.

    Low rank by `placement="device"` ends near them, and with the same bits on all ranks.

    Args:
        group: DDP's process group for the device; None: the default one.
        placement: with "device" only the schemes that work there.
    Raises: CheckFailed.
    """
    seconds: dict[str, float] = {}
    different = []
    for name in schemes.names():
        if schemes.needs_adam(name):  # these steps are SGD's
            continue
        on_cpu, on_device = (schemes.by_name(name, **_OPTIONS.get(name, {})) for _ in range(2))
        if placement == "device" and not on_device.works_on_device:
            continue
        expected = train_with_given_gradients(on_cpu, torch.device("cpu"))
        started = time.perf_counter()
        try:
            found = train_with_given_gradients(on_device, device, group, placement)
        except GradwireError as error:  # a scheme may see for itself that ranks have drifted apart
            different.append(f"{name} (raised {type(error).__name__}: {error})")
            continue
        seconds[name] = time.perf_counter() - started
        if placement == "device" and isinstance(on_device, LowRank):  # whose products and sums are the device's own
            is_right = torch.allclose(found, expected, rtol=0, atol=_LOW_RANK_OFF) and _is_equal_on_all_ranks(found)
        else:
            is_right = torch.equal(found, expected)
        if not is_right:
            different.append(f"{name} (by up to {float((found - expected).abs().max()):.3g})")
        note(f"  {name}: {'other bits' if different and different[-1].startswith(name) else 'same bits'}")
    if different:
        raise CheckFailed(f"on {device} other bits than on the CPU: {', '.join(different)}")
    return {"n_schemes": len(seconds), "seconds": seconds}
