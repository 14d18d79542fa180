"""homomorphic's float sketches: index and cells in one aggregation, as soon as the last steps tell how large they are."""

from typing import Any

import pytest
import torch

import gradwire
from buckets import Driver
from gradwire import schemes
from gradwire.codecs.count_sketch import MAX_CORE, CountSketch, FixedPoint, Outcome
from gradwire.exchange.aggregators import Sum
from gradwire.exchange.aggregators.process_group import ProcessGroup
from ranks import agree, on_ranks
from sketches import PATTERNS, gradients_of, index_of, quantise, sparse_gradients

N = 50_021


class Counting(ProcessGroup):
    """How often it is asked to aggregate, and to wait."""

    n_calls = 0

    def or_words(self, *arguments: Any) -> None:
        self.n_calls += 1
        super().or_words(*arguments)

    def start_sum(self, *arguments: Any) -> Any:
        self.n_calls += 1
        return super().start_sum(*arguments)

    def start_or_and_sum(self, *arguments: Any) -> tuple[Sum, Sum]:
        before = self.n_calls
        both = super().start_or_and_sum(*arguments)
        self.n_calls = before + 1
        return both


@pytest.mark.parametrize("or_by", ["all-reduce", "all-to-all"])
@on_ranks(3)
def test_warm_sketch_takes_one_aggregation_a_bucket(rank: int, world_size: int, or_by: str) -> None:
    for index in ("bitmap", "bloom", "auto"):
        aggregator = Counting(or_by)
        scheme = schemes.by_name("homomorphic", mode="sketch", index=index, aggregator=aggregator)
        driver = Driver(scheme, [torch.zeros(N)])
        n_calls = []
        for step in range(6):
            shares = gradients_of("random", N, world_size, 0.05, torch.float32, step + 1)
            before = aggregator.n_calls
            (mean,) = driver.reduce([shares[rank].clone()])
            n_calls.append(aggregator.n_calls - before)
            assert agree(mean)
            expected = shares.double().mean(0)
            assert float((mean.double() - expected).norm()) <= 2e-6 * float(expected.norm())
        stats = scheme.stats()
        n_more = stats["n_sketches_resent"] + stats["n_bloom_fallbacks"] + (stats["n_core_values"] > 0) * 5
        n_more += stats["n_bloom_indices"]  # whose candidates are confirmed, while the cells travel
        assert n_calls[0] == 2
        assert sum(n_calls[1:]) <= 5 + n_more, (index, n_calls)
        assert stats["n_sketches_at_once"] + stats["n_sketches_resent"] == 5
        assert stats["n_sketches_at_once"] >= 4
        driver.close()


@pytest.mark.parametrize("pattern", PATTERNS)
@on_ranks(2)
def test_density_that_changes_is_sent_again_or_learnt_anew(rank: int, world_size: int, pattern: str) -> None:
    """More non-zeros than the table was made for: sent again, at the right size; far fewer: learnt anew."""
    driver = Driver(schemes.by_name("homomorphic", mode="sketch"), [torch.zeros(N)])
    for step, density in enumerate((0.02, 0.02, 0.3, 0.3, 0.02, 0.02, 0.0, 0.0, 0.02, 0.02, 0.02)):
        shares = gradients_of(pattern, N, world_size, density, torch.float32, step + 1)
        (mean,) = driver.reduce([shares[rank].clone()])
        assert agree(mean)
        error = (mean.double() - shares.double().mean(0)).abs()
        assert float(error.max()) <= 2.0**-16 * float(shares.double().abs().amax(1).sum())
    stats = driver.scheme.stats()
    assert stats["n_sketches_at_once"] > 0
    assert stats["n_sketches_resent"] > 0
    assert stats["n_buckets_too_dense"] == stats["n_steps_not_finite"] == 0
    # What it has learnt is in the checkpoint, and older ones that lack it are read.
    state = driver.scheme.state_dict()
    assert state["tables"] or pattern == "clustered"  # whose counts halve from step to step
    driver.scheme.load_state_dict(state)
    assert driver.scheme.state_dict() == state
    for broken in (
        {"0:x": {}},
        {"0:x": {"batch_values": 64, "counts": [[-1]]}},
        {"0:x": {"batch_values": 64, "counts": []}},
    ):
        with pytest.raises(gradwire.InvalidArgument, match="tables"):
            driver.scheme.load_state_dict({**state, "tables": broken})
    del state["tables"]
    driver.scheme.load_state_dict(state)
    assert driver.scheme.state_dict()["tables"] == {}
    driver.close()


@pytest.mark.parametrize("n_elements", [3_000, 200_003, 3_000_000])
def test_assumed_tables_give_back_the_exact_sums(n_elements: int) -> None:
    gradients = [gradient.clamp_(-1000, 1000) for gradient in sparse_gradients(n_elements, 0.05, 3)]
    fixed = FixedPoint.fit(10, 3, torch.int64)
    own = [index_of(gradient) for gradient in gradients]
    index = own[0] | own[1] | own[2]
    known = CountSketch()
    known.prepare(index, n_elements)
    counts = known.block_nonzeros()
    assert sum(counts) == known.n_nonzeros
    sketch = CountSketch()
    rows = [max(3, int(1.5 * n / known.table_batch_values) + 1) for n in counts]
    assert sketch.assume(n_elements, known.table_batch_values, rows) == sum(rows) * known.table_batch_values
    total = torch.zeros(sketch.n_cells, dtype=torch.int64)
    for gradient, words in zip(gradients, own, strict=True):
        cells = torch.empty_like(total)
        sketch.add(gradient, words, cells, fixed)
        total += cells
    sketch.adopt(index)
    assert sketch.block_nonzeros() == counts
    n_core = sketch.peel(index)
    assert n_core <= MAX_CORE
    out = torch.empty(n_elements)
    assert sketch.recover(total, fixed.scale, out) is Outcome.COMPLETE
    expected = torch.stack([quantise(gradient, fixed) for gradient in gradients]).sum(0).double() * fixed.scale
    core = sketch.core() if n_core else torch.empty(0, dtype=torch.int64)
    out[core] = expected[core].float()
    assert torch.equal(out, expected.float())


@pytest.mark.parametrize(
    ("batch_values", "rows", "match"),
    [
        (48, [3], "power of two"),
        (64, [], "a block at least"),
        (64, [2], "three rows"),
        (64, [3] * 4_000, "than batches"),
    ],
)
def test_tables_that_cannot_be_are_refused(batch_values: int, rows: list[int], match: str) -> None:
    with pytest.raises(gradwire.InvalidArgument, match=match):
        CountSketch().assume(10_000, batch_values, rows)
