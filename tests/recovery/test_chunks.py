"""Chunks of top-k: against a reading of the format value by value, in plain Python."""

import math
import struct

import pytest
import torch

from gradwire.codecs.chunks import CHUNK, add_chunks, n_bytes, take_chunks


def read(message: torch.Tensor, n: int, k: int) -> dict[int, float]:
    """The values that a message holds, by docs/format.md."""
    raw, found = bytes(message.view(torch.uint8).tolist()), {}
    size = 3 + 7 * math.ceil(k / 4)
    for chunk in range(math.ceil(n / CHUNK)):
        own = raw[chunk * size :][:size]
        (large,) = struct.unpack("<f", b"\0\0" + own[:2])
        bits, last = int.from_bytes(own[3:], "little"), -1
        groups = [bits >> 56 * group & (1 << 56) - 1 for group in range(math.ceil(k / 4))]
        for word in [group >> 14 * i & 0x3FFF for group in groups for i in range(4)][:k]:
            place = word >> 2
            if place <= last:
                continue
            last = place
            magnitude = large if word & 1 else large * own[2] / 255
            if CHUNK * chunk + place < n and magnitude:
                found[CHUNK * chunk + place] = -magnitude if word & 2 else magnitude
    return found


@pytest.mark.parametrize(("n", "k"), [(1, 1), (5, 4096), (4096, 64), (10_000, 64), (9000, 3), (4097, 1)])
@pytest.mark.parametrize("share_of_zeros", [0.0, 0.5, 0.999, 1.0])
def test_the_largest_of_each_chunk_travel_and_the_rest_stays(n: int, k: int, share_of_zeros: float) -> None:
    generator = torch.Generator().manual_seed(n + k)
    values = torch.randn(n, generator=generator) * 10 ** torch.randint(-20, 3, (n,), generator=generator)
    values[torch.rand(n, generator=generator) < share_of_zeros] = 0
    left, momenta = values.clone(), torch.ones(n)
    message = take_chunks(left, k, momenta)
    assert 4 * message.numel() == n_bytes(n, k)
    held = read(message, n, k)
    sums = torch.zeros(n)
    add_chunks(message, k, sums)
    expected = torch.zeros(n)
    for place, value in held.items():
        expected[place] = value
    torch.testing.assert_close(sums, expected, rtol=1e-6, atol=0)
    torch.testing.assert_close(left, values - sums, rtol=1e-6, atol=1e-38)
    for start in range(0, n, CHUNK):
        own = values[start : start + CHUNK]
        largest = own.abs().topk(min(k, own.numel())).indices[: int((own != 0).sum())]
        assert set(momenta[start : start + CHUNK].eq(0).nonzero().flatten().tolist()) == set(largest.tolist())
        taken, sent = own[largest], sums[start : start + CHUNK][largest]
        assert bool((taken * sent >= 0).all())
        large = taken.abs() * taken.numel() >= taken.abs().sum()  # by the mean of all: each half has its own mean
        for half in (large, ~large):
            if half.any():
                torch.testing.assert_close(
                    sent[half].abs().mean(), taken[half].abs().mean(), rtol=2**-8, atol=float(taken.abs().max()) / 400
                )


def test_fourteen_bits_an_element() -> None:
    """Of 1.56 % of the values: 1/142 of float32's bytes."""
    assert 4 * (1 << 20) / n_bytes(1 << 20, 64) > 142
