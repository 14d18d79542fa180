"""Every feature of DDP works with every scheme: the ranks agree, and lossless schemes train as DDP alone does."""

import contextlib
import copy
import math
from functools import partial
from typing import Any

import pytest
import torch
from ddp_cases import N_STEPS, Case, check_case, finish, sgd, start
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

import gradwire
from awkward_models import Branches, Mixed, Oddments, Recomputed, build_model
from gradwire import schemes
from gradwire.schemes import Scheme
from ranks import on_ranks
from small_training import MakeOptimizer, Training, batch_of, from_one, mean_square, muon_and_adamw


def train(rank: int, scheme: Scheme | None, **options: Any) -> Tensor:
    """N_STEPS steps, and a look at what the model is awkward by."""
    training = start(rank, scheme, **options).after(range(N_STEPS))
    module, attachment = training.ddp.module, training.attachment
    if attachment is not None:
        counts = [step.n_buckets for step in attachment.recorder.steps]
        assert options or counts[0] == 1 < counts[1] == counts[-1], counts  # rebuilt: one for all, then several
        assert not isinstance(module, Mixed) or min(counts) >= 3, "every dtype has one"
    if isinstance(module, Branches):
        assert module.spare.weight.grad is None
    if isinstance(module, Oddments):
        assert torch.equal(module.frozen, torch.ones(20))
    return finish(training)


def accumulate_without_sync(rank: int, scheme: Scheme | None) -> Tensor:
    training = start(rank, scheme)
    for step in range(2 * N_STEPS):
        with training.ddp.no_sync() if step % 2 == 0 else contextlib.nullcontext():
            training.ddp(batch_of(rank, step)).square().mean().backward()
        if step % 2:
            training.optimizer.step()
            training.optimizer.zero_grad()
    assert scheme is None or training.attachment.step == N_STEPS
    return finish(training)


def join_with_uneven_inputs(rank: int, scheme: Scheme | None) -> Tensor:
    training = start(rank, scheme, optimizer=sgd)
    with training.ddp.join():
        training.take_steps(range(N_STEPS + 2 * rank))
    # Rank 0 shadowed the last two; under auto nobody decides while ranks may run out, and plain steps are DDP's own.
    assert scheme is None or training.attachment.step == N_STEPS + 2 or scheme.name == "auto"
    return finish(training)  # DDP broadcasts the parameters of the last rank to those that left early


def clip_after_backward(rank: int, scheme: Scheme | None) -> Tensor:
    training = start(rank, scheme, optimizer=sgd, loss=mean_square)
    for step in range(N_STEPS):
        training.backward(step, 100.0)
        assert torch.nn.utils.clip_grad_norm_(training.ddp.parameters(), 0.5) > 0.5
        training.optimizer.step()
    return finish(training)


def compile_the_model(rank: int, scheme: Scheme | None) -> Tensor:
    training = start(rank, bucket_cap_mb=1)  # torch.compile cuts the graph at buckets, none below DDP's first of 1 MB
    training.ddp = torch.compile(training.ddp, backend="aot_eager")
    if scheme:
        training.attachment = gradwire.attach(training.ddp, training.optimizer, scheme, timeout_s=100)
    training.take_steps(range(N_STEPS))
    return finish(training)


def register_the_hook_alone(rank: int, scheme: Scheme | None) -> Tensor:
    training = start(rank)
    module = training.ddp if scheme and scheme.name == "auto" else None  # whose steps it times, from the second one on
    state = gradwire.HookState(scheme, module, optimizer=training.optimizer, timeout_s=100) if scheme else None
    if state:
        training.ddp.register_comm_hook(state, gradwire.ddp_hook)
    training.take_steps(range(N_STEPS))
    if state:
        assert state.recorder.totals()["n_steps"] == N_STEPS - (module is not None)
        state.close()
    return finish(training)


def change_the_optimizer_on_the_way(rank: int, scheme: Scheme | None) -> Tensor:
    """Another learning rate, and parameters that join the optimizer later: both are read at every step."""
    training = start(rank, scheme, optimizer=lambda parameters: torch.optim.AdamW(list(parameters)[:4], lr=1e-3))
    ddp, optimizer = training.ddp, training.optimizer
    for step in range(N_STEPS + 3):
        if step == 2:
            optimizer.param_groups[0].update(lr=3e-3, weight_decay=0.1, betas=(0.8, 0.99))
        if step == 3:
            optimizer.add_param_group({"params": list(ddp.module[4].parameters()), "lr": 1e-2})
        optimizer.zero_grad()
        from_one(ddp, rank, step).backward()
        optimizer.step()
    return finish(training)


def go_on_after_closing(rank: int, scheme: Scheme | None) -> Tensor:
    """After close(), DDP's own all-reduce, bit by bit; then a new attachment through the same door."""
    training, alone = start(rank, scheme, optimizer=sgd), start(rank, optimizer=sgd)
    attachment = training.attachment
    for one in (training, alone):
        one.take_steps(range(3))
    if attachment:
        attachment.close()
        attachment.close()
        assert attachment.stats()["n_steps"] == 3
        with pytest.raises(gradwire.InvalidArgument, match="closed"):
            attachment.state_dict()
        with pytest.raises(gradwire.InvalidArgument, match="closed"):
            attachment.switch("plain")
        alone.ddp.load_state_dict(training.ddp.state_dict())
        alone.optimizer.load_state_dict(copy.deepcopy(training.optimizer.state_dict()))  # torch shares the tensors
    for one in (training, alone):
        one.take_steps(range(3))
    assert torch.equal(training.flat(), alone.flat())
    if scheme:  # the same object, free again
        training.attachment = gradwire.attach(training.ddp, training.optimizer, scheme, timeout_s=100)
    training.take_steps(range(4))
    return finish(training)


