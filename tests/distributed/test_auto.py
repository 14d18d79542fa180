"""attach(ddp, optimizer): watching, trying, switching, and models and loops of every kind, odd ones as under DDP."""

import math
import time
from collections.abc import Callable
from typing import Any
from unittest.mock import Mock, patch

import pytest
import torch
from auto_cases import Quick, quick
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel

import gradwire
from gradwire.errors import GradwireError, PeerLost, RankMismatch
from gradwire.schemes.auto.scheme import Auto
from gradwire.schemes.auto.turns import Polls, Turns, Vote
from gradwire.telemetry.stopwatch import StepClock
from ranks import on_ranks, patience, run_ranks
from small_training import Training, adamw

UNIFORM = "gcomp:importance=uniform,bits=12"
THROUGH_ALL = [UNIFORM, "one-bit", "terngrad", "qsgd", "bf16", "two-bit", "embedded-float:bits=8"]


def trained(rank: int, n_steps: int, scheme: Any = None, **options: Any) -> Training:
    return Training(rank, scheme, **options).after(range(n_steps))


def test_a_budget_is_rounded_up_to_thousandths() -> None:
    assert [Auto(budget=budget)._budget_permille for budget in (0, 0.001, 0.001001, 0.0999)] == [0, 1, 2, 100]


@pytest.mark.parametrize("world_size", [1, 2, 3])
@on_ranks()
def test_where_nothing_is_tried_ddp_is_untouched_and_every_step_is_counted(rank: int, world_size: int) -> None:
    alone = trained(rank, 60).flat()
    for auto in (Auto(replay=[(0, "plain")]), Quick(rank, {"one-bit": 3.0}, budget=0)):
        watched = trained(rank, 60, auto)
        stats = watched.close()
        assert torch.equal(alone, watched.flat())
        assert not watched.ddp._comm_hooks
        assert (stats["n_steps"], stats["auto"]["scheme"], stats["ratio"]) == (60, "plain", 1.0)
        assert (stats["auto"]["schedule"], stats["auto"]["decisions"]) == ([(0, "plain")], [])


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
    training.attachment._register()
    training.take_steps(range(5, 12))
    training.close()
    assert torch.equal(training.flat(), trained(rank, 12).flat())


