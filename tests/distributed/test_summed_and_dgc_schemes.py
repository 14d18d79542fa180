"""terngrad and thc, whose integers are summed, and dgc: against transcriptions that know all ranks."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import quantiser_oracles as oracle
from buckets import Driver
from gradwire import InvalidArgument, schemes
from gradwire.core.bucket import Bucket
from gradwire.errors import RankMismatch, Unsupported
from gradwire.schemes.dgc import Dgc, select_by_sample
from ranks import run_ranks, try_ranks

SHAPES = [(24, 18), (7,), (30, 11), (0, 5), (), (50,)]
LAYOUT = [2, 4]
SEED = 9


def gradients_of(rank: int, step: int, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(100 * rank + step)
    return [torch.randn(shape, generator=generator).to(dtype) for shape in SHAPES]


def flat(tensors: list[torch.Tensor]) -> torch.Tensor:
    return torch.cat([tensor.reshape(-1) for tensor in tensors])


def buckets_of(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    return [flat(tensors[:2]), flat(tensors[2:])]


def place_of(step: int, index: int) -> Bucket:
    return Bucket(torch.zeros(1), step=step, index=index)


def follow_terngrad(rank: int, world_size: int) -> None:
    driver = Driver(schemes.by_name("terngrad", seed=SEED), [torch.zeros(shape) for shape in SHAPES], LAYOUT)
    for step in range(3):
        everyone = [buckets_of(gradients_of(other, step)) for other in range(world_size)]
        results = buckets_of(driver.reduce(gradients_of(rank, step)))
        for index, result in enumerate(results):
            scale = max(oracle.ternary_scale(ranks[index].numpy(), 2.5) for ranks in everyone)
            drawn = [
                oracle.ternary(ranks[index].numpy(), scale, SEED, place_of(step, index).draw(other))
                for other, ranks in enumerate(everyone)
            ]
            expected = np.sum(drawn, 0) * scale / world_size
            wrong = ~np.isclose(result.numpy(), expected, rtol=1e-5)
            assert wrong.sum() <= 1, (step, index)  # where numpy's scale differs in its last bit
    driver.close()


def follow_thc(rank: int, world_size: int) -> None:
    for feeds_back in (True, False):
        scheme = schemes.by_name("thc", seed=SEED, error_feedback=feeds_back)
        driver = Driver(scheme, [torch.zeros(shape) for shape in SHAPES], LAYOUT)
        sizes = [bucket.numel() for bucket in buckets_of(gradients_of(0, 0))]
        residuals = [[np.zeros(size) for size in sizes] for _ in range(world_size)]
        for step in range(3):
            driver.loss_scale = 4.0**step
            everyone = [buckets_of(gradients_of(other, step)) for other in range(world_size)]
            results = buckets_of(driver.reduce([driver.loss_scale * one for one in gradients_of(rank, step)]))
            for index, result in enumerate(results):
                given = [ranks[index].numpy() + residuals[other][index] for other, ranks in enumerate(everyone)]
                norms = np.max([oracle.thc_norms(one) for one in given], 0)
                sign_step = place_of(step, index).draw(-1)
                codes = [
                    oracle.thc_codes(one, norms, 2.15, SEED, sign_step, place_of(step, index).draw(other))
                    for other, one in enumerate(given)
                ]
                expected = oracle.thc_mean(np.sum(codes, 0), sizes[index], world_size, norms, 2.15, SEED, sign_step)
                # One code in many may fall to the other side of an edge, float32 against float64.
                off = np.linalg.norm(result.numpy() / driver.loss_scale - expected)
                assert off < 0.05 * np.linalg.norm(expected), (step, index)
                if feeds_back:
                    for other, one in enumerate(codes):
                        own = oracle.thc_mean(one, sizes[index], 1, norms, 2.15, SEED, sign_step)
                        residuals[other][index] = given[other] - own
        if feeds_back:
            state = scheme.state_dict()["residuals"]
            kept = torch.cat([state[f"p{i}"] for i in range(len(SHAPES))]).numpy()
            expected = np.concatenate(residuals[rank])
            assert np.linalg.norm(kept - expected) < 0.1 * np.linalg.norm(expected)
        driver.close()


@pytest.mark.parametrize("world_size", [2, 4])
def test_terngrad_follows_its_transcription(world_size: int) -> None:
    run_ranks(follow_terngrad, world_size)


@pytest.mark.parametrize("world_size", [2, 3])
def test_thc_follows_its_transcription(world_size: int) -> None:
    run_ranks(follow_thc, world_size)


def follow_dgc(rank: int, world_size: int) -> None:
    """Six steps in float64, all ranks at once; in buckets this small every element is sampled, so the selection is exact."""
    for options in ({}, {"momentum": 0.5, "warmup_steps": 3}, {"max_norm": 4.0}):
        scheme = Dgc(share=0.05, **options)
        driver = Driver(scheme, [torch.zeros(shape) for shape in SHAPES], LAYOUT)
        momentum = options.get("momentum", 0.9)
        is_whole = [flat([torch.full(shape, len(shape) < 2) for shape in part]) for part in (SHAPES[:2], SHAPES[2:])]
        sizes = [one.numel() for one in is_whole]
        u = [[torch.zeros(size, dtype=torch.float64) for size in sizes] for _ in range(world_size)]
        v = [[torch.zeros(size, dtype=torch.float64) for size in sizes] for _ in range(world_size)]
        for step in range(6):
            driver.loss_scale = 2.0**step
            everyone = [[one.double() for one in gradients_of(other, step)] for other in range(world_size)]
            results = buckets_of(driver.reduce([driver.loss_scale * one for one in gradients_of(rank, step)]))
            if "max_norm" in options:
                limit = options["max_norm"] / world_size**0.5
                everyone = [
                    [one * min(1, limit / max(1e-30, float(one.norm()))) for one in ranks] for ranks in everyone
                ]
            share = 0.05 ** min(1, (step + 1) / (options.get("warmup_steps", 0) + 1))
            for index, result in enumerate(results):
                expected = torch.zeros(sizes[index], dtype=torch.float64)
                whole = is_whole[index]
                means = torch.stack([buckets_of(ranks)[index] for ranks in everyone]).mean(0)
                for other in range(world_size):
                    gradient = buckets_of(everyone[other])[index]
                    u[other][index] = momentum * u[other][index] + torch.where(whole, means, gradient)
                    v[other][index] = torch.where(whole, 0, v[other][index] + u[other][index])
                    k = max(1, round(share * int((~whole).sum())))
                    chosen = v[other][index].abs().topk(k).indices
                    expected[chosen] += v[other][index][chosen] / world_size
                    u[other][index][chosen] = 0  # momentum factor masking
                    v[other][index][chosen] = 0
                if world_size == 1:
                    expected = u[0][index].clone()
                expected = torch.where(whole, u[rank][index], expected)
                assert torch.allclose(result.double() / driver.loss_scale, expected, atol=1e-4), (options, step, index)
        state = scheme.state_dict()
        for kind, ours in (("momenta", u), ("residuals", v)):
            kept = torch.cat([state[kind][f"p{i}"] for i in range(len(SHAPES))])
            assert torch.allclose(kept.double(), torch.cat(ours[rank]), atol=1e-4), kind
        driver.close()


@pytest.mark.parametrize("world_size", [2, 3])
def test_dgc_follows_its_float64_transcription(world_size: int) -> None:
    run_ranks(follow_dgc, world_size)


def be_alone(rank: int, world_size: int) -> None:
    driver = Driver(Dgc(), [torch.zeros(shape) for shape in SHAPES], LAYOUT)
    velocity = torch.zeros(flat(gradients_of(0, 0)).numel())
    for step in range(4):
        velocity = 0.9 * velocity + flat(gradients_of(0, step))
        assert torch.allclose(flat(driver.reduce(gradients_of(0, step))), velocity, atol=1e-5)
    driver.close()


def test_dgc_alone_is_the_gradient_with_momentum() -> None:
    run_ranks(be_alone, 1)


def wait_unused(rank: int, world_size: int) -> None:
    """State of what a rank has no gradient of stays, and a result that nobody has a share in is zero."""
    for name in ("dgc", "thc"):
        scheme = schemes.by_name(name)
        driver = Driver(scheme, [torch.zeros(shape) for shape in SHAPES], LAYOUT)
        driver.reduce(gradients_of(rank, 0))
        before = scheme.state_dict()
        gradients = gradients_of(rank, 1)
        gradients[0].zero_()
        gradients[1].zero_()
        if rank == 0:
            gradients[2].zero_()
        results = driver.reduce(gradients)
        assert not results[0].any()
        assert not results[1].any()
        after = scheme.state_dict()
        for kind in before:
            for parameter in ("p0", "p1"):
                assert torch.equal(before[kind][parameter], after[kind][parameter]), (name, kind)
            if name == "dgc" and rank == 0:
                assert torch.equal(before[kind]["p2"], after[kind]["p2"])
        driver.close()


def test_state_of_unused_parameters_waits() -> None:
    run_ranks(wait_unused, 2)


def disagree(rank: int, world_size: int, name: str) -> None:
    driver = Driver(schemes.by_name(name, seed=rank), [torch.zeros(shape) for shape in SHAPES], LAYOUT)
    driver.reduce(gradients_of(rank, 0))


@pytest.mark.parametrize("name", ["terngrad", "thc", "dgc"])
def test_ranks_with_different_options_are_told_on_every_rank(name: str) -> None:
    for outcome in try_ranks(disagree, 2, name, timeout_s=60):
        assert isinstance(outcome.error, RankMismatch)
        assert "configuration" in str(outcome.error)


def test_sampled_threshold_selects_about_as_many_of_the_largest_as_were_asked_for() -> None:
    generator = torch.Generator().manual_seed(0)
    n = 300_000
    kinds = {
        "Gaussian": torch.randn(n, generator=generator),
        "heavy tails": torch.randn(n, generator=generator) ** 7,
        "mostly zero": torch.randn(n, generator=generator) * (torch.rand(n, generator=generator) < 0.005),
        "ordered": torch.linspace(-1, 1, n),
        "alike": torch.ones(n),
        "few values": torch.randint(-3, 4, (n,), generator=generator).float(),
    }
    for kind, values in kinds.items():
        for k in (300, 3_000, 30_000):
            chosen = select_by_sample(values, k, torch.Generator().manual_seed(1)).long()
            n_nonzero = int((values != 0).sum())
            assert len(chosen) <= k, kind
            assert len(chosen) >= min(0.8 * k, n_nonzero), (kind, k, len(chosen))
            assert (chosen[1:] > chosen[:-1]).all()
            rest = torch.ones(n, dtype=torch.bool)
            rest[chosen] = False
            assert float(values[chosen].abs().min()) >= float(values[rest].abs().max()), (kind, k)
    assert select_by_sample(torch.zeros(1_000), 10, torch.Generator()).numel() == 0
    assert select_by_sample(torch.ones(1), 1, torch.Generator()).tolist() == [0]


def be_refused(rank: int, world_size: int, name: str) -> None:
    scheme = schemes.by_name(name)
    driver = Driver(scheme, [torch.zeros(3)])
    scheme.unbind()
    driver.communicator.world_size = 2_000
    with pytest.raises(Unsupported, match="two-bit"):
        scheme.bind(type("Many", (), {"communicator": driver.communicator})())  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["terngrad", "thc"])
def test_more_ranks_than_can_be_summed_are_refused(name: str) -> None:
    run_ranks(be_refused, 1, name)


@pytest.mark.parametrize(
    ("name", "options", "match"),
    [
        ("terngrad", {"clip": 0}, "clip"),
        ("terngrad", {"seed": -1}, "seed"),
        ("thc", {"clip": float("nan")}, "clip"),
        ("dgc", {"share": 0}, "share"),
        ("dgc", {"momentum": 1.0}, "momentum"),
        ("dgc", {"warmup_steps": -1}, "warmup_steps"),
        ("dgc", {"max_norm": 0.0}, "max_norm"),
        ("dgc", {"seed": 0.5}, "seed"),
    ],
)
def test_options_out_of_range_are_refused(name: str, options: dict[str, Any], match: str) -> None:
    with pytest.raises(InvalidArgument, match=match):
        schemes.by_name(name, **options)
