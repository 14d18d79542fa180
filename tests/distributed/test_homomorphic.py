"""The scheme homomorphic: whole sums on every rank, and the bytes it promises."""

import contextlib
import copy
import itertools
import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import gradwire
from buckets import LAYOUT, Driver, flat, mean_over_ranks
from gradwire import schemes
from gradwire.exchange.aggregators import Sum
from gradwire.exchange.aggregators.process_group import ProcessGroup
from gradwire.wire.wire import Wire
from ranks import agree, on_ranks
from sketches import DTYPES, EPSILON, SMALLEST, check_mean, sparse_gradients
from small_training import Loss, Training

N_ROWS, N_USERS, N_ITEMS, N_WORDS = 3_000, 1_500, 1_200, 1_800
N_STEPS = 4


class Rows(nn.Module):
    """One embedding, whose touched rows are summed and judged."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(N_ROWS, 16), nn.Linear(16, 1)

    def forward(self, places: Tensor) -> Tensor:
        return self.head(self.embedding(places % N_ROWS).sum(1).tanh())


class Filtering(nn.Module):
    """Neural collaborative filtering: users' and items' embeddings for a product and for layers."""

    def __init__(self) -> None:
        super().__init__()
        self.users, self.items = nn.Embedding(N_USERS, 24), nn.Embedding(N_ITEMS, 24)
        self.layers = nn.Sequential(nn.Linear(32, 8), nn.ReLU(), nn.Linear(8, 4))
        self.head = nn.Linear(12, 1)

    def forward(self, places: Tensor) -> Tensor:
        user, item = self.users(places[:, 0] % N_USERS), self.items(places[:, 1] % N_ITEMS)
        deep = self.layers(torch.cat([user[:, 8:], item[:, 8:]], 1))
        return self.head(torch.cat([user[:, :8] * item[:, :8], deep], 1))


class Reading(nn.Module):
    """An LSTM over words of which a batch holds few."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.lstm, self.head = nn.Embedding(N_WORDS, 24), nn.LSTM(24, 8), nn.Linear(8, 1)

    def forward(self, places: Tensor) -> Tensor:
        hidden, _ = self.lstm(self.embedding(places.t() % N_WORDS))
        return self.head(hidden[-1])


MODELS: dict[str, Callable[[], nn.Module]] = {"embedding": Rows, "ncf": Filtering, "lstm": Reading}


def build(name: str, dtype: torch.dtype = torch.float32) -> nn.Module:
    """The same parameters on every rank."""
    torch.manual_seed(7)
    return MODELS[name]().to(dtype)


def loss_of(model: nn.Module, rank: int, step: int) -> Tensor:
    """Of 12 times 3 rows that differ by rank and step, and some that all ranks share."""
    own, shared = (torch.Generator().manual_seed(seed) for seed in (1_000 * rank + step, step))
    places = torch.randint(0, 1_000_000, (12, 3), generator=own)
    places[:3] = torch.randint(0, 1_000_000, (3, 3), generator=shared)
    return (model(places).float().view(-1) - (places.sum(1) % 3 - 1)).square().mean()


def start(
    rank: int, name: str, options: Any, rate: float = 0.3, dtype: Any = torch.float32, loss: Loss = loss_of, **ddp: Any
) -> Training:
    """The model of this name under SGD, with homomorphic's options or by DDP alone, in one bucket; `ddp`: DDP's options."""
    scheme = None if options is None else make(**options)
    ddp = {"bucket_cap_mb": 25, **ddp}
    return Training(rank, scheme, lambda p: torch.optim.SGD(p, rate), lambda: build(name, dtype), loss, ddp)


SHAPES = [(40, 300), (7,), (70, 11), (0, 5), (), (30_000,)]


def gradients_of(rank: int, world_size: int, step: int, density: float) -> list[Tensor]:
    sizes = [math.prod(shape) for shape in SHAPES]
    values = sparse_gradients(sum(sizes), density, world_size, run=(1, 32)[step % 2], seed=step)[rank]
    parts = values.clamp_(-60_000, 60_000).split(sizes)
    return [part.view(shape) for part, shape in zip(parts, SHAPES, strict=True)]


def make(**options: Any) -> schemes.Scheme:
    return schemes.by_name("homomorphic", **options)


