"""GComp's kernels beside the codec for CPUs, byte for byte; on a GPU, or in tests on an emulator."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from gradwire.codecs.gcomp import GCompCodec, HuffmanTable
from gradwire.errors import GradwireError
from gradwire.gpu.driver import CudaKernels
from gradwire.gpu.kernels import Kernels, using
from gradwire.gpu.launching import raise_error
from gradwire_lab.bench.device_checks import CheckFailed
from gradwire_lab.bench.kernel_checks import CONTENTS, DTYPES, difference, not_run, require, values_of

KERNELS = tuple(
    f"gw_gcomp_{name}"
    for name in (
        "measure",
        "place",
        "pack",
        "exponents",
        "seal_chunks",
        "seal",
        "count",
        "check",
        "checksums",
        "streams",
        "unpack",
    )
)
SIZES = (0, 1, 3, 4, 5, 15, 16, 17, 33, 1_000, 16_383, 16_384, 16_385)
_LARGE = ((1 << 20) + 1, 1 << 24)


def _codecs() -> dict[str, GCompCodec]:
    few = torch.zeros(256, dtype=torch.int64)
    few[0], few[110:124] = 5, 10  # all else is escaped
    all_of_them = torch.ones(256, dtype=torch.int64)
    all_of_them[100:132] = 8
    return {
        "uniform": GCompCodec("uniform", bits=6),
        "paper": GCompCodec("paper"),
        "paper, few codes": GCompCodec("paper", bits=5, table=HuffmanTable.from_histogram(few)),
        "none, every exponent has a code": GCompCodec("none", table=HuffmanTable.from_histogram(all_of_them)),
        "truncate": GCompCodec("truncate", bits=7),
        "paper, truncated": GCompCodec("paper", rounding="truncate"),
    }


CODECS = _codecs()


def importance_of(n: int, seed: int = 0) -> Tensor:
    """(n,) uint8: around the size of the values of `values_of`, some of any value."""
    generator = torch.Generator().manual_seed(seed + n)
    near = torch.randn(n, generator=generator) * 30 + 150
    importance = near.clamp(0, 255).to(torch.uint8)
    importance[torch.rand(n, generator=generator) < 0.1] = 0
    return importance


def compare(kernels: Kernels, codec: GCompCodec, values: Tensor, importance: Tensor) -> None:
    """Message and decoded values of the kernels are the CPU's, bit for bit; nothing beside them is written."""
    n, place = values.numel(), kernels.device
    room = torch.empty(codec.max_encoded_bytes(n, values.dtype), dtype=torch.uint8)
    message = room[: int(codec.encode(values, room, importance))]
    sent, weights = values.to(place), importance.to(place)
    written = torch.full((room.numel() + 8,), 0xEE, dtype=torch.uint8, device=place)
    expected, counts = torch.ones(256, dtype=torch.int64), torch.ones(256, dtype=torch.int64, device=place)
    codec.histogram(values, expected)
    with using(kernels):
        n_bytes = int(codec.encode(sent, written[:-8], weights))
        codec.histogram(sent, counts)
    require(n_bytes == message.numel(), f"{n_bytes} bytes, not {message.numel()}")
    require(torch.equal(written[:n_bytes].cpu(), message), difference(written.cpu(), message))
    require(bool((written[n_bytes:].cpu() == 0xEE).all()), "bytes past the message were written")
    require(torch.equal(counts.cpu(), expected), "other counts of exponents")
    for divisor, adds in ((1, False), (3, False), (4, False), (1, True)):
        wanted = torch.linspace(-1, 1, n).to(values.dtype)
        fenced = torch.cat([wanted, wanted.new_full((8,), 7)]).to(place)
        error = torch.zeros(1, dtype=torch.int32, device=place)
        codec.decode(message, wanted, importance, divisor=divisor, adds=adds)
        with using(kernels):
            codec.decode(message.to(place), fenced[:n], weights, divisor=divisor, adds=adds, error=error)
        raise_error(int(error), codec.name, place)
        found = fenced.cpu()
        is_plain = divisor == 1 and not adds
        require(_same(found[:n], wanted, nan_too=is_plain), f"other values (/ {divisor}, adds: {adds})")
        require(bool((found[n:] == 7).all()), "values past the end were written")


def run(
    kernels: Kernels,
    codecs: Iterable[str],
    sizes: Iterable[int],
    contents: Iterable[str],
    dtypes: Iterable[torch.dtype] = DTYPES,
) -> int:
    """How many cases there were. Raises: CheckFailed (the first case that differs)."""
    n_cases = 0
    for name, n, content, dtype in itertools.product(codecs, sizes, contents, dtypes):
        try:
            compare(kernels, CODECS[name], values_of(content, n, dtype), importance_of(n))
        except (GradwireError, RuntimeError) as error:
            raise CheckFailed(f"gcomp {name}, {n} x {dtype}, {content}: {error}") from error
        n_cases += 1
    return n_cases


def check_gcomp_kernels(device: torch.device, kernels: CudaKernels | None = None) -> dict[str, Any]:
    """Every kernel loads and makes the CPU codec's bytes; of all contents, and of messages up to 16 M values.

    Raises: CheckFailed, Unsupported (no NVRTC, an old driver, ...).
    """
    if kernels is None:
        if device.type != "cuda":
            return not_run(device)
        kernels = CudaKernels(device)
    found: dict[str, Any] = {"kernels": {name: kernels.resources(name) for name in KERNELS}}
    found["n_cases"] = run(kernels, CODECS, SIZES, CONTENTS)
    found["n_cases"] += run(kernels, ("uniform", "paper"), _LARGE, ("gradient",))
    spilt = [name for name, used in found["kernels"].items() if used["local_bytes"]]
    require(not spilt, f"kernels that keep registers in memory: {', '.join(spilt)}")
    return found


def _same(found: Tensor, expected: Tensor, *, nan_too: bool) -> bool:
    """Bit by bit; sums and quotients but for what a NaN looks like."""
    words = {4: torch.int32, 2: torch.int16}[found.element_size()]
    same = found.view(words) == expected.view(words)
    return bool((same if nan_too else same | (found.isnan() & expected.isnan())).all())
