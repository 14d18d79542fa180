"""The scheme homomorphic: whole sums on every rank, the bytes it promises, and loud errors."""

from __future__ import annotations

import copy
import io
import math
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import gradwire
from buckets import Driver
from gradwire import schemes
from gradwire.codecs.count_sketch import FixedPoint
from gradwire.exchange.aggregators.process_group import ProcessGroup
from ranks import run_ranks, try_ranks
from sketches import quantise, sparse_gradients

SHAPES = [(40, 300), (7,), (70, 11), (0, 5), (), (30_000,)]
LAYOUT = [2, 4]
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def gradients_of(
    rank: int, world_size: int, step: int, density: float, dtype: torch.dtype = torch.float32
) -> list[torch.Tensor]:
    n_elements = sum(torch.Size(shape).numel() for shape in SHAPES)
    values = sparse_gradients(n_elements, density, world_size, run=(1, 32)[step % 2], seed=step)[rank]
    values.clamp_(-60_000, 60_000)
    parts = values.to(dtype).split([torch.Size(shape).numel() for shape in SHAPES])
    return [part.view(shape) for part, shape in zip(parts, SHAPES, strict=True)]


def flat(tensors: list[torch.Tensor]) -> torch.Tensor:
    return torch.cat([tensor.reshape(-1) for tensor in tensors])


