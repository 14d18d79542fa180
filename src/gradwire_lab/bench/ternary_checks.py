"""TernGrad's kernels beside the codec for CPUs: scales, fields and means, bit for bit."""

from __future__ import annotations

import itertools
from collections.abc import Iterable

import torch
from torch import Tensor

from gradwire.codecs.ternary import Ternary
from gradwire.gpu.kernels import Kernels, using
from gradwire_lab.bench.device_checks import CheckFailed

KERNELS = tuple(f"gw_ternary_{name}" for name in ("measure", "scales", "count", "mean"))
CONTENTS = ("gradient", "zeros", "tiny", "large")
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_STEP = (1 << 50) + 7


def values_of(content: str, n: int, dtype: torch.dtype) -> Tensor:
    """(n,) of `dtype` on the CPU."""
    generator = torch.Generator().manual_seed(n)
    values = torch.randn(n, generator=generator) * torch.exp(torch.randn(n, generator=generator) - 5)
    factor = {"gradient": 1.0, "zeros": 0.0, "tiny": 1e-30, "large": 1e37}[content]
    return (values * factor).clamp(-3e38, 3e38).to(dtype).nan_to_num(posinf=6e4, neginf=-6e4)


def spans_of(n: int) -> list[tuple[int, int]]:
    """Tensors of one value, of none, of more than the CPU adds up at once, and the rest."""
    bounds = sorted({0, n, *(cut for cut in (1, 70, 4700) if cut < n)})
    return [(0, 0), *itertools.pairwise(bounds)]


def compare(kernels: Kernels, codec: Ternary, values: Tensor, spans: list[tuple[int, int]], n_ranks: int) -> None:
    """As the native core reckons, rank by rank and summed. Raises: CheckFailed."""
    n, place = values.numel(), kernels.device
    filled = torch.tensor([start < end for start, end in spans])  # what is empty has no scale on a device
    shares = codec.share(n, spans, torch.device("cpu"))
    expected, counts = torch.empty(len(spans)), torch.empty(codec.count_bytes(n, n_ranks), dtype=torch.uint8)
    codec.write_scales(values, shares, expected)
    there, scales = values.to(place, copy=True), torch.zeros(int(filled.sum()), device=place)
    with using(kernels):
        on_device = codec.share(n, spans, place)
        codec.write_scales(there, on_device, scales)
    _require(torch.equal(scales.cpu(), expected[filled]), "other scales")
    expected *= 1.5  # another rank's are larger
    scales.copy_(expected[filled])
    codec.write_counts(values, shares, expected, n_ranks, counts, _STEP)
    fenced = torch.full((counts.numel() + 8,), 0xEE, dtype=torch.uint8, device=place)
    with using(kernels):
        codec.write_counts(there, on_device, scales, n_ranks, fenced[:-8], _STEP)
    _require(torch.equal(fenced[:-8].cpu(), counts), "other fields")
    _require(bool((fenced[-8:].cpu() == 0xEE).all()), "bytes past the fields were written")
    sums, mean = counts.mul_(n_ranks), values.clone()  # all of them drew the same
    codec.read_counts(sums, shares, expected, n_ranks, mean)
    with using(kernels):
        codec.read_counts(sums.to(place), on_device, scales, n_ranks, there)
    _require(torch.equal(there.cpu().view(torch.uint8), mean.view(torch.uint8)), "other means")


def run(kernels: Kernels, sizes: Iterable[int] = (1, 63, 65, 4097, 9_000), contents: Iterable[str] = CONTENTS) -> int:
    """How many cases there were. Raises: CheckFailed (the first case that differs)."""
    n_cases = 0
    for n, content, dtype, n_ranks in itertools.product(sizes, contents, DTYPES, (3, 9)):
        for spans in (spans_of(n), [(0, n)]):
            try:
                compare(kernels, Ternary(2.5, seed=n), values_of(content, n, dtype), spans, n_ranks)
            except CheckFailed as error:
                raise CheckFailed(f"ternary, {n} x {dtype}, {content}, {n_ranks} ranks: {error}") from error
            n_cases += 1
    return n_cases


def _require(is_right: bool, what: str) -> None:
    if not is_right:
        raise CheckFailed(what)
