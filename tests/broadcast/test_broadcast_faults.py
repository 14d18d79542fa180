"""What goes wrong ends in an error with its own type on every rank, within the time limit."""

import contextlib
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

import gradwire
from gradwire.errors import GradwireError, InvalidArgument, PeerLost, RankMismatch, Unsupported
from gradwire.schemes.aqgb.pacing import Pacing
from gradwire.schemes.aqgb.scheme import Aqgb, Broadcast
from gradwire.stepping.blocks import find_blocks
from ranks import on_ranks, patience
from small_training import Training, small_layers

# Of a peer's silence; longer where the machine is so busy that a healthy one is silent for that long.
TIMEOUT_S = max(3.0, patience())


def start(rank: int, scheme: Any) -> Training:
    return Training(rank, scheme, model=small_layers, timeout_s=TIMEOUT_S)


def clip(training: Training) -> None:
    training.backward(1)
    nn.utils.clip_grad_norm_(training.ddp.parameters(), 1.0)
    training.optimizer.step()


def replace_gradient(training: Training) -> None:
    training.backward(1)
    for parameter in training.ddp.parameters():
        parameter.grad = parameter.grad * 0.5
    training.optimizer.step()


def step_with_closure(training: Training) -> None:
    training.backward(1)
    training.optimizer.step(lambda: 0.0)


def step_twice(training: Training) -> None:
    training.take_steps([1])
    training.optimizer.step()


def step_without_reduction(training: Training) -> None:
    with training.ddp.no_sync():
        training.take_steps([1])


def accumulate_without_no_sync(training: Training) -> None:
    for step in (1, 2):
        training.loss(training.ddp, training.rank, step).backward()
    training.optimizer.step()


def scale_without_telling(training: Training, unscales: bool = False) -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    scaler.scale(training.loss(training.ddp, training.rank, 1)).backward()
    if unscales:
        scaler.unscale_(training.optimizer)
    scaler.step(training.optimizer)


def join(training: Training) -> None:
    with training.ddp.join():
        training.take_steps([1])


MISUSES: dict[Callable[[Training], None], str] = {
    clip: "max_grad_norm", replace_gradient: "max_grad_norm", step_with_closure: "without a closure",
    step_twice: "once for each reduction", step_without_reduction: "once for each reduction",
    accumulate_without_no_sync: "no_sync", partial(scale_without_telling, unscales=True): "max_grad_norm",
    scale_without_telling: "scaler=scaler", join: "ddp.join",
}  # fmt: skip


@on_ranks(1)
def test_what_would_go_lost_is_refused(rank: int, world_size: int) -> None:
    for misuse, told in MISUSES.items():
        training = start(rank, Aqgb())
        ddp, optimizer = training.ddp, training.optimizer
        training.take_steps([0])
        optimizer.zero_grad()
        with pytest.raises(Unsupported, match=told):
            misuse(training)
        training.attachment.close()
        hooks = "train" in vars(ddp), "step" in vars(optimizer), bool(ddp.module[0]._forward_pre_hooks)
        assert not any(hooks), f"{misuse}: hooks are left behind"
    training = Training(rank, model=small_layers)
    ddp, optimizer = training.ddp, training.optimizer
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
            training = start(rank, scheme(rank))
            training.take_steps(range(30))
            training.attachment.flush()

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
    training = start(rank, scheme)
    training.take_steps(range(4 - rank))
    with contextlib.nullcontext() if rank else pytest.raises(PeerLost, match="rank 1"):
        training.attachment.close()


@on_ranks(2)
def test_what_a_step_has_raised_is_not_raised_again_by_close(rank: int, world_size: int) -> None:
    training = start(rank, StopsBetweenStages(max_contention=1) if rank else Aqgb())
    with pytest.raises(GradwireError):
        training.take_steps(range(30))
    training.attachment.close()
