"""attach(ddp, optimizer): watching, trying, switching, and loops of every kind."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
from auto_cases import Quick, quick
from torch import Tensor, nn

from gradwire.schemes.auto.scheme import Auto
from ranks import on_ranks, run_ranks
from small_training import Training, adamw

THROUGH_ALL = [
    "gcomp:importance=uniform,bits=12",
    "one-bit",
    "terngrad",
    "qsgd",
    "bf16",
    "two-bit",
    "embedded-float:bits=8",
]


def trained(rank: int, n_steps: int, scheme: Any = None, **options: Any) -> Training:
    training = Training(rank, scheme, **options)
    training.take_steps(range(n_steps))
    return training


# ---- watching


@pytest.mark.parametrize("world_size", [1, 2, 3])
@on_ranks()
def test_where_nothing_is_tried_ddp_is_untouched_and_every_step_is_counted(rank: int, world_size: int) -> None:
    alone, watched = trained(rank, 12), trained(rank, 12, Auto(replay=[(0, "plain")]))
    stats = watched.close()
    assert torch.equal(alone.flat(), watched.flat())
    assert not watched.ddp._comm_hooks
    assert (stats["n_steps"], stats["auto"]["scheme"], stats["ratio"]) == (12, "plain", 1.0)


@pytest.mark.parametrize("static_graph", [False, True])
@on_ranks(2)
def test_a_hook_may_come_late(rank: int, world_size: int, static_graph: bool) -> None:
    """The hook comes at step 5 for one compressed step; from then on it does what DDP does."""
    schedule = [(0, "plain"), (5, "gcomp:importance=none"), (6, "plain")]
    auto, options = Auto(fidelity=["gcomp:importance=none"], replay=schedule), {"static_graph": static_graph}
    watched, alone = trained(rank, 12, auto, ddp=options), trained(rank, 12, ddp=options)
    watched.close()
    assert bool((watched.flat() - alone.flat()).abs().max() < 1e-6)
    assert watched.ddp._comm_hooks


@on_ranks(3)
def test_plain_through_a_late_hook_has_the_bits_of_ddp(rank: int, world_size: int) -> None:
    training = trained(rank, 5, Auto(replay=[(0, "plain")]))
    training.attachment._door.register()
    training.take_steps(range(5, 12))
    training.close()
    assert torch.equal(training.flat(), trained(rank, 12).flat())


# ---- switching


def through_all_schemes(rank: int, world_size: int) -> tuple[Tensor, list[Any]]:
    order = ["plain", *THROUGH_ALL]
    schedule = [(step, order[step // 3 % len(order)]) for step in range(0, 200, 3)]
    training = trained(rank, 48, Auto(fidelity=THROUGH_ALL, replay=schedule))
    return training.flat(), training.close()["auto"]["schedule"]


def test_ranks_stay_equal_through_every_scheme_and_replay_repeats_to_the_bit() -> None:
    first, second = run_ranks(through_all_schemes, 3), run_ranks(through_all_schemes, 3)
    assert all(torch.equal(first[0][0], parameters) for parameters, _ in [*first, *second])
    assert [name for _, name in first[0][1]][:8] == ["plain", *THROUGH_ALL]


@on_ranks(3)
def test_ranks_with_clocks_that_differ_decide_alike_and_end_with_the_fastest(
    rank: int, world_size: int
) -> tuple[Tensor, Any, Any]:
    gains = {"one-bit": 3.0, "qsgd": 1.5, "bf16": 0.5}
    training = trained(rank, 150, Quick(rank, gains, fidelity=list(gains)))
    auto = training.close()["auto"]
    assert auto["scheme"] == "one-bit"
    assert {"try", "switch"} <= {decision["kind"] for decision in auto["decisions"]}
    assert all("ms a step" in decision["why"] for decision in auto["decisions"])
    return training.flat(), auto["schedule"], auto["decisions"]


@on_ranks(2)
def test_under_adam_error_feedback_waits_a_hundred_steps(rank: int, world_size: int) -> None:
    first, second, *_ = trained(rank, 130, quick(rank), optimizer=adamw).close()["auto"]["schedule"]
    assert first == (0, "plain")
    assert second[0] >= 100
    assert second[1] == "one-bit"


# ---- residuals


@on_ranks(2)
def test_what_one_scheme_has_not_sent_the_next_one_does(rank: int, world_size: int) -> None:
    """The sum of what was applied and what is left is the sum of all gradients, over twenty changes of scheme."""
    order = ["one-bit", "plain", "two-bit", "one-bit", "two-bit", "plain"]
    auto = Auto(fidelity=["one-bit", "two-bit"], replay=[(s, order[s // 4 % len(order)]) for s in range(0, 84, 4)])
    torch.manual_seed(0)
    training = Training(
        rank,
        auto,
        lambda p: torch.optim.SGD(p, lr=0.0),
        lambda: nn.Linear(64, 32, bias=False),
        ddp={"bucket_cap_mb": 25},
    )
    generator = torch.Generator().manual_seed(rank)
    given, applied = (torch.zeros(32, 64, dtype=torch.float64) for _ in range(2))
    for _ in range(84):
        inputs, weights = (torch.randn(4, n, generator=generator) for n in (64, 32))
        training.optimizer.zero_grad(set_to_none=True)
        (training.ddp(inputs) * weights).sum().backward()
        given += (weights.T @ inputs).double()
        applied += training.ddp.module.weight.grad.double()
        training.optimizer.step()
    communicator, scheme = training.attachment.communicator, training.attachment.scheme
    communicator.submit(scheme.hand_over).wait()  # all that was not sent, by the schemes before too
    left = communicator.submit(scheme.session.feedback.take).wait()
    training.close()
    rest = next(iter(left.values())).view(32, 64).double()
    total = given - rest
    torch.distributed.all_reduce(total)
    assert float((total / world_size - applied).abs().max()) < 1e-3
    assert float(rest.abs().max()) > 1e-2


# ---- in loops of every kind


@on_ranks(2)
def test_accumulation_without_synchronising_is_one_step(rank: int, world_size: int) -> None:
    alone, watched = Training(rank), Training(rank, Auto(replay=[(0, "plain")]))
    for training in (alone, watched):
        for step in range(5):
            training.optimizer.zero_grad()
            for micro in range(3):
                with contextlib.nullcontext() if micro == 2 else training.ddp.no_sync():
                    training.loss(training.ddp, rank, 3 * step + micro).backward()
            training.optimizer.step()
    assert watched.close()["n_steps"] == 5
    assert torch.equal(alone.flat(), watched.flat())


@on_ranks(2)
def test_a_rank_that_evaluates_alone_counts_no_steps(rank: int, world_size: int) -> None:
    training = Training(rank, quick(rank))
    for step in range(40):
        training.take_steps([step])
        if rank == 0 and step % 3 == 0:
            with torch.no_grad():
                training.ddp.module(torch.zeros(1, 20))
            training.ddp.module(torch.zeros(1, 20))  # with gradients that nobody asks for
    assert training.close()["n_steps"] == 40


@pytest.mark.parametrize("gain", [3.0, 0.5])
@on_ranks(2)
def test_uneven_input_keeps_what_was_at_work_and_ranks_equal(
    rank: int, world_size: int, gain: float
) -> tuple[int, Tensor]:
    # DDP gives parameters to those that ran out, and no momentum.
    training = trained(rank, 40, quick(rank, gain), optimizer=lambda p: torch.optim.SGD(p, lr=0.1))
    for _ in range(3):
        with training.ddp.join():
            training.take_steps(range(6 + 2 * rank))
    training.take_steps(range(4))
    training.attachment.switch("gcomp")
    training.take_steps(range(4))
    step = training.attachment.step
    training.close()
    return step, training.flat()


@on_ranks(2)
def test_a_resumed_run_begins_with_the_scheme_and_the_residuals_that_it_had(rank: int, world_size: int) -> None:
    def residuals_of(training: Training) -> dict[str, Tensor]:
        session = training.attachment.session
        residuals: dict[str, Tensor] = session.feedback.state_by_name(session.slots)
        return residuals

    training = trained(rank, 60, quick(rank))
    saved, kept = training.state(), residuals_of(training)
    training.close()
    resumed = Training(rank, quick(rank)).load(saved)
    loaded = residuals_of(resumed)
    assert kept
    assert all(torch.equal(kept[name], loaded[name]) for name in kept)
    resumed.take_steps([60])
    assert resumed.stats()["auto"]["schedule"][0][1] == "one-bit"
    resumed.take_steps(range(61, 81))
    assert resumed.close()["auto"]["scheme"] == "one-bit"


@on_ranks(2)
def test_two_attachments_decide_each_for_itself(rank: int, world_size: int) -> None:
    trainings = [Training(rank, quick(rank, gain)) for gain in (3.0, 0.5)]
    for step in range(50):
        for training in trainings:
            training.take_steps([step])
    assert [training.close()["auto"]["scheme"] for training in trainings] == ["one-bit", "plain"]
