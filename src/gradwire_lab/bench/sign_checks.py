"""The kernels of signs and votes beside the CPU's: bit for bit, on a GPU, or in tests on an emulator."""

from __future__ import annotations

import itertools
from collections.abc import Iterable

import torch

from gradwire.codecs.signs import Signs
from gradwire.gpu.kernels import Kernels, using
from gradwire_lab.bench.device_checks import CheckFailed

KERNELS = ("gw_signs_pack", "gw_signs_vote")
SHAPES = ((1, 1), (31, 2), (32, 3), (33, 255), (255, 4), (257, 2), (9_000, 3), (9_001, 4))  # values, ranks
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_SCALE = 512.0  # the loss scale


def run(kernels: Kernels, shapes: Iterable[tuple[int, int]] = SHAPES) -> int:
    """How many cases there were. Raises: CheckFailed (the first that differs)."""
    n_cases = 0
    for (n, n_ranks), dtype, ties in itertools.product(shapes, DTYPES, (False, True)):
        try:
            _compare(kernels, n, n_ranks, dtype, ties)
        except CheckFailed as error:
            raise CheckFailed(f"signs, {n} x {dtype}, {n_ranks} ranks, ties {ties}: {error}") from error
        n_cases += 1
    return n_cases


def values_of(n: int, n_ranks: int, dtype: torch.dtype) -> torch.Tensor:
    """(n_ranks, n) of `dtype` on the CPU: zeros of both signs, subnormals, and elements in which all ranks are alike."""
    generator = torch.Generator().manual_seed(n + n_ranks)
    values = torch.randn(n_ranks, n, generator=generator)
    values *= torch.tensor([1.0, 0.0, 1e-39, 1e37]).repeat(-(-n // 4))[:n]
    values[:, ::9] = values[:1, ::9]
    return values.to(dtype).nan_to_num(posinf=6e4, neginf=-6e4)


def _compare(kernels: Kernels, n: int, n_ranks: int, dtype: torch.dtype, ties: bool) -> None:
    place, signs, values = kernels.device, Signs(ties), values_of(n, n_ranks, dtype)
    n_words = signs.n_words(values[0])
    expected, voted = torch.empty(n_ranks, n_words, dtype=torch.int32), torch.empty(n, dtype=dtype)
    for words, own in zip(expected, values, strict=True):
        _require(bool(signs.pack(own, words)), "finite values were called others")
    signs.vote(expected, voted, _SCALE)
    # A word before them, and one that stays as it is.
    found = torch.full((n_ranks, n_words + 2), -1, dtype=torch.int32, device=place)
    flags, out = torch.zeros(1, dtype=torch.int32, device=place), torch.full((n + 1,), 7.0, dtype=dtype, device=place)
    with using(kernels):
        for words, own in zip(found, values.to(place), strict=True):
            _require(bool(signs.pack(own, words[:-1])), "finite values were called others")
        signs.vote(found[:, :-1], out[:n], _SCALE, flags)
    packed, written = found.cpu(), out.cpu()
    _require(torch.equal(packed[:, 1:-1], expected), "other signs")
    _require(bool((packed[:, 0] == 0).all()), "finite values were noted as others")
    _require(bool((packed[:, -1] == -1).all()), "words past the message were written")
    _require(torch.equal(written[:n].view(torch.uint8), voted.view(torch.uint8)), "another majority")
    _require(float(written[n]) == 7.0, "values past the end were written")
    _require(int(flags) == 0, "finite values were noted as others")
    # One rank's value that is not finite: all are NaN.
    bad = values[-1].to(place, copy=True)
    bad[n // 2] = float("-inf") if n % 2 else float("nan")
    with using(kernels):
        is_finite = signs.pack(bad, found[-1, :-1])
        signs.vote(found[:, :-1], out[:n], _SCALE, flags)
    is_told = not bool(is_finite) and int(flags) == 1
    _require(bool(out[:n].isnan().all()) and is_told, "a value that is not finite was not told")


def _require(is_right: bool, what: str) -> None:
    if not is_right:
        raise CheckFailed(what)
