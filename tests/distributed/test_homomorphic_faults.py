"""homomorphic on values that are not finite, ranks that disagree, sums that were altered and options out of range."""

from __future__ import annotations

import copy
import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from homomorphic_cases import SHAPES, gradients_of, make, parameters

import gradwire
from buckets import LAYOUT, Driver, by_bucket, flat
from gradwire.exchange.aggregators import Sum
from gradwire.exchange.aggregators.process_group import ProcessGroup
from gradwire.wire.wire import Wire
from ranks import on_ranks


@on_ranks(2)
def test_step_with_inf_or_nan_on_one_rank_is_as_if_it_had_not_been(rank: int, world_size: int) -> None:
    """What a step with Inf or NaN leaves behind: NaN on all ranks where its bucket was, and nothing else."""
    for options in (
        {},
        {"mode": "sketch"},
        {"mode": "exact"},
        {"sparsifier": "top-k"},
        {"mode": "lossy", "error_feedback": True},
    ):
        runs = []
        for value in (float("inf"), float("nan"), None):
            driver = Driver(make(**options), parameters(), LAYOUT)
            driver.reduce(gradients_of(rank, world_size, 0, 0.02))
            if value is None:
                driver.step += 1  # estimates have hashes of their own at every step
            else:
                poisoned = gradients_of(rank, world_size, 1, 0.3)
                poisoned[0][3, 5] = value if rank == 1 else 0.0
                before = copy.deepcopy(driver.scheme.state_dict())
                first, second = by_bucket(driver.reduce(poisoned))
                assert bool(first.isnan().all())
                assert bool(second.isfinite().all())
                assert str(driver.scheme.state_dict()) == str(before)
                assert driver.scheme.stats()["n_steps_not_finite"] == 1
                assert not driver.last_buckets[0].record.fallbacks
            runs.append(torch.cat([flat(driver.reduce(gradients_of(rank, world_size, s, 0.02))) for s in (2, 3)]))
            driver.close()
        assert torch.equal(runs[0], runs[2])
        assert torch.equal(runs[1], runs[2])


@on_ranks(2)
def test_nan_in_a_dense_bucket_is_noticed(rank: int, world_size: int) -> None:
    """In a bucket that is known to be dense, for which no index goes first."""
    driver = Driver(make(), parameters(), LAYOUT)
    for step in range(3):
        gradients = gradients_of(rank, world_size, step, 1.0)
        if step == 2:
            gradients[0][3, 5] = math.nan if rank == 1 else 0.0
            before = copy.deepcopy(driver.scheme.state_dict())
        result = driver.reduce(gradients)
    assert math.isnan(float(result[0][3, 5]))
    assert driver.scheme.stats()["n_steps_not_finite"] == 1
    assert driver.scheme.state_dict() == before
    driver.close()


@on_ranks(2)
def test_values_too_large_for_a_sketch_of_floats_are_sent_plainly(rank: int, world_size: int) -> None:
    """Near the end of float32 a sketch of floats could overflow, and the plain mean does not: it is taken, and counts."""
    for options in ({"mode": "sketch"}, {"mode": "lossy", "error_feedback": True}):
        driver = Driver(make(**options), parameters(), LAYOUT)
        for step in range(3):
            gradients = gradients_of(rank, world_size, step, 0.3)
            if step == 2:
                gradients[0][0, 0] = 1e38
                before = copy.deepcopy(driver.scheme.state_dict())
            result = driver.reduce(gradients)
        assert float(result[0][0, 0]) == pytest.approx(1e38, rel=1e-6)
        assert bool(flat(result).isfinite().all())
        (why,) = driver.last_buckets[0].record.fallbacks
        assert "too large for a sketch" in why
        assert not driver.last_buckets[1].record.fallbacks
        stats, after = driver.scheme.stats(), driver.scheme.state_dict()
        assert (stats["n_buckets_too_large"], stats["n_steps_not_finite"]) == (1, 0)
        for name, residual in before.get("residuals", {}).items():
            if name in ("p0", "p1", "p5"):  # of the first bucket they stay, of the second they do not
                assert torch.equal(after["residuals"][name], residual) == (name != "p5"), name
        driver.close()


