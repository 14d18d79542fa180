"""terngrad and thc, whose integers are summed, and dgc: against transcriptions that know all ranks."""

import math
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import quantiser_oracles as oracle
from buckets import SHAPES, Driver, by_bucket, drive, flat, gradients_of
from gradwire import schemes
from gradwire.codecs.selection import take_by_sample
from gradwire.core.bucket import Bucket
from gradwire.errors import Unsupported
from gradwire.schemes.dgc import Dgc, draw_sample
from ranks import on_ranks
from small_training import Training

SEED = 9


def place_of(step: int, index: int) -> Bucket:
    return Bucket(torch.zeros(1), step=step, index=index)


def of_unlike_sizes(rank: int, step: int) -> list[torch.Tensor]:
    """Tensors whose gradients differ a thousandfold; one of them is zero on all ranks."""
    scales = [1.0, 1e-3, 1e3, 1.0, 0.0, 30.0]
    return [scale * gradient for scale, gradient in zip(scales, gradients_of(rank, step), strict=True)]


@pytest.mark.parametrize("per", ["layer", "bucket"])
@pytest.mark.parametrize("world_size", [2, 4])
@on_ranks()
def test_terngrad_follows_its_transcription(rank: int, world_size: int, per: str) -> None:
    """A scale a tensor: each is divided by its own, and all are drawn in the order of their bucket."""
    driver = drive("terngrad", {"seed": SEED, "per": per})
    for step in range(3):
        everyone = [of_unlike_sizes(other, step) for other in range(world_size)]
        results = by_bucket(driver.reduce(of_unlike_sizes(rank, step)))
        for index, result in enumerate(results):
            mine = [ranks[:2] if index == 0 else ranks[2:] for ranks in everyone]
            shares = [flat(tensors).numpy() for tensors in mine]
            if per == "bucket":
                mine = [[flat(tensors)] for tensors in mine]
            scales = [
                max(oracle.ternary_scale(one.reshape(-1).numpy(), 2.5) if one.numel() else 0.0 for one in tensors)
                for tensors in zip(*mine, strict=True)
            ]
            by_value = np.repeat(np.array(scales, np.float32), [tensor.numel() for tensor in mine[0]])
            shared = scales[0]
            if per == "layer":
                shared, zeros = np.float32(1), np.zeros_like(by_value)
                shares = [np.divide(one, by_value, out=zeros.copy(), where=by_value > 0) for one in shares]
            drawn = [
                oracle.ternary(one, shared, SEED, place_of(step, index).draw(other)) for other, one in enumerate(shares)
            ]
            expected = np.sum(drawn, 0) * by_value / world_size
            wrong = ~np.isclose(result.numpy(), expected, rtol=1e-5)
            assert wrong.sum() <= 1, (step, index)  # where numpy's scale differs in its last bit
    driver.close()


@pytest.mark.parametrize("world_size", [2, 3])
@on_ranks()
def test_thc_follows_its_transcription(rank: int, world_size: int) -> None:
    for feeds_back in (True, False):
        driver = drive("thc", {"seed": SEED, "error_feedback": feeds_back})
        sizes = [bucket.numel() for bucket in by_bucket(gradients_of(0, 0))]
        residuals = [[np.zeros(size) for size in sizes] for _ in range(world_size)]
        for step in range(3):
            driver.loss_scale = 4.0**step
            everyone = [by_bucket(gradients_of(other, step)) for other in range(world_size)]
            results = by_bucket(driver.reduce([driver.loss_scale * one for one in gradients_of(rank, step)]))
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
            expected = np.concatenate(residuals[rank])
            assert np.linalg.norm(driver.state().numpy() - expected) < 0.1 * np.linalg.norm(expected)
        driver.close()


def layers_of(shapes: list[tuple[int, ...]]) -> list[torch.Tensor]:
    """The places of each matrix in a bucket of these."""
    sizes = [math.prod(shape) for shape in shapes]
    spans = torch.arange(sum(sizes)).split(sizes)
    return [span for shape, span in zip(shapes, spans, strict=True) if len(shape) > 1 and len(span)]


