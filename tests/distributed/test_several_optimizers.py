"""Muon for matrices and AdamW for the rest: `attach(ddp, [muon, adamw])` trains as DDP does, and says what it cannot know."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from auto_cases import Quick
from torch.optim import Optimizer

import gradwire
from gradwire.errors import InvalidArgument, RankMismatch, Unsupported
from gradwire.registry import parse_spec
from logs import log_of
from ranks import on_ranks
from small_training import Training, layers, muon_and_adamw, sgd


def _steps(training: Training, steps: range, closure: bool = False) -> torch.Tensor:
    for step in steps:
        if closure:
            training.optimizer.step(lambda step=step: training.backward(step))
        else:
            training.take_steps([step])
    return training.flat()


# ---- with every scheme


@pytest.mark.parametrize("scheme", ["plain", "auto:budget=0.0"])
@on_ranks(2)
def test_what_sends_all_bits_gives_ddps_own(rank: int, world_size: int, scheme: str) -> None:
    name, options = parse_spec(scheme)
    alone, ours = Training(rank, optimizer=muon_and_adamw), Training(rank, name, muon_and_adamw, **options)
    ours.take_steps(range(5))
    ours.close()
    assert torch.equal(_steps(alone, range(5)), ours.flat())


UNIFORM = "gcomp:importance=uniform,bits=12"


@pytest.mark.parametrize(
    "scheme", [UNIFORM, "embedded-float", "one-bit:warmup_steps=0", "one-bit-adam:freeze_step=2", "acp-sgd", "aqgb"]
)
@on_ranks(2)
def test_a_resumed_run_ends_with_the_same_bits(rank: int, world_size: int, scheme: str) -> torch.Tensor:
    name, kept = parse_spec(scheme)
    first = Training(rank, name, muon_and_adamw, **kept)
    _steps(first, range(4))
    state = first.state()
    first.close()
    halves = []
    for _ in range(2):  # each wraps the model anew
        again = Training(rank, name, muon_and_adamw, **kept).load(state)
        halves.append(_steps(again, range(4, 8)))
        again.close()
    assert torch.equal(*halves) or scheme == "aqgb"  # which sends what the clock leaves time for
    return halves[0]


@pytest.mark.parametrize("with_state", [False, True])
@on_ranks(2)
def test_local_sgd_counts_a_step_of_both_as_one(rank: int, world_size: int, with_state: bool) -> torch.Tensor:
    net = layers()
    both = muon_and_adamw(net.parameters())
    loop = gradwire.LocalSgd(net, both, "plain", every=3)
    for step in range(6):
        net(torch.full((4, 20), 0.1 * (rank + step))).square().mean().backward()
        for one in both[: 1 if with_state else 2]:  # or one of them alone
            one.step()
        net.zero_grad()
    assert len(loop.reducer.recorder.steps) == (1 if with_state else 2)
    loop.close()
    return torch.zeros(1)


@pytest.mark.parametrize(
    ("scheme", "options"),
    [("slimgc", {"backup": True}), ("slimgc", {"update": "owner", "topology": "server", "pull": "raw"})],
)
@on_ranks(2, raises=Unsupported, match="takes the step of one optimizer, and was given Muon and AdamW")
def test_owners_of_one_step_say_so(rank: int, world_size: int, scheme: str, options: dict[str, Any]) -> None:
    Training(rank, scheme, muon_and_adamw, **options)


def _halves(parameters: Any) -> list[Optimizer]:
    several = list(parameters)
    return [torch.optim.SGD(several[:3], 0.1), torch.optim.SGD(several[3:], 0.1)]


@on_ranks(2)
def test_an_owner_of_the_step_leaves_out_an_optimizer_that_was_not_asked(rank: int, world_size: int) -> torch.Tensor:
    """As one optimizer does with a rate of 0 for those parameters."""
    flats = []
    for two in (True, False):
        training = Training(rank, "broadcast", _halves if two else lambda ps: _grouped(_halves(ps)))
        for step in range(8):
            training.backward(step)
            if two:
                for one in training.optimizers[step % 4 == 1 : 2 - (step % 4 == 3)]:
                    one.step()
            else:
                for group, left_out in zip(training.optimizer.param_groups, (1, 3), strict=True):
                    group["lr"] = 0.1 * (step % 4 != left_out)
                training.optimizer.step()
        training.close()
        flats.append(training.flat())
    assert torch.equal(*flats)
    return flats[0]


def _grouped(several: list[Optimizer]) -> Optimizer:
    return torch.optim.SGD([group for one in several for group in one.param_groups], 0.1)


# ---- what DDP trains, by any optimizers


def _other(rank: int) -> Callable[[Any], Any]:
    return muon_and_adamw if rank else lambda parameters: torch.optim.AdamW(parameters)


class Unknown(Optimizer):
    """Its step is SGD's, which cannot be told."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.sub_(parameter.grad, alpha=group["lr"])