@on_ranks(2)
def test_accumulation_under_auto_that_stays_plain_has_the_bits_of_ddp(rank: int, world_size: int) -> None:
    watched = accumulate_without_sync(rank, schemes.by_name("auto", replay=[(0, "plain")]))
    assert torch.equal(watched, accumulate_without_sync(rank, None))


@on_ranks(2)
def test_join_that_changes_the_divisor_is_refused(rank: int, world_size: int) -> None:
    training = start(rank, "plain", optimizer=sgd)
    with (
        pytest.raises(gradwire.Unsupported, match="divide_by_initial_world_size"),
        training.ddp.join(divide_by_initial_world_size=False),
    ):
        training.take_steps([0])


def under_autocast(module: nn.Module, rank: int, step: int) -> Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return module(batch_of(rank, step)).float().square().mean()


def train_with_scaler(rank: int, scheme: Scheme | None) -> Tensor:
    """An Inf on one rank in step 1: the scaler skips that step on all ranks, and halves its scale."""
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**14)
    training = start(rank, scheme, optimizer=sgd, loss=mean_square, scaler=scaler)
    drifts = scheme is not None and scheme.name == "periodic"
    for step in range(N_STEPS):
        is_bad = (rank, step) == (1, 1) and not drifts
        training.take_scaled_step(scaler, step, math.inf if is_bad else 1.0, max_norm=1.0)
    assert scaler.get_scale() == (2.0**14 if drifts else 2.0**13)
    return finish(training)


def in_its_dtype(module: nn.Module, rank: int, step: int) -> Tensor:
    return (module(batch_of(rank, step).to(next(module.parameters()).dtype)).float() - 1).square().mean()


FEATURES: dict[str, Case] = {
    "rebuild_buckets": train,
    "view_buckets": partial(train, gradient_as_bucket_view=True),
    "keep_graph_static": partial(train, static_graph=True),
    "leave_parameters_unused": partial(train, model=Branches, find_unused_parameters=True),
    "accumulate_without_sync": accumulate_without_sync,
    "join_with_uneven_inputs": join_with_uneven_inputs,
    "train_odd_parameters": partial(train, model=Oddments),
    "clip_after_backward": clip_after_backward,
    "recompute_activations": partial(train, model=Recomputed),
    "compile_the_model": compile_the_model,
    "register_the_hook_alone": register_the_hook_alone,
    "change_the_optimizer_on_the_way": change_the_optimizer_on_the_way,
    "go_on_after_closing": go_on_after_closing,
    "autocast": partial(train, loss=under_autocast),
    "scaler": train_with_scaler,
    "bfloat16": partial(train, model=lambda: build_model().bfloat16(), optimizer=sgd, loss=in_its_dtype),
    "float16": partial(train, model=lambda: build_model().half(), optimizer=sgd, loss=in_its_dtype),
    "mixed": partial(train, model=Mixed, optimizer=sgd),
}
# A unit in the last place of bfloat16 is 2^16 of float32's, of float16 2^13: near-lossless means as much less there; and
# the activations' rounding to bfloat16 magnifies a difference in float32's last place.
COARSER = {"autocast": 100, "bfloat16": 2**14, "float16": 2**12, "mixed": 2**14}


@pytest.mark.parametrize("feature", FEATURES)
@on_ranks(2, timeout_s=120)
def test_feature_works_with_every_scheme(rank: int, world_size: int, feature: str) -> None:
    check_case(rank, FEATURES[feature], COARSER.get(feature, 1))


@pytest.mark.parametrize("optimizer", [sgd, muon_and_adamw])
@on_ranks([1, 2, 3])
def test_plain_gives_the_bits_of_ddp_without_a_hook(rank: int, world_size: int, optimizer: MakeOptimizer) -> None:
    alone, plain = (Training(rank, scheme, optimizer).after(range(4)) for scheme in (None, "plain"))
    assert plain.close()["scheme"] == "plain"
    assert torch.equal(alone.flat(), plain.flat())


@on_ranks([1, 2, 3])
def test_it_does_what_pytorchs_hook_does_with_half_the_bytes(rank: int, world_size: int) -> Tensor:
    theirs, ours = Training(rank), Training(rank, "bf16")
    # DDP refuses the hook itself off CUDA.
    theirs.ddp.register_comm_hook(None, lambda state, bucket: default_hooks.bf16_compress_hook(state, bucket))
    for training in (theirs, ours):
        training.take_steps(range(4))
    ratio = ours.close()["ratio"]
    # PyTorch rounds first and divides in bfloat16, once more rounded unless the divisor is a power of two.
    assert float((theirs.flat() - ours.flat()).abs().max()) < (1e-6 if world_size == 2 else 2e-3)
    assert world_size == 1 or 0.5 <= ratio < 0.51
    return ours.flat()
