"""THC's kernels beside the codec for CPUs: norms, codes, residuals and means, bit for bit."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from gradwire.codecs.hadamard import Thc
from gradwire.gpu.kernels import Kernels, using
from gradwire_lab.bench.device_checks import CheckFailed

KERNELS = ("gw_thc_norms", "gw_thc_write", "gw_thc_read")
SIZES = (1, 65, 300, 1024, 2_500)
CONTENTS = ("gradient", "zeros", "tiny", "large")
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_STEP, _SIGN_STEP = (1 << 50) + 7, (1 << 60) + 11
_SCALE = 512.0  # the loss scale


def values_of(content: str, n: int, dtype: torch.dtype) -> Tensor:
    """(n,) of `dtype` on the CPU."""
    generator = torch.Generator().manual_seed(n)
    values = torch.randn(n, generator=generator) * torch.exp(torch.randn(n, generator=generator) - 5)
    values[::7] = -0.0
    factor = {"gradient": 1.0, "zeros": 0.0, "tiny": 1e-38, "large": 1e36}[content]
    return (values * factor).to(dtype).nan_to_num(posinf=6e4, neginf=-6e4)


def compare(kernels: Kernels, codec: Thc, values: Tensor, residual: Tensor | None, n_ranks: int) -> None:
    """As the native core reckons. Raises: CheckFailed."""
    n, place = values.numel(), kernels.device
    there, old = values.to(place), None if residual is None else residual.to(place)
    expected, norms = torch.empty(codec.n_norms(n)), torch.zeros(codec.n_norms(n), device=place)
    codec.write_norms(values, expected, residual, _SCALE)
    with using(kernels):
        codec.write_norms(there, norms, old, _SCALE)
    _require(torch.equal(norms.cpu(), expected), "other norms")
    expected *= 1.5  # another rank's are larger
    norms.copy_(expected)
    codes = torch.empty(codec.code_bytes(n, n_ranks), dtype=torch.uint8)
    unsent = None if residual is None else torch.empty(n)
    draws: dict[str, Any] = {"n_ranks": n_ranks, "sign_step": _SIGN_STEP, "step": _STEP, "residual_scale": _SCALE}
    codec.write_codes(values, expected, codes, residual=residual, new_residual=unsent, **draws)
    fenced = torch.full((codes.numel() + 8,), 0xEE, dtype=torch.uint8, device=place)
    left = None if residual is None else torch.full((n + 1,), 7.0, device=place)
    with using(kernels):
        new = None if left is None else left[:n]
        codec.write_codes(there, norms, fenced[:-8], residual=old, new_residual=new, **draws)
    _require(torch.equal(fenced[:-8].cpu(), codes), "other codes")
    _require(bool((fenced[-8:].cpu() == 0xEE).all()), "bytes past the codes were written")
    if left is not None and unsent is not None:
        _require(torch.equal(left[:n].cpu().view(torch.int32), unsent.view(torch.int32)), "other residuals")
        _require(float(left[n]) == 7.0, "values past the residuals were written")
    codec.summable(codes, n_ranks).mul_(n_ranks)  # all of them drew the same
    mean, out = torch.empty_like(values), torch.full((n + 1,), 7.0, dtype=values.dtype, device=place)
    codec.read_sums(codes, expected, n_ranks, mean, sign_step=_SIGN_STEP)
    with using(kernels):
        codec.read_sums(codes.to(place), norms, n_ranks, out[:n], sign_step=_SIGN_STEP)
    _require(torch.equal(out[:n].cpu().view(torch.uint8), mean.view(torch.uint8)), "other means")
    _require(float(out[n]) == 7.0, "values past the means were written")


def run(kernels: Kernels, sizes: Iterable[int] = SIZES, contents: Iterable[str] = CONTENTS) -> int:
    """How many cases there were. Raises: CheckFailed (the first case that differs)."""
    n_cases = 0
    for n, content, dtype, n_ranks in itertools.product(sizes, contents, DTYPES, (8, 9)):
        residual = values_of("gradient", n, torch.float32) / 3 if n_ranks == 8 or n % 2 else None
        try:
            compare(kernels, Thc(seed=n), values_of(content, n, dtype), residual, n_ranks)
        except CheckFailed as error:
            raise CheckFailed(f"thc, {n} x {dtype}, {content}, {n_ranks} ranks: {error}") from error
        n_cases += 1
    return n_cases


def _require(is_right: bool, what: str) -> None:
    if not is_right:
        raise CheckFailed(what)
