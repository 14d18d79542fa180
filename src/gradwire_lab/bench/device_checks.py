"""What one machine with any device of torch's can show: every scheme against the CPU's bits, and rates."""

import functools
import importlib
import itertools
import json
import os
import re
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from gradwire import codecs, schemes
from gradwire.codecs.gcomp import GCompCodec, HuffmanTable
from gradwire.codecs.quantised import Quantised
from gradwire.doors.attachment import attach
from gradwire.errors import GradwireError, Unsupported
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
        devices = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
        found["names"] = [one.name for one in devices]
        found["capabilities"] = [(one.major, one.minor) for one in devices]
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


def _gb_s(device: torch.device, n_bytes: int, call: Callable[[], object], n_calls: int = _TIMED_CALLS) -> float:
    times = []
    for _ in range(6):
        torch.accelerator.synchronize(device)
        started = time.perf_counter()
        for _ in range(n_calls):
            call()
        torch.accelerator.synchronize(device)
        times.append((time.perf_counter() - started) / n_calls)
    return n_bytes / statistics.median(times[1:]) / 1e9


def list_kernels(kernels: Kernels) -> dict[str, Any]:
    """The registers of every kernel, each loaded for it. Raises: CheckFailed (one keeps registers in memory)."""
    if not isinstance(kernels, CudaKernels):
        return {}
    text = b"".join(source_files().values()).decode()
    found = {name: kernels.resources(name) for name in re.findall(r"\bGW_KERNEL(?:_\w+)?\((gw_\w+)\b", text)}
    if spilt := [name for name, used in found.items() if used["local_bytes"]]:
        raise CheckFailed(f"kernels that keep registers in memory: {', '.join(spilt)}")
    return {"driver": kernels.driver, "architecture": kernels.architecture, "kernels": found}


# What is timed of each codec, as the registry knows it.
_TIMED: dict[str, tuple[str, dict[str, Any]]] = {
    "one-bit": ("one-bit", {}),
    "one-bit by 64": ("one-bit", {"scale_values": 64}),
    "two-bit": ("two-bit", {}),
    "two-bit, four levels by 64": ("two-bit", {"scale_values": 64, "levels": 4}),
    "qsgd": ("qsgd", {}),
    "truncated-float, 8 bits": ("truncated-float", {"bits": 8}),
    **{f"embedded-float, {bits} bits": ("embedded-float", {"bits": bits}) for bits in (8, 5, 4)},
    "gcomp, every bit": ("gcomp", {"importance": "none"}),
    "gcomp, 7 bits": ("gcomp", {"importance": "uniform", "bits": 7}),
}


def measure_kernels(kernels: Kernels, n_elements: int = 1 << 24, n_calls: int = _TIMED_CALLS) -> dict[str, Any]:
    """GB/s of float32 values that codecs encode, with error feedback where they want it, decode, and decode and add.
    `of_copy`: the memory traffic that a call cannot do without, in a second, as a share of a copy's. Beside them
    nvCOMP's ANS, where its package (`nvidia-nvcomp-cu13`) is."""
    device = kernels.device
    drawn = [torch.randn(n_elements, device=device) for _ in range(4)]
    inputs = itertools.cycle(drawn)
    copied, residual, sums = (torch.zeros(n_elements, device=device) for _ in range(3))
    error = torch.zeros(1, dtype=torch.int32, device=device)
    rates = {"copy": _gb_s(device, 4 * n_elements, lambda: copied.copy_(next(inputs)), n_calls)}
    shares, sizes = {"copy": 1.0}, {}
    with using(kernels):
        for label, (name, options) in _TIMED.items():
            codec: Any = codecs.by_name(name, **options)
            is_quantiser, dtype = isinstance(codec, Quantised), torch.float32
            room = codec.message_room(n_elements) if is_quantiser else codec.max_encoded_bytes(n_elements, dtype)
            whole = torch.empty(room, dtype=torch.uint8, device=device)
            if isinstance(codec, GCompCodec):  # of the values at hand, as the scheme has it
                counts = torch.zeros(256, dtype=torch.int64, device=device)
                codec.histogram(next(inputs), counts)
                codec.use_table(HuffmanTable.from_histogram(counts.cpu()))
            message = whole[: int(codec.encode(next(inputs), whole))].clone()
            sizes[label] = n_bytes = message.numel()
            kept = {"residual": residual} if is_quantiser else {}
            encode = functools.partial(codec.encode, out=whole, **kept)
            decode = functools.partial(codec.decode, message, sums, error=error)
            for way, call, n_passes in (
                ("encode", lambda encode=encode: encode(next(inputs)), 3 if is_quantiser else 1),
                ("decode", decode, 1),
                ("decode and add", functools.partial(decode, adds=True), 2),
            ):
                at = f"{label} {way}"
                rates[at] = _gb_s(device, 4 * n_elements, call, n_calls)
                traffic = 4 * n_elements * n_passes + n_bytes
                shares[at] = rates[at] * traffic / (4 * n_elements) / (2 * rates["copy"])
    raise_error(int(error), "a message", device)
    # In a process of its own: version 6.0.0 ends one with a broken heap.
    here = f"from {__name__} import print_nvcomp; print_nvcomp({n_elements}, {n_calls})"
    ended = subprocess.run([sys.executable, "-c", here], capture_output=True, text=True, timeout=120)
    try:
        ans = json.loads(ended.stdout)
    except ValueError:
        ans = f"not measured: {(ended.stderr.strip() or 'no output').splitlines()[-1]}"
    return {"n_elements": n_elements, "gb_s": rates, "of_copy": shares, "message_bytes": sizes, "nvcomp_ans": ans}