@on_ranks(3)
def test_ranks_stay_equal_through_every_scheme_and_replay_repeats_to_the_bit(rank: int, world_size: int) -> Tensor:
    order, runs = ["plain", *THROUGH_ALL], []
    for _ in range(2):
        schedule = [(step, order[step // 3 % len(order)]) for step in range(0, 200, 3)]
        training = trained(rank, 48, Auto(fidelity=THROUGH_ALL, replay=schedule))
        runs.append(training.flat())
        assert [name for _, name in training.close()["auto"]["schedule"]][:8] == order
    assert torch.equal(*runs)
    return runs[0]


@on_ranks(3)
def test_ranks_with_clocks_that_differ_decide_alike_and_end_with_the_fastest(rank: int, world_size: int) -> Any:
    gains = {"one-bit": 3.0, "qsgd": 1.5, "bf16": 0.5}
    training = trained(rank, 150, Quick(rank, gains, fidelity=list(gains)))
    plain_s, best, best_s = training.attachment.scheme.plan_for(1e15)
    rate, auto = training.attachment.scheme._profiles[0].link.rate, training.close()["auto"]
    assert (auto["scheme"], auto["link_mbit"]) == ("one-bit", rate * 8 / 1e6)
    assert (best, best_s, auto["density"]) == ("plain", plain_s, 1.0)
    assert {"try", "switch"} <= {decision["kind"] for decision in auto["decisions"]}
    assert all("ms a step" in decision["why"] for decision in auto["decisions"])
    return training.flat(), auto["schedule"], auto["decisions"]


@on_ranks(2)
def test_under_adam_error_feedback_waits_a_hundred_steps(rank: int, world_size: int) -> None:
    first, second, *_ = trained(rank, 130, quick(rank), optimizer=adamw).close()["auto"]["schedule"]
    assert first == (0, "plain")
    assert second[0] >= 100
    assert second[1] == "one-bit"


@on_ranks(2)
def test_what_one_scheme_has_not_sent_the_next_one_does(rank: int, world_size: int) -> None:
    """The sum of what was applied and what is left, by two schemes, is the sum of all gradients, over twenty changes."""
    order = ["one-bit", "plain", "two-bit", "one-bit", "two-bit", "plain"]
    auto = Auto(fidelity=["one-bit", "two-bit"], replay=[(s, order[s // 4 % len(order)]) for s in range(0, 84, 4)])
    torch.manual_seed(0)
    still = lambda p: torch.optim.SGD(p, lr=0.0)  # noqa: E731
    training = Training(rank, auto, still, lambda: nn.Linear(64, 32, bias=False), ddp={"bucket_cap_mb": 25})
    generator = torch.Generator().manual_seed(rank)
    given, applied = (torch.zeros(32, 64, dtype=torch.float64) for _ in range(2))
    for _ in range(82):
        inputs, weights = (torch.randn(4, n, generator=generator) for n in (64, 32))
        training.optimizer.zero_grad(set_to_none=True)
        (training.ddp(inputs) * weights).sum().backward()
        given += (weights.T @ inputs).double()
        applied += training.ddp.module.weight.grad.double()
        training.optimizer.step()
    communicator, scheme = training.attachment.communicator, training.attachment.scheme
    left = communicator.submit(scheme.hand_over).wait()  # all that was not sent, by the schemes before too
    training.close()
    rest = next(iter(left.values())).view(32, 64).double()
    total = given - rest
    torch.distributed.all_reduce(total)
    assert float((total / world_size - applied).abs().max()) < 1e-3
    assert float(rest.abs().max()) > 1e-2


@pytest.mark.parametrize(("asked", "found"), [(False, False), (False, True), (True, False)])
def test_another_link_or_a_rank_that_asks_is_enough_to_think_again(asked: bool, found: bool) -> None:
    auto = Mock(**{"_note_transfer.return_value": found, "_told": 0})
    auto.law.decisions = []
    Turns._count(auto, Vote(8, asked, 900, None, [(7, 100, 80, False), (8, 100, 80, False)]))
    assert [call.args[3] for call in auto.law.observe.call_args_list] == [False, asked or found]


@on_ranks(2)
def test_steps_share_votes_while_nothing_is_tried(rank: int, world_size: int) -> None:
    """Of 40 steps the first ones are voted on by themselves, to look for zeros, and then five by five."""
    with patch.object(Polls, "_start", autospec=True, side_effect=Polls._start) as start:
        trained(rank, 40, Quick(rank, {"one-bit": 3.0}, budget=0)).close()
    assert 8 <= start.call_count <= 15


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
def test_uneven_input_keeps_what_was_at_work_and_ranks_equal(rank: int, world_size: int, gain: float) -> Any:
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


@on_ranks(2)
def test_a_data_loader_that_is_the_bottleneck_is_not_on_a_steps_account(rank: int, world_size: int) -> None:
    training, took_s = Training(rank), []
    ddp = training.ddp
    clock = StepClock(ddp, ddp, lambda: None, lambda lap: took_s.append(lap.took_ns / 1e9))
    started = time.perf_counter()
    for step in range(8):
        time.sleep(0.25)  # the loader
        training.take_steps([step])
        ddp.eval()
        ddp(torch.randn(8, 20))
        ddp.train()
    clock.close()
    assert len(took_s) == 8
    assert sum(took_s) <= time.perf_counter() - started - 8 * 0.25


@on_ranks(2)
def test_a_rank_that_stalls_in_its_steps_parts_nobody(rank: int, world_size: int) -> tuple[Any, ...]:
    training = Training(rank, Auto(fidelity=["one-bit", "bf16"]))
    handle = training.ddp.module[0].register_forward_pre_hook(
        lambda module, inputs: time.sleep(0.2) if rank == 1 and training.attachment.step % 9 == 7 else None
    )
    training.take_steps(range(40))
    handle.remove()
    auto = training.close()["auto"]
    return auto["schedule"], auto["decisions"], auto["scheme"], training.flat()


def trained_a_while(rank: int, world_size: int) -> tuple[str, dict[str, Any]]:
    training = trained(rank, 40, quick(rank))
    state = training.attachment.state_dict(all_ranks=True)
    return training.close()["auto"]["scheme"], state


def goes_on_in_another_world(rank: int, world_size: int, state: dict[str, Any]) -> tuple[str, int]:
    training = Training(rank, quick(rank))
    slots = training.attachment.session.slots  # below: as if a scheme had just been left
    state["ranks"][0]["state"]["carried"] = {name: torch.ones(slot.numel()) for name, slot in slots.items()}
    training.attachment.load_state_dict(state)
    assert not training.attachment.scheme._handover
    training.take_steps(range(10))
    step = training.attachment.step
    return training.close()["auto"]["schedule"][0][1], step


def test_of_another_world_size_it_begins_anew() -> None:
    (scheme, state), _ = run_ranks(trained_a_while, 2)
    assert scheme == "one-bit"
    assert run_ranks(goes_on_in_another_world, 3, state) == [("plain", 50)] * 3


@pytest.mark.parametrize("asks_at", [50, 51, 52, 53, 54])
@on_ranks(2)
def test_any_rank_may_ask_to_think_again_whatever_is_on_its_ballot(rank: int, world_size: int, asks_at: int) -> Any:
    auto = Quick(rank, {"one-bit": 3.0}, noise=0.01)
    training = trained(rank, asks_at, auto)
    if rank == 1:
        auto.reconsider()
    training.take_steps(range(asks_at, 70))
    decisions = training.close()["auto"]["decisions"]
    assert any(d["kind"] == "drift" and d["step"] >= asks_at for d in decisions)
    return decisions, training.flat()


@on_ranks(2)
def test_a_torch_without_ddps_private_timers_does(rank: int, world_size: int) -> None:
    for name in ("_set_ddp_runtime_logging_sample_rate", "_get_ddp_logging_data"):
        setattr(DistributedDataParallel, name, Mock(side_effect=AttributeError("no such timer in this torch")))
    assert trained(rank, 40, quick(rank)).close()["auto"]["scheme"] == "one-bit"


@on_ranks(2, raises=RankMismatch, match="no such luck")
def test_a_candidate_that_raises_in_a_trial_is_heard_on_every_rank(rank: int, world_size: int) -> None:
    auto = Auto(fidelity=["one-bit"], replay=[(0, "plain"), (3, "one-bit")])
    training = Training(rank, auto)
    if rank == 1:
        auto._subs["one-bit"].reduce = Mock(side_effect=ValueError("no such luck"))  # type: ignore[method-assign]
    training.take_steps(range(6))


@on_ranks(2, raises=RankMismatch, match="options")
def test_ranks_that_were_given_other_classes_are_told_when_they_attach(rank: int, world_size: int) -> None:
    training = Training(rank)
    gradwire.attach(training.ddp, training.optimizer, fidelity="exact" if rank else "close")


@on_ranks(2, raises=RankMismatch, match="configuration")
def test_ranks_that_replay_different_runs_are_told_when_they_attach(rank: int, world_size: int) -> None:
    Training(rank, Auto(replay=[(rank, "plain")]))


@on_ranks(2, raises=PeerLost)
def test_a_rank_that_switches_alone_is_missed_and_no_process_is_aborted(rank: int, world_size: int) -> None:
    training = Training(rank, Auto(fidelity=["bf16"], replay=[(0, "bf16")]), timeout_s=max(5, patience())).after(
        range(3)
    )
    if rank:
        training.attachment.switch("plain")
    training.take_steps(range(3, 6))


@on_ranks(2)
def test_times_of_another_link_are_forgotten(rank: int, world_size: int) -> None:
    training = trained(rank, 60, quick(rank))
    state, law = training.attachment.state_dict(), training.attachment.scheme.law
    training.attachment.load_state_dict(state)
    assert law.candidates["one-bit"].measured_us > 0
    state["state"]["rate"] *= 10
    training.attachment.load_state_dict(state)
    assert (law.candidates["one-bit"].measured_us, law.incumbent) == (0, "one-bit")
    training.close()


@on_ranks(2)
def test_overflows_under_amp_neither_stop_it_nor_part_the_ranks(rank: int, world_size: int) -> Tensor:
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8)
    training = Training(rank, quick(rank), scaler=scaler)
    for step in range(60):
        training.take_scaled_step(scaler, step, math.inf if step % 13 == 5 and rank == 1 else 1.0)
    assert training.close()["auto"]["scheme"] == "one-bit"
    assert bool(training.flat().isfinite().all())
    return training.flat()


@on_ranks(2)
def test_where_another_hook_comes_first_it_stays_plain_and_says_so(rank: int, world_size: int) -> None:
    training = Training(rank, quick(rank))
    training.ddp.register_comm_hook(None, allreduce_hook)
    training.take_steps(range(20))
    assert "communication hook already" in training.close()["auto"]["stays_plain"]


@pytest.mark.parametrize(("how", "ends_at"), [("switch", 42), ("away and back", 42), ("load", 32), ("load late", 15)])
@on_ranks(2)
def test_a_switch_and_a_state_in_mid_run_are_gone_on_from(rank: int, world_size: int, how: str, ends_at: int) -> Tensor:
    """Long enough after whatever it is: votes are of five steps, and read two steps later."""
    quick = Quick(rank, {"one-bit": 2.0}, fidelity=["one-bit"])
    training = Training(rank, "gcomp" if how == "switch" else quick, timeout_s=100)
    attachment, saved = training.attachment, ()
    for step in range(42):
        if step == 3:
            saved = training.state()
        if step == 13 + 17 * (how == "load late"):  # late: with residuals
            if how == "switch":
                attachment.switch(Quick(rank, {}, fidelity=["bf16"]))
            elif how == "away and back":
                attachment.switch("gcomp")
                attachment.switch("auto")
            else:
                training.load(saved)
                assert attachment.step == 3
                assert not attachment.session.feedback.state_by_name(attachment.session.slots)
        training.take_steps([step])
    assert attachment.step == ends_at
    attachment.close()
    gradwire.attach(training.ddp, training.optimizer, timeout_s=100).close()  # and it may be attached again
    return training.flat()


REFUSED_DTYPE = "parameter weight: gradient dtype torch."
# What no scheme takes: the model, what `auto` says, and who else refuses it when it is attached.
MODELS: dict[str, tuple[Callable[[], nn.Module], str, str]] = {
    "sparse": (lambda: nn.Sequential(nn.EmbeddingBag(50, 8, sparse=True), nn.Linear(8, 1)), "layer 0: a s", "one-bit"),
    "float64": (lambda: nn.Linear(8, 1).double(), REFUSED_DTYPE + "float64", "one-bit"),
    "complex": (lambda: nn.Linear(8, 1, dtype=torch.complex64), REFUSED_DTYPE + "complex64", "power-sgd"),
    "python_reducer": (lambda: nn.Linear(8, 1), "python_reducer", "plain"),
}


def train(rank: int, make: Callable[[], nn.Module], loop: str, scheme: Any) -> tuple[torch.Tensor, str]:
    """One of the loops that DDP takes, and why `auto` stayed plain."""
    torch.manual_seed(5)
    model = make()
    ddp = DistributedDataParallel(model)
    parts: list[Any] = list(model.children()) if "optimizers" in loop else [ddp]
    optimizers = [torch.optim.SGD(part.parameters(), 0.01) for part in parts]
    given = optimizers if loop == "both optimizers" else optimizers[0]
    attachment: Any = None if scheme is None else gradwire.attach(ddp, given, scheme, timeout_s=100)
    generator = torch.Generator().manual_seed(rank)
    for step in range(30):
        x = torch.randn(16, 8, generator=generator, dtype=torch.float64)
        x = (9 * x).abs().long().clamp(max=49) if loop == "sparse" else x.to(next(model.parameters()).dtype)
        ddp.zero_grad()
        (0.01 * ddp(x)).abs().square().mean().backward()
        if loop == "changes by itself":
            for _ in range(3):
                with torch.no_grad():
                    torch._foreach_mul_(list(model.parameters()), 0.999)
                ddp(x).square().mean().backward()
        if loop == "scales up":
            for parameter in model.parameters():
                parameter.grad.div_(parameter.grad.norm() + 1e-12)  # type: ignore[union-attr]
        optimizers[0 if step % 4 == 3 else -1].step()
    why = attachment.scheme.stats()["auto"]["stays_plain"] if attachment and isinstance(scheme, Auto) else ""
    if attachment is not None:
        attachment.close()
    return torch.cat([torch.view_as_real(p.detach().to(torch.complex128)).flatten() for p in model.parameters()]), why


def eager(rank: int) -> Auto:
    return Quick(rank, {"gcomp": 3.0}, fidelity=["gcomp"])


@on_ranks(2)
def test_models_that_no_scheme_takes_train_as_under_ddp_and_are_named_by_attach(rank: int, world_size: int) -> None:
    for name, (make, words, refuses) in MODELS.items():
        torch._dynamo.config.optimize_ddp = "python_reducer" if name == "python_reducer" else True
        with pytest.raises(GradwireError, match=words):
            train(rank, make, name, refuses)
        if name == "python_reducer":  # which the compiler would train
            ddp, auto = DistributedDataParallel(make()), eager(rank)
            gradwire.attach(ddp, torch.optim.SGD(ddp.parameters(), 0.1), auto, timeout_s=100).close()
            assert words in auto._stays_plain
            with pytest.raises(gradwire.Unsupported, match=words):
                gradwire.ddp_hook(None, (torch.ones(3), torch.ones(3)))  # type: ignore[arg-type]
            continue
        expected, _ = train(rank, make, name, None)
        values, why = train(rank, make, name, eager(rank))
        assert torch.equal(values, expected), name
        assert words in why, (name, why)
        assert torch.equal(train(rank, make, name, "plain")[0], expected), name


LOOPS = {
    "changes by itself": "changed 2 times",
    "scales up": "times as large",
    "two optimizers": "",
    "both optimizers": "",
}


@on_ranks(2)
def test_loops_that_a_scheme_cannot_serve_go_on_plainly_on_all_ranks(rank: int, world_size: int) -> list[str]:
    def make() -> nn.Module:
        return nn.Sequential(nn.Linear(8, 64), nn.Linear(64, 1))

    said = []
    for loop, words in LOOPS.items():
        expected, (values, why) = train(rank, make, loop, None)[0], train(rank, make, loop, eager(rank))
        # One step of length 0.01 had lost bits that counted after it was scaled up; all others are DDP's.
        assert (values - expected).abs().max() < (2e-3 if loop == "scales up" else 1e-5), loop
        assert words in why if words else not why, (loop, why)
        said.append(why)
    return said
