"""The means of ring and owners, bit for bit, by every instruction set: against codec, sum and division one after another.

The last message of a sum and its mean are made in one pass (native/exchange/codec.hpp: encode_mean), by the rank that
owns the part; every other rank decodes the message. Ranks are threads here.
"""

import functools

import pytest
import torch

from float_messages import LEVELS, at_level, there_and_back
from gcomp_gradients import KINDS, make_gradient, make_importance, words_of
from gradwire import _native
from gradwire.codecs import Codec
from gradwire.codecs.embedded_float import EmbeddedFloat
from gradwire.codecs.gcomp import GCompCodec
from gradwire.codecs.tensors import bytes_of, dtype_code
from gradwire.codecs.truncated_float import TruncatedFloat
from meshes import FACTS, at_once, meshes

CODECS = {
    "paper": lambda: GCompCodec("paper"),
    "paper, format 1": lambda: GCompCodec("paper", format=1),
    "none": lambda: GCompCodec("none"),
    "none, format 1": lambda: GCompCodec("none", format=1),
    "uniform": lambda: GCompCodec("uniform", bits=5),
    "uniform, format 1": lambda: GCompCodec("uniform", bits=5, format=1),
    "truncate": lambda: GCompCodec("truncate", bits=4),
    "truncate, format 1": lambda: GCompCodec("truncate", bits=4, format=1),
    "embedded-float": lambda: EmbeddedFloat(bits=9),
    "truncated-float": lambda: TruncatedFloat(bits=8),
}
WORLD = 2
SIZES = [1, 2, 3, 17, 255, 2 * 16384 - 1, 2 * 16384 + 130, 70_001]


def through(codec: Codec, values: torch.Tensor, importance: torch.Tensor) -> torch.Tensor:
    """What a message of `values` decodes to."""
    return there_and_back(codec, values, **({"importance": importance} if isinstance(codec, GCompCodec) else {}))


def expected_mean(codec: Codec, gradients: list[torch.Tensor], pattern: str) -> torch.Tensor:
    """Of two ranks, part by part: the other's share through a message, its sum with the owner's through another."""
    divided_before = WORLD if gradients[0].dtype == torch.float16 else 1
    shares = [gradient / divided_before for gradient in gradients]
    n = gradients[0].numel()
    mean, importance = torch.empty_like(gradients[0]), make_importance(n)
    for part in range(WORLD):
        begin, end = n * part // WORLD, n * (part + 1) // WORLD
        owner = part if pattern == "owners" else (part + 1) % WORLD
        mine, theirs = shares[owner][begin:end].clone(), shares[1 - owner][begin:end].clone()
        total = through(codec, theirs, importance[begin:end]) + mine
        if pattern == "owners":
            total += 0  # it begins with +0, to which ranks' values are added
        mean[begin:end] = through(codec, total, importance[begin:end]) / (WORLD // divided_before)
    return mean


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("pattern", ["ring", "owners"])
def test_mean_is_that_of_codec_sum_and_division(pattern: str, dtype: torch.dtype, level: str) -> None:
    run = _native.ring_mean if pattern == "ring" else _native.direct_mean
    ahead = (2,) if pattern == "ring" else ()
    with meshes(timeout_s=60) as made:
        stream = 0
        for name, make in CODECS.items():
            for index, n in enumerate(SIZES):
                kind = tuple(KINDS)[(index + len(name)) % len(KINDS)]
                gradients = [make_gradient(kind, n, dtype), make_gradient(kind, n, dtype).flip(0).contiguous()]
                codec = make()
                with at_level("portable"):
                    expected = expected_mean(codec, gradients, pattern)
                stream += 2
                ready = make_importance(n)
                importance = _native.BucketImportance([(0, n, 0, 0, 0, 0.0, 0.0, 0.0, ready.data_ptr())], 0)
                weights = importance if name.startswith("paper") else None
                results = [gradient.clone() for gradient in gradients]
                engines = [codec.exchange_codec(dtype, weights) for _ in range(WORLD)]  # type: ignore[attr-defined]
                alike = dtype_code(dtype), None, 1, *ahead
                calls = [
                    functools.partial(run, made[rank], stream, FACTS, engines[rank], bytes_of(results[rank]), *alike)
                    for rank in range(WORLD)
                ]
                with at_level(level):
                    if _native.simd_level() != level:
                        pytest.skip(f"this machine has no {level}")
                    assert [len(account) for account in at_once(*calls)] == [4] * WORLD
                assert (words_of(results[0]) == words_of(results[1])).all(), (name, kind, n)
                assert (results[0].isnan() == expected.isnan()).all(), (name, kind, n)  # whatever a NaN's payload
                is_same = words_of(results[0]) == words_of(expected)
                assert is_same[~expected.isnan().numpy()].all(), (name, kind, n)
