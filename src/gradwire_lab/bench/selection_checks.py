"""Kernels that select elements beside the CPU's selection: the same elements, in the same order, bit for bit."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from gradwire.codecs.selection import add_elements, raise_error, take_by_sample, take_largest
from gradwire.gpu.kernels import Kernels, using
from gradwire.schemes.compressed import count_of
from gradwire.schemes.dgc import draw_sample
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
    """The k largest are those of the native core, and are added alike. Raises: CheckFailed."""
    left, on_device = values.clone(), values.to(kernels.device, copy=True)
    indices, taken, is_finite = take_largest(left, k)
    with using(kernels):
        found = take_largest(on_device, k)
    _require(bool(found[2]) == bool(is_finite), "values are finite, or not")
    count = torch.tensor([k], dtype=torch.int32)
    _compare(kernels, (count, indices, taken, left), (count.to(kernels.device), *found[:2], on_device))


def compare_sampled(kernels: Kernels, values: Tensor, spans: Sequence[tuple[int, int]], share: float) -> None:
    """The elements that thresholds from samples select of each span are those of the native core. Raises: CheckFailed."""
    counts, generator = [count_of(share, end - start) for start, end in spans], torch.Generator().manual_seed(_SEED)
    samples = [draw_sample(end - start, k, generator) for (start, end), k in zip(spans, counts, strict=True)]
    left, zeroed = values.clone(), torch.ones_like(values)
    on_device, beside = values.to(kernels.device, copy=True), zeroed.to(kernels.device, copy=True)
    expected = take_by_sample(left, spans, counts, samples, zeroed)
    with using(kernels):
        found = take_by_sample(on_device, spans, counts, samples, beside)
    _require(torch.equal(beside.cpu(), zeroed), "other places beside them are zero")
    _compare(kernels, (*expected, left), (*found, on_device))


def _compare(kernels: Kernels, expected: tuple[Tensor, ...], found: tuple[Tensor, ...]) -> None:
    """Elements, as (count, indices, taken, what is left), and their sums."""
    for what, own, other in zip(("numbers", "elements", "values", "values left"), expected, found, strict=True):
        _require(torch.equal(_bits(own), _bits(other)), f"other {what}")
    (count, indices, taken, left), error = expected, torch.zeros(1, dtype=torch.int32)
    sums = torch.linspace(-1, 1, left.numel())
    summed, noted = sums.to(kernels.device, copy=True), error.to(kernels.device, copy=True)
    add_elements(indices, taken, sums, error, count)
    with using(kernels):
        add_elements(found[1], found[2], summed, noted, found[0])
    raise_error(max(int(error), int(noted)))
    _require(torch.equal(summed.cpu().nan_to_num(9.0), sums.nan_to_num(9.0)), "other sums")


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