def print_nvcomp(n_elements: int, n_calls: int) -> None:
    """nvCOMP's ANS of as many values, as bytes: GB/s of them, and the share that is left of them, as JSON."""
    nvcomp: Any = importlib.import_module("nvidia.nvcomp")
    device = torch.device("cuda")
    values = torch.randn(n_elements, device=device).view(torch.uint8)
    codec, source = nvcomp.Codec(algorithm="ANS"), nvcomp.as_array(values)
    encoded = codec.encode(source)
    assert torch.equal(torch.utils.dlpack.from_dlpack(codec.decode(encoded)).view(torch.uint8), values)
    found = {"version": nvcomp.__version__, "share": encoded.buffer_size / values.numel()}
    found["encode_gb_per_s"] = _gb_s(device, values.numel(), lambda: codec.encode(source), n_calls)
    found["decode_gb_per_s"] = _gb_s(device, values.numel(), lambda: codec.decode(encoded), n_calls)
    print(json.dumps(found), flush=True)


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
    """(n,) on the CPU: the parameters after a few steps, which depend on `device` only if gradwire's means do."""
    model = GivenGradients().to(device)
    ddp = DistributedDataParallel(model, process_group=group, bucket_cap_mb=0.02)
    # A rate that is a power of two: a step rounds once, wherever it runs.
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
    """Every scheme, with "device" every one that works there, ends with the bits of its run on the CPU, the same on all
    ranks. Low rank by `placement="device"` ends near them, and with the same bits on all ranks. Raises: CheckFailed."""
    seconds: dict[str, float] = {}
    different = []
    for name in schemes.names():
        if schemes.needs_momenta(name):  # these steps are SGD's
            continue
        options = {} if name == "auto" and dist.get_world_size(group) == 1 else _OPTIONS.get(name, {})
        try:
            on_cpu, on_device = (schemes.by_name(name, **options) for _ in range(2))
        except Unsupported as error:  # a package that it needs is not installed
            note(f"{name}: not run: {error}")
            continue
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


def check_features(device: torch.device) -> dict[str, Any]:
    """What people do around DDP on a device: mixed precision, compiling, capturing a CUDA graph. Raises: CheckFailed."""
    placements = ("staged", "device") if dist.get_backend() != "gloo" else ("staged",)
    done = []
    for name, placement, is_compiled in itertools.product(("one-bit", "gcomp", "auto"), placements, (False, True)):
        torch.manual_seed(0)
        model = nn.Sequential(*(layer for _ in range(4) for layer in (nn.Linear(512, 512), nn.GELU()))).to(device)
        ddp = DistributedDataParallel(model)
        optimizer = torch.optim.AdamW(ddp.parameters())
        attachment = attach(ddp, optimizer, name, placement=placement)
        step = torch.compile(ddp) if is_compiled else ddp
        batch = torch.randn(32, 512, device=device)
        for _ in range(4):
            optimizer.zero_grad()
            with torch.autocast(device.type, torch.bfloat16):
                loss = step(batch).square().mean()
            loss.backward()
            optimizer.step()
        if not bool(loss.isfinite()):
            raise CheckFailed(f"{name}, {placement}, compiled: {is_compiled}: a loss of {float(loss)}")
        if name == "one-bit" and device.type == "cuda" and not is_compiled:
            _check_capture(ddp, batch)
        attachment.close()
        done.append(f"{name}, {placement}{', compiled' if is_compiled else ''}")
    return {"trained": done}


def _check_capture(ddp: nn.Module, batch: Tensor) -> None:
    try:
        with torch.cuda.graph(torch.cuda.CUDAGraph(), capture_error_mode="thread_local"):
            ddp(batch).square().mean().backward()
    except Exception as error:
        if "CUDA graph" not in str(error):
            raise CheckFailed(f"a captured backward pass was answered by {error}") from error
        return
    raise CheckFailed("a captured backward pass was not refused")
