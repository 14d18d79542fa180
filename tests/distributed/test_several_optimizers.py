"""Muon for matrices and AdamW for the rest: `attach(ddp, [muon, adamw])` trains as DDP does, and says what it cannot know."""

from functools import partial
from types import SimpleNamespace
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
from small_training import Training, layers, mean_square, muon_and_adamw


def _steps(training: Training, steps: range, closure: bool = False) -> torch.Tensor:
    for step in steps:
        if closure:
            training.optimizer.step(lambda step=step: training.backward(step))
        else:
            training.take_steps([step])
    return training.flat()


# ---- with every scheme
UNIFORM, ONE_BIT = "gcomp:importance=uniform,bits=12", "one-bit:warmup_steps=0"
TOLERANCE = "gcomp:tolerance=32,least_bits=7"


@pytest.mark.parametrize("spec", [UNIFORM, "embedded-float", ONE_BIT, "one-bit-adam:freeze_step=2", "acp-sgd", "aqgb"])
@on_ranks(2)
def test_a_resumed_run_ends_with_the_same_bits(rank: int, world_size: int, spec: str) -> torch.Tensor:
    name, kept = parse_spec(spec)
    first = Training(rank, name, muon_and_adamw, **kept)
    _steps(first, range(4))
    state = first.state()
    first.close()
    flats = [_steps(Training(rank, name, muon_and_adamw, **kept).load(state), range(4, 8))]
    # The run that goes on: what is in memory, in a new DDP, whose buckets are then laid out as those of the resumed one.
    first = Training(rank, name, lambda _: first.optimizers, lambda: first.ddp.module, **kept)
    first.attachment.load_state_dict(state[-1])
    flats.append(_steps(first, range(4, 8)))
    assert torch.equal(*flats) or spec == "aqgb"  # which sends what the clock leaves time for
    return flats[0]


@pytest.mark.parametrize("n_stepped", [1, 2])
@on_ranks(2)
def test_local_sgd_counts_a_step_of_both_as_one(rank: int, world_size: int, n_stepped: int) -> None:
    """With one of them alone a step is over when it steps again."""
    net = layers()
    both = muon_and_adamw(net.parameters())
    loop = gradwire.LocalSgd(net, both, "plain", every=3)
    for step in range(6):
        mean_square(net, rank, step).backward()
        for one in both[:n_stepped]:
            one.step()
        net.zero_grad()
    assert len(loop.reducer.recorder.steps) == n_stepped
    loop.close()


@pytest.mark.parametrize("scheme", ["broadcast", ONE_BIT])
@on_ranks(2)
def test_two_step_as_one_with_two_groups(rank: int, world_size: int, scheme: str) -> torch.Tensor:
    """Under a GradScaler, with an overflow; one that is not asked is as a group with a rate of 0."""
    (name, options), flats, both = parse_spec(scheme), [], _two(SGD, SGD)
    for two in (True, False):
        scaler = torch.amp.GradScaler("cpu", init_scale=256.0, growth_interval=3)
        told = scaler if name == "broadcast" else None  # or found where it steps
        training = Training(rank, name, both if two else lambda ps: _grouped(both(ps)), scaler=told, **options)
        for step in range(12):
            scale = float(scaler.scale(torch.ones(())))
            training.backward(step, float("inf") if step == 7 and rank else scale)
            asked = training.optimizers[step % 4 == 1 : 2 - (step % 4 == 2)] if two else training.optimizers
            for group, left_out in zip(training.optimizer.param_groups if not two else (), (1, 2), strict=False):
                group["lr"] = 0.01 * (step % 4 != left_out)
            for one in asked:
                scaler.step(one)
            scaler.update()
        training.close()
        flats.append(training.flat())
    assert torch.equal(*flats)
    return flats[0]


def _grouped(several: list[Optimizer]) -> Optimizer:
    return SGD([group for one in several for group in one.param_groups], 0.1)


@on_ranks(2)
def test_frameworks_pass_all_that_they_have(rank: int, world_size: int) -> None:
    from gradwire.integrations import accelerate, lightning

    for framework in ("lightning", "accelerate"):
        training = Training(rank, optimizer=muon_and_adamw)
        if framework == "lightning":
            callback, strategy = lightning.GradwireCallback("broadcast"), SimpleNamespace(model=training.ddp)
            trainer = SimpleNamespace(strategy=strategy, optimizers=training.optimizers, precision_plugin=None)
            callback.on_train_start(trainer, None)
            training.attachment = callback.attachment
        else:
            accelerator: Any = SimpleNamespace(scaler=None, register_for_checkpointing=lambda _: None)
            wrapped = [SimpleNamespace(optimizer=one) for one in training.optimizers]
            training.attachment = accelerate.attach(accelerator, training.ddp, wrapped, "broadcast")
        assert list(training.attachment.session.optimizers) == training.optimizers
        _steps(training, range(2))
        training.close()


