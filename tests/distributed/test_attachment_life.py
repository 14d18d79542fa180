"""What an attachment does between steps: refuse what it cannot serve, switch, resume, count."""

import copy
import functools
import gc
import io
import os
import weakref
from typing import Any
from unittest.mock import DEFAULT, Mock

import pytest
import torch
import torch.distributed as dist
from ddp_cases import finish, sgd, start
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel

import gradwire
from awkward_models import build_model
from gradwire import schemes
from ranks import agree, on_ranks
from small_training import Training, adamw, batch_of, flat, small_layers


@on_ranks(2)
def test_what_cannot_be_attached_is_refused_by_name(rank: int, world_size: int) -> None:
    training, bare = start(rank, optimizer=sgd), build_model()
    ddp, optimizer = training.ddp, training.optimizer
    sharded = FullyShardedDataParallel(build_model(), device_id=torch.device("cpu"))
    zero = ZeroRedundancyOptimizer(ddp.parameters(), torch.optim.SGD, lr=0.1)
    for model, given, scheme, error, words in [
        (bare, optimizer, "gcomp", gradwire.InvalidArgument, "steps none of the model's parameters"),
        (nn.DataParallel(bare), optimizer, "gcomp", gradwire.Unsupported, "got DataParallel"),
        (sharded, optimizer, "gcomp", gradwire.Unsupported, "FSDP1 models are not supported"),
        (ddp, zero, "gcomp", gradwire.Unsupported, "ZeroRedundancyOptimizer is not supported yet"),
        (ddp, None, "gcomp", gradwire.Unsupported, "torch.optim.Optimizer second, .* got NoneType"),
        (ddp, optimizer, "gcmop", gradwire.InvalidArgument, r"'gcmop'; did you mean 'gcomp'\? there are: acp-sgd, "),
        (ddp, optimizer, "GComp", gradwire.InvalidArgument, "did you mean 'gcomp'"),
        (ddp, optimizer, 7, gradwire.InvalidArgument, "got int"),
    ]:
        with pytest.raises(error, match=words):
            gradwire.attach(model, given, scheme)
    for given, options, words in [
        ("plain", {"timeout_s": 0}, "timeout_s is a number of seconds above 0"),
        ("one-bit", {"floor": 0.5}, "has no option 'floor'"),
        ("gcomp", {"importnce": "none"}, r"'importnce'; did you mean 'importance'\? there are: importance"),
        (schemes.by_name("plain"), {"seed": 1}, "options go with a scheme's name"),
        ("gcomp", {"bucket_mb": 3}, "DDP has its own bucket_mb"),
    ]:
        with pytest.raises(gradwire.InvalidArgument, match=words):
            gradwire.attach(ddp, optimizer, given, **options)
    for door, more in ((ddp, {}), (bare, {"bucket_mb": 1})):
        torch.manual_seed(0)
        attachment = gradwire.attach(door, sgd(door.parameters()), "top-k", share=0.25, timeout_s=100, **more)
        assert attachment.scheme.configuration["share"] == 0.25
        attachment.close()


@on_ranks(2)
def test_switch_goes_on_from_the_same_bits_on_all_ranks(rank: int, world_size: int) -> None:
    training, alone = Training(rank, schemes.by_name("gcomp", refresh_every=3), timeout_s=100), Training(rank)
    attachment = training.attachment
    learnt = schemes.by_name("gcomp", importance="none")
    for scheme in ("zlib", "plain", learnt, "zstd", learnt):
        for one in (training, alone):
            one.take_steps(range(3))
        attachment.switch(scheme)
        with pytest.raises(gradwire.InvalidArgument, match="no scheme is called"):
            attachment.switch("gcmop")  # nothing has changed
        with pytest.raises(gradwire.InvalidArgument, match="got int"):
            attachment.switch(7)
    training.take_steps([3])
    alone.take_steps([3])
    assert attachment.step == 16
    assert training.close()["scheme"] == "gcomp"
    assert agree(training.flat())
    assert torch.allclose(training.flat(), alone.flat(), rtol=0, atol=1e-5)


@on_ranks(3, raises=gradwire.RankMismatch, match="disagree on scheme.*rank 2: zlib; the others: plain")
def test_ranks_that_switch_to_different_schemes_are_named_on_all_of_them(rank: int, world_size: int) -> None:
    training = Training(rank, "gcomp", timeout_s=100).after([0])
    training.attachment.switch("zlib" if rank == 2 else "plain")
    training.take_steps([1])


