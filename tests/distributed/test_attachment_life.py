"""What an attachment does between steps: refuse what it cannot serve, switch, resume, count."""

from __future__ import annotations

from types import ModuleType

import pytest
import torch
from ddp_cases import attach, batches, build_model, finish, sgd, take_step, wrap
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.optim import ZeroRedundancyOptimizer

import gradwire
from gradwire import codecs, schemes
from gradwire.core.bucket import Bucket
from gradwire_lab.schemes.baselines import CodecRing
from ranks import agree, on_ranks


def gradwire_free_hook(state, bucket):  # type: ignore[no-untyped-def]
    future: torch.futures.Future = torch.futures.Future()
    future.set_result(bucket.buffer())
    return future


@on_ranks(2)
def test_what_cannot_be_attached_is_refused_by_name(rank: int, world_size: int) -> None:
    ddp = wrap(build_model())
    optimizer = sgd(ddp)
    bare = build_model()
    sharded = FullyShardedDataParallel(build_model(), device_id=torch.device("cpu"))
    zero = ZeroRedundancyOptimizer(ddp.parameters(), torch.optim.SGD, lr=0.1)
    for model, given, scheme, error, words in [
        (bare, optimizer, "gcomp", gradwire.InvalidArgument, "steps none of the model's parameters"),
        (nn.DataParallel(bare), optimizer, "gcomp", gradwire.Unsupported, "got DataParallel"),
        (sharded, optimizer, "gcomp", gradwire.Unsupported, "FSDP1 models are not supported"),
        (ddp, zero, "gcomp", gradwire.Unsupported, "ZeroRedundancyOptimizer is not supported yet"),
        (ddp, None, "gcomp", gradwire.Unsupported, "torch.optim.Optimizer second, .* got NoneType"),
        (
            ddp,
            optimizer,
            "gcmop",
            gradwire.InvalidArgument,
            "'gcmop'; did you mean 'gcomp'\\? there are: acp-sgd, ",
        ),
        (ddp, optimizer, "GComp", gradwire.InvalidArgument, "did you mean 'gcomp'"),
        (ddp, sgd(bare), "gcomp", gradwire.InvalidArgument, "steps none of the model's parameters"),
        (ddp, optimizer, 7, gradwire.InvalidArgument, "got int"),
    ]:
        with pytest.raises(error, match=words):
            gradwire.attach(model, given, scheme)
    with pytest.raises(gradwire.InvalidArgument, match="timeout_s is a number of seconds above 0"):
        gradwire.attach(ddp, optimizer, "plain", timeout_s=0)
    for given, options, words in [
        ("one-bit", {"floor": 0.5}, "has no option 'floor'"),
        (schemes.by_name("plain"), {"seed": 1}, "options go with a scheme's name"),
        ("gcomp", {"bucket_mb": 3}, "DDP has its own bucket_mb"),
    ]:
        with pytest.raises(gradwire.InvalidArgument, match=words):
            gradwire.attach(ddp, optimizer, given, **options)
    for door, more in ((ddp, {}), (bare, {"bucket_mb": 1})):
        torch.manual_seed(0)
        attachment = gradwire.attach(door, sgd(door), "top-k", share=0.25, timeout_s=100, **more)
        assert attachment.scheme.configuration["share"] == 0.25
        attachment.close()
    attachment = gradwire.attach(ddp, optimizer, "plain", timeout_s=100)
    with pytest.raises(gradwire.Unsupported, match=r"attachment\.switch"):
        gradwire.attach(ddp, optimizer, "gcomp")
    attachment.close()
    hooked = wrap(build_model())
    hooked.register_comm_hook(None, gradwire_free_hook)
    with pytest.raises(gradwire.Unsupported, match="has a communication hook already"):
        gradwire.attach(hooked, sgd(hooked), "plain", timeout_s=100)


@pytest.mark.parametrize("registry", [schemes, codecs])
def test_option_that_there_is_not_is_named_with_those_that_there_are(registry: ModuleType) -> None:
    with pytest.raises(
        gradwire.InvalidArgument, match=r"has no option 'importnce'; did you mean 'importance'\? there are: importance"
    ):
        registry.by_name("gcomp", importnce="none")


