"""Kernels of low-rank matrices beside the CPU's: bit for bit, on a GPU, or in tests on an emulator."""

from __future__ import annotations

import itertools

import torch

from gradwire.gpu.kernels import Kernels
from gradwire.schemes.low_rank import multiply, orthogonalise
from gradwire_lab.bench.device_checks import CheckFailed

KERNELS = ("gw_multiply_factors", "gw_orthogonalise_factors")
SHAPES = ((1, 1, 1), (1, 7, 300), (2, 16, 17), (4, 33, 65), (4, 257, 31), (9, 40, 11), (12, 12, 100))  # rank, n, m


def run(kernels: Kernels) -> int:
    """How many cases there were. Raises: CheckFailed (the first that differs)."""
    n_cases = 0
    for (rank, n, m), dtype in itertools.product(SHAPES, (torch.float32, torch.bfloat16, torch.float16)):
        left, right, matrix = (_drawn(shape) for shape in ((rank, n), (rank, m), (n, m)))
        for subtract in (False, True) if dtype == torch.float32 else (False,):
            expected, found = matrix.to(dtype, copy=True), matrix.to(kernels.device, dtype, copy=True)
            multiply(None, left[None], right[None], [expected], subtract)
            multiply(kernels, left[None].to(kernels.device), right[None].to(kernels.device), [found], subtract)
            _compare(f"a product of rank {rank}, {n} x {m}, {dtype}", expected, found)
            n_cases += 1
    for rank, n in {(rank, n) for rank, n, _ in SHAPES if rank <= n}:
        factors = _drawn((9, rank, n))
        factors[1] = 0
        factors[2, -1] = factors[2, 0]
        factors[3, :, 1:] = 0
        for place, size in enumerate((1e15, 1e34, 1e-25, 1e-38, 1e-43), 4):
            factors[place] *= size
        expected, found = factors.clone(), factors.to(kernels.device, copy=True)
        orthogonalise(None, expected)
        orthogonalise(kernels, found)
        _compare(f"orthogonal factors of rank {rank}, {n}", expected, found)
        n_cases += 1
    return n_cases


def _drawn(shape: tuple[int, ...]) -> torch.Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(shape, generator=generator) * torch.exp(torch.randn(shape, generator=generator))


def _compare(what: str, expected: torch.Tensor, found: torch.Tensor) -> None:
    if not torch.equal(found.cpu().view(torch.uint8), expected.view(torch.uint8)):
        raise CheckFailed(f"{what}: off by {(found.cpu() - expected).abs().max()}")
