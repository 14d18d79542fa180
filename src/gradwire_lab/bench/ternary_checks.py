"""TernGrad's kernels beside the codec for CPUs: scales, fields and means, bit for bit."""

from __future__ import annotations

import itertools
from collections.abc import Iterable

import torch
from torch import Tensor

from gradwire.codecs.ternary import Ternary
from gradwire.gpu.kernels import Kernels
from gradwire.gpu.ternary import DeviceTernary
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
    """As the scheme reckons on a CPU, rank by rank and summed. Raises: CheckFailed."""
    n, place, on = values.numel(), kernels.device, DeviceTernary(codec, kernels, n_ranks)
    shares = on.share(n, spans)
    scales = torch.zeros(shares.n_spans, dtype=torch.int32, device=place)
    work = torch.full((on.work_bytes(shares),), 0xA5, dtype=torch.uint8, device=place)
    on.write_scales(values.to(place), shares, work, scales)
    filled = [(start, end) for start, end in spans if start < end]
    expected = torch.tensor([codec.scale_of(values[start:end]) for start, end in filled])
    _require(torch.equal(scales.cpu(), expected.view(torch.int32)), "other scales")
    if not bool(expected.isfinite().all()):
        return
    expected *= 1.5  # another rank's are larger
    scales.copy_(expected.view(torch.int32))
    n_bytes = codec.count_bytes(n, n_ranks)
    fenced = torch.full((n_bytes + 8,), 0xEE, dtype=torch.uint8, device=place)
    on.write_counts(values.to(place), shares, scales, fenced[:n_bytes], _STEP)
    counts = torch.empty(n_bytes, dtype=torch.uint8)
    mean, shared, drawn = values.clone(), values.float(), torch.empty(n)
    if len(spans) == 1:
        codec.write_counts(values, float(expected[0]), n_ranks, counts, step=_STEP)
    else:
        for (start, end), scale in zip(filled, expected.tolist(), strict=True):
            if scale:
                shared[start:end].div_(scale)
        codec.write_counts(shared, 1.0, n_ranks, counts, step=_STEP)
    _require(torch.equal(fenced[:n_bytes].cpu(), counts), "other fields")
    _require(bool((fenced[n_bytes:].cpu() == 0xEE).all()), "bytes past the fields were written")
    sums = counts.mul_(n_ranks)  # all of them drew the same
    if len(spans) == 1:
        codec.read_counts(sums, float(expected[0]), n_ranks, mean)
    else:
        codec.read_counts(sums, 1.0, n_ranks, drawn)
        for (start, end), scale in zip(filled, expected.tolist(), strict=True):
            torch.mul(drawn[start:end], scale, out=mean[start:end])
    out = values.to(place, copy=True)
    on.read_counts(sums.to(place), shares, scales, out)
    _require(torch.equal(out.cpu().view(torch.uint8), mean.view(torch.uint8)), "other means")


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