@pytest.mark.parametrize("world_size", [2, 3])
@on_ranks()
def test_dgc_follows_its_float64_transcription(rank: int, world_size: int) -> None:
    """Six steps in float64, all ranks at once; in buckets this small every element is sampled, so the selection is exact."""
    for options in ({}, {"momentum": 0.5, "warmup_steps": 3}, {"max_norm": 4.0}, {"nesterov": True}, {"per": "layer"}):
        driver = drive(Dgc(**{"share": 0.05, "per": "bucket", **options}))
        momentum = options.get("momentum", 0.9)
        is_whole = [flat([torch.full(shape, len(shape) < 2) for shape in part]) for part in (SHAPES[:2], SHAPES[2:])]
        places = [[torch.where(~whole)[0]] for whole in is_whole]  # among which a share is chosen
        if "per" in options:
            places = [layers_of(SHAPES[:2]), layers_of(SHAPES[2:])]
        sizes = [one.numel() for one in is_whole]
        u, v = ([[torch.zeros(size).double() for size in sizes] for _ in range(world_size)] for _ in range(2))
        for step in range(6):
            driver.loss_scale = 2.0**step
            everyone = [[one.double() for one in gradients_of(other, step)] for other in range(world_size)]
            results = by_bucket(driver.reduce([driver.loss_scale * one for one in gradients_of(rank, step)]))
            limit = options.get("max_norm", math.inf) / world_size**0.5
            everyone = [[one * min(1, limit / max(1e-30, float(one.norm()))) for one in ranks] for ranks in everyone]
            share = 0.05 ** min(1, (step + 1) / (options.get("warmup_steps", 0) + 1))
            for index, result in enumerate(results):
                expected = torch.zeros(sizes[index], dtype=torch.float64)
                whole = is_whole[index]
                means = torch.stack([by_bucket(ranks)[index] for ranks in everyone]).mean(0)
                for other in range(world_size):
                    gradient = by_bucket(everyone[other])[index]
                    u[other][index] = momentum * u[other][index] + torch.where(whole, means, gradient)
                    update = gradient + momentum * u[other][index] if "nesterov" in options else u[other][index]
                    v[other][index] = torch.where(whole, 0, v[other][index] + update)
                    counts = [max(1, round(share * one.numel())) for one in places[index]]
                    largest = [v[other][index][one].abs().topk(k) for one, k in zip(places[index], counts, strict=True)]
                    chosen = torch.cat([one[top.indices] for one, top in zip(places[index], largest, strict=True)])
                    expected[chosen] += v[other][index][chosen] / world_size
                    u[other][index][chosen] = 0  # momentum factor masking
                    v[other][index][chosen] = 0
                moved = means + momentum * u[rank][index] if "nesterov" in options else u[rank][index]
                expected = torch.where(whole, moved, expected)
                assert torch.allclose(result.double() / driver.loss_scale, expected, atol=1e-4), (options, step, index)
        for kind, ours in (("momenta", u), ("residuals", v)):
            assert torch.allclose(driver.state(kind).double(), torch.cat(ours[rank]), atol=1e-4), kind
        driver.close()


@pytest.mark.parametrize("nesterov", [False, True])
@on_ranks(1)
def test_dgc_alone_is_sgd_with_momentum_and_weight_decay(rank: int, world_size: int, nesterov: bool) -> None:
    """dgc's momentum and weight decay over bare SGD, beside SGD with its own: several buckets, a convolution's memory order."""

    def convolutional() -> nn.Module:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 16, 5))
        return model.to(memory_format=torch.channels_last)

    def loss(model: nn.Module, rank: int, step: int) -> torch.Tensor:
        return model(torch.randn(4, 3, 6, 6, generator=torch.Generator().manual_seed(step))).square().mean()

    def ended(scheme: Dgc | None, **options: Any) -> torch.Tensor:
        sgd = partial(torch.optim.SGD, lr=0.05, **options)
        training = Training(rank, scheme, sgd, convolutional, loss, ddp={"bucket_cap_mb": 25}).after(range(6))
        training.close()
        return training.flat()

    ours = ended(Dgc(nesterov=nesterov, weight_decay=0.1))
    assert torch.allclose(ours, ended(None, momentum=0.9, nesterov=nesterov, weight_decay=0.1), rtol=1e-5, atol=1e-6)


