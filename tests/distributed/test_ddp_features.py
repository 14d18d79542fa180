"""Every feature of DDP works with every scheme: the ranks agree, and lossless schemes train as DDP alone does."""

from __future__ import annotations

import contextlib
import copy
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from ddp_cases import (
    N_STEPS,
    adamw,
    attach,
    batches,
    build_model,
    check_case,
    finish,
    sgd,
    take_step,
    train,
    wrap,
)
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import gradwire
from gradwire import schemes
from gradwire.schemes import Scheme
from ranks import on_ranks, run_ranks


def rebuild_buckets(rank: int, scheme: Scheme | None) -> Tensor:
    def count(attachment: Any) -> None:
        counts = [step.n_buckets for step in attachment.recorder.steps]
        assert counts[0] == 1 < counts[1] == counts[-1], counts  # one bucket for all, then several

    return train(rank, scheme, wrap(build_model()), look_at=count)


def view_buckets(rank: int, scheme: Scheme | None) -> Tensor:
    return train(rank, scheme, wrap(build_model(), gradient_as_bucket_view=True))


def keep_graph_static(rank: int, scheme: Scheme | None) -> Tensor:
    return train(rank, scheme, wrap(build_model(), static_graph=True))


class Branches(nn.Module):
    """`left` or `right` by the batch, so by rank and step; `spare` is never used."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.trunk, self.left, self.right, self.spare = (nn.Linear(20, 20) for _ in range(4))

    def forward(self, batch: Tensor) -> Tensor:
        branch = self.left if float(batch[0, 0]) > 0 else self.right
        return branch(self.trunk(batch).relu())


def leave_parameters_unused(rank: int, scheme: Scheme | None) -> Tensor:
    ddp = wrap(Branches(), find_unused_parameters=True)
    result = train(rank, scheme, ddp)
    assert ddp.module.spare.weight.grad is None
    return result


def accumulate_without_sync(rank: int, scheme: Scheme | None) -> Tensor:
    ddp = wrap(build_model())
    optimizer = adamw(ddp)
    attachment = attach(ddp, optimizer, scheme)
    for step, batch in enumerate(batches(rank, 2 * N_STEPS)):
        with ddp.no_sync() if step % 2 == 0 else contextlib.nullcontext():
            ddp(batch).square().mean().backward()
        if step % 2:
            optimizer.step()
            optimizer.zero_grad()
    assert attachment is None or attachment.step == N_STEPS
    return finish(ddp, attachment)


def join_with_uneven_inputs(rank: int, scheme: Scheme | None) -> Tensor:
    ddp = wrap(build_model())
    optimizer = sgd(ddp)
    attachment = attach(ddp, optimizer, scheme)
    with ddp.join():
        for batch in batches(rank, N_STEPS + 2 * rank):
            take_step(ddp, optimizer, batch)
    # Rank 0 shadowed the last two; under auto nobody decides while ranks may run out, and plain steps are DDP's own.
    assert attachment is None or attachment.step == N_STEPS + 2 or attachment.scheme.name == "auto"
    return finish(ddp, attachment)  # DDP broadcasts the parameters of the last rank to those that left early


class Oddments(nn.Module):
    """Parameters of size 0, a frozen one, a tied one, and one in another memory order."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.first, self.second = nn.Linear(20, 20), nn.Linear(20, 20)
        self.second.weight = self.first.weight
        self.empty = nn.Parameter(torch.empty(0, 7))
        self.nothing = nn.Parameter(torch.empty(0))
        self.frozen = nn.Parameter(torch.ones(20), requires_grad=False)
        self.turned = nn.Parameter(torch.randn(20, 9).t())

    def forward(self, batch: Tensor) -> Tensor:
        hidden = self.second(self.first(batch).relu()) * self.frozen
        return hidden @ self.turned.t() + self.empty.sum() + self.nothing.sum()


def train_odd_parameters(rank: int, scheme: Scheme | None) -> Tensor:
    ddp = wrap(Oddments())
    result = train(rank, scheme, ddp)
    assert torch.equal(ddp.module.frozen, torch.ones(20))
    return result


