"""THC's kernels beside the codec for CPUs: norms, codes, residuals and means, bit for bit."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from gradwire.codecs.hadamard import Thc
from gradwire.gpu.kernels import Kernels
from gradwire.gpu.thc import DeviceThc
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
    """As the scheme reckons on a CPU. Raises: CheckFailed."""
    n, place, on = values.numel(), kernels.device, DeviceThc(codec, kernels, n_ranks)
    there, old = values.to(place), None if residual is None else residual.to(place)
    expected = torch.empty(codec.n_norms(n))
    codec.norms_of(values, expected, residual, _SCALE)
    norms = torch.zeros(codec.n_norms(n), dtype=torch.int32, device=place)
    on.write_norms(there, norms, old, _SCALE)
    _require(torch.equal(norms.cpu(), expected.view(torch.int32)), "other norms")
    expected *= 1.5  # another rank's are larger
    norms.copy_(expected.view(torch.int32))
    codes, unsent = torch.empty(codec.n_codes(n), dtype=torch.uint8), None if residual is None else torch.empty(n)
    draws: dict[str, Any] = {"sign_step": _SIGN_STEP, "step": _STEP, "residual_scale": _SCALE}
    codec.write_codes(values, expected, codes, residual=residual, new_residual=unsent, **draws)
    n_bytes = on.code_bytes(n)
    fenced = torch.full((n_bytes + 8,), 0xEE, dtype=torch.uint8, device=place)
    left = None if residual is None else torch.full((n + 1,), 7.0, device=place)
    on.write_codes(
        there, norms, fenced[:n_bytes], residual=old, new_residual=None if left is None else left[:n], **draws
    )
    is_wide = codec.sums_are_wide(n_ranks)
    wanted = codes.to(torch.int16).view(torch.uint8) if is_wide else codes
    _require(torch.equal(fenced[:n_bytes].cpu(), wanted), "other codes")
    _require(bool((fenced[n_bytes:].cpu() == 0xEE).all()), "bytes past the codes were written")
    if left is not None and unsent is not None:
        _require(torch.equal(left[:n].cpu().view(torch.int32), unsent.view(torch.int32)), "other residuals")
        _require(float(left[n]) == 7.0, "values past the residuals were written")
    sums = codes.to(torch.int16).mul_(n_ranks) if is_wide else codes.mul_(n_ranks)  # all of them drew the same
    mean = torch.empty_like(values)
    codec.read_sums(sums, expected, n_ranks, mean, sign_step=_SIGN_STEP)
    out = torch.full((n + 1,), 7.0, dtype=values.dtype, device=place)
    on.read_sums(sums.view(torch.uint8).to(place), norms, out[:n], sign_step=_SIGN_STEP)
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