@on_ranks(2)
def test_recommend_takes_both(rank: int, world_size: int) -> None:
    training = Training(rank, optimizer=muon_and_adamw)
    plan = gradwire.recommend(training.ddp, training.optimizers, lambda: training.backward(0), seconds=0.5)
    exact = {one.spec for one in plan.forecasts() if one.level == "exact" and not one.by_name_only}
    assert exact == {"plain", TOLERANCE}


# ---- what DDP trains, by any optimizers
class Unknown(Optimizer):
    """Its step is SGD's, which cannot be told."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.sub_(parameter.grad, alpha=group["lr"])


def _two(first: Any, second: Any, start: int = 3) -> Any:
    """One for the first three parameters, and one for those from `start` on."""
    return lambda parameters: (lambda all_: [first(all_[:3], 0.01), second(all_[start:], 0.01)])(list(parameters))


def _rate_of_zero(parameters: Any) -> Any:
    both = muon_and_adamw(parameters)
    for one in both:
        torch.optim.lr_scheduler.LambdaLR(one, lambda step: 0.0)
    return both


SGD, ADAMW = torch.optim.SGD, torch.optim.AdamW
CAREFUL = {"plain", "homomorphic", UNIFORM, "bf16", "embedded-float:bits=8"}
KNOWN = CAREFUL - {UNIFORM} | {TOLERANCE}
SAID = "attach: parameter"
OF_ADAM = {*KNOWN, "embedded-float:bits=5"}
OF_SGD = {*KNOWN, "truncated-float:bits=8,rounding=stochastic"}
# The optimizers, what "close" may use, and what is said when they are attached.
TRAINED: dict[str, tuple[Any, set[str], str]] = {
    "Muon and AdamW": (muon_and_adamw, KNOWN, ""),
    "AdamW": (ADAMW, OF_ADAM, ""),
    "two AdamW, one fused": (_two(ADAMW, partial(ADAMW, fused=True)), OF_ADAM, ""),
    "8 bits": (type("AdamW8bit", (ADAMW,), {}), OF_ADAM, ""),
    "SGD": (partial(SGD, lr=0.1), OF_SGD, ""),
    "SGD and AdamW": (_two(SGD, ADAMW), CAREFUL, ""),
    "a rate of 0": (_rate_of_zero, KNOWN, ""),
    "two that share": (_two(SGD, SGD, 2), CAREFUL, f"{SAID} 2.weight (1 in all) is one that two optimizers step"),
    "one in none": (_two(SGD, SGD, 4), CAREFUL, f"{SAID} 2.bias (1 in all) is one that none of the optimizers"),
    "unknown": (Unknown, CAREFUL, "what a step of Unknown does with a gradient cannot be told"),
    "LBFGS": (lambda parameters: torch.optim.LBFGS(parameters, 0.01, 2), CAREFUL, "what a step of LBFGS"),
}


@pytest.mark.parametrize("kind", TRAINED)
@on_ranks(2)
def test_auto_trains_as_ddp_does_and_says_what_it_cannot_know(rank: int, world_size: int, kind: str) -> torch.Tensor:
    make, specs, words = TRAINED[kind]
    said = log_of("gradwire")
    alone, ours = Training(rank, optimizer=make), Training(rank, "auto", make, fidelity="close", budget=0.0)
    closure = kind == "LBFGS"
    ours_flat, alones = _steps(ours, range(4), closure), _steps(alone, range(4), closure)
    candidates = {one["spec"] for one in ours.close()["auto"]["candidates"]}
    assert torch.equal(ours_flat, alones)
    assert candidates == specs
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
    assert flats[0].allclose(flats[1], atol=0.05)
    return flats[1]


@pytest.mark.parametrize("scheme", ["auto", "embedded-float", "broadcast"])
@on_ranks(2, raises=RankMismatch, match="disagree on configuration.*this rank was given (Muon and )?AdamW")
def test_ranks_with_optimizers_of_other_classes_are_told(rank: int, world_size: int, scheme: str) -> None:
    Training(rank, scheme, muon_and_adamw if rank else ADAMW, timeout_s=20).take_steps([0])


@on_ranks(2)
def test_an_owner_of_the_step_says_what_it_needs(rank: int, world_size: int) -> None:
    with pytest.raises(Unsupported, match="takes the step of one optimizer, and was given Muon and AdamW"):
        Training(rank, "slimgc", muon_and_adamw, timeout_s=20, backup=True)
    with pytest.raises(InvalidArgument, match=r"two optimizers step 2.weight \(1 in all\)"):
        Training(rank, "broadcast", _two(SGD, SGD, 2), timeout_s=20)
