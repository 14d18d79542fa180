"""Several models and several process groups at once do not get in each other's way."""

import gc
import weakref
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ddp_cases import N_STEPS, SCHEMES, finish, sgd, start
from torch import Tensor

import gradwire
from awkward_models import build_model
from gradwire import schemes
from gradwire.wire import rendezvous
from gradwire.wire.communicator import Communicator
from ranks import agree, on_ranks
from small_training import MakeOptimizer, Training, adamw, batch_of


def of_seed(seed: int, rank: int, name: str | None, optimizer: MakeOptimizer, **options: Any) -> Training:
    scheme = SCHEMES[name]() if name else None
    return start(rank, scheme, lambda: build_model(seed), optimizer, **options)


def train_two_models(rank: int, names: tuple[str | None, str | None]) -> list[Tensor]:
    """Two models over the same ranks, whose backward passes alternate, one of them in a common pass."""
    both = first, second = of_seed(1, rank, names[0], adamw), of_seed(2, rank, names[1], sgd)
    for step in range(N_STEPS):
        batch = batch_of(rank, step)
        for one in both:
            one.optimizer.zero_grad()
        (first.ddp(batch) - second.ddp(batch)).square().mean().backward()
        for one in both:
            one.optimizer.step()
        for one in both:
            one.take_steps([step])
    return [finish(one) for one in both]


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


@on_ranks(3, timeout_s=60)
def test_subgroups_of_different_ranks_train_side_by_side(rank: int, world_size: int) -> None:
    """Ranks 0 and 1 are in one group more than rank 2, then all of them meet, then 2 and 0 in this order."""
    left, right = dist.new_group([0, 1]), dist.new_group([2, 0])
    groups = [(left, 1), (None, 2), *([(right, 3)] if rank != 1 else [])][rank == 2 :]
    runs: dict[int, list[Tensor]] = {}
    for name in (None, "zlib", "gcomp none", "plain"):
        for group, seed in groups:
            training = of_seed(seed, rank, name, sgd, process_group=group).after(range(N_STEPS))
            runs.setdefault(seed, []).append(finish(training))
    for group, seed in groups:
        for run in runs[seed]:
            assert torch.allclose(run, runs[seed][0], rtol=0, atol=1e-5)
        assert agree(torch.stack(runs[seed]), group)


@on_ranks(2)
def test_closed_attachment_keeps_no_model_alive(rank: int, world_size: int) -> None:
    training = start(rank, "gcomp").after([0])
    training.close()
    attachment, parameter = training.attachment, weakref.ref(next(training.ddp.parameters()))
    del training
    gc.collect()
    assert parameter() is None
    assert attachment.stats()["n_steps"] == 1


@on_ranks(2)
def test_scheme_object_serves_one_attachment_at_a_time(rank: int, world_size: int) -> None:
    scheme = schemes.by_name("gcomp")
    first = start(rank, scheme)
    with pytest.raises(gradwire.InvalidArgument, match="make one for each"):
        start(rank, scheme)
    first.attachment.switch("plain")
    other = start(rank, scheme)  # free again
    with pytest.raises(gradwire.InvalidArgument, match="make one for each"):
        first.attachment.switch(scheme)
    other.close()


@on_ranks(4)
def test_communicator_may_be_closed_at_once(rank: int, world_size: int) -> None:
    """A rank that closes at once leaves nobody behind who still connects to it or to others."""
    for _ in range(40):
        Communicator(timeout_s=100).close()


def test_a_version_that_says_otherwise_where_it_listens_is_named() -> None:
    store = dist.HashStore()
    store.set("1", "4711 10.0.0.2")
    with pytest.raises(gradwire.IncompatibleVersion, match="rank 1 says otherwise where it listens: install the same"):
        rendezvous._read_endpoints(store, 1)
