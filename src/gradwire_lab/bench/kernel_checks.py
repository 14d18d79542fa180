"""Kernels beside the codecs for CPUs: byte for byte, and how fast; on a GPU, or in tests on an emulator."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

from gradwire.codecs.quantised import OneBit, Qsgd, Quantised, TwoBit
from gradwire.errors import GradwireError
from gradwire.gpu.driver import CudaKernels
from gradwire.gpu.kernels import Kernels, using
from gradwire.gpu.launching import raise_error
from gradwire_lab.bench import factor_checks, index_checks, selection_checks, sign_checks, ternary_checks, thc_checks
from gradwire_lab.bench.device_checks import CheckFailed

CODECS: dict[str, Quantised] = {
    "one-bit": OneBit(),
    "one-bit two-means": OneBit("two-means"),
    "one-bit fixed": OneBit("fixed", 0.25),
    "two-bit": TwoBit(),
    "two-bit absolute": TwoBit(0.01, relative=False),
    "one-bit by group": OneBit(scale_values=512),
    "one-bit two-means by group": OneBit("two-means", scale_values=64),
    "two-bit by group": TwoBit(scale_values=128),
    "four levels by group": TwoBit(scale_values=64, levels=4),
    "qsgd": Qsgd(),
    "qsgd 127": Qsgd(levels=127, block=128, seed=(1 << 63) + 5),
    "qsgd 4096": Qsgd(levels=3, block=4096),
}
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
SIZES = (0, 1, 31, 32, 33, 63, 64, 65, 511, 513, 4095, 4096, 4097, 9_000)
KERNELS = tuple(
    f"gw_quantised_{name}"
    for name in (
        "measure",
        "choose",
        "pack",
        "pack_levels",
        "pieces",
        "seal",
        "read_pieces",
        "check",
        "unpack",
    )
) + tuple(f"gw_grouped_{name}" for name in ("measure", "head", "pack", "check", "unpack"))
# Of kernels that make no messages.
_SMALLER = (factor_checks, index_checks, selection_checks, sign_checks, ternary_checks, thc_checks)
_LARGE = ((1 << 20) + 1, 1 << 24)
_MEASURED = 1 << 24  # 64 MiB
_ROUNDS = 20
CONTENTS = ("gradient", "zeros", "negative zeros", "subnormal", "large", "nan", "infinity", "one")


def values_of(content: str, n: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    """(n,) of `dtype` on the CPU."""
    generator = torch.Generator().manual_seed(seed + n)
    values = torch.randn(n, generator=generator) * torch.exp(torch.randn(n, generator=generator) * 2 - 6)
    values[torch.rand(n, generator=generator) < 0.05] = 0
    if content == "zeros":
        values.zero_()
    elif content == "negative zeros":
        values.fill_(-0.0)
    elif content == "subnormal":
        values *= 1e-37 if dtype != torch.float16 else 1e-5
    elif content == "large":
        values *= 1e37 if dtype != torch.float16 else 1e3
    elif content in ("nan", "infinity") and n:
        values[n // 3] = float("nan") if content == "nan" else float("-inf")
    elif content == "one" and n:
        values.zero_()
        values[n - 1] = 1.5
    return values.to(dtype)


def compare(
    kernels: Kernels, codec: Quantised, values: Tensor, residual: Tensor | None, scale: float, step: int
) -> None:
    """Message, residual and decoded values of the kernels are the CPU's, and nothing beside them is written."""
    n, place = values.numel(), kernels.device
    cuts = _cuts_of(n) if codec.scale_values else []
    room = codec.message_room(n, cuts)
    expected, fenced = torch.empty(room + 8, dtype=torch.uint8), torch.full((room + 8,), 0xEE, dtype=torch.uint8)
    left, expected_left = (None, None) if residual is None else (torch.empty(n, device=place), torch.empty(n))

    def encode(values: Tensor, residual: Tensor | None, out: Tensor, left: Tensor | None) -> int:
        if left is None:
            return int(codec.encode(values, out, step=step, cuts=cuts))
        return int(
            codec.encode_with_residual(values, residual, out, step, new_residual=left, residual_scale=scale, cuts=cuts)
        )

    n_expected = encode(values, residual, expected, expected_left)
    written = fenced.to(place)
    with using(kernels):
        old = None if residual is None else residual.to(place)
        n_bytes = encode(values.to(place), old, written[:room], left)
    found = written.cpu()
    require(n_bytes == n_expected, f"{n_bytes} bytes, not {n_expected}")
    require(torch.equal(found[:n_expected], expected[:n_expected]), difference(found, expected))
    require(bool((found[room:] == 0xEE).all()), "bytes past the message were written")
    if left is not None and expected_left is not None:
        require(torch.equal(left.cpu().view(torch.int32), expected_left.view(torch.int32)), "other residuals")
    for dtype, divisor, adds in ((values.dtype, 1.0, False), (torch.float32, 3.0, False), (torch.float32, 3.0, True)):
        error = torch.zeros(1, dtype=torch.int32, device=place)
        wanted = torch.linspace(-1, 1, n).to(dtype)
        out = wanted.clone().to(place)
        codec.decode(expected[:n_expected], wanted, divisor=divisor, adds=adds)
        with using(kernels):
            codec.decode(written[:room], out, divisor=divisor, adds=adds, cuts=cuts, error=error)
        raise_error(int(error), codec.name, place)
        require(_same(out.cpu(), wanted), f"other values ({dtype}, / {divisor}, adds: {adds})")