def clip_after_backward(rank: int, scheme: Scheme | None) -> Tensor:
    def step(ddp: nn.Module, optimizer: torch.optim.Optimizer, batch: Tensor) -> None:
        optimizer.zero_grad()
        (10 * ddp(batch)).square().mean().backward()
        assert torch.nn.utils.clip_grad_norm_(ddp.parameters(), 0.5) > 0.5
        optimizer.step()

    return train(rank, scheme, wrap(build_model()), sgd, step)


class Recomputed(nn.Module):
    """The hidden layers run again in the backward pass, in a backward pass of their own (re-entrant)."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = build_model()

    def forward(self, batch: Tensor) -> Tensor:
        hidden = self.layers[0](batch)
        return self.layers[4](checkpoint(self.layers[1:4], hidden, use_reentrant=True))


def recompute_activations(rank: int, scheme: Scheme | None) -> Tensor:
    return train(rank, scheme, wrap(Recomputed()))


def compile_the_model(rank: int, scheme: Scheme | None) -> Tensor:
    # torch.compile cuts the graph at buckets, none below DDP's first of 1 MB
    return train(rank, scheme, torch.compile(wrap(build_model(), bucket_cap_mb=1), backend="aot_eager"))


def register_the_hook_alone(rank: int, scheme: Scheme | None) -> Tensor:
    ddp = wrap(build_model())
    optimizer = adamw(ddp)
    module = ddp if scheme and scheme.name == "auto" else None  # whose steps it times, from the second one on
    state = gradwire.HookState(scheme, module, optimizer=optimizer, timeout_s=100) if scheme else None
    if state:
        ddp.register_comm_hook(state, gradwire.ddp_hook)
    for batch in batches(rank):
        take_step(ddp, optimizer, batch)
    if state:
        assert state.recorder.totals()["n_steps"] == N_STEPS - (module is not None)
        state.close()
    return finish(ddp, None)


def change_the_optimizer_on_the_way(rank: int, scheme: Scheme | None) -> Tensor:
    """Another learning rate, and parameters that join the optimizer later: both are read at every step."""
    ddp = wrap(build_model())
    optimizer = torch.optim.AdamW(ddp.module[:4].parameters(), lr=1e-3)
    attachment = attach(ddp, optimizer, scheme)
    for step, batch in enumerate(batches(rank, N_STEPS + 3)):
        if step == 2:
            optimizer.param_groups[0].update(lr=3e-3, weight_decay=0.1, betas=(0.8, 0.99))
        if step == 3:
            optimizer.add_param_group({"params": list(ddp.module[4].parameters()), "lr": 1e-2})
        take_step(ddp, optimizer, batch)
    return finish(ddp, attachment)


def go_on_after_closing(rank: int, scheme: Scheme | None) -> Tensor:
    """After close(), DDP's own all-reduce, bit by bit; then a new attachment through the same door."""
    ddp, alone = wrap(build_model()), wrap(build_model())
    optimizer, optimizer_alone = sgd(ddp), sgd(alone)
    attachment = attach(ddp, optimizer, scheme)
    for batch in batches(rank, 3):
        take_step(ddp, optimizer, batch)
        take_step(alone, optimizer_alone, batch)
    if attachment:
        attachment.close()
        attachment.close()
        assert attachment.stats()["n_steps"] == 3
        with pytest.raises(gradwire.InvalidArgument, match="closed"):
            attachment.state_dict()
        with pytest.raises(gradwire.InvalidArgument, match="closed"):
            attachment.switch("plain")
        alone.load_state_dict(ddp.state_dict())
        optimizer_alone.load_state_dict(copy.deepcopy(optimizer.state_dict()))  # torch shares the tensors
    for batch in batches(rank, 3):
        take_step(ddp, optimizer, batch)
        take_step(alone, optimizer_alone, batch)
    for mine, theirs in zip(ddp.parameters(), alone.parameters(), strict=True):
        assert torch.equal(mine, theirs)
    again = attach(ddp, optimizer, scheme)  # the same scheme object, free again
    for batch in batches(rank, 4):
        take_step(ddp, optimizer, batch)
    return finish(ddp, again)


FEATURES: list[Callable[[int, Scheme | None], Tensor]] = [
    rebuild_buckets,
    view_buckets,
    keep_graph_static,
    leave_parameters_unused,
    accumulate_without_sync,
    join_with_uneven_inputs,
    train_odd_parameters,
    clip_after_backward,
    recompute_activations,
    compile_the_model,
    register_the_hook_alone,
    change_the_optimizer_on_the_way,
    go_on_after_closing,
]