def by_bucket(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    return [flat(tensors[:2]), flat(tensors[2:])]


def make(**options: Any) -> schemes.Scheme:
    return schemes.by_name("homomorphic", **options)


def parameters(dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    return [torch.zeros(shape, dtype=dtype) for shape in SHAPES]


# ---- sums


def sum_in_every_mode(rank: int, world_size: int) -> torch.Tensor:
    results = []
    for dtype in DTYPES:
        rounding = {torch.float32: 0.0, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}[dtype]
        for options in (
            {},
            {"mode": "sketch"},
            {"index": "bloom", "aggregator": ProcessGroup("all-to-all")},
            {"mode": "sketch", "index": "bloom", "aggregator": ProcessGroup("all-to-all")},
            {"mode": "exact"},
            {"mode": "exact", "integer_bits": 64},
            {"mode": "sketch", "index": "bitmap", "batch_values": 64, "gamma": 1.5, "seed": 9},
        ):
            scheme = make(**options)
            driver = Driver(scheme, parameters(dtype), LAYOUT)
            for step, density in enumerate((0.01, 0.03, 0.0, 0.001, 0.3, 1.0)):
                everyone = [gradients_of(other, world_size, step, density, dtype) for other in range(world_size)]
                result = by_bucket(driver.reduce(everyone[rank]))
                results.append(flat(result).float())
                for index, mean in enumerate(result):
                    shares = torch.stack([by_bucket(tensors)[index].double() for tensors in everyone])
                    expected = shares.sum(0) / world_size
                    # Packed values and dense buckets take the backend's own sum, which rounds every partial sum to the dtype.
                    is_plain = density > 0.03 or "mode" not in options
                    summed = shares.abs().sum(0) / world_size
                    rounded = rounding * (world_size * summed if is_plain else expected.abs())
                    error = (mean.double() - expected).abs() - rounded - 2.0**-24 * (dtype != DTYPES[0])
                    if options.get("mode") == "exact" and world_size > 1 and density <= 0.03:
                        largest = float(shares.abs().max())
                        bits = torch.int32 if options.get("integer_bits") is None else torch.int64
                        fixed = FixedPoint.fit(math.frexp(largest)[1], world_size, bits)
                        total = torch.stack([quantise(share, fixed) for share in shares]).sum(0)
                        exact = (total.double() * (fixed.scale / world_size)).float().to(dtype)
                        assert torch.equal(mean, exact)
                    else:
                        assert float(error.clamp(min=0).norm()) <= 2e-6 * float(expected.norm())
            if world_size > 1:
                stats = scheme.stats()
                assert stats["n_buckets_too_dense"] > 0
                assert (stats["n_bloom_indices"] > 0) == (options.get("index") != "bitmap")
            driver.close()
    return torch.cat(results)


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_every_mode_gives_the_mean_and_the_same_bits_on_all_ranks(world_size: int) -> None:
    outcomes = run_ranks(sum_in_every_mode, world_size)
    for outcome in outcomes[1:]:
        assert torch.equal(outcome.view(torch.int32), outcomes[0].view(torch.int32))


def count_bytes(rank: int, world_size: int) -> list[tuple[float, float, float, float]]:
    n_elements, counted = 3_000_000, []
    for density in (0.01, 0.05):
        for run in (1, 32, 1024):
            parameter = torch.zeros(n_elements)
            generator = torch.Generator().manual_seed(run)
            in_union = torch.rand(-(-n_elements // run), generator=generator).lt(density)
            in_union = in_union.repeat_interleave(run)[:n_elements]
            gradient = torch.randn(n_elements) * in_union
            true_density = float(in_union.float().mean())
            for index in ("bitmap", "bloom"):
                driver = Driver(make(mode="sketch", index=index), [parameter])
                for _ in range(2):
                    driver.reduce([gradient])
                sent = driver.last_buckets[0].record.bytes_sent * 8 / (2 * (world_size - 1) / world_size)
                driver.close()
                n = true_density * n_elements
                n_hashes = math.log2(math.log(2) ** 2 * 1.3 * 32 * (n_elements - n) / n)
                bits = n_elements if index == "bitmap" else n / math.log(2) * n_hashes
                n_in_sketch = n if index == "bitmap" else n + (n_elements - n) / 2**n_hashes
                counted.append((density, run, sent, bits + 1.3 * 32 * n_in_sketch))
    return counted


def test_wire_volume_is_index_plus_gamma_times_density() -> None:
    """Single values, rows of 32 and whole batches, by bitmap and by the paper's Bloom filter: 5 % for all that is round."""
    for counted in run_ranks(count_bytes, 2):
        for density, run, sent, promised in counted:
            assert 0.95 * promised <= sent <= 1.05 * promised, (density, run, sent / promised)


# ---- what is left out


def conserve(rank: int, world_size: int) -> None:
    for options in (
        {"sparsifier": "top-k", "density": 0.05},
        {"mode": "lossy", "budget": 0.05, "error_feedback": True},
    ):
        driver = Driver(make(**options), parameters(), LAYOUT)
        old = torch.zeros(flat(parameters()).numel())
        for step in range(3):
            mine = [torch.randn(shape) * 2.0**-step for shape in SHAPES]
            driver.loss_scale = 2.0**step
            result = flat(driver.reduce([gradient * driver.loss_scale for gradient in mine])) / driver.loss_scale
            state = driver.scheme.state_dict()["residuals"]
            new = torch.cat([state[f"p{i}"].view(-1) for i in range(len(SHAPES))])
            balance = flat(mine).double() + old.double() - new.double()
            everyone = driver.communicator.submit(driver.communicator.all_gather, balance)
            everyone.wait()
            scale = float(new.abs().max()) + 1
            assert torch.allclose(everyone.value().mean(0), result.double(), atol=2e-5 * scale)
            assert float(new.abs().max()) > 0
            old = new
        stats = driver.scheme.stats()
        assert stats["n_buckets_too_dense"] == stats["n_buckets_redone"] == 0
        driver.close()


def test_results_and_residuals_conserve_the_gradients() -> None:
    run_ranks(conserve, 3)


def feed_back(rank: int, world_size: int) -> tuple[float, float]:
    driver = Driver(make(mode="lossy", budget=0.1, error_feedback=True), parameters(), LAYOUT)
    generator = torch.Generator().manual_seed(rank)
    gradient = [torch.randn(shape, generator=generator) for shape in SHAPES]
    total = torch.zeros(flat(gradient).numel(), dtype=torch.float64)
    n_steps = 120
    for _ in range(n_steps):
        total += flat(driver.reduce([g.clone() for g in gradient])).double()
    state = driver.scheme.state_dict()["residuals"]
    residual = torch.cat([state[f"p{i}"].view(-1) for i in range(len(SHAPES))])
    means = []
    for mine in (residual, flat(gradient)):
        everyone = driver.communicator.submit(driver.communicator.all_gather, mine)
        everyone.wait()
        means.append(everyone.value().double().mean(0))
    driver.close()
    return float(means[0].norm() / means[1].norm()), float((total / n_steps - means[1]).norm() / means[1].norm())


def test_error_feedback_of_estimates_does_not_grow_without_bound() -> None:
    """An estimate at a tenth of the size is off by 3.7 times the value: fed back as it is, it would grow 3.7-fold a step."""
    for residual, error in run_ranks(feed_back, 2):
        assert residual < 40
        assert error < 0.5


def sparsify(rank: int, world_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    results = []
    for scheme in (make(sparsifier="top-k", density=0.02), schemes.by_name("top-k", share=0.02)):
        driver = Driver(scheme, parameters(), LAYOUT)
        generator = torch.Generator().manual_seed(rank)
        for _ in range(3):
            result = flat(driver.reduce([torch.randn(shape, generator=generator) for shape in SHAPES]))
        results.append(result)
        driver.close()
    return results[0], results[1]


def test_sum_of_sparsified_gradients_is_that_of_top_k_without_gathering() -> None:
    outcomes = run_ranks(sparsify, 3)
    for through_sketch, gathered in outcomes:
        assert torch.equal(through_sketch, outcomes[0][0])
        assert torch.allclose(through_sketch, gathered, atol=1e-5)
        assert torch.equal(through_sketch != 0, gathered != 0)


# ---- bad input


def meet_nonfinite(rank: int, world_size: int) -> None:
    """What a step with Inf or NaN leaves behind: nothing. Values near the end of float32 are summed plainly."""
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
                result = driver.reduce(poisoned)
                assert not math.isfinite(float(result[0][3, 5]))
                assert str(driver.scheme.state_dict()) == str(before)
                assert driver.scheme.stats()["n_buckets_redone"] == 1
            runs.append(torch.cat([flat(driver.reduce(gradients_of(rank, world_size, s, 0.02))) for s in (2, 3)]))
            driver.close()
        assert torch.equal(runs[0], runs[2])
        assert torch.equal(runs[1], runs[2])
    driver = Driver(make(mode="sketch"), parameters(), LAYOUT)
    huge = gradients_of(rank, world_size, 0, 0.02)
    huge[0][0, 0] = 1e38
    result = driver.reduce(huge)
    assert float(result[0][0, 0]) == pytest.approx(1e38, rel=1e-6)
    assert driver.scheme.stats()["n_buckets_redone"] == 1
    driver.close()


def test_step_with_inf_or_nan_on_one_rank_is_as_if_it_had_not_been() -> None:
    run_ranks(meet_nonfinite, 2)


def disagree(rank: int, world_size: int, options: list[dict[str, Any]]) -> None:
    driver = Driver(make(**options[min(rank, 1)]), parameters(), LAYOUT)
    driver.reduce(gradients_of(rank, world_size, 0, 0.02))


@pytest.mark.parametrize("options", [[{"seed": 0}, {"seed": 1}], [{"batch_values": 1024}, {"batch_values": 512}]])
def test_other_seed_or_batch_size_on_one_rank_is_named(options: list[dict[str, Any]]) -> None:
    for outcome in try_ranks(disagree, 3, options):
        assert isinstance(outcome.error, gradwire.RankMismatch)
        assert "configuration" in str(outcome.error)
        assert "rank 0" in str(outcome.error)


def count_another_step(rank: int, world_size: int) -> None:
    """Dense gradients: from the second step on no index goes before the values."""
    driver = Driver(make(mode="exact"), parameters(), LAYOUT)
    for step in range(6):
        driver.step += step == 2 and rank == 1
        driver.reduce(gradients_of(rank, world_size, step, 1.0))
    driver.close()


def test_rank_in_another_step_is_named_where_buckets_are_too_dense_for_an_index() -> None:
    for outcome in try_ranks(count_another_step, 2):
        assert isinstance(outcome.error, gradwire.RankMismatch), outcome
        assert "step" in str(outcome.error)
        assert "rank 1" in str(outcome.error)


class Altering(ProcessGroup):
    """Changes one cell of the second sum on every rank, as a faulty fabric would."""

    n_sums = 0

    def start_sum(self, values: torch.Tensor, record: Any) -> Any:
        summed = super().start_sum(values, record)
        self.n_sums += 1
        if self.n_sums == 2:
            summed.wait()
            values[100] += 1000
            summed = type("Done", (), {"wait": lambda self: None})()
        return summed


class IntegersOnly(ProcessGroup):
    name = "integers"
    sums_floats = False


def meet_faults(rank: int, world_size: int) -> None:
    for mode in ("sketch", "exact"):
        driver = Driver(make(mode=mode, aggregator=Altering()), parameters(), LAYOUT)
        with pytest.raises(Exception, match="altered on its way"):
            driver.reduce(gradients_of(rank, world_size, 0, 0.05))
    for options in ({"mode": "sketch"}, {"mode": "lossy"}, {"integer_bits": 64}, {"mode": "exact", "integer_bits": 64}):
        with pytest.raises(gradwire.Unsupported, match='mode="exact", integer_bits=32'):
            Driver(make(aggregator=IntegersOnly(), **options), parameters())
    driver = Driver(make(mode="exact", aggregator=IntegersOnly()), parameters())
    driver.reduce(gradients_of(rank, world_size, 0, 0.05))
    driver.close()


def test_altered_sums_raise_and_integer_aggregators_get_integers() -> None:
    run_ranks(meet_faults, 2)


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"mode": "fast"}, "packed, sketch, exact, lossy"),
        ({"budget": 0}, "budget"),
        ({"integer_bits": 16}, "integer_bits"),
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


# ---- under DDP


class Recommender(nn.Module):
    """Two embeddings of which a batch touches few rows, and a small dense head."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(4_000, 16)
        self.head = nn.Sequential(nn.Linear(32, 8), nn.ReLU(), nn.Linear(8, 1))

    def forward(self, pairs: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.head(self.embedding(pairs).flatten(1))
        return output


def run_steps(ddp: nn.Module, optimizer: torch.optim.Optimizer, rank: int, steps: range) -> list[float]:
    losses = []
    for step in steps:
        pairs = torch.randint(0, 4_000, (16, 2), generator=torch.Generator().manual_seed(100 * (step % 5) + rank))
        optimizer.zero_grad()
        loss = (ddp(pairs).view(-1) - (pairs.sum(1) % 2)).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


OPTIONS: list[dict[str, Any]] = [
    {},
    {"mode": "sketch"},
    {"mode": "exact"},
    {"sparsifier": "top-k"},
    {"mode": "lossy", "budget": 0.2},
]


def start(options: dict[str, Any], state: dict[str, Any] | None) -> tuple[Any, ...]:
    torch.manual_seed(1)
    model = Recommender()
    if state is not None:
        model.load_state_dict(state)
    ddp = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.5)
    return ddp, optimizer, gradwire.attach(ddp, optimizer, make(**options))


def train(rank: int, world_size: int) -> list[torch.Tensor]:
    results = []
    for options in OPTIONS:
        ddp, optimizer, attachment = start(options, None)
        losses = run_steps(ddp, optimizer, rank, range(10))
        kept = {name: value.clone() for name, value in ddp.module.state_dict().items()}
        saved = io.BytesIO()
        torch.save(attachment.state_dict(), saved)
        attachment.close()
        runs = []
        for _ in range(2):
            ddp, optimizer, attachment = start(options, kept)
            saved.seek(0)
            attachment.load_state_dict(torch.load(saved, weights_only=True))
            saved = io.BytesIO()
            torch.save(attachment.state_dict(), saved)
            later = run_steps(ddp, optimizer, rank, range(10, 20))
            runs.append(torch.cat([parameter.detach().view(-1) for parameter in ddp.parameters()]))
            stats = attachment.stats()
            attachment.close()
            assert sum(later[-5:]) < 0.8 * sum(losses[:5])
            if world_size > 1:
                assert stats["n_fallbacks"] == 0
                assert 0 < stats["ratio"] < 0.25
        assert torch.equal(runs[0], runs[1])
        results.append(runs[0])
    return results


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_embeddings_train_alike_on_all_ranks_and_resume_bit_by_bit(world_size: int) -> None:
    outcomes = run_ranks(train, world_size)
    for outcome in outcomes[1:]:
        for mine, first in zip(outcome, outcomes[0], strict=True):
            assert torch.equal(mine, first)


# ---- steps that once were taken for something else


def skip_a_step(rank: int, world_size: int) -> None:
    """A step without gradients, then what came before it: never taken for a dense bucket, whatever the mode."""
    for mode in ("packed", "sketch"):
        driver = Driver(make(mode=mode), parameters(), LAYOUT)
        n_sent = []
        for density in (0.02, *(0.0,) * 10, 0.02, 0.02, 0.02):  # longer than counts are kept
            driver.reduce(gradients_of(rank, world_size, 0, density))
            n_sent.append(sum(bucket.record.bytes_sent for bucket in driver.last_buckets))
            for bucket in driver.last_buckets:
                assert not any("too dense" in why for why in bucket.record.fallbacks)
        assert n_sent[-3] <= 1.2 * n_sent[0]  # a filter of one row came first
        assert n_sent[-1] <= n_sent[0]
        assert driver.scheme.stats()["n_bloom_fallbacks"] > 0
        driver.close()


def test_step_without_gradients_is_not_followed_by_plain_ones() -> None:
    run_ranks(skip_a_step, 2)


def cancel(rank: int, world_size: int) -> None:
    """Sums 10^-4 of the values, with other ranks' rounding in every cell."""
    for mode in ("packed", "sketch"):
        driver = Driver(make(mode=mode), parameters(), LAYOUT)
        for step in range(3):
            base = gradients_of(0, 1, step, 0.03)
            everyone = [[g * (1 if r % 2 else -1) * (1 + 1e-4 * r) for g in base] for r in range(world_size)]
            mean = flat(driver.reduce([gradient.clone() for gradient in everyone[rank]])).double()
            shares = torch.stack([flat(gradients).double() for gradients in everyone])
            error = (mean - shares.mean(0)).abs()
            assert float(error.max()) <= 2.0**-16 * float(shares.abs().max())
            if mode == "packed":
                assert bool((error <= 2.0**-21 * shares.abs().sum(0)).all())
        assert driver.scheme.stats()["n_buckets_too_dense"] == 0
        driver.close()


def test_ranks_that_nearly_cancel_are_summed() -> None:
    run_ranks(cancel, 4)


def send_columns(rank: int, world_size: int) -> None:
    parameter = torch.zeros(1024, 1024)
    gradient = torch.zeros(1024, 1024)
    gradient[:, 64:80] = torch.randn(1024, 16, generator=torch.Generator().manual_seed(rank))
    driver = Driver(make(mode="sketch", index="bitmap"), [parameter])
    for _ in range(2):
        driver.reduce([gradient.clone()])
        assert driver.last_buckets[0].record.bytes_sent <= 1.05 * (1024 * 1024 / 8 + 1.3 * 4 * 16 * 1024)
    assert driver.scheme.stats()["n_sketches_resent"] == 0
    driver.close()


def test_columns_of_a_matrix_are_sent_once() -> None:
    run_ranks(send_columns, 2)
