"""Several models and several process groups at once do not get in each other's way."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
import torch.distributed as dist
from ddp_cases import SCHEMES, adamw, attach, batches, build_model, finish, sgd, take_step, wrap
from torch import Tensor

import gradwire
from gradwire import schemes
from gradwire.wire.communicator import Communicator
from ranks import agree, on_ranks


def train_two_models(rank: int, names: tuple[str | None, str | None]) -> list[Tensor]:
    """Two models over the same ranks, whose backward passes alternate, one of them in a common pass."""
    models = [wrap(build_model(seed)) for seed in (1, 2)]
    optimizers = [adamw(models[0]), sgd(models[1])]
    attachments = [
        attach(model, optimizer, SCHEMES[name]() if name else None)
        for model, optimizer, name in zip(models, optimizers, names, strict=True)
    ]
    for batch in batches(rank):
        for optimizer in optimizers:
            optimizer.zero_grad()
        (models[0](batch) - models[1](batch)).square().mean().backward()
        for optimizer in optimizers:
            optimizer.step()
        for model, optimizer in zip(models, optimizers, strict=True):
            take_step(model, optimizer, batch)
    return [finish(model, attachment) for model, attachment in zip(models, attachments, strict=True)]


@on_ranks(2, timeout_s=60)
def test_two_models_over_the_same_ranks_train_at_once(rank: int, world_size: int) -> list[list[Tensor]]:
    expected = train_two_models(rank, (None, None))
    results = []
    for names in (("gcomp none", "zlib"), ("plain", "gcomp none"), ("gcomp none", "gcomp direct")):
        found = train_two_models(rank, names)
        for mine, theirs in zip(found, expected, strict=True):
            assert torch.allclose(mine, theirs, rtol=0, atol=1e-5), names
        results.append(found)
    return results


def train_over(group: dist.ProcessGroup | None, rank: int, name: str | None, seed: int) -> Tensor:
    ddp = wrap(build_model(seed), process_group=group)
    optimizer = sgd(ddp)
    attachment = attach(ddp, optimizer, SCHEMES[name]() if name else None)
    for batch in batches(rank):
        take_step(ddp, optimizer, batch)
    return finish(ddp, attachment)


@on_ranks(3, timeout_s=60)
def test_subgroups_of_different_ranks_train_side_by_side(rank: int, world_size: int) -> None:
    """Ranks 0 and 1 are in one group more than rank 2, then all of them meet, then 2 and 0 in this order."""
    left, right = dist.new_group([0, 1]), dist.new_group([2, 0])
    groups = [(left, 1), (None, 2), *([(right, 3)] if rank != 1 else [])][rank == 2 :]
    runs: dict[int, list[Tensor]] = {}
    for name in (None, "zlib", "gcomp none", "plain"):
        for group, seed in groups:
            runs.setdefault(seed, []).append(train_over(group, rank, name, seed))
    for group, seed in groups:
        for run in runs[seed]:
            assert torch.allclose(run, runs[seed][0], rtol=0, atol=1e-5)
        assert agree(torch.stack(runs[seed]), group)


@on_ranks(2)
def test_closed_attachment_keeps_no_model_alive(rank: int, world_size: int) -> None:
    ddp = wrap(build_model())
    optimizer = adamw(ddp)
    attachment = gradwire.attach(ddp, optimizer, "gcomp", timeout_s=100)
    take_step(ddp, optimizer, next(batches(rank)))
    attachment.close()
    parameter = weakref.ref(next(ddp.parameters()))
    del ddp, optimizer
    gc.collect()
    assert parameter() is None
    assert attachment.stats()["n_steps"] == 1


@on_ranks(2)
def test_scheme_object_serves_one_attachment_at_a_time(rank: int, world_size: int) -> None:
    scheme = schemes.by_name("gcomp")
    first, second = wrap(build_model(1)), wrap(build_model(2))
    attachment = gradwire.attach(first, adamw(first), scheme, timeout_s=100)
    with pytest.raises(gradwire.InvalidArgument, match="make one for each"):
        gradwire.attach(second, adamw(second), scheme)
    attachment.switch("plain")
    other = gradwire.attach(second, adamw(second), scheme, timeout_s=100)  # free again
    with pytest.raises(gradwire.InvalidArgument, match="make one for each"):
        attachment.switch(scheme)
    attachment.close()
    other.close()


@on_ranks(4)
def test_communicator_may_be_closed_at_once(rank: int, world_size: int) -> None:
    """A rank that closes at once leaves nobody behind who still connects to it or to others."""
    for _ in range(40):
        Communicator(timeout_s=100).close()