@pytest.mark.parametrize("feature", FEATURES, ids=lambda feature: feature.__name__)
def test_feature_works_with_every_scheme(feature: Callable[[int, Scheme | None], Tensor]) -> None:
    run_ranks(check_case, 2, feature, timeout_s=120)


@on_ranks(2)
def test_accumulation_under_auto_that_stays_plain_has_the_bits_of_ddp(rank: int, world_size: int) -> None:
    watched = accumulate_without_sync(rank, schemes.by_name("auto", replay=[(0, "plain")]))
    assert torch.equal(watched, accumulate_without_sync(rank, None))


@on_ranks(2)
def test_join_that_changes_the_divisor_is_refused(rank: int, world_size: int) -> None:
    ddp = wrap(build_model())
    optimizer = sgd(ddp)
    attachment = gradwire.attach(ddp, optimizer, "plain", timeout_s=100)
    with (
        pytest.raises(gradwire.Unsupported, match="divide_by_initial_world_size"),
        ddp.join(divide_by_initial_world_size=False),
    ):
        take_step(ddp, optimizer, next(batches(rank)))
    attachment.close()


# ---- Mixed precision in all its forms works with every scheme: autocast, GradScaler, 16-bit and mixed parameters


def train_with_autocast(rank: int, scheme: Scheme | None) -> Tensor:
    def step(ddp: nn.Module, optimizer: torch.optim.Optimizer, batch: Tensor) -> None:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = ddp(batch).float().square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    return train(rank, scheme, wrap(build_model()), step=step)


def train_with_scaler(rank: int, scheme: Scheme | None) -> Tensor:
    """An Inf on one rank in step 1: the scaler skips that step on all ranks, and halves its scale."""
    ddp = wrap(build_model())
    optimizer = sgd(ddp)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**14)
    attachment = attach(ddp, optimizer, scheme, scaler=scaler)
    drifts = scheme is not None and scheme.name == "periodic"
    for step, batch in enumerate(batches(rank)):
        optimizer.zero_grad()
        loss = ddp(batch).square().mean()
        scaler.scale(loss * float("inf") if (rank, step) == (1, 1) and not drifts else loss).backward()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(ddp.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
    assert scaler.get_scale() == (2.0**14 if drifts else 2.0**13)
    return finish(ddp, attachment)


def train_in(dtype: torch.dtype, rank: int, scheme: Scheme | None) -> Tensor:
    def step(ddp: nn.Module, optimizer: torch.optim.Optimizer, batch: Tensor) -> None:
        take_step(ddp, optimizer, batch.to(dtype))

    return train(rank, scheme, wrap(build_model().to(dtype)), sgd, step)


class Mixed(nn.Module):
    """Three dtypes in one model: DDP makes buckets for each."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.wide, self.short, self.narrow = nn.Linear(20, 20), nn.Linear(20, 20).bfloat16(), nn.Linear(20, 20).half()

    def forward(self, batch: Tensor) -> Tensor:
        hidden = self.short(self.wide(batch).bfloat16()).relu()
        return self.narrow(hidden.half()).float()


def train_mixed_dtypes(rank: int, scheme: Scheme | None) -> Tensor:
    def count(attachment: Any) -> None:
        assert min(step.n_buckets for step in attachment.recorder.steps) >= 3

    return train(rank, scheme, wrap(Mixed()), sgd, look_at=count)


# A unit in the last place of bfloat16 is 2^16 of float32's, of float16 2^13: near-lossless means as much less there.
CASES: dict[str, tuple[Callable[[int, Scheme | None], Tensor], float]] = {
    # The activations' rounding to bfloat16 magnifies a difference in float32's last place.
    "autocast": (train_with_autocast, 100),
    "scaler": (train_with_scaler, 1),
    "bfloat16": (functools.partial(train_in, torch.bfloat16), 2**14),
    "float16": (functools.partial(train_in, torch.float16), 2**12),
    "mixed": (train_mixed_dtypes, 2**14),
}


@pytest.mark.parametrize("case", CASES)
@on_ranks(2)
def test_dtype_works_with_every_scheme(rank: int, world_size: int, case: str) -> None:
    check_case(rank, world_size, *CASES[case])
