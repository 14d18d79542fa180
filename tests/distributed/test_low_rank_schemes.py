"""acp-sgd, power-sgd and power-sgd-overlap under DDP: their options, states, factors, and what they say."""

import copy
import logging
from typing import Any

import pytest
import torch
from torch import nn

import gradwire
from buckets import Driver
from gradwire import schemes
from logs import log_of
from ranks import assert_alike, on_ranks
from small_training import Training, adamw

SCHEMES = ("acp-sgd", "power-sgd", "power-sgd-overlap")


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
    made = schemes.by_name(scheme, **{"rank": 3, **options})
    return Training(
        of, made, lambda p: torch.optim.SGD(p, lr=0.02, momentum=0.9), model, loss_of, {"bucket_cap_mb": 0.01}
    )


OPTIONS: list[dict[str, Any]] = [
    {"overlap": False},
    {"buffer_mb": 0},
    {"buffer_mb": float("inf")},
    {"factor_dtype": "bfloat16"},
    {"reuse": False},
    {"error_feedback": False},
    {"rank": 10_000, "min_compression_rate": 0},
]


@on_ranks(3)
def test_ranks_agree_with_every_option_and_overlap_and_fusion_change_no_result(
    rank: int, world_size: int
) -> dict[str, torch.Tensor]:
    results = {}
    for scheme in SCHEMES:
        for options in OPTIONS:
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
    training, results = start(rank, scheme), []
    training.take_steps(range(steps_before))
    saved = training.state()
    training.close()  # what goes on is wrapped anew, as DDP's first step has its own bucket layout
    for _ in range(2):
        resumed = start(rank, scheme).load(saved)
        saved = resumed.state()  # loading and saving again loses nothing
        resumed.take_steps(range(steps_before, steps_before + 5))
        results.append((resumed.flat(), resumed.state()[-1]["state"]["residuals"]))
        resumed.close()
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
    training.close()


@on_ranks(2)
def test_state_of_another_rank_scheme_or_model_is_refused(rank: int, world_size: int) -> None:
    training = start(rank, "acp-sgd").after(range(2))
    saved = training.attachment.state_dict()
    training.close()
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
        other.close()


@pytest.mark.parametrize(
    ("scheme", "at_rank", "highest"),
    [("acp-sgd", 42, 0), ("acp-sgd", 48, 42), ("power-sgd", 21, 0), ("power-sgd", 22, 21)],
)
@on_ranks(2)
def test_rank_that_compresses_nothing_is_told_with_one_that_does(
    rank: int, world_size: int, scheme: str, at_rank: int, highest: int
) -> None:
    """What counts is what a step sends: one factor of acp-sgd, both of power-sgd."""
    texts = log_of("gradwire", logging.WARNING)
    shapes = [(64, 64), (64, 128), (64,)]
    driver = Driver(schemes.by_name(scheme, rank=at_rank), [torch.zeros(shape) for shape in shapes])
    for _ in range(2):
        driver.reduce([torch.randn(shape) for shape in shapes])
    stats = driver.scheme.stats()
    driver.close()
    assert [f"rank={highest} or less compresses some" in text for text in texts] == [True] * bool(highest)
    assert (stats["n_matrices"], stats["n_matrices_whole"]) == ((0, 2) if highest else (1, 1))


@on_ranks(2)
def test_residuals_fade_as_asked_and_beside_momentum(rank: int, world_size: int) -> None:
    kept = []
    for options in ({}, {"feedback_decay": 0.25}):
        driver = Driver(schemes.by_name("acp-sgd", rank=2, **options), [torch.zeros(24, 18)])
        driver.reduce([torch.randn(24, 18, generator=torch.Generator().manual_seed(rank))])
        kept.append(driver.state())
        driver.close()
    assert torch.equal(kept[1], kept[0] * 0.25)
    for scheme in ("acp-sgd", "power-sgd"):
        for momentum, adam in ((0.9, False), (0.0, False), (0.9, True)):
            made = schemes.by_name(scheme)
            Training(rank, made, adamw if adam else lambda p, m=momentum: torch.optim.SGD(p, 0.1, m)).close()
            assert made.configuration["feedback_decay"] == (0.5 if scheme == "acp-sgd" and momentum and not adam else 1)
