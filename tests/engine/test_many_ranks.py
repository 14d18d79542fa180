"""64 ranks on one machine: that they agree, and what each rank holds. `pytest -m slow` runs it."""

import contextlib
import hashlib
import os

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import gradwire
from gradwire import schemes
from gradwire.core.bucket import Bucket
from ranks import on_ranks, run_ranks

WORLD = 64
# Scheme, options, and connections of each rank: to its neighbours, or to all.
CASES = [
    ("gcomp", {"importance": "none"}, 2),
    ("gcomp", {"importance": "none", "topology": "direct"}, WORLD - 1),
    ("one-bit", {}, WORLD - 1),
]
N_ELEMENTS = 999
# A mesh's own: where it listens, its poll loop, and an event each for it and for the thread at the door.
OWN_DESCRIPTORS, OWN_THREADS = 4, 1


def held() -> set[str]:
    """Descriptors with what they are, and threads."""
    threads = {f"thread {number}" for number in os.listdir("/proc/self/task")}
    found = set()
    for number in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # the listing's own
            found.add(f"{number} {os.readlink(f'/proc/self/fd/{number}')}")
    return found | threads


def reduce_all(rank: int, world_size: int) -> list[tuple[str, float, tuple[int, int], int]]:
    found = []
    exact = sum(gradient_of(one).double() for one in range(world_size)) / world_size
    for name, options, _ in CASES:
        state = gradwire.HookState(schemes.by_name(name, **options), timeout_s=200)
        state.communicator.submit(state.communicator.all_gather, torch.ones(1)).wait()  # the backend's own are there
        before = held()
        gradient = gradient_of(rank)
        for step in range(3):
            gradient.copy_(gradient_of(rank))
            state.scheme.reduce(Bucket(gradient, step=step)).wait()
        own = held() - before
        threads = {name for name in own if name.startswith("thread")}
        made = len(own - threads), len(threads)
        error = float((gradient.double() - exact).abs().max())
        # Nobody needs this rank's any more.
        state.communicator.submit(state.communicator.all_gather, torch.ones(1)).wait()
        state.communicator.mesh.shut()
        n_left = len(own & held())
        state.close()
        found.append((hashlib.sha256(gradient.numpy().tobytes()).hexdigest(), error, made, n_left))
    return found


def gradient_of(rank: int) -> torch.Tensor:
    return torch.randn(N_ELEMENTS, generator=torch.Generator().manual_seed(rank))


@pytest.mark.slow
def test_64_ranks_agree_and_hold_a_connection_to_each_rank_that_they_talk_to() -> None:
    results = run_ranks(reduce_all, WORLD, timeout_s=300)
    for case, (name, options, n_connections) in enumerate(CASES):
        digests, errors, made, left = zip(*(found[case] for found in results), strict=True)
        assert len(set(digests)) == 1, (name, options)
        assert set(made) == {(n_connections + OWN_DESCRIPTORS, OWN_THREADS)}, (name, options, set(made))
        assert set(left) == {0}, (name, options)
        if name == "gcomp":
            assert max(errors) < 1e-5  # 63 sums in float32, without loss


@pytest.mark.slow
@on_ranks(2, timeout_s=500)
def test_a_thousand_attachments_leave_nothing_behind(rank: int, world_size: int) -> None:
    ddp = DistributedDataParallel(nn.Linear(9, 5))
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)

    def take_a_step() -> None:
        attachment = gradwire.attach(ddp, optimizer, "truncate", timeout_s=100)
        optimizer.zero_grad()
        ddp(torch.ones(3, 9)).sum().backward()
        optimizer.step()
        attachment.close()

    def count() -> tuple[int, int]:
        return len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))

    for _ in range(5):
        take_a_step()
    before = count()
    for _ in range(1_000):
        take_a_step()
    assert count() == before
