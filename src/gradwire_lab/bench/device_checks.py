"""What one machine with a device can show: every scheme against the CPU's bits, and rates.

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
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from gradwire import codecs, schemes
from gradwire.doors.attachment import attach
from gradwire.errors import GradwireError
from gradwire.gpu.compiler import source_files
from gradwire.gpu.driver import CudaKernels
from gradwire.gpu.kernels import Kernels, using
from gradwire.gpu.launching import raise_error
from gradwire.schemes.base import Scheme
from gradwire.schemes.low_rank import LowRank

_SHAPES = [(60, 20), (60,), (60, 60), (3,), (0,), (40_000,), (25, 4)]
_N_STEPS = 5
_LOW_RANK_OFF = 1e-4  # of parameters that five steps move by some 0.1
_TIMED_CALLS = 20  # between two looks at the clock, so that waiting for the device is a small part

# Options under which a scheme's bits are the same in every run; all others have theirs by default.
_OPTIONS: dict[str, dict[str, Any]] = {
    "aqgb": {"floor": 0.125, "ceiling": 0.125},  # its bits follow the clock
    "auto": {"fidelity": ["gcomp:topology=ring"], "replay": [(2, "gcomp:topology=ring")]},  # its decisions do
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
        if shutil.which(listing[0]):
            found["nvidia_smi"] = subprocess.run(listing, capture_output=True, text=True, timeout=30).stdout.split("\n")
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


def list_kernels(kernels: Kernels) -> dict[str, Any]:
    """The registers of every kernel, each loaded for it. Raises: CheckFailed (one keeps registers in memory)."""
    if not isinstance(kernels, CudaKernels):
        return {}
    text = b"".join(source_files().values()).decode()
    found = {name: kernels.resources(name) for name in re.findall(r"\bGW_KERNEL(?:_OF_\w+)?\((gw_\w+)\b", text)}
    if spilt := [name for name, used in found.items() if used["local_bytes"]]:
        raise CheckFailed(f"kernels that keep registers in memory: {', '.join(spilt)}")
    return {"driver": kernels.driver, "architecture": kernels.architecture, "kernels": found}


def measure_kernels(kernels: Kernels, n_elements: int = 1 << 24) -> dict[str, Any]:
    """GB/s of float32 values that quantisers encode with error feedback, decode and add; beside a copy.

    Several inputs in turn, so that none is still in the cache.
    """
    device = kernels.device
    inputs = itertools.cycle([torch.randn(n_elements, device=device) for _ in range(4)])
    copied, residual, sums = (torch.zeros(n_elements, device=device) for _ in range(3))
    error = torch.zeros(1, dtype=torch.int32, device=device)
    rates = {"copy": _gb_s(device, 4 * n_elements, lambda: copied.copy_(next(inputs)))}
    with using(kernels):
        for name in ("one-bit", "two-bit", "qsgd"):
            codec: Any = codecs.by_name(name)
            message = torch.empty(codec.message_room(n_elements), dtype=torch.uint8, device=device)

            def encode(codec: Any = codec, message: Tensor = message) -> None:
                codec.encode_with_residual(next(inputs), residual, message)

            calls: dict[str, Callable[[], object]] = {
                "encode": encode,
                "decode": functools.partial(codec.decode, message, sums, error=error),
                "decode and add": functools.partial(codec.decode, message, sums, error=error, adds=True),
            }
            rates |= {f"{name} {way}": _gb_s(device, 4 * n_elements, call) for way, call in calls.items()}
    raise_error(int(error), "a message", device)
    return {"n_elements": n_elements, "gb_s": rates}


class GivenGradients(nn.Module):
    """A model whose gradient is what it is given, exactly, on every kind of device."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(5)
        self.weights = nn.ParameterList([torch.randn(shape, generator=generator) for shape in _SHAPES])

    def forward(self, gradients: list[Tensor]) -> Tensor:
        return torch.stack([(w * gradient).sum() for w, gradient in zip(self.weights, gradients, strict=True)]).sum()


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


def check_schemes(
    device: torch.device, group: Any = None, note: Callable[[str], None] = print, placement: str = "staged"
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
        if schemes.needs_momenta(name):  # these steps are SGD's
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
        is_right = torch.equal(found, expected)
        if placement == "device" and isinstance(on_device, LowRank):  # whose products and sums are the device's own
            by_rank = [torch.empty_like(found) for _ in range(dist.get_world_size())]
            dist.all_gather(by_rank, found)
            is_right = torch.allclose(found, expected, rtol=0, atol=_LOW_RANK_OFF)
            is_right &= all(torch.equal(other, found) for other in by_rank)
        if not is_right:
            different.append(f"{name} (by up to {float((found - expected).abs().max()):.3g})")
        note(f"{name}: {'same' if is_right else 'other'} bits")
    if different:
        raise CheckFailed(f"on {device} other bits than on the CPU: {', '.join(different)}")
    return {"n_schemes": len(seconds), "seconds": seconds}
