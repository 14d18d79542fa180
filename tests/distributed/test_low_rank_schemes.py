"""acp-sgd, power-sgd and power-sgd-overlap under DDP: every feature that a user combines them with."""

from __future__ import annotations

import copy
import io
import logging
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import gradwire
from buckets import Driver
from gradwire import schemes
from logs import log_of
from ranks import on_ranks

SCHEMES = ("acp-sgd", "power-sgd", "power-sgd-overlap")


class Net(nn.Module):
    """A convolution, an embedding, tied weights, a parameter without elements and a branch that may go unused."""

    def __init__(self) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(3, 16, 3)
        self.embedding = nn.Embedding(40, 24)
        nn.init.normal_(self.embedding.weight, std=0.2)
        self.hidden = nn.ModuleList(nn.Linear(24, 24) for _ in range(3))
        self.mix = nn.Linear(16, 24)
        self.branch = nn.Linear(24, 24)
        self.out = nn.Linear(24, 40, bias=False)
        self.out.weight = self.embedding.weight
        self.empty = nn.Parameter(torch.empty(0, 4))

    def forward(self, images: torch.Tensor, tokens: torch.Tensor, uses_branch: bool = True) -> torch.Tensor:
        x = self.mix(self.convolution(images).mean((2, 3))) + self.embedding(tokens) + self.empty.sum()
        for layer in self.hidden:
            x = layer(x).tanh()
        if uses_branch:
            x = x + self.branch(x)
        return self.out(x)


def build(
    dtype: torch.dtype | None = None, **ddp_options: Any
) -> tuple[DistributedDataParallel, torch.optim.Optimizer]:
    torch.manual_seed(1)
    ddp = DistributedDataParallel(Net().to(dtype or torch.float32), bucket_cap_mb=0.01, **ddp_options)
    return ddp, torch.optim.SGD(ddp.parameters(), lr=0.02, momentum=0.9)


def loss_of(ddp: nn.Module, rank: int, step: int, uses_branch: bool = True) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1_000 * rank + step)
    dtype = next(ddp.parameters()).dtype
    images = torch.randn(6, 3, 8, 8, generator=generator).to(dtype)
    tokens = torch.randint(40, (6,), generator=generator)
    return nn.functional.cross_entropy(ddp(images, tokens, uses_branch).float(), (tokens + 1) % 40)


def run_steps(ddp: nn.Module, optimizer: torch.optim.Optimizer, rank: int, steps: range) -> list[float]:
    losses = []
    for step in steps:
        optimizer.zero_grad()
        loss = loss_of(ddp, rank, step)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def flat(ddp: nn.Module) -> torch.Tensor:
    return torch.cat([parameter.detach().reshape(-1) for parameter in ddp.parameters()]).clone()


def gradients(ddp: nn.Module) -> torch.Tensor:
    return torch.cat([torch.zeros_like(p).view(-1) if p.grad is None else p.grad.view(-1) for p in ddp.parameters()])


@pytest.mark.parametrize(
    ("scheme", "world_size"), [("acp-sgd", n) for n in (1, 2, 3, 4)] + [(name, 3) for name in SCHEMES[1:]]
)
@on_ranks(timeout_s=170)
def test_parameters_are_identical_on_all_ranks_after_300_steps(rank: int, world_size: int, scheme: str) -> torch.Tensor:
    torch.manual_seed(1)
    ddp = DistributedDataParallel(nn.Sequential(nn.Linear(20, 32), nn.Tanh(), nn.Linear(32, 3)))
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.05, momentum=0.9)
    attachment = gradwire.attach(ddp, optimizer, schemes.by_name(scheme, rank=1, min_compression_rate=1))
    generator = torch.Generator().manual_seed(rank)
    losses = []
    for _ in range(300):
        inputs = torch.randn(8, 20, generator=generator)
        optimizer.zero_grad()
        loss = (ddp(inputs) - inputs[:, :3]).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    stats = attachment.stats()
    attachment.close()
    assert sum(losses[-20:]) < 0.7 * sum(losses[:20])
    assert stats["n_fallbacks"] == 0
    assert stats["ratio"] < (0.6 if world_size > 1 else 1.1)
    return flat(ddp)


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
            ddp, optimizer = build()
            attachment = gradwire.attach(ddp, optimizer, schemes.by_name(scheme, **{"rank": 3, **options}))
            losses = run_steps(ddp, optimizer, rank, range(10))
            assert all(loss == loss for loss in losses)
            results[f"{scheme} {options}"] = flat(ddp)
            stats = attachment.stats()
            assert stats["n_fallbacks"] == 0
            assert stats["bytes_sent"] > 0
            attachment.close()
    packed = results["acp-sgd {'buffer_mb': inf}"]
    # The same sums in other portions: Gloo's order of addition depends on where a buffer is cut, so not bit by bit.
    for name in ("acp-sgd {'overlap': False}", "acp-sgd {'buffer_mb': 0}"):
        assert torch.allclose(results[name], packed, atol=1e-5), name
    return results