@on_ranks(2)
def test_step_whose_mean_overflows_float16_keeps_no_residual(rank: int, world_size: int) -> None:
    """With residuals a mean leaves float16's range, though no gradient does."""
    driver = Driver(make(sparsifier="top-k", density=0.05), parameters(torch.float16), LAYOUT)
    gradients = [torch.full(shape, 40_000.0, dtype=torch.float16) for shape in SHAPES]
    assert all(bool(mean.isfinite().all()) for mean in driver.reduce([values.clone() for values in gradients]))
    before = copy.deepcopy(driver.scheme.state_dict())
    result = flat(driver.reduce([values.clone() for values in gradients]))
    assert bool(result.isinf().any())
    assert not bool(result.isnan().any())
    assert str(driver.scheme.state_dict()) == str(before)
    driver.close()


@pytest.mark.parametrize("options", [[{"seed": 0}, {"seed": 1}], [{"batch_values": 1024}, {"batch_values": 512}]])
@on_ranks(3, raises=gradwire.RankMismatch, match="(?=.*configuration).*rank 0")
def test_other_seed_or_batch_size_on_one_rank_is_named(
    rank: int, world_size: int, options: list[dict[str, Any]]
) -> None:
    driver = Driver(make(**options[min(rank, 1)]), parameters(), LAYOUT)
    driver.reduce(gradients_of(rank, world_size, 0, 0.02))


@on_ranks(2, raises=gradwire.RankMismatch, match="(?=.*step).*rank 1")
def test_rank_in_another_step_is_named_where_buckets_are_too_dense_for_an_index(rank: int, world_size: int) -> None:
    """Dense gradients: from the second step on no index goes before the values."""
    driver = Driver(make(mode="exact"), parameters(), LAYOUT)
    for step in range(6):
        driver.step += step == 2 and rank == 1
        driver.reduce(gradients_of(rank, world_size, step, 1.0))
    driver.close()


class Altering(ProcessGroup):
    """Changes one cell of the second sum on every rank, as a faulty fabric would."""

    n_sums = 0

    def start_sum(self, values: torch.Tensor, wire: Wire) -> Sum:
        wait = super().start_sum(values, wire)
        self.n_sums += 1
        if self.n_sums != 2:
            return wait

        def wait_and_alter() -> None:
            wait()
            values[100] += 1000

        return wait_and_alter


class IntegersOnly(ProcessGroup):
    name = "integers"
    sums_floats = False


@on_ranks(2)
def test_altered_sums_raise_and_integer_aggregators_get_integers(rank: int, world_size: int) -> None:
    for mode in ("sketch", "exact"):
        driver = Driver(make(mode=mode, aggregator=Altering()), parameters(), LAYOUT)
        with pytest.raises(Exception, match="altered on its way"):
            driver.reduce(gradients_of(rank, world_size, 0, 0.05))
    for mode in ("sketch", "lossy"):
        with pytest.raises(gradwire.Unsupported, match='mode="packed" or mode="exact"'):
            Driver(make(mode=mode, aggregator=IntegersOnly()), parameters())
    many = SimpleNamespace(wire=SimpleNamespace(world_size=17, on_device=False))
    with pytest.raises(gradwire.Unsupported, match="sums of 17 ranks leave too little of 8 bits: take integer_bits=16"):
        make(integer_bits=8).bind(many)
    many.wire.world_size = 8  # cells of a sketch have to hold twice as much
    with pytest.raises(gradwire.Unsupported, match="sums of 8 ranks leave too little of 8 bits"):
        make(integer_bits=8, mode="exact").bind(many)
    driver = Driver(make(mode="exact", aggregator=IntegersOnly()), parameters())
    driver.reduce(gradients_of(rank, world_size, 0, 0.05))
    driver.close()


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"mode": "fast"}, "packed, sketch, exact, lossy"),
        ({"budget": 0}, "budget"),
        ({"integer_bits": 24}, "integer_bits"),
        ({"integer_bits": 16, "mode": "sketch"}, 'integer_bits=16 is for mode="packed"'),
        ({"sparsifier": "random"}, "top-k"),
        ({"density": 2}, "density"),
        ({"error_feedback": True}, "left out"),
        ({"index": "list"}, "auto, bitmap, bloom"),
        ({"gamma": 1.1}, "gamma"),
        ({"aggregator": "cloud"}, "process-group"),
    ],
)
def test_options_out_of_range_are_refused(options: dict[str, Any], match: str) -> None:
    with pytest.raises(gradwire.InvalidArgument, match=match):
        make(**options)