@on_ranks(2, raises=gradwire.Unsupported, match="was given Adamax")  # in less than the attachment's own timeout
def test_rank_that_cannot_attach_tells_the_others(rank: int, world_size: int) -> None:
    Training(rank, "one-bit-adam", torch.optim.Adamax if rank == 1 else torch.optim.Adam, timeout_s=300).take_steps([0])


@on_ranks(2)
def test_stats_count_every_fallback(rank: int, world_size: int) -> None:
    training = Training(rank, "homomorphic:mode=sketch", timeout_s=100).after(range(3))  # of dense gradients
    stats = training.close()
    assert stats["n_fallbacks"] == stats["n_buckets_too_dense"] > 3
    assert list(training.attachment.recorder.fallback_reasons.values()) == [stats["n_fallbacks"]]


@on_ranks(2, raises=gradwire.RankMismatch, match="rank 1 failed: ZeroDivisionError: a bug in commit")
def test_exception_at_the_end_of_a_step_is_raised_on_all_ranks(rank: int, world_size: int) -> None:
    training, n_done = Training(rank, "zlib", timeout_s=100), 0
    scheme = training.attachment.scheme
    if rank == 1:  # when step 1 is to be committed
        scheme.end_step = Mock(wraps=scheme.end_step, side_effect=[DEFAULT, ZeroDivisionError("a bug in commit")])
    try:
        for step in range(4):
            training.take_steps([step])
            n_done += 1
    finally:
        assert n_done in (1, 2), n_done  # with the step itself, or with the next
        with pytest.raises(gradwire.RankMismatch):
            training.stats()
        training.attachment.close()


@on_ranks(2)
def test_error_of_the_users_between_two_steps_harms_nothing(rank: int, world_size: int) -> None:
    training = Training(rank, "gcomp", timeout_s=100).after(range(2))
    if rank == 1:
        with pytest.raises(RuntimeError, match="mat1 and mat2"):
            training.ddp(torch.ones(4, 3))
    training.take_steps(range(2, 5))
    assert agree(training.flat())


