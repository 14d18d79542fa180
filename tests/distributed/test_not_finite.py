"""One rule for what is not finite: all ranks get NaN for the message that it was in, and the step leaves no state."""

import copy
import math
from typing import Any

import pytest
import torch
from test_quantised_schemes import CASES as QUANTISERS

from buckets import Driver
from gradwire import schemes
from logs import log_of
from ranks import assert_alike, on_ranks

SHAPE = 40, 60
LOW_RANK = {"rank": 2, "min_compression_rate": 0}
Options, Means = dict[str, Any], list[list[torch.Tensor]]
# With options that make them compress within few steps.
CASES: list[tuple[str, Options]] = [
    *((name, LOW_RANK) for name in ("acp-sgd", "power-sgd", "power-sgd-overlap")),
    *((name, {"share": 0.1}) for name in ("dgc", "top-k")),
    *((name, {}) for name in ("homomorphic", "sign-sgd", "terngrad", "thc")),
    ("homomorphic", {"mode": "sketch"}),
    ("homomorphic", {"mode": "exact"}),
    ("homomorphic", {"mode": "lossy", "error_feedback": True}),
    ("homomorphic", {"sparsifier": "top-k", "density": 0.1}),
    *QUANTISERS,
    ("one-bit", {"exempt": "p0"}),  # which then travels plainly
    ("slimgc", {"threshold_bytes": 0}),
]
BUCKETS, BAD_STEP, N_STEPS = 2, 2, 5
TOO_LARGE = 3e38  # of all ranks: the sums of who sends quantised sums overflow


def make(name: str, options: Options) -> Driver:
    scheme = schemes.by_name(name, **schemes.as_published(name, options))
    return Driver(scheme, [torch.zeros(SHAPE) for _ in range(BUCKETS)], [1] * BUCKETS)


def train(rank: int, name: str, options: Options, bad: float | None) -> tuple[Means, dict[str, Any]]:
    """The results of each step, of which the bad one has such a value on rank 1 or, None, is left out; and the stats."""
    driver, results = make(name, options), []
    for step in range(N_STEPS):
        if step == BAD_STEP and bad is None:
            driver.step += 1  # what is drawn by it goes on
            continue
        generator = torch.Generator().manual_seed(10 * step + rank)
        gradients = [torch.randn(SHAPE, generator=generator) for _ in range(BUCKETS)]
        if name == "homomorphic" and "sparsifier" not in options:
            gradients = [one * (torch.rand(SHAPE, generator=generator) < 0.01) for one in gradients]
        if step == BAD_STEP:
            before = copy.deepcopy(driver.scheme.state_dict())
            if bad == TOO_LARGE:
                gradients[0].fill_(bad)
            elif rank == 1 and bad is not None:
                gradients[0][3, 4] = bad
        results.append(driver.reduce(gradients))
        if step == BAD_STEP and not results[-1][0].isfinite().all():
            assert_alike([before, driver.scheme.state_dict()])
            assert not driver.last_buckets[0].record.fallbacks
    return results, driver.scheme.stats()


@pytest.mark.parametrize(("name", "options"), CASES, ids=str)
@on_ranks(3)
def test_a_step_not_finite_is_as_if_it_had_not_been(rank: int, world_size: int, name: str, options: Options) -> Means:
    expected, _ = train(rank, name, options, None)
    for bad in (math.nan, math.inf, *([TOO_LARGE] if name in ("one-bit", "two-bit", "qsgd") else [])):
        found, stats = train(rank, name, options, bad)
        met = found.pop(BAD_STEP)
        if bad == TOO_LARGE and met[0].isfinite().all():  # by a fixed scale
            continue
        assert not met[0][3, 4].isfinite(), "the training does not see it"
        assert name != "homomorphic" or met[0].isnan().all()
        assert met[1].isfinite().all(), "another message is NaN too"
        assert stats["n_steps_not_finite"] == 1
        assert stats.get("n_fallbacks", 0) == stats.get("n_buckets_too_dense", 0) == 0
        for before, after in zip(expected, found, strict=True):
            for one, other in zip(before, after, strict=True):
                assert torch.equal(one, other), "the step has left something"
        found.insert(BAD_STEP, [one.nan_to_num(7e30) for one in met])
    return found


@on_ranks(2)
def test_only_the_first_of_such_steps_is_logged(rank: int, world_size: int) -> None:
    driver, texts = make("one-bit", {}), log_of("gradwire.schemes.compressed")
    for step in range(4):
        driver.reduce([torch.full(SHAPE, math.nan if step % 2 else 1.0) for _ in range(BUCKETS)])
        assert len(texts) == min(step, 1), texts


@pytest.mark.parametrize("name", ["acp-sgd", "power-sgd", "one-bit", "top-k", "thc"])
@on_ranks(2)
def test_a_residual_beyond_float32_costs_one_step(rank: int, world_size: int, name: str) -> None:
    """The products of a low rank can be larger than what they stand for."""
    driver = make(name, LOW_RANK if "sgd" in name else {})
    feedback = driver.scheme.session.feedback
    feedback.stage(driver.slots[0], torch.full((math.prod(SHAPE),), math.inf).view(SHAPE))
    feedback.commit()
    for step in range(3):
        generator = torch.Generator().manual_seed(10 * step + rank)
        driver.reduce([torch.randn(SHAPE, generator=generator) for _ in range(BUCKETS)])
        assert driver.scheme.stats()["n_steps_not_finite"] == 1
    assert feedback.state_by_name(driver.scheme.session.slots)["p0"].isfinite().all()


IN_FLOAT16: list[tuple[str, Options]] = [
    *((name, {}) for name in ("plain", "homomorphic", "one-bit")),
    ("gcomp", {"importance": "none"}),
    ("gcomp", {"importance": "uniform", "bits": 8, "topology": "direct"}),
    ("truncated-float", {"bits": 16}),
    ("embedded-float", {"bits": 16, "topology": "direct"}),
    ("one-bit", {"pull": "raw"}),
    ("top-k", {"share": 1.0}),
    ("slimgc", {"threshold_bytes": 0}),
    ("slimgc", {"threshold_bytes": 0, "pull": "raw"}),
    ("power-sgd", {"rank": 1, "min_compression_rate": 0}),
]


@pytest.mark.parametrize(("name", "options"), IN_FLOAT16, ids=str)
@on_ranks(3)
def test_a_mean_that_float16_holds_is_finite(rank: int, world_size: int, name: str, options: Options) -> None:
    """Although the sum is not: as DDP's own, which divides before it sums."""
    scheme = schemes.by_name(name, **schemes.as_published(name, options))
    driver = Driver(scheme, [torch.zeros(SHAPE, dtype=torch.float16)])
    (result,) = driver.reduce([torch.full(SHAPE, 50_000.0, dtype=torch.float16)])
    torch.testing.assert_close(result, torch.full(SHAPE, 50_000.0, dtype=torch.float16), rtol=0.02, atol=0)
