"""What goes wrong ends in an error with its own type on every rank, within the time limit."""

import contextlib
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import gradwire
from gradwire.errors import GradwireError, InvalidArgument, PeerLost, RankMismatch, Unsupported
from gradwire.schemes.aqgb.pacing import Pacing
from gradwire.schemes.aqgb.scheme import Aqgb, Broadcast
from gradwire.stepping.blocks import find_blocks
from ranks import on_ranks, patience

# Of a peer's silence; longer where the machine is so busy that a healthy one is silent for that long.
TIMEOUT_S = max(3.0, patience())


def make(**options: Any) -> tuple[Any, Any]:
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 2))
    ddp = DistributedDataParallel(model, **options)
    return ddp, torch.optim.SGD(ddp.parameters(), lr=0.1)


def attach(scheme: Any, **options: Any) -> tuple[Any, Any, Any]:
    ddp, optimizer = make()
    return ddp, optimizer, gradwire.attach(ddp, optimizer, scheme, timeout_s=TIMEOUT_S, **options)


def step(ddp: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    ddp(torch.ones(3, 8)).sum().backward()
    optimizer.step()


# ---- misuse, one rank: refused before anything is lost


def clip(ddp: Any, optimizer: Any) -> None:
    ddp(torch.ones(3, 8)).sum().backward()
    nn.utils.clip_grad_norm_(ddp.parameters(), 1.0)
    optimizer.step()


def replace_gradient(ddp: Any, optimizer: Any) -> None:
    ddp(torch.ones(3, 8)).sum().backward()
    for parameter in ddp.parameters():
        parameter.grad = parameter.grad * 0.5
    optimizer.step()


def step_with_closure(ddp: Any, optimizer: Any) -> None:
    ddp(torch.ones(3, 8)).sum().backward()
    optimizer.step(lambda: 0.0)


def step_twice(ddp: Any, optimizer: Any) -> None:
    ddp(torch.ones(3, 8)).sum().backward()
    optimizer.step()
    optimizer.step()


def step_without_reduction(ddp: Any, optimizer: Any) -> None:
    with ddp.no_sync():
        ddp(torch.ones(3, 8)).sum().backward()
    optimizer.step()


def accumulate_without_no_sync(ddp: Any, optimizer: Any) -> None:
    for _ in range(2):
        ddp(torch.ones(3, 8)).sum().backward()
    optimizer.step()


def unscale(ddp: Any, optimizer: Any) -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    scaler.scale(ddp(torch.ones(3, 8)).sum()).backward()
    scaler.unscale_(optimizer)
    scaler.step(optimizer)


def scale_without_telling(ddp: Any, optimizer: Any) -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    scaler.scale(ddp(torch.ones(3, 8)).sum()).backward()
    scaler.step(optimizer)


def join(ddp: Any, optimizer: Any) -> None:
    with ddp.join():
        step(ddp, optimizer)


MISUSES: dict[Callable[[Any, Any], None], str] = {
    clip: "max_grad_norm",
    replace_gradient: "max_grad_norm",
    step_with_closure: "without a closure",
    step_twice: "once for each reduction",
    step_without_reduction: "once for each reduction",
    accumulate_without_no_sync: "no_sync",
    unscale: "max_grad_norm",
    scale_without_telling: "scaler=scaler",
    join: "ddp.join",
}


@on_ranks(1)
def test_what_would_go_lost_is_refused(rank: int, world_size: int) -> None:
    for misuse, told in MISUSES.items():
        ddp, optimizer, attachment = attach(Aqgb())
        step(ddp, optimizer)
        optimizer.zero_grad()
        with pytest.raises(Unsupported, match=told):
            misuse(ddp, optimizer)
        attachment.close()
        hooks = "train" in vars(ddp), "step" in vars(optimizer), bool(ddp.module[0]._forward_pre_hooks)
        assert not any(hooks), f"{misuse.__name__}: hooks are left behind"
    ddp, optimizer = make()
    half = torch.optim.SGD(ddp.module[0].parameters(), lr=0.1)
    replaced = torch.optim.SGD(ddp.parameters(), lr=0.1)
    replaced.step = lambda: None
    for model, stepping, scheme in (
        (torch.compile(ddp), optimizer, Aqgb()),
        (ddp, half, "aqgb"),
        (ddp, replaced, "aqgb"),
        (ddp, optimizer, Aqgb(blocks=[["nowhere"]])),
    ):
        with pytest.raises((Unsupported, InvalidArgument)):
            gradwire.attach(model, stepping, scheme)
    with pytest.raises((Unsupported, InvalidArgument)):
        gradwire.HookState("aqgb")


def test_blocks_are_of_about_equal_size_and_cover_everything_once():
    model = nn.Sequential(*[nn.Linear(400, 400) for _ in range(10)])
    blocks = find_blocks(model, model.parameters(), 4)
    assert len(blocks) == 4
    assert [p for block in blocks for p in block.parameters] == list(model.parameters())
    assert max(block.n_elements for block in blocks) <= 3 * 400 * 401
    assert len(find_blocks(nn.Linear(3, 3), nn.Linear(3, 3).parameters(), 4)) <= 1
    with pytest.raises(InvalidArgument, match="name it once"):
        find_blocks(model, model.parameters(), [["0"], ["0"]])


# ---- between ranks


class Jumping:
    """A clock that jumps back an hour."""

    def __init__(self) -> None:
        self.n_calls = 0

    def __call__(self) -> float:
        self.n_calls += 1
        return time.perf_counter() - (3_600 if self.n_calls > 40 else 0)


class StopsBetweenStages(Aqgb):
    """Sends the first stage of its third step, and never the end."""

    def _make_pacing(self, *arguments: Any) -> Pacing:
        pacing = super()._make_pacing(*arguments)

        def more_bits(block: int, sent_bits: int, extra_bytes: int = 0) -> int:
            if extra_bytes:
                return 1  # something will follow ...
            if self._open[block].step == 2:
                time.sleep(3 * TIMEOUT_S)  # ... some day
            return 0

        pacing.more_bits = more_bits  # type: ignore[method-assign]
        return pacing


CASES: dict[str, tuple[Callable[[int], Any], tuple[type[GradwireError], ...]]] = {
    "options": (lambda rank: Broadcast(4 + rank), (RankMismatch,)),
    "block order": (lambda rank: Aqgb(blocks=[["0"], ["2"]] if rank else [["2"], ["0"]]), (RankMismatch,)),
    "schemes": (lambda rank: Aqgb() if rank else Broadcast(), (RankMismatch,)),
    "another scheme": (lambda rank: Aqgb() if rank else "plain", (RankMismatch,)),
    "a scheme that sends at once": (lambda rank: "gcomp" if rank else Broadcast(topology="ring"), (RankMismatch,)),
    "clock": (lambda rank: Aqgb(clock=Jumping()) if rank else Aqgb(), (InvalidArgument,)),
    "formats": (lambda rank: Broadcast(format=1 + rank), (RankMismatch,)),
    "topologies": (lambda rank: Broadcast(topology="owners" if rank else "fan-out"), (RankMismatch,)),
    "stops, owners": (
        lambda rank: StopsBetweenStages(max_contention=1, topology="owners") if rank else Aqgb(topology="owners"),
        (PeerLost,),
    ),
    "stops": (lambda rank: StopsBetweenStages(max_contention=1) if rank else Aqgb(), (PeerLost,)),
}


@on_ranks(2)
def test_every_rank_gets_the_same_typed_error_in_time(rank: int, world_size: int) -> None:
    for name, (scheme, expected) in CASES.items():
        started = time.monotonic()

        def take_steps(scheme: Callable[[int], Any] = scheme) -> None:
            ddp, optimizer, attachment = attach(scheme(rank))
            for _ in range(30):
                step(ddp, optimizer)
            attachment.flush()

        with pytest.raises(expected):
            take_steps()
        after_s = time.monotonic() - started
        assert after_s < 3 * max(TIMEOUT_S, 3 * patience()) or (rank == 1 and "stops" in name), name  # it sleeps
        time.sleep(0.2)  # both have read the note


@pytest.mark.parametrize("scheme", ["aqgb", "broadcast"])
@on_ranks(2)
def test_a_last_step_that_a_peer_does_not_take_is_not_lost_without_a_word(
    rank: int, world_size: int, scheme: str
) -> None:
    """Rank 1 ends one step before rank 0, whose last step is under way when it closes."""
    ddp, optimizer, attachment = attach(scheme)
    for _ in range(4 - rank):
        step(ddp, optimizer)
    with contextlib.nullcontext() if rank else pytest.raises(PeerLost, match="rank 1"):
        attachment.close()


@on_ranks(2)
def test_what_a_step_has_raised_is_not_raised_again_by_close(rank: int, world_size: int) -> None:
    ddp, optimizer, attachment = attach(StopsBetweenStages(max_contention=1) if rank else Aqgb())

    def take_steps() -> None:
        for _ in range(30):
            step(ddp, optimizer)

    with pytest.raises(GradwireError):
        take_steps()
    attachment.close()