def saved_and_loaded(ddp: Any) -> Any:
    file = io.BytesIO()
    torch.save(ddp, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@on_ranks(2)
def test_model_with_an_attachment_is_copied_and_saved_as_any_other(rank: int, world_size: int) -> None:
    for scheme in ("gcomp", "one-bit", "broadcast"):
        training = start(rank, schemes.by_name(scheme, **schemes.as_published(scheme, {})))
        for state in ("attached", "closed"):
            training.take_steps(range(2))
            if state == "closed":
                training.close()
            training.attachment.flush()
            twins = [copy.deepcopy(training.ddp), saved_and_loaded(training.ddp), AveragedModel(training.ddp).module]
            for twin in twins:
                assert torch.equal(training.flat(), flat(twin)), (scheme, state)
        training.attachment = None
        for twin in twins:  # a copy trains by itself, and with an attachment of its own
            training.ddp, training.optimizers = twin, [sgd(twin.parameters())]
            training.take_steps([0])
            training.attachment = gradwire.attach(twin, training.optimizers[0], scheme, timeout_s=100)
            training.take_steps(range(3))
            assert agree(finish(training)), scheme
    hooked = start(rank).ddp
    state = gradwire.HookState("plain", timeout_s=100)
    hooked.register_comm_hook(state, gradwire.ddp_hook)
    assert saved_and_loaded(copy.deepcopy(hooked)).module is not hooked.module
    state.close()


class HandedThrough(torch.optim.Optimizer):
    """As Accelerate wraps an optimizer: a torch Optimizer by name alone, without its own fields."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer

    param_groups = property(lambda self: self.optimizer.param_groups)  # type: ignore[assignment]
    state = property(lambda self: self.optimizer.state)  # type: ignore[assignment]

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.optimizer.zero_grad(set_to_none)

    def step(self, closure: Any = None) -> None:
        self.optimizer.step(closure)


@on_ranks(2)
def test_optimizer_that_hands_through_to_another_is_taken_for_the_one_inside(rank: int, world_size: int) -> None:
    with pytest.raises(gradwire.Unsupported, match=r"attach the optimizer inside it \(AdamW\)"):
        start(rank, "broadcast", optimizer=lambda p: HandedThrough(adamw(p)))
    HandedThrough.__module__ = "accelerate.optimizer"
    for scheme in ("gcomp", "broadcast", "acp-sgd"):
        ends = []
        for given in (HandedThrough, lambda optimizer: optimizer):
            made = schemes.by_name(scheme, **schemes.as_published(scheme, {}))
            training = Training(rank, made, lambda p, given=given: given(adamw(p)), timeout_s=100).after(range(5))
            training.close()
            ends.append(training.flat())
        assert torch.equal(*ends), scheme


@pytest.mark.parametrize("what", ["nothing", "group"])
@on_ranks(2, raises=Exception, match="needs a gradwire.HookState, got")
def test_hook_with_another_state_says_what_it_needs(rank: int, world_size: int, what: str) -> None:
    training = start(rank)
    training.ddp.register_comm_hook(None if what == "nothing" else training.ddp.process_group, gradwire.ddp_hook)
    training.take_steps([0])


# One of each kind of message; the others make their tensors in the same places, which the architecture's tests look at.
SCHEMES = ["acp-sgd", "dgc", "gcomp", "homomorphic", "one-bit", "power-sgd", "slimgc", "terngrad"]
# Made once, before any default is set.
given_layers, given_batch = functools.cache(small_layers), functools.cache(batch_of)


def train(rank: int, scheme: Any, n_steps: int = 5, scaler: Any = None, told: Any = None) -> tuple[torch.Tensor, Any]:
    """A scaled loss overflows in step 2."""
    loss = lambda module, rank, step: module(given_batch(rank, step)).square().mean()  # noqa: E731
    training = Training(
        rank, scheme, model=lambda: copy.deepcopy(given_layers()), loss=loss, scaler=told, timeout_s=100
    )
    for step in range(n_steps):
        if scaler is None:
            training.take_steps([step])
        else:
            training.take_scaled_step(scaler, step, torch.inf if step == 2 else 1.0)
    state = training.attachment.state_dict()["state"]
    training.close()
    return training.flat(), state


@on_ranks(2)
def test_defaults_of_dtype_and_device_change_no_bit(rank: int, world_size: int) -> None:
    for scheme in SCHEMES:
        expected, _ = train(rank, scheme)
        for dtype, device in ((torch.float64, None), (torch.bfloat16, None), (torch.float32, "meta")):
            torch.set_default_dtype(dtype)
            torch.set_default_device(device)
            try:
                values, _ = train(rank, scheme)
            finally:
                torch.set_default_dtype(torch.float32)
                torch.set_default_device(None)
            assert torch.equal(values, expected), (scheme, dtype, device)


@on_ranks(2)
def test_a_scaler_that_attach_was_not_given_counts_as_if_it_had_been(rank: int, world_size: int) -> None:
    for scheme in ("one-bit", "dgc", "acp-sgd", "top-k"):
        ends = []
        for is_told in (True, False):
            scaler = torch.amp.GradScaler("cpu", init_scale=2.0**6)
            ends.append(train(rank, scheme, 6, scaler, scaler if is_told else None))
        (told, told_state), (untold, state) = ends
        assert torch.equal(told, untold), scheme
        for name, residual in told_state.get("residuals", {}).items():
            assert torch.equal(residual, state["residuals"][name]), (scheme, name)


@pytest.mark.parametrize(
    ("scheme", "door", "closes"),
    [("auto", "ddp", 0), ("gcomp", "ddp", 0), ("one-bit", "ddp", 0), ("gcomp", "module", 0), ("truncate", "ddp", 10)],
)
@on_ranks(2)
def test_an_attachment_that_nobody_closes_goes_with_its_model(
    rank: int, world_size: int, scheme: str, door: str, closes: int
) -> None:
    """And those before it, which were closed: threads and descriptors that three more folds have left, and models."""

    def fold() -> weakref.ref[nn.Module]:
        torch.manual_seed(0)
        model: nn.Module = nn.Sequential(nn.Linear(16, 40), nn.Linear(40, 8))
        if door == "ddp":
            model = DistributedDataParallel(model)
        optimizer = torch.optim.SGD(model.parameters(), 0.05)
        for is_closed in [*[True] * closes, False]:
            attachment = gradwire.attach(model, optimizer, scheme, timeout_s=100)
            for _ in range(4):
                optimizer.zero_grad()
                model(torch.ones(2, 16)).square().mean().backward()
                optimizer.step()
            if is_closed:
                attachment.close()
        return weakref.ref(model)

    def held() -> int:
        gc.collect()
        return len(os.listdir("/proc/self/task")) + len(os.listdir("/proc/self/fd"))

    fold()
    before = held()
    left = [fold() for _ in range(3)]
    dist.barrier()
    assert held() - before <= 2
    assert all(one() is None for one in left)