def parameters(dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    return [torch.zeros(shape, dtype=dtype) for shape in SHAPES]


@on_ranks(2)
def test_wire_volume_is_index_plus_gamma_times_density(rank: int, world_size: int) -> None:
    """Single values, rows of 32 and whole batches, by bitmap or confirmed filter: 5 % for all that is round."""
    n_elements = 3_000_000
    for density, run, index in itertools.product((0.01, 0.05), (1, 32, 1024), ("bitmap", "bloom")):
        in_union = torch.rand(-(-n_elements // run), generator=torch.Generator().manual_seed(run)).lt(density)
        in_union = in_union.repeat_interleave(run)[:n_elements]
        gradient, n = torch.randn(n_elements) * in_union, int(in_union.sum())
        driver = Driver(make(mode="sketch", index=index), [torch.zeros(n_elements)])
        for _ in range(2):
            driver.reduce([gradient])
        sent = driver.last_buckets[0].record.bytes_sent * 8 / (2 * (world_size - 1) / world_size)
        n_hashes = round(math.log2(math.log(2) ** 2 * (n_elements - n) / n))  # a zero let through costs a bit
        bits = n / math.log(2) * n_hashes + n + (n_elements - n) / 2**n_hashes
        promised = (n_elements if index == "bitmap" else bits) + 1.3 * 32 * n
        assert 0.95 * promised <= sent <= 1.05 * promised, (density, run, sent / promised)


# ---- awkward steps and layouts
@on_ranks(2)
def test_step_without_gradients_is_not_followed_by_plain_ones(rank: int, world_size: int) -> None:
    """A step without gradients, then what came before it: never taken for a dense bucket, whatever the mode."""
    for mode in ("packed", "sketch"):
        driver = Driver(make(mode=mode), parameters(), LAYOUT)
        n_sent = []
        for density in (0.02, *(0.0,) * 10, 0.02, 0.02, 0.02):  # longer than counts are kept
            driver.reduce(gradients_of(rank, world_size, 0, density))
            n_sent.append(sum(bucket.record.bytes_sent for bucket in driver.last_buckets))
            assert not any("too dense" in why for bucket in driver.last_buckets for why in bucket.record.fallbacks)
        assert n_sent[-3] <= 1.2 * n_sent[0]  # a filter of one row came first
        assert n_sent[-1] <= n_sent[0]
        assert driver.scheme.stats()["n_bloom_fallbacks"] > 0


@on_ranks(4)
def test_ranks_that_nearly_cancel_are_summed(rank: int, world_size: int) -> None:
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


@on_ranks(2)
def test_columns_of_a_matrix_are_sent_once(rank: int, world_size: int) -> None:
    gradient = torch.zeros(1024, 1024)
    gradient[:, 64:80] = torch.randn(1024, 16, generator=torch.Generator().manual_seed(rank))
    driver = Driver(make(mode="sketch", index="bitmap"), [torch.zeros(1024, 1024)])
    for _ in range(2):
        driver.reduce([gradient.clone()])
        assert driver.last_buckets[0].record.bytes_sent <= 1.05 * (1024 * 1024 / 8 + 1.3 * 4 * 16 * 1024)
    assert driver.scheme.stats()["n_sketches_resent"] == 0


@pytest.mark.parametrize("mode", ["packed", "sketch", "exact", "lossy"])
@on_ranks(2)
def test_zeros_of_all_ranks_are_zeros_and_adam_leaves_them_alone(rank: int, world_size: int, mode: str) -> None:
    """As in NCF: few rows of an embedding have gradients, of very different sizes; from the second step on by a filter."""
    n_elements, n_false = 400_000, 0
    parameter = torch.nn.Parameter(torch.zeros(n_elements))
    optimizer = torch.optim.Adam([parameter], lr=1e-3)
    is_touched = torch.zeros(n_elements, dtype=torch.bool)
    driver = Driver(make(mode=mode), [parameter])
    for step in range(4):
        everyone = sparse_gradients(n_elements, 0.01, world_size, run=32, seed=step)
        is_touched |= torch.stack(everyone).ne(0).any(0)
        (parameter.grad,) = driver.reduce([everyone[rank].clone()])
        n_false += int(parameter.grad[torch.stack(everyone).eq(0).all(0)].count_nonzero())
        optimizer.step()
    assert driver.scheme.stats()["n_bloom_indices"] == 3
    assert n_false == 0
    assert not bool(parameter.detach()[~is_touched].any())


# ---- What homomorphic leaves out, by a sparsifier or by estimates: conserved, and sent later
@on_ranks(2)
def test_error_feedback_of_estimates_does_not_grow_without_bound(rank: int, world_size: int) -> None:
    """An estimate at a tenth of the size is off by 3.7 times the value: fed back as it is, it would grow 3.7-fold a step."""
    driver = Driver(make(mode="lossy", budget=0.1, error_feedback=True), parameters(), LAYOUT)
    generator = torch.Generator().manual_seed(rank)
    gradient = [torch.randn(shape, generator=generator) for shape in SHAPES]
    total = torch.zeros(flat(gradient).numel(), dtype=torch.float64)
    n_steps = 120
    for _ in range(n_steps):
        total += flat(driver.reduce([g.clone() for g in gradient])).double()
    left, given = mean_over_ranks(driver.state()), mean_over_ranks(flat(gradient))
    assert float(left.norm() / given.norm()) < 40
    assert float((total / n_steps - given).norm() / given.norm()) < 0.5


@on_ranks(3)
def test_sum_of_sparsified_gradients_is_that_of_top_k_without_gathering(rank: int, world_size: int) -> torch.Tensor:
    results = []
    for scheme in (make(sparsifier="top-k", density=0.02), schemes.by_name("top-k", share=0.02)):
        driver = Driver(scheme, parameters(), LAYOUT)
        generator = torch.Generator().manual_seed(rank)
        for _ in range(3):
            result = flat(driver.reduce([torch.randn(shape, generator=generator) for shape in SHAPES]))
        results.append(result)
    through_sketch, gathered = results
    assert torch.allclose(through_sketch, gathered, atol=1e-5)
    assert torch.equal(through_sketch != 0, gathered != 0)
    return through_sketch


# ---- homomorphic under DDP: embeddings train, alike on all ranks, and resume bit by bit
def loss_in_turn(module: nn.Module, rank: int, step: int) -> torch.Tensor:
    """Of five batches."""
    return loss_of(module, rank, step % 5)


OPTIONS = ({}, {"mode": "sketch"}, {"mode": "exact"}, {"sparsifier": "top-k"}, {"mode": "lossy", "budget": 0.2})


@on_ranks([1, 2, 3, 4])
def test_embeddings_train_alike_on_all_ranks_and_resume_bit_by_bit(rank: int, world_size: int) -> list[torch.Tensor]:
    results = []
    for options in OPTIONS:
        training, runs = start(rank, "ncf", options, loss=loss_in_turn), []
        losses = training.take_steps(range(10))
        saved = training.state()
        for _ in range(2):
            resumed = start(rank, "ncf", options, loss=loss_in_turn).load(saved)
            saved = resumed.state()
            later = resumed.take_steps(range(10, 35))
            stats = resumed.close()
            assert sum(later[-5:]) < 0.8 * sum(losses[:5])
            if world_size > 1:
                assert stats["n_fallbacks"] == 0
                assert 0 < stats["ratio"] < 0.25
            runs.append(resumed.flat())
        assert torch.equal(*runs)
        results.append(runs[0])
    return results


# ---- homomorphic on values that are not finite, ranks that disagree, sums that were altered and options out of range
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


@on_ranks(2, raises=gradwire.RankMismatch, match="(?=.*step).*rank 1")
def test_rank_in_another_step_is_named_where_buckets_are_too_dense_for_an_index(rank: int, world_size: int) -> None:
    """Dense gradients: from the second step on no index goes before the values."""
    driver = Driver(make(mode="exact"), parameters(), LAYOUT)
    for step in range(6):
        driver.step += step == 2 and rank == 1
        driver.reduce(gradients_of(rank, world_size, step, 1.0))


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


# ---- in training that it is made for nothing goes plainly, and what comes back are the ranks' exact sums
MODES: dict[str, dict[str, Any]] = {
    "packed": {},
    "sketch": {"mode": "sketch"},
    "exact 32": {"mode": "exact"},
    "exact 64": {"mode": "exact", "integer_bits": 64},
}
HEADER_BYTES = 48


def shares_of(model: nn.Module, world_size: int, step: int) -> Tensor:
    """(world_size, n): every rank's own gradient, made here: the same code on the same batch."""
    shares = []
    for rank in range(world_size):
        alone = copy.deepcopy(model)
        alone.zero_grad()
        loss_of(alone, rank, step).backward()
        shares.append(torch.cat([parameter.grad.reshape(-1) for parameter in alone.parameters()]))
    return torch.stack(shares)


def check_values(mode: str, mean: Tensor, shares: Tensor) -> None:
    check_mean(MODES[mode], False, mean, shares)
    expected = shares.double().mean(0)
    if mode == "packed" and len(shares) == 2:  # two values have but one order of summation: DDP's bits
        assert torch.equal(mean, shares[0] * 0.5 + shares[1] * 0.5)
    if mode == "sketch" and len(shares) > 1:
        error = (mean.double() - expected).abs() - EPSILON[mean.dtype] * expected.abs() - SMALLEST[mean.dtype]
        assert float(error.clamp(min=0).norm()) <= 2e-6 * float(expected.norm())
    assert torch.equal(mean == 0, expected == 0) or float(expected.abs()[expected != 0].min()) < 1e-6


def check_bytes(mode: str, index: str, gradient: Tensor, n_nonzeros: int, n_bytes: int, world_size: int) -> None:
    """What a ring of index and values, or of index and sketch, sends: so neither was replaced by the gradient itself."""
    n, n_sent = gradient.numel(), n_bytes * world_size / (2 * (world_size - 1))
    if mode == "packed":
        cell_bytes, least, most = gradient.element_size(), 1.0, 1.0
    else:  # tables are of whole rows
        cell_bytes, least, most = 8 if mode == "exact 64" else 4, 1.3, 1.5
    if index == "bitmap":
        n_index = HEADER_BYTES + 4 * -(-n // 32)
        assert n_index + least * cell_bytes * n_nonzeros - 16 <= n_sent
        assert n_sent <= n_index + most * cell_bytes * n_nonzeros + 16 * world_size + 64 * cell_bytes
    else:  # a filter lets some zeros through, and one that was made for another step may be followed by a bitmap
        assert least * cell_bytes * n_nonzeros < n_sent < 0.75 * n * gradient.element_size()


@pytest.mark.parametrize("name", MODELS)
@on_ranks([1, 2, 3], timeout_s=200)
def test_sparse_gradients_are_sent_compressed_and_summed_exactly(rank: int, world_size: int, name: str) -> None:
    for (mode, options), dtype, index in itertools.product(MODES.items(), DTYPES, ("bitmap", "auto")):
        training, closed = start(rank, name, {"index": index, **options}, 0.1, dtype), []
        sink = SimpleNamespace(write_step=lambda _, records, closed=closed: closed.append(records), close=lambda: None)
        training.attachment.recorder.add_sink(sink)
        for step in range(N_STEPS):
            shares = shares_of(training.ddp.module, world_size, step)
            training.backward(step)
            mean = training.gradient()
            assert agree(mean), (mode, dtype, index)
            check_values(mode, mean, shares)
            (record,) = [record for record in closed[-1] if record.bucket >= 0]  # the preamble's traffic is of none
            if world_size > 1:
                n_nonzeros = int((shares != 0).any(0).sum())
                check_bytes(mode, index, mean, n_nonzeros, record.bytes_sent, world_size)
            training.optimizer.step()
        stats = training.close()
        assert stats["n_buckets_too_dense"] == stats["n_steps_not_finite"] == stats["n_sketches_resent"] == 0
        assert stats["n_fallbacks"] == stats["n_bloom_fallbacks"]


# Those that are an option of DDP, and those that a script does.
OF_DDP = {"views": "gradient_as_bucket_view", "static graph": "static_graph", "unused": "find_unused_parameters"}
FEATURES = (*OF_DDP, "accumulated", "clipped", "autocast", "masked")


def take_step(feature: str, training: Training, step: int) -> None:
    """Where losses are masked, rank 1's is in every second step, and all ranks' in the last one."""
    rank, ddp, optimizer = training.rank, training.ddp, training.optimizer
    is_masked = feature == "masked" and (step == N_STEPS - 1 or (rank == 1 and step % 2 == 1))
    n_parts = 2 if feature == "accumulated" else 1
    optimizer.zero_grad()
    for part in range(n_parts):
        with ddp.no_sync() if part < n_parts - 1 else contextlib.nullcontext():
            is_mixed = feature == "autocast"  # in which oneDNN has no LSTM for processors without AVX-512
            with torch.autocast("cpu", torch.bfloat16, is_mixed), torch.backends.mkldnn.flags(enabled=not is_mixed):
                loss = loss_of(ddp, rank, n_parts * step + part)
            (loss * (0.0 if is_masked else 1.0)).backward()
    if feature == "clipped":
        torch.nn.utils.clip_grad_norm_(ddp.parameters(), 0.5)
    optimizer.step()


# By SGD, whose step is in proportion to the error: of the largest parameter. Two ranks' packed sums are DDP's own.
TOLERANCES = {"packed": 0.0, "sketch": 1e-6, "exact 32": 1e-7, "exact 64": 1e-7}


@pytest.mark.parametrize("feature", FEATURES)
@on_ranks(2, timeout_s=120)
def test_features_of_ddp_with_sparse_models_train_as_ddp_does(rank: int, world_size: int, feature: str) -> None:
    ddp = {OF_DDP[feature]: True} if feature in OF_DDP else {}
    for name in MODELS:
        results: dict[str, Tensor] = {}
        for mode in ("ddp", *MODES):
            training = start(rank, name, MODES.get(mode), **ddp)
            for step in range(2 * N_STEPS):
                take_step(feature, training, step % N_STEPS)
            stats = training.close()
            if mode != "ddp":
                assert stats["n_buckets_too_dense"] == stats["n_steps_not_finite"] == 0, (name, mode)
                assert 0 < stats["ratio"] < 0.5, (name, mode, stats["ratio"])
            results[mode] = training.flat()
            assert agree(results[mode]), (name, mode)
            deviation = float((results[mode] - results["ddp"]).abs().max())
            assert deviation <= TOLERANCES.get(mode, 0.0) * float(results["ddp"].abs().max()), (name, mode, deviation)