def _cuts_of(n: int) -> list[int]:
    """Where tensors begin: one value, a piece about as long as a group, the rest; and near the end."""
    return sorted({cut for cut in (1, 66, 578, n // 2, n - 1) if 0 < cut < n})


def cases(
    codecs: Iterable[str], sizes: Iterable[int], contents: Iterable[str], dtypes: Iterable[torch.dtype] = DTYPES
) -> Iterator[tuple[str, Tensor, Tensor | None, float]]:
    """(name, values, residual, residual scale): every value dtype and content, with a residual and without."""
    for name, n, content, dtype in itertools.product(codecs, sizes, contents, dtypes):
        values = values_of(content, n, dtype)
        yield f"{name}, {n} x {dtype}, {content}", values, None, 1.0
        residual = values_of("gradient", n, torch.float32, seed=7) / 1024
        yield f"{name}, {n} x {dtype}, {content}, residual", values, residual, 1024.0


def run(kernels: Kernels, codecs: Iterable[str], sizes: Iterable[int], contents: Iterable[str]) -> int:
    """How many cases there were; Raises: CheckFailed (the first case that differs)."""
    n_cases = 0
    for codec_name in codecs:
        for name, values, residual, scale in cases([codec_name], sizes, contents):
            try:
                compare(kernels, CODECS[codec_name], values, residual, scale, step=(1 << 40) + 3)
            except (GradwireError, RuntimeError) as error:
                raise CheckFailed(f"{name}: {error}") from error
            n_cases += 1
    return n_cases


def _same(found: Tensor, expected: Tensor) -> bool:
    """Bit by bit, but for what a NaN looks like."""
    both_nan = found.isnan() & expected.isnan()
    return (
        bool(
            (
                both_nan
                | (
                    found.view(torch.uint8).view(found.numel(), -1)
                    == expected.view(torch.uint8).view(found.numel(), -1)
                ).all(dim=1)
            ).all()
        )
        if found.numel()
        else True
    )


def difference(found: Tensor, expected: Tensor) -> str:
    """Where two messages, the longer one cut off, are not the same."""
    n = min(found.numel(), expected.numel())
    places = (found[:n] != expected[:n]).nonzero().view(-1)[:8].tolist()
    return f"bytes differ, the first at {places}"


def require(is_right: bool, what: str) -> None:
    """Raises: CheckFailed."""
    if not is_right:
        raise CheckFailed(what)


def check_kernels(device: torch.device, kernels: CudaKernels | None = None) -> dict[str, Any]:
    """Every kernel loads and makes the CPU's bytes: of all contents, and of messages up to 16 M values.

    Factors, sums of ternaries and selected elements too.

    Raises: CheckFailed, Unsupported (no NVRTC, an old driver, ...).
    """
    if kernels is None:
        if device.type != "cuda":
            return not_run(device)
        kernels = CudaKernels(device)
    found: dict[str, Any] = {"driver": kernels.driver, "architecture": kernels.architecture}
    names = (*KERNELS, *(name for checks in _SMALLER for name in checks.KERNELS))
    found["kernels"] = {name: kernels.resources(name) for name in names}
    found["n_cases"] = run(kernels, CODECS, SIZES, CONTENTS) + sum(checks.run(kernels) for checks in _SMALLER)
    for name, n_elements, seed in itertools.product(("one-bit", "two-bit", "qsgd"), _LARGE, range(3)):
        values = values_of("gradient", n_elements, torch.float32, seed)
        compare(kernels, CODECS[name], values, values / 3, 1.0, step=seed)
        found["n_cases"] += 1
    spilt = [name for name, used in found["kernels"].items() if used["local_bytes"]]
    require(not spilt, f"kernels that keep registers in memory: {', '.join(spilt)}")
    return found


def measure_kernels(device: torch.device, kernels: Kernels | None = None) -> dict[str, Any]:
    """GB/s of float32 values that one-bit, two-bit and qsgd encode with error feedback, decode and add; beside a copy.

    Several inputs in turn, so that none is still in the cache; medians, by the device's own clock.
    """
    if kernels is None:
        if device.type != "cuda":
            return not_run(device)
        kernels = CudaKernels(device)
    inputs = [torch.randn(_MEASURED, device=device) for _ in range(4)]
    copied = torch.empty_like(inputs[0])
    rates = {"copy": _rate(device, lambda turn: copied.copy_(inputs[turn % 4]))}
    residual, sums = torch.zeros_like(copied), torch.zeros_like(copied)
    error = torch.zeros(1, dtype=torch.int32, device=device)
    for name in ("one-bit", "two-bit", "qsgd"):
        codec = CODECS[name]
        message = torch.empty(codec.message_room(_MEASURED), dtype=torch.uint8, device=device)

        def encode(turn: int, codec: Quantised = codec, message: Tensor = message) -> None:
            codec.encode_with_residual(inputs[turn % 4], residual, message)

        def decode(turn: int, codec: Quantised = codec, message: Tensor = message) -> None:
            codec.decode(message, sums, error=error)

        def add(turn: int, codec: Quantised = codec, message: Tensor = message) -> None:
            codec.decode(message, sums, adds=True, error=error)

        with using(kernels):
            rates[f"{name} encode"] = _rate(device, encode)
            rates[f"{name} decode"] = _rate(device, decode)
            rates[f"{name} decode and add"] = _rate(device, add)
        raise_error(int(error), name, device)
    return {"n_elements": _MEASURED, "gb_s": rates}


def not_run(device: torch.device) -> dict[str, Any]:
    """What a section says of a device that is not NVIDIA's."""
    return {"status": "not run", "reason": f"kernels are for NVIDIA GPUs, and this is {device}"}


def _rate(device: torch.device, call: Callable[[int], object]) -> float:
    times = []
    for turn in range(_ROUNDS + 3):
        began, ended = (torch.Event(device=device, enable_timing=True) for _ in range(2))
        began.record()
        call(turn)
        ended.record()
        ended.synchronize()
        times.append(began.elapsed_time(ended))
    return 4 * _MEASURED / statistics.median(times[3:]) / 1e6