@on_ranks(2)
def test_steps_before_start_step_are_those_of_plain(rank: int, world_size: int) -> None:
    parameters = []
    for scheme in (schemes.by_name("acp-sgd", start_step=3), schemes.by_name("plain")):
        ddp, optimizer = build()
        attachment = gradwire.attach(ddp, optimizer, scheme)
        run_steps(ddp, optimizer, rank, range(3))
        parameters.append(flat(ddp))
        run_steps(ddp, optimizer, rank, range(3, 5))
        parameters.append(flat(ddp))
        attachment.close()
    assert torch.equal(parameters[0], parameters[2])
    assert not torch.equal(parameters[1], parameters[3])


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("steps_before", [3, 4])
@on_ranks(2)
def test_resumed_run_continues_bit_by_bit(rank: int, world_size: int, scheme: str, steps_before: int) -> None:
    ddp, optimizer = build()
    attachment = gradwire.attach(ddp, optimizer, schemes.by_name(scheme, rank=3))
    run_steps(ddp, optimizer, rank, range(steps_before))
    model_state = {name: value.clone() for name, value in ddp.module.state_dict().items()}
    optimizer_state = copy.deepcopy(optimizer.state_dict())
    saved = io.BytesIO()
    torch.save(attachment.state_dict(), saved)
    # What goes on: the same object on a model wrapped anew, as DDP's first step has its own bucket layout.
    attachment.close()
    results = []
    for _ in range(2):
        ddp, optimizer = build()
        ddp.module.load_state_dict(model_state)
        optimizer.load_state_dict(copy.deepcopy(optimizer_state))
        attachment = gradwire.attach(ddp, optimizer, schemes.by_name(scheme, rank=3))
        saved.seek(0)
        attachment.load_state_dict(torch.load(saved, weights_only=True))
        saved = io.BytesIO()
        torch.save(attachment.state_dict(), saved)  # loading and saving again loses nothing
        run_steps(ddp, optimizer, rank, range(steps_before, steps_before + 5))
        results.append((flat(ddp), attachment.state_dict()["state"]["residuals"]))
        attachment.close()
    assert torch.equal(results[0][0], results[1][0])
    for name, error in results[0][1].items():
        assert torch.equal(error, results[1][1][name])


@pytest.mark.parametrize("scheme", SCHEMES)
@on_ranks(3)
def test_factors_that_differ_between_ranks_are_named_on_every_rank(rank: int, world_size: int, scheme: str) -> None:
    ddp, optimizer = build()
    attachment = gradwire.attach(ddp, optimizer, scheme)
    run_steps(ddp, optimizer, rank, range(2))
    state = attachment.state_dict()
    if rank == 2:
        state["state"]["factors"]["hidden.0.weight"][0, 0] += 1e-3
    attachment.load_state_dict(state)
    with pytest.raises(gradwire.RankMismatch, match=r"different factors.*rank 2: "):
        run_steps(ddp, optimizer, rank, range(2, 3))


@pytest.mark.parametrize("scheme", SCHEMES)
@on_ranks(2)
def test_zero_gradients_are_zero_means_and_do_no_harm(rank: int, world_size: int, scheme: str) -> None:
    ddp, optimizer = build()
    attachment = gradwire.attach(ddp, optimizer, schemes.by_name(scheme, rank=3))
    for _ in range(3):
        optimizer.zero_grad()
        (loss_of(ddp, rank, 0) * 0.0).backward()
        assert not gradients(ddp).any()
    run_steps(ddp, optimizer, rank, range(4))
    assert gradients(ddp).isfinite().all()
    assert ddp.module.hidden[0].weight.grad.any()
    attachment.close()


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
            ddp, _ = build()
            other: Any = (
                torch.optim.AdamW(ddp.parameters()) if adam else torch.optim.SGD(ddp.parameters(), 0.1, momentum)
            )
            made = schemes.by_name(scheme)
            gradwire.attach(ddp, other, made).close()
            assert made.configuration["feedback_decay"] == (0.5 if scheme == "acp-sgd" and momentum and not adam else 1)