@on_ranks(2)
def test_switch_goes_on_from_the_same_bits_on_all_ranks(rank: int, world_size: int) -> None:
    ddp, alone = wrap(build_model()), wrap(build_model())
    optimizer, optimizer_alone = sgd(ddp), sgd(alone)
    attachment = attach(ddp, optimizer, schemes.by_name("gcomp", refresh_every=3))
    learnt = schemes.by_name("gcomp", importance="none")
    for scheme in ("zlib", "plain", learnt, "zstd", learnt):
        for batch in batches(rank, 3):
            take_step(ddp, optimizer, batch)
            take_step(alone, optimizer_alone, batch)
        attachment.switch(scheme)
        with pytest.raises(gradwire.InvalidArgument, match="no scheme is called"):
            attachment.switch("gcmop")  # nothing has changed
        with pytest.raises(gradwire.InvalidArgument, match="got int"):
            attachment.switch(7)
    take_step(ddp, optimizer, next(batches(rank)))
    take_step(alone, optimizer_alone, next(batches(rank)))
    assert attachment.stats()["scheme"] == "gcomp"
    assert attachment.step == 16
    found, expected = finish(ddp, attachment), finish(alone, None)
    assert agree(found)
    assert torch.allclose(found, expected, rtol=0, atol=1e-5)


@on_ranks(3, raises=gradwire.RankMismatch, match="disagree on scheme.*rank 2: zlib; the others: plain")
def test_ranks_that_switch_to_different_schemes_are_named_on_all_of_them(rank: int, world_size: int) -> None:
    ddp = wrap(build_model())
    optimizer = sgd(ddp)
    attachment = gradwire.attach(ddp, optimizer, "gcomp", timeout_s=100)
    take_step(ddp, optimizer, next(batches(rank)))
    attachment.switch("zlib" if rank == 2 else "plain")
    take_step(ddp, optimizer, next(batches(rank)))


@on_ranks(2, raises=gradwire.Unsupported, match="was given Adamax")  # in less than the attachment's own timeout
def test_rank_that_cannot_attach_tells_the_others(rank: int, world_size: int) -> None:
    ddp = wrap(build_model())
    optimizer = (torch.optim.Adamax if rank == 1 else torch.optim.Adam)(ddp.parameters())
    gradwire.attach(ddp, optimizer, "one-bit-adam", timeout_s=300)
    take_step(ddp, optimizer, next(batches(rank)))


class FallsBack(CodecRing):
    """Sends every bucket of step 1 plainly, as a scheme may that meets what it cannot compress."""

    def reduce(self, bucket: Bucket) -> torch.futures.Future:
        if bucket.step == 1:
            bucket.record.fallbacks.append("not compressible")
        return super().reduce(bucket)


class FailsAtTheEnd(CodecRing):
    """Fails when step 1 is to be committed, on one rank."""

    def end_step(self, step: int) -> None:
        if (self.session.communicator.rank, step) == (1, 1):
            raise ZeroDivisionError("a bug in commit")


@on_ranks(2)
def test_stats_count_every_fallback(rank: int, world_size: int) -> None:
    ddp = wrap(build_model())
    optimizer = sgd(ddp)
    attachment = gradwire.attach(ddp, optimizer, FallsBack("zlib", {}), timeout_s=100)
    for batch in batches(rank, 3):
        take_step(ddp, optimizer, batch)
    assert attachment.stats()["n_fallbacks"] == attachment.recorder.steps[1].n_buckets > 1
    assert attachment.recorder.fallback_reasons == {"not compressible": attachment.recorder.steps[1].n_buckets}
    attachment.close()


@on_ranks(2, raises=gradwire.RankMismatch, match="rank 1 failed: ZeroDivisionError: a bug in commit")
def test_exception_at_the_end_of_a_step_is_raised_on_all_ranks(rank: int, world_size: int) -> None:
    ddp = wrap(build_model())
    optimizer = sgd(ddp)
    attachment = gradwire.attach(ddp, optimizer, FailsAtTheEnd("zlib", {}), timeout_s=100)
    n_done = 0
    try:
        for batch in batches(rank, 4):
            take_step(ddp, optimizer, batch)
            n_done += 1
    finally:
        assert n_done in (1, 2), n_done  # with the step itself, or with the next
        with pytest.raises(gradwire.RankMismatch):
            attachment.stats()
        attachment.close()


@on_ranks(2)
def test_error_of_the_users_between_two_steps_harms_nothing(rank: int, world_size: int) -> None:
    """The user's own error, caught by the user: one rank loses a batch's forward pass and takes another."""
    ddp = wrap(build_model())
    optimizer = sgd(ddp)
    attachment = gradwire.attach(ddp, optimizer, "gcomp", timeout_s=100)
    for step, batch in enumerate(batches(rank)):
        if (rank, step) == (1, 2):
            with pytest.raises(RuntimeError, match="mat1 and mat2"):
                ddp(batch[:, :3])
        take_step(ddp, optimizer, batch)
    assert agree(finish(ddp, attachment))