@on_ranks(2)
def test_dgc_takes_weight_decay_into_what_it_sends(rank: int, world_size: int) -> None:
    """Everything is sent, so that factor masking forgets all momentum: each step is Nesterov's first, of the ranks' mean."""

    def linear() -> nn.Module:
        torch.manual_seed(0)
        return nn.Linear(6, 4, bias=False)

    def loss(model: nn.Module, rank: int, step: int) -> torch.Tensor:
        return model(torch.randn(3, 6, generator=torch.Generator().manual_seed(10 * step + rank))).square().mean()

    scheme = Dgc(share=1.0, momentum=0.5, nesterov=True, weight_decay=0.2)
    training, twin = Training(rank, scheme, lambda p: torch.optim.SGD(p, 0.1), linear, loss), linear()
    for step in range(4):
        training.take_steps([step])
        theirs = torch.optim.SGD(twin.parameters(), 0.1, momentum=0.5, nesterov=True, weight_decay=0.2)
        theirs.zero_grad()
        (sum(loss(twin, one, step) for one in range(world_size)) / world_size).backward()
        theirs.step()
        assert torch.allclose(training.ddp.module.weight, twin.weight, rtol=1e-5, atol=1e-6)
    training.close()


@on_ranks(2)
def test_state_of_unused_parameters_waits(rank: int, world_size: int) -> None:
    """State of what a rank has no gradient of stays, and a result that nobody has a share in is zero."""
    for name in ("dgc", "thc"):
        driver = drive(name)
        driver.reduce(gradients_of(rank, 0))
        before = driver.scheme.state_dict()
        gradients = gradients_of(rank, 1)
        for unused in gradients[: 3 if rank == 0 else 2]:
            unused.zero_()
        results = driver.reduce(gradients)
        assert not flat(results[:2]).any()
        after = driver.scheme.state_dict()
        for kind in before:
            for parameter in ("p0", "p1"):
                assert torch.equal(before[kind][parameter], after[kind][parameter]), (name, kind)
            if name == "dgc" and rank == 0:
                assert torch.equal(before[kind]["p2"], after[kind]["p2"])
        driver.close()


def chosen_of(values: torch.Tensor, k: int) -> torch.Tensor:
    n = values.numel()
    sample = draw_sample(n, k, torch.Generator().manual_seed(1))
    n_taken, indices, _ = take_by_sample(values.clone(), [(0, n)], [k], [sample])
    return indices[: int(n_taken)].long()


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
            chosen = chosen_of(values, k)
            n_nonzero = int((values != 0).sum())
            assert len(chosen) <= k, kind
            assert len(chosen) >= min(0.8 * k, n_nonzero), (kind, k, len(chosen))
            assert (chosen[1:] > chosen[:-1]).all()
            rest = torch.ones(n, dtype=torch.bool)
            rest[chosen] = False
            assert float(values[chosen].abs().min()) >= float(values[rest].abs().max()), (kind, k)
    assert chosen_of(torch.zeros(1_000), 10).numel() == 0
    assert chosen_of(torch.ones(1), 1).tolist() == [0]


@pytest.mark.parametrize("name", ["terngrad", "thc"])
@on_ranks(1)
def test_more_ranks_than_can_be_summed_are_refused(rank: int, world_size: int, name: str) -> None:
    scheme = schemes.by_name(name)
    driver = Driver(scheme, [torch.zeros(3)])
    scheme.unbind()
    driver.communicator.world_size = 2_000
    with pytest.raises(Unsupported, match="two-bit"):
        scheme.bind(type("Many", (), {"communicator": driver.communicator})())  # type: ignore[arg-type]
