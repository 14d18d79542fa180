"""acp-sgd, power-sgd and power-sgd-overlap: against float64 transcriptions and PyTorch's own hook, and under DDP."""

import copy
import itertools
import logging
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

import gradwire
from buckets import Driver, flat
from gradwire import schemes
from gradwire.schemes.matrices import draw_factor
from logs import log_of
from ranks import assert_alike, on_ranks
from small_training import Given, Training, adamw

SHAPES = [(24, 18), (7,), (24, 18), (10, 4, 3, 3), (1, 9), (9, 1), (0, 5), (30, 50), (), (24, 18)]
MATRICES = {i: shape for i, shape in enumerate(SHAPES) if len(shape) > 1 and np.prod(shape)}
RANK = 3
SCHEMES = ("acp-sgd", "power-sgd", "power-sgd-overlap")


def drive(scheme: str, bucket_sizes: list[int], **options: Any) -> Driver:
    made = schemes.by_name(scheme, rank=RANK, min_compression_rate=0, **options)
    return Driver(made, [torch.zeros(shape) for shape in SHAPES], bucket_sizes)


def gradients_of(rank: int, step: int) -> list[torch.Tensor]:
    """What the ranks share and what is their own, about alike in size."""
    own, shared = torch.Generator().manual_seed(100 * rank + step + 1), torch.Generator().manual_seed(step // 4)
    return [torch.randn(shape, generator=own) + torch.randn(shape, generator=shared) for shape in SHAPES]


def matrix(tensor: torch.Tensor) -> np.ndarray:
    return tensor.double().numpy().reshape(tensor.shape[0], -1)


class Transcription:
    """All ranks of one matrix in float64, straight from the papers; factors not transposed."""

    def __init__(self, scheme: str, shape: tuple[int, ...], key: str, world_size: int, feedback: bool) -> None:
        n, m = shape[0], int(np.prod(shape[1:]))
        self.r = min(RANK, n, m)
        self.scheme, self.feedback, self.world_size = scheme, feedback, world_size
        self.q = draw_factor(0, key, 0, self.r, m).double().numpy().T
        self.p = np.zeros((n, self.r))
        self.errors = [np.zeros((n, m)) for _ in range(world_size)]
        self.computes_p = True

    def step(self, gradients: list[np.ndarray]) -> np.ndarray:
        corrected = [g + e for g, e in zip(gradients, self.errors, strict=True)]
        if self.scheme != "acp-sgd":
            self.p = np.linalg.qr(sum(x @ self.q for x in corrected) / self.world_size)[0]
            self.q = sum(x.T @ self.p for x in corrected) / self.world_size
            new_errors = [x - self.p @ self.q.T for x in corrected]
        elif self.computes_p:
            self.q = np.linalg.qr(self.q)[0]
            local = [x @ self.q for x in corrected]
            new_errors = [x - p @ self.q.T for x, p in zip(corrected, local, strict=True)]
            self.p = sum(local) / self.world_size
        else:
            self.p = np.linalg.qr(self.p)[0]
            local = [x.T @ self.p for x in corrected]
            new_errors = [x - self.p @ q.T for x, q in zip(corrected, local, strict=True)]
            self.q = sum(local) / self.world_size
        self.computes_p = not self.computes_p
        if self.feedback:
            self.errors = new_errors
        return self.p @ self.q.T


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize(("world_size", "options"), [(2, {}), (3, {"error_feedback": False}), (4, {"buffer_mb": 0})])
@on_ranks(timeout_s=90)
def test_scheme_follows_its_transcription(rank: int, world_size: int, scheme: str, options: dict[str, Any]) -> Any:
    driver = drive(scheme, [2, 3, 1, 4], **options)
    feedback = options.get("error_feedback", True)
    oracles = {i: Transcription(scheme, shape, f"p{i}", world_size, feedback) for i, shape in MATRICES.items()}
    digest = []
    for step in range(12):
        everyone = [gradients_of(other, step) for other in range(world_size)]
        results = driver.reduce(everyone[rank])
        for i, result in enumerate(results):
            if i in oracles:
                expected = oracles[i].step([matrix(gradients[i]) for gradients in everyone])
                assert np.allclose(matrix(result), expected, rtol=1e-3, atol=2e-4), (step, i)
            elif result.numel():
                mean = torch.stack([gradients[i] for gradients in everyone]).mean(0)
                assert torch.allclose(result, mean, atol=1e-6)
        digest.append(flat(results))
    state = driver.scheme.state_dict()
    for i, oracle in oracles.items():
        if feedback:
            assert np.allclose(state["residuals"][f"p{i}"].numpy(), oracle.errors[rank], rtol=1e-3, atol=5e-4), i
    assert len(state["residuals"]) == (len(oracles) if feedback else 0)
    return {"results": torch.stack(digest), "factors": state["factors"]}


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize(("dtype", "limit"), [(torch.float32, 2e-5), (torch.float16, 50.0)])
@on_ranks(3)
def test_full_rank_gives_the_mean(rank: int, world_size: int, scheme: str, dtype: torch.dtype, limit: float) -> None:
    """In float16 of values whose sum it does not hold, and whose mean, DDP's, it does: factors are summed as float32."""
    driver = Driver(schemes.by_name(scheme, rank=12, min_compression_rate=0), [torch.zeros(12, 12, dtype=dtype)])
    for step in range(6):
        generators = [torch.Generator().manual_seed(9 * step + other) for other in range(world_size)]
        everyone = [torch.randn(12, 12, generator=generator) for generator in generators]
        if dtype == torch.float16:
            everyone = [50_000.0 * gradient.sign() for gradient in everyone]
        (result,) = driver.reduce([everyone[rank].to(dtype)])
        assert torch.allclose(result.float(), torch.stack(everyone).mean(0), atol=limit)
    if scheme == "acp-sgd":  # its error is local; Power-SGD's holds what this rank's gradient differs from the mean
        assert driver.scheme.state_dict()["residuals"]["p0"].abs().max() < limit


ROWS, COLUMNS, N_CHOICES, STEPS = 30, 40, 4, 6


@pytest.mark.parametrize("name", ["power-sgd", "power-sgd-overlap"])
@on_ranks(2)
def test_means_and_errors_are_those_of_powersgd_hook(rank: int, world_size: int, name: str) -> None:
    """From one state."""
    model = DistributedDataParallel(Given((ROWS, COLUMNS)))
    state = powerSGD_hook.PowerSGDState(dist.group.WORLD, matrix_approximation_rank=N_CHOICES, start_powerSGD_iter=2)
    model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    driver = Driver(schemes.by_name(name, rank=N_CHOICES), [torch.zeros(ROWS, COLUMNS)])
    generator = torch.Generator().manual_seed(rank)
    for step in range(-3, STEPS):
        gradient = torch.randn(ROWS, COLUMNS, generator=generator)
        model.zero_grad()
        model(gradient).backward()
        if step < 0:  # two plain steps, and one with factors of the hook's own
            continue
        if step == 0:
            factors = {"p0": state.q_memory_dict[0].view(COLUMNS, N_CHOICES).T.contiguous()}
            residuals = {"p0": state.error_dict[0].view(ROWS, COLUMNS).clone()}
            driver.scheme.load_state_dict({**driver.scheme.state_dict(), "factors": factors, "residuals": residuals})
            continue
        (ours,) = driver.reduce([gradient])
        theirs = model.module.weight.grad
        assert torch.allclose(ours, theirs, rtol=1e-4, atol=1e-4), (step, float((ours - theirs).abs().max()))
        kept = driver.scheme.state_dict()["residuals"]["p0"]
        error = state.error_dict[0].view(ROWS, COLUMNS)
        assert torch.allclose(kept, error, rtol=1e-4, atol=1e-3), (step, float((kept - error).abs().max()))
        assert float((theirs - gradient).norm()) > 0.1 * float(gradient.norm()), "something was left out"


@on_ranks(2)
def test_two_steps_on_a_constant_gradient_are_one_step_of_power_sgd(rank: int, world_size: int) -> None:
    """From the same start, in float64."""
    driver = drive("acp-sgd", [10], error_feedback=False)
    everyone = [gradients_of(other, 0) for other in range(world_size)]
    driver.reduce(everyone[rank])
    results = driver.reduce(everyone[rank])
    for i, shape in MATRICES.items():
        oracle = Transcription("power-sgd", shape, f"p{i}", world_size, feedback=False)
        expected = oracle.step([matrix(gradients[i]) for gradients in everyone])
        assert np.allclose(matrix(results[i]), expected, rtol=1e-4, atol=1e-5), i


class Net(nn.Module):
    """A convolution, an embedding, tied weights and a parameter without elements."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.convolution = nn.Conv2d(3, 16, 3)
        self.embedding = nn.Embedding(40, 24)
        nn.init.normal_(self.embedding.weight, std=0.2)
        self.hidden = nn.ModuleList(nn.Linear(24, 24) for _ in range(3))
        self.mix = nn.Linear(16, 24)
        self.out = nn.Linear(24, 40, bias=False)
        self.out.weight = self.embedding.weight
        self.empty = nn.Parameter(torch.empty(0, 4))

    def forward(self, images: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        x = self.mix(self.convolution(images).mean((2, 3))) + self.embedding(tokens) + self.empty.sum()
        for layer in self.hidden:
            x = layer(x).tanh()
        return self.out(x)


def loss_of(module: nn.Module, rank: int, step: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1_000 * rank + step)
    images = torch.randn(6, 3, 8, 8, generator=generator)
    tokens = torch.randint(40, (6,), generator=generator)
    return nn.functional.cross_entropy(module(images, tokens), (tokens + 1) % 40)


def start(of: int, scheme: str, model: Any = Net, **options: Any) -> Training:
    """On the rank `of`; `options` are the scheme's, with its own rank."""
    made = schemes.by_name(scheme, **{"rank": RANK, **options})
    return Training(of, made, lambda p: torch.optim.SGD(p, 0.02, 0.9), model, loss_of, {"bucket_cap_mb": 0.01})


CHOICES = {"overlap": False, "buffer_mb": 0, "factor_dtype": "bfloat16", "reuse": False, "error_feedback": False}
OPTIONS = [
    *({key: value} for key, value in CHOICES.items()),
    {"buffer_mb": float("inf")},
    {"rank": 10_000, "min_compression_rate": 0},
]


@on_ranks(3)
def test_ranks_agree_with_every_option_and_overlap_and_fusion_change_no_result(rank: int, world_size: int) -> Any:
    results = {}
    for scheme, options in itertools.product(SCHEMES, OPTIONS):
        if "overlap" in options and scheme != "acp-sgd":
            continue
        training = start(rank, scheme, **options)
        assert all(loss == loss for loss in training.take_steps(range(10)))
        stats = training.close()
        results[f"{scheme} {options}"] = training.flat()
        assert stats["n_fallbacks"] == 0
        assert stats["bytes_sent"] > 0
    packed = results["acp-sgd {'buffer_mb': inf}"]
    # The same sums in other portions: Gloo's order of addition depends on where a buffer is cut, so not bit by bit.
    for name in ("acp-sgd {'overlap': False}", "acp-sgd {'buffer_mb': 0}"):
        assert torch.allclose(results[name], packed, atol=1e-5), name
    return results


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("steps_before", [3, 4])
@on_ranks(2)
def test_resumed_run_continues_bit_by_bit(rank: int, world_size: int, scheme: str, steps_before: int) -> None:
    saved, results = start(rank, scheme).after(range(steps_before)).state(), []
    for _ in range(2):  # what goes on is wrapped anew, as DDP's first step has its own bucket layout
        resumed = start(rank, scheme).load(saved)
        saved = resumed.state()  # loading and saving again loses nothing
        resumed.take_steps(range(steps_before, steps_before + 5))
        results.append((resumed.flat(), resumed.state()[-1]["state"]["residuals"]))
    assert_alike(results)


@pytest.mark.parametrize("scheme", SCHEMES)
@on_ranks(3)
def test_factors_that_differ_between_ranks_are_named_on_every_rank(rank: int, world_size: int, scheme: str) -> None:
    training = start(rank, scheme).after(range(2))
    state = training.attachment.state_dict()
    if rank == 2:
        state["state"]["factors"]["hidden.0.weight"][0, 0] += 1e-3
    training.attachment.load_state_dict(state)
    with pytest.raises(gradwire.RankMismatch, match=r"different factors.*rank 2: "):
        training.take_steps([2])


@pytest.mark.parametrize("scheme", SCHEMES)
@on_ranks(2)
def test_zero_gradients_are_zero_means_and_do_no_harm(rank: int, world_size: int, scheme: str) -> None:
    training = start(rank, scheme)
    for step in range(3):
        training.backward(step, 0.0)
        assert not training.gradient().any()
    training.take_steps(range(4))
    assert training.gradient().isfinite().all()
    assert training.ddp.module.hidden[0].weight.grad.any()


@on_ranks(2)
def test_state_of_another_rank_scheme_or_model_is_refused(rank: int, world_size: int) -> None:
    training = start(rank, "acp-sgd").after(range(2))
    saved = training.attachment.state_dict()
    reshaped = copy.deepcopy(saved)
    reshaped["state"]["residuals"]["mix.weight"] = torch.zeros(3, 3)
    for other, state, words in (
        (start(rank, "acp-sgd", rank=4), saved, "rank: 3 saved, 4 now"),
        (start(rank, "power-sgd"), saved, "written by scheme 'acp-sgd'"),
        (start(rank, "acp-sgd", lambda: nn.Linear(24, 24)), saved, "has no such parameter"),
        (start(rank, "acp-sgd"), reshaped, "9 elements for 'mix.weight'; it has 384"),
        (start(rank, "acp-sgd"), {**saved, "state": {}}, "does not read .*is_step_for_p"),
    ):
        with pytest.raises(gradwire.InvalidArgument, match=words):
            other.attachment.load_state_dict(state)


@pytest.mark.parametrize(
    ("scheme", "at_rank", "highest"),
    [("acp-sgd", 42, 0), ("acp-sgd", 48, 42), ("power-sgd", 21, 0), ("power-sgd", 22, 21)],
)
@on_ranks(2)
def test_rank_too_high_to_compress_is_told(rank: int, world_size: int, scheme: str, at_rank: int, highest: int) -> None:
    """What counts is what a step sends: one factor of acp-sgd, both of power-sgd."""
    texts = log_of("gradwire", logging.WARNING)
    shapes = [(64, 64), (64, 128), (64,)]
    driver = Driver(schemes.by_name(scheme, rank=at_rank), [torch.zeros(shape) for shape in shapes])
    for _ in range(2):
        driver.reduce([torch.randn(shape) for shape in shapes])
    stats = driver.scheme.stats()
    assert [f"rank={highest} or less compresses some" in text for text in texts] == [True] * bool(highest)
    assert (stats["n_matrices"], stats["n_matrices_whole"]) == ((0, 2) if highest else (1, 1))


@on_ranks(2)
def test_residuals_fade_as_asked_and_beside_momentum(rank: int, world_size: int) -> None:
    kept = []
    for options in ({}, {"feedback_decay": 0.25}):
        driver = Driver(schemes.by_name("acp-sgd", rank=2, **options), [torch.zeros(24, 18)])
        driver.reduce([torch.randn(24, 18, generator=torch.Generator().manual_seed(rank))])
        kept.append(driver.state())
    assert torch.equal(kept[1], kept[0] * 0.25)
    for scheme in ("acp-sgd", "power-sgd"):
        for momentum, adam in ((0.9, False), (0.0, False), (0.9, True)):
            made = schemes.by_name(scheme)
            Training(rank, made, adamw if adam else lambda p, m=momentum: torch.optim.SGD(p, 0.1, m)).close()
            assert made.configuration["feedback_decay"] == (0.5 if scheme == "acp-sgd" and momentum and not adam else 1)