def _shared(parameters: Any) -> Any:
    several = list(parameters)
    return [torch.optim.SGD(several, 0.01), torch.optim.AdamW(several[:2])]


def _sgd_and_adamw(parameters: Any) -> Any:
    several = list(parameters)
    return [torch.optim.SGD(several[:3], 0.1), torch.optim.AdamW(several[3:])]


def _one_in_none(parameters: Any) -> Any:
    return [torch.optim.SGD(list(parameters)[1:], 0.01)]


def _rate_of_zero(parameters: Any) -> Any:
    both = muon_and_adamw(parameters)
    for one in both:
        torch.optim.lr_scheduler.LambdaLR(one, lambda step: 0.0)
    return both


def _eight_bits(parameters: Any) -> Any:
    return type("AdamW8bit", (torch.optim.AdamW,), {})(parameters)


def _fused(parameters: Any) -> Any:
    both = muon_and_adamw(parameters)
    return [both[0], torch.optim.AdamW(both[1].param_groups[0]["params"], fused=True)]


# The optimizers, and what is said when they are attached.
TRAINED: dict[str, tuple[Any, str]] = {
    "two that share": (_shared, "attach: parameter 0.weight (2 in all) is one that two optimizers step"),
    "a parameter in none": (
        _one_in_none,
        "attach: parameter 0.weight (1 in all) is one that none of the optimizers",
    ),
    "unknown": (Unknown, "what a step of Unknown does with a gradient cannot be told"),
    "LBFGS": (lambda parameters: torch.optim.LBFGS(parameters, 0.01, 2), "what a step of LBFGS"),
    "a rate of 0": (_rate_of_zero, ""),
    "fused": (_fused, ""),
    "foreach": (lambda parameters: torch.optim.AdamW(parameters, foreach=True), ""),
    "8 bits": (_eight_bits, ""),
}


@pytest.mark.parametrize("kind", TRAINED)
@on_ranks(2)
def test_auto_trains_as_ddp_does_and_says_what_it_cannot_know(rank: int, world_size: int, kind: str) -> torch.Tensor:
    make, words = TRAINED[kind]
    said = log_of("gradwire")
    alone, ours = Training(rank, optimizer=make), Training(rank, "auto", make, budget=0.0)
    closure = kind == "LBFGS"
    ours_flat, alones = _steps(ours, range(4), closure), _steps(alone, range(4), closure)
    candidates = {one["spec"] for one in ours.close()["auto"]["candidates"]}
    assert torch.equal(ours_flat, alones)
    assert candidates == {"plain", UNIFORM}
    warned = [text for text in said if text.startswith(("attach:", "what a step"))]
    assert len(warned) == (1 if words and rank == 0 else 0)
    assert all(text.startswith(words) for text in warned)
    return ours_flat


@on_ranks(2)
def test_one_that_comes_after_attach_trains_as_under_ddp(rank: int, world_size: int) -> torch.Tensor:
    """The first is replaced in mid-run by one that nobody has told of, while a candidate is at work."""
    flats = []
    for scheme in (None, Quick(rank, {"plain": 1.0, UNIFORM: 3.0}, fidelity=[UNIFORM])):
        training = Training(rank, scheme, muon_and_adamw)
        _steps(training, range(10))
        training.optimizers = [torch.optim.Muon(training.optimizers[0].param_groups[0]["params"], lr=0.01)]
        flats.append(_steps(training, range(10, 40)))
        training.close()
    assert flats[0].allclose(flats[1], atol=0.05)
    return flats[1]


@pytest.mark.parametrize("scheme", ["auto", "embedded-float", "broadcast"])
@on_ranks(2, raises=RankMismatch, match="disagree on configuration.*this rank was given (Muon and )?AdamW")
def test_ranks_with_optimizers_of_other_classes_are_told(rank: int, world_size: int, scheme: str) -> None:
    Training(rank, scheme, _other(rank), timeout_s=20).take_steps([0])


@on_ranks(2, raises=InvalidArgument, match=r"two optimizers step 0.weight \(2 in all\)")
def test_an_owner_of_the_step_refuses_a_shared_parameter(rank: int, world_size: int) -> None:
    Training(rank, "broadcast", _shared)


# ---- what each row is for


@on_ranks(2)
def test_the_classes_hold_for_every_family_of_the_model(rank: int, world_size: int) -> None:
    careful = {"plain", UNIFORM, "bf16", "embedded-float:bits=8"}
    for make, specs in (
        (muon_and_adamw, careful),
        (Unknown, careful),
        (_sgd_and_adamw, careful),
        (torch.optim.AdamW, {*careful, "embedded-float:bits=5"}),
        (sgd, careful - {UNIFORM} | {"gcomp", "truncated-float:bits=8,rounding=stochastic"}),
    ):
        training = Training(rank, "auto", make, fidelity="close")
        assert {one["spec"] for one in training.close()["auto"]["candidates"]} == specs
