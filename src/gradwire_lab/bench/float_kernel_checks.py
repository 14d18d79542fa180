"""Kernels of truncated and embedded floats beside the codecs for CPUs, byte for byte; on a GPU, or on an emulator."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from gradwire.codecs.embedded_float import EmbeddedFloat
from gradwire.codecs.truncated_float import TruncatedFloat
from gradwire.errors import GradwireError
from gradwire.gpu.driver import CudaKernels
from gradwire.gpu.kernels import Kernels, using
from gradwire.gpu.launching import raise_error
from gradwire_lab.bench.device_checks import CheckFailed
from gradwire_lab.bench.kernel_checks import CONTENTS, DTYPES, difference, not_run, require, values_of

KERNELS = tuple(f"gw_floats_{name}" for name in ("seal_chunks", "seal", "check", "read_chunks")) + tuple(
    f"gw_{name}"
    for name in ("truncated_scales", "truncated_pack", "truncated_unpack", "embedded_pack", "embedded_unpack")
)
SIZES = (0, 1, 31, 32, 33, 255, 256, 257, 1_000)
EDGES = (16_383, 16_384, 16_385)  # of chunks
_LARGE = ((1 << 20) + 1, 1 << 24)
_STEP = (1 << 40) + 3

Codec = TruncatedFloat | EmbeddedFloat


def _codecs() -> dict[str, Codec]:
    found: dict[str, Codec] = {}
    for bits in range(2, 17):
        found[f"truncated {bits}"] = TruncatedFloat(bits)
        found[f"truncated native {bits} stochastic"] = TruncatedFloat(
            bits, "native", "stochastic", seed=(1 << 63) + bits
        )
        found[f"embedded {bits}"] = EmbeddedFloat(bits)
    for name, bits in (("fp16", 16), ("fp16", 5), ("fp8-e4m3", 8), ("fp8-e4m3", 3), ("fp8-e5m2", 7), ("fp6-e3m2", 6)):
        for rounding in ("nearest", "truncate", "stochastic"):
            found[f"{name} {bits} {rounding}"] = TruncatedFloat(bits, name, rounding, partition=32)
    for rounding in ("truncate", "stochastic"):
        found[f"fp4-e2m1 4 {rounding}"] = TruncatedFloat(4, "fp4-e2m1", rounding, partition=1024)
        found[f"native 11 {rounding}"] = TruncatedFloat(11, "native", rounding, partition=64)
    for bits, partition in ((17, 32), (24, 64), (31, 1024)):
        found[f"embedded {bits} by {partition}"] = EmbeddedFloat(bits, partition)
    return found


CODECS = _codecs()
# Of float32, which alone has so many bits.
WIDE: dict[str, Codec] = {
    f"truncated native {bits} {rounding}": TruncatedFloat(bits, "native", rounding)
    for bits, rounding in itertools.product((17, 20, 25, 31, 32), ("nearest", "truncate", "stochastic"))
}


def compare(kernels: Kernels, codec: Codec, values: Tensor) -> None:
    """Message and decoded values of the kernels are the CPU's, bit for bit; nothing beside them is written."""
    n, dtype, place = values.numel(), values.dtype, kernels.device
    room = codec.max_encoded_bytes(n, dtype)
    expected = torch.empty(room, dtype=torch.uint8)
    n_expected = int(codec.encode(values, expected, step=_STEP))
    written = torch.full((room + 8,), 0xEE, dtype=torch.uint8, device=place)
    with using(kernels):
        n_bytes = int(codec.encode(values.to(place), written[:-8], step=_STEP))
    found = written.cpu()
    require(n_bytes == n_expected, f"{n_bytes} bytes, not {n_expected}")
    require(torch.equal(found[:n_expected], expected[:n_expected]), difference(found, expected[:n_expected]))
    require(bool((found[room:] == 0xEE).all()), "bytes past the message were written")
    for divisor, adds in ((1, False), (3, False), (1, True)):
        wanted = torch.linspace(-1, 1, n).to(dtype)
        fenced = torch.cat([wanted, wanted.new_full((8,), 7)]).to(place)
        error = torch.zeros(1, dtype=torch.int32, device=place)
        codec.decode(expected[:n_expected], wanted, divisor=divisor, adds=adds)
        with using(kernels):
            codec.decode(written[:-8], fenced[:n], divisor=divisor, adds=adds, error=error)
        raise_error(int(error), codec.name, place)
        values_found = fenced.cpu()
        is_plain = divisor == 1 and not adds
        require(_same(values_found[:n], wanted, nan_too=is_plain), f"other values (/ {divisor}, adds: {adds})")
        require(bool((values_found[n:] == 7).all()), "values past the end were written")


def run(
    kernels: Kernels,
    codecs: dict[str, Codec],
    sizes: Iterable[int],
    contents: Iterable[str],
    dtypes: Iterable[torch.dtype] = DTYPES,
) -> int:
    """How many cases there were. Raises: CheckFailed (the first case that differs)."""
    n_cases = 0
    for name, n, content, dtype in itertools.product(codecs, sizes, contents, dtypes):
        try:
            compare(kernels, codecs[name], values_of(content, n, dtype))
        except (GradwireError, RuntimeError) as error:
            raise CheckFailed(f"{name}, {n} x {dtype}, {content}: {error}") from error
        n_cases += 1
    return n_cases


def check_float_kernels(device: torch.device, kernels: CudaKernels | None = None) -> dict[str, Any]:
    """Every kernel loads and makes the CPU codecs' bytes; of all contents, and of messages up to 16 M values.

    Raises: CheckFailed, Unsupported (no NVRTC, an old driver, ...).
    """
    if kernels is None:
        if device.type != "cuda":
            return not_run(device)
        kernels = CudaKernels(device)
    found: dict[str, Any] = {"kernels": {name: kernels.resources(name) for name in KERNELS}}
    found["n_cases"] = run(kernels, CODECS, (*SIZES, 16_385), ("gradient", "nan"))
    found["n_cases"] += run(kernels, CODECS, (300,), CONTENTS)
    found["n_cases"] += run(kernels, WIDE, (*SIZES, 16_385), ("gradient",), (torch.float32,))
    large = {name: CODECS[name] for name in ("truncated 8", "fp4-e2m1 4 stochastic", "embedded 8")}
    found["n_cases"] += run(kernels, large, _LARGE, ("gradient",), (torch.float32,))
    spilt = [name for name, used in found["kernels"].items() if used["local_bytes"]]
    require(not spilt, f"kernels that keep registers in memory: {', '.join(spilt)}")
    return found


def _same(found: Tensor, expected: Tensor, *, nan_too: bool) -> bool:
    """Bit by bit; sums and quotients but for what a NaN looks like."""
    words = {4: torch.int32, 2: torch.int16}[found.element_size()]
    same = found.view(words) == expected.view(words)
    return bool((same if nan_too else same | (found.isnan() & expected.isnan())).all())
