"""Every scheme trains on the late device, through host memory, and ends with the bits of its run on the CPU."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from late_cases import CPU, N_STEPS, SCHEMES, Place, begin, train

from gradwire.reducer import Reducer
from ranks import run_ranks


@contextlib.contextmanager
def counting_waits_of_hooks(late: Any) -> Iterator[list[int]]:
    """How often DDP's hook stood still for the device, call by call."""
    waits: list[int] = []
    reduce = Reducer.reduce

    def counted(reducer: Reducer, *bucket: Any) -> Any:
        before = late.n_waits_here()
        try:
            return reduce(reducer, *bucket)
        finally:
            waits.append(late.n_waits_here() - before)

    Reducer.reduce = counted  # type: ignore[method-assign]
    try:
        yield waits
    finally:
        Reducer.reduce = reduce  # type: ignore[method-assign]


def train_on_both(rank: int, world_size: int, library: Path, names: list[str], latenesses_us: list[int]) -> None:
    late, device = begin(library)
    for name in names:
        late.set_lateness_us(0)
        expected = train(rank, Place(CPU), SCHEMES[name]())
        for lateness_us in latenesses_us:
            late.set_lateness_us(lateness_us)
            scheme = SCHEMES[name]()
            with counting_waits_of_hooks(late) as waits:
                found = train(rank, device, scheme)
            assert len(waits) > N_STEPS or name == "auto"  # which puts its hook in where something is to be won
            assert scheme.owns_step or not any(waits), f"{name}: autograd's thread waited for the device"
            assert torch.equal(found, expected), f"{name}, {lateness_us} us: off by {(found - expected).abs().max()}"
    assert late.n_waits_with_gil() == 0, "a thread waited for the device and held up all others"


@pytest.mark.parametrize(("world_size", "latenesses_us"), [(1, [1_000]), (2, [0, 5_000]), (3, [1_000])])
def test_every_scheme_has_its_bits_of_the_cpu(library: Path, world_size: int, latenesses_us: list[int]) -> None:
    run_ranks(train_on_both, world_size, library, list(SCHEMES), latenesses_us, timeout_s=170)
