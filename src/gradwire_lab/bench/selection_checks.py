"""Kernels that select elements beside the CPU's selection: the same elements, in the same order, bit for bit."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from gradwire import _native
from gradwire.gpu.kernels import Kernels
from gradwire.gpu.selection import DeviceSelection, Segments, raise_error
from gradwire.schemes.compressed import count_of
from gradwire.schemes.dgc_rule import draw_sample, select_by_sample
from gradwire_lab.bench.device_checks import CheckFailed

KERNELS = tuple(
    f"gw_select_{name}"
    for name in ("begin", "count", "narrow", "try", "adapt", "measure", "place", "bases", "write", "add")
)
CONTENTS = ("gradient", "zeros", "negative zeros", "alike", "short", "subnormal", "few", "nan", "steep")
SIZES = (1, 33, 2047, 2049, 16_385, 40_000)
SHARES = (0.001, 0.1, 1.0)
_SEED = 11


def values_of(content: str, n: int) -> Tensor:
    """(n,) float32 on the CPU."""
    generator = torch.Generator().manual_seed(n)
    values = torch.randn(n, generator=generator) * torch.exp(torch.randn(n, generator=generator) - 5)
    if content == "zeros":
        values.zero_()
    elif content == "negative zeros":
        values.fill_(-0.0)
    elif content == "alike":  # equal magnitudes are taken by their places
        values.sign_().mul_(0.5)
    elif content == "short":  # many are equal
        values = values.bfloat16().float()
    elif content == "subnormal":
        values *= 1e-38
    elif content == "few":  # fewer than are wanted
        values[torch.rand(n, generator=generator) < 0.999] = 0
    elif content == "nan":
        values[n // 2], values[n // 3] = float("nan"), float("-inf")
    elif content == "steep":  # a sample's threshold has to be moved far
        values = torch.exp(torch.randn(n, generator=generator) * 30).clamp(max=3e38)
    return values


def compare_exact(kernels: Kernels, values: Tensor, k: int) -> None:
    """The k largest are the CPU's, and are added alike. Raises: CheckFailed."""
    n, on = values.numel(), DeviceSelection(kernels)
    expected = torch.empty(k, dtype=torch.int32)
    _native.select_largest(values, expected)
    segments = on.lay_out(n, [(0, n)], [k], lambda tensor: tensor.to(kernels.device))
    _compare(kernels, on, segments, values, expected)


def compare_sampled(kernels: Kernels, values: Tensor, spans: Sequence[tuple[int, int]], share: float) -> None:
    """What thresholds from samples select of each span is the CPU's. Raises: CheckFailed."""
    n, on = values.numel(), DeviceSelection(kernels)
    counts = [count_of(share, end - start) for start, end in spans]
    generators = [torch.Generator().manual_seed(_SEED) for _ in range(2)]
    chosen, samples = [], []
    for (start, end), k in zip(spans, counts, strict=True):
        if k:
            chosen.append(select_by_sample(values[start:end], k, generators[0]) + start)
        samples.append(draw_sample(end - start, k, generators[1]))
    segments = on.lay_out(n, spans, counts, lambda tensor: tensor.to(kernels.device), samples)
    _compare(kernels, on, segments, values, torch.cat(chosen) if chosen else torch.empty(0, dtype=torch.int32))


def _compare(kernels: Kernels, on: DeviceSelection, segments: Segments, values: Tensor, expected: Tensor) -> None:
    place, room, n = kernels.device, segments.room, expected.numel()
    left, beside = values.to(place, copy=True), torch.ones_like(values, device=place)
    work = torch.full((on.work_bytes(segments),), 0xA5, dtype=torch.uint8, device=place)
    indices = torch.full((room + 2,), -7, dtype=torch.int32, device=place)
    taken = torch.full((room + 2,), 7.0, device=place)
    n_taken = torch.full((1,), -1, dtype=torch.int32, device=place)
    on.take(left, segments, work, indices[:room], taken[:room], beside=beside, n_taken=n_taken)
    _require(int(n_taken) == n, f"{int(n_taken)} elements, not {n}")
    _require(torch.equal(indices[:n].cpu(), expected), "other elements")
    _require(bool((indices[n:] == -7).all()) and bool((taken[n:] == 7).all()), "more was written")
    places, emptied, zeroed = expected.long(), values.clone(), torch.ones_like(values)
    _require(torch.equal(_bits(taken[:n]), _bits(values[places])), "other values")
    emptied[places], zeroed[places] = 0, 0
    _require(torch.equal(_bits(left), _bits(emptied)), "other values are left")
    _require(torch.equal(beside.cpu(), zeroed), "other places beside them are zero")
    sums, error = torch.linspace(-1, 1, values.numel()), torch.zeros(1, dtype=torch.int32, device=place)
    found = sums.to(place)
    on.add(indices[:room], taken[:room], found, error, n_taken=n_taken)
    raise_error(int(error))
    sums.index_add_(0, places, values[places])
    _require(torch.equal(found.cpu().nan_to_num(9.0), sums.nan_to_num(9.0)), "other sums")


def _bits(values: Tensor) -> Tensor:
    return values.cpu().view(torch.int32)


def spans_of(n: int) -> list[tuple[int, int]]:
    """Tensors of one value, of none, of many, and the rest; and between them values of none."""
    bounds = sorted({0, n, *(cut for cut in (1, 70, 4_700, 25_000) if cut < n)})
    spans = list(itertools.pairwise(bounds))
    return [(0, 0), *spans[:1], *spans[2:]] if len(spans) > 2 else spans


def run(
    kernels: Kernels,
    sizes: Iterable[int] | None = None,
    contents: Iterable[str] = CONTENTS,
    shares: Iterable[float] = SHARES,
) -> int:
    """How many cases there were; `sizes`: SIZES, if not given. Raises: CheckFailed (the first case that differs)."""
    n_cases = 0
    for n, content, share in itertools.product(SIZES if sizes is None else sizes, contents, shares):
        values = values_of(content, n)
        try:
            compare_exact(kernels, values, count_of(share, n))
            n_cases += 1
            for spans in ([(0, n)], spans_of(n)) if content != "nan" else ():
                compare_sampled(kernels, values, spans, share)
                n_cases += 1
        except CheckFailed as error:
            raise CheckFailed(f"selection of {share} of {n}, {content}: {error}") from error
    return n_cases


def _require(is_right: bool, what: str) -> None:
    if not is_right:
        raise CheckFailed(what)
