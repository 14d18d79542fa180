"""truncated-float and embedded-float in ring and direct: an oracle of every rounding, the same bits on all ranks."""

import itertools
from typing import Any

import pytest
import torch

from buckets import Driver
from float_messages import same_bits
from gradwire import codecs, schemes
from gradwire.codecs import Codec
from ranks import on_ranks

N = 3001
CASES: list[tuple[str, dict[str, Any]]] = [
    ("truncated-float", {"bits": 4}),
    ("truncated-float", {"bits": 8, "topology": "direct"}),
    ("truncated-float", {"bits": 12, "format": "native", "rounding": "stochastic", "seed": 5}),
    ("truncated-float", {"bits": 8, "rounding": "stochastic", "topology": "direct", "chunk_elements": 500}),
    ("embedded-float", {"bits": 8}),
    ("embedded-float", {"bits": 5, "topology": "direct", "chunk_elements": 640}),
]
DTYPES = (torch.float32, torch.bfloat16)


def gradient_of(rank: int, dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(rank)
    return (torch.randn(N, generator=generator) * 1e-3).to(dtype)


def through(codec: Codec, values: torch.Tensor) -> torch.Tensor:
    out = torch.empty(codec.max_encoded_bytes(values.numel(), values.dtype), dtype=torch.uint8)
    found = torch.empty_like(values)
    codec.decode(out[: codec.encode(values.contiguous(), out)], found)
    return found


def ring_oracle(codec: Codec, gradients: list[torch.Tensor]) -> torch.Tensor:
    """Part p goes round from rank p on; each hop adds to what it decoded, the last one's message is the result."""
    world_size, result = len(gradients), torch.empty_like(gradients[0])
    for part in range(world_size):
        start, end = N * part // world_size, N * (part + 1) // world_size
        total = gradients[part][start:end]
        for k in range(1, world_size):
            total = through(codec, total) + gradients[(part + k) % world_size][start:end]
        result[start:end] = through(codec, total) / world_size
    return result


@pytest.mark.parametrize("world_size", [2, 3])
@on_ranks()
def test_every_rank_gets_the_same_mean_and_sees_a_non_finite_gradient(rank: int, world_size: int) -> list[torch.Tensor]:
    results = []
    for (name, options), dtype in itertools.product(CASES, DTYPES):
        driver = Driver(schemes.by_name(name, **options), [torch.zeros(N, dtype=dtype)])
        (first,), (second,) = (driver.reduce([gradient_of(rank, dtype)]) for _ in range(2))
        bad = gradient_of(rank, dtype)
        if rank == 1:
            bad[1234] = float("inf")
        (infinite,) = driver.reduce([bad])
        driver.close()
        gradients = [gradient_of(other, dtype) for other in range(world_size)]
        exact = torch.stack([gradient.double() for gradient in gradients]).mean(0)
        is_random = options.get("rounding") == "stochastic"
        assert same_bits(first, second) != is_random, (name, options)  # each step draws anew
        error = (first.double() - exact).norm() / exact.norm()
        assert error < {4: 0.4, 5: 0.5}.get(options["bits"], 0.15), (name, options, error)
        assert infinite[1234].isnan()
        assert infinite.isfinite().sum() >= N - 512
        if "topology" not in options and not is_random:
            codec = codecs.by_name(name, bits=options["bits"])
            assert same_bits(first, ring_oracle(codec, gradients)), (name, options, dtype)
        results += [first, second, infinite]
    return results
