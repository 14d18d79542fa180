"""Sums, ORs and maxima round a ring, against torch's own in the same order. Ranks are threads here."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from test_connections import FACTS, STREAM, at_once, meshes

from gradwire import _native, errors
from gradwire.codecs.tensors import bytes_of

ELEMENTS = [torch.float32, torch.bfloat16, torch.float16, torch.int32, torch.int64]
OPERATIONS = {"sum": (0, torch.add), "or": (1, torch.bitwise_or), "maximum": (2, torch.maximum)}


def values_of(rank: int, n: int, dtype: torch.dtype) -> torch.Tensor:
    draw = torch.Generator().manual_seed(100 * n + rank)
    if dtype.is_floating_point:
        return (torch.randn(n, generator=draw) * torch.randn(n, generator=draw).exp()).to(dtype)
    size = torch.iinfo(dtype)
    return torch.randint(size.min, size.max, (n,), generator=draw, dtype=dtype)  # sums wrap around


def expected(shares: list[torch.Tensor], operation: str) -> torch.Tensor:
    """Part p: rank p's values, then those of p + 1, and so on."""
    world, n = len(shares), shares[0].numel()
    whole = torch.empty_like(shares[0])
    for part in range(world):
        begin, end = n * part // world, n * (part + 1) // world
        total = shares[part][begin:end].clone()
        for distance in range(1, world):
            total = OPERATIONS[operation][1](total, shares[(part + distance) % world][begin:end])
        whole[begin:end] = total
    return whole


def combine(on_a_thread: bool, *arguments: Any) -> int:
    """Bytes sent."""
    return (_native.SumOnItsWay(*arguments).wait() if on_a_thread else _native.ring_combine(*arguments))[0]


@pytest.mark.parametrize("world", [1, 2, 3, 5])
@pytest.mark.parametrize("on_a_thread", [False, True])
def test_values_are_combined_in_the_order_of_the_ring(world: int, on_a_thread: bool) -> None:
    stream = STREAM
    with meshes(world) as made:
        for dtype in ELEMENTS:
            for operation in OPERATIONS if dtype == torch.int32 else ["sum"]:
                for n, n_chunks in ((0, 1), (1, 1), (world, 2), (1_003, 1), (70_001, 3), (70_001, 7)):
                    shares = [values_of(rank, n, dtype) for rank in range(world)]
                    results = [share.clone() for share in shares]
                    stream += 2

                    calls = [
                        functools.partial(
                            combine, on_a_thread, made[rank], stream, FACTS, bytes_of(results[rank]),
                            ELEMENTS.index(dtype), OPERATIONS[operation][0], n_chunks,
                        )
                        for rank in range(world)
                    ]  # fmt: skip
                    sent = at_once(*calls)
                    for result in results:
                        assert torch.equal(result, expected(shares, operation)), (dtype, operation, n, n_chunks)
                    n_messages = 2 * (world - 1) * n_chunks if n else 0
                    payload = sum(sent) - world * n_messages * _native.MESSAGE_HEADER_BYTES
                    assert payload == 2 * (world - 1) * n * dtype.itemsize, (dtype, n, sent)


def test_sum_of_a_rank_that_leaves_or_brings_less_ends_with_an_error() -> None:
    with meshes(timeout_s=20) as made:
        values = torch.ones(1_000)
        running = _native.SumOnItsWay(made[0], STREAM, FACTS, bytes_of(values), 0, 0, 1)
        made[1].open(STREAM, FACTS, 10_000, [0])
        made[1].break_off()
        with pytest.raises(errors.PeerLost, match="rank 0 lost rank 1"):
            running.wait()
    with meshes(timeout_s=20) as made:
        longer, shorter = torch.ones(1_000), torch.ones(900)
        outcomes = at_once(
            lambda: _native.ring_combine(made[0], STREAM, FACTS, bytes_of(longer), 0, 0, 1),
            lambda: _native.ring_combine(made[1], STREAM, FACTS, bytes_of(shorter), 0, 0, 1),
        )
        assert any(isinstance(outcome, errors.CorruptMessage) for outcome in outcomes), outcomes


def test_what_has_no_meaning_is_refused() -> None:
    with meshes() as made:
        for element, operation in ((0, 1), (4, 2), (5, 0), (-1, 0), (0, 3)):
            with pytest.raises(errors.InvalidArgument):
                _native.ring_combine(made[0], STREAM, FACTS, bytes_of(torch.ones(4)), element, operation, 1)
