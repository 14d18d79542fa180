"""Model backup: bit-identical to synchronous training where it must be, one step stale where it may be, never more."""

import math
import os
import threading
import time
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gradwire.codecs.general import RawCodec
from gradwire.errors import PeerLost, Unsupported
from gradwire.schemes import Scheme, by_name
from gradwire.schemes.slimgc.threshold import NEVER
from gradwire_lab.training.loop import hash_parameters
from ranks import on_ranks, try_ranks
from small_training import MakeOptimizer, Training, adamw, from_one, sgd, small_layers
from training_runs import CASES, MORE_OPTIMIZERS, N_STEPS, OPTIMIZERS, find_differences

PLAIN = {"codec": "raw", "threshold_bytes": NEVER, "backup": True}


def model(seed: int = 1) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Linear(20, 30), nn.BatchNorm1d(30), nn.Tanh(), nn.Linear(30, 30), nn.Tanh(), nn.Linear(30, 3)
    )


def start(
    rank: int, scheme: Scheme, optimizer: MakeOptimizer = sgd, seed: int = 1, timeout_s: float = 100, **ddp: Any
) -> Training:
    ddp = {"bucket_cap_mb": 0.003, **ddp}
    return Training(rank, scheme, optimizer, lambda: model(seed), from_one, ddp, timeout_s=timeout_s)


def weights_of(ddp: nn.Module) -> Tensor:
    """Parameters and buffers."""
    return torch.cat([value.detach().double().reshape(-1) for value in ddp.state_dict().values()])


EVERYTHING = {"accumulate": 2, "max_norm": 0.05, "look": "evaluation", "schedule": "one cycle"}
ALONE: dict[str, dict[str, Any]] = {
    **{name: options for name, options in CASES.items() if not name.endswith(("cosine", "cycle"))},
    **{name: {"optimizer": name} for name in MORE_OPTIMIZERS},
    **{f"{name} scaled": {"optimizer": name, "amp": True} for name in OPTIMIZERS | MORE_OPTIMIZERS},
    **{f"{name}, everything": {"optimizer": name, **EVERYTHING} for name in ("sgd", "momentum", "adam", "adamw")},
}


@on_ranks(1)
def test_one_rank_without_compression_is_synchronous_training_bit_for_bit(rank: int, world_size: int) -> None:
    made: list[Scheme] = []

    def ahead(blocks: Any, max_norm: float | None) -> Scheme:
        clips = {} if max_norm is None else {"max_grad_norm": max_norm}
        made.append(by_name("slimgc", **PLAIN, **clips, local="peek", sync_steps=0))
        return made[-1]

    assert find_differences(rank, ALONE, ahead) == []
    for scheme, options in zip(made, ALONE.values(), strict=True):  # no step has waited; one that overflows is none
        assert scheme.stats()["steps_ahead"] == N_STEPS - ("amp" in options)


@on_ranks(2)
def test_gradients_are_one_step_stale_and_never_two(rank: int, world_size: int) -> None:
    """A network that takes a second: the next step is computed meanwhile, the one after it is not begun."""
    scheme = by_name("slimgc", **PLAIN, sync_steps=0)
    training = start(rank, scheme, lambda p: torch.optim.SGD(p, lr=0.1), bucket_cap_mb=25)
    ddp, optimizer, attachment = training.ddp, training.optimizer, training.attachment
    events: list[tuple[str, int]] = []
    lock = threading.Lock()
    inner = scheme.inner._reduce_on_lane

    def slow(bucket: Any) -> Any:
        time.sleep(1.0)
        result = inner(bucket)
        with lock:
            events.append(("aggregated", bucket.step))
        return result

    scheme.inner._reduce_on_lane = slow  # type: ignore[method-assign]
    for step in range(4):
        optimizer.zero_grad()
        with lock:
            events.append(("begun", step))
        from_one(ddp, rank, step).backward()
        with lock:
            events.append(("computed", step))
        optimizer.step()
    attachment.flush()
    place = {event: index for index, event in enumerate(events)}
    for step in range(3):
        assert place["computed", step + 1] < place["aggregated", step], "nothing waits for the step before"
    for step in range(2):
        assert place["aggregated", step] < place["begun", step + 2], "never more than one aggregate is missing"
    assert attachment.stats()["wait_s"] >= 0
    assert attachment.recorder.steps[-1].exposed_ns > 2e8  # what the second step waited for the first is told


@pytest.mark.parametrize(
    "spec", ["slimgc:codec=one-bit,threshold_bytes=400", "acp-sgd:rank=2,start_step=1", "top-k:share=0.1"]
)
@on_ranks(2)
def test_saved_in_the_middle_of_a_pending_step_a_run_goes_on_with_the_same_bits(
    rank: int, world_size: int, spec: str
) -> None:
    def begin(seed: int = 1) -> Training:
        return start(rank, by_name(spec, ahead=1, sync_steps=2), lambda p: torch.optim.AdamW(p, lr=1e-2), seed)

    saved, results = begin().after(range(6)).state(), []  # with a step pending: saving takes it
    for _ in range(2):
        resumed = begin(seed=9).load(saved)
        resumed.take_steps(range(6, 10))
        resumed.attachment.flush()
        assert resumed.close()["steps_ahead"] == 4, "the synchronous steps are behind it"
        results.append(weights_of(resumed.ddp))
    assert torch.equal(*results)


@on_ranks([1, 2, 3, 4])
def test_global_weights_are_identical_on_all_ranks_after_300_steps(rank: int, world_size: int) -> str:
    # Measured times would make the decision, and so the hash, another one in each run.
    scheme = by_name("slimgc", codec="one-bit", threshold_bytes=300, backup=True)
    training = Training(rank, scheme, adamw, small_layers, from_one, {"bucket_cap_mb": 25}, timeout_s=30)
    training.take_steps(range(300))
    training.attachment.flush()
    assert training.close()["steps_ahead"] == 298
    return hash_parameters(training.ddp.module)


class Odd(torch.optim.SGD):
    """With state of its own that no look-ahead could know of."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        self.n_calls = getattr(self, "n_calls", 0) + 1
        super().step(closure)


@on_ranks(2)
def test_what_cannot_be_peeked_or_would_be_lost_is_refused(rank: int, world_size: int) -> None:
    sgd = partial(torch.optim.SGD, lr=0.1)
    for kind in (Odd, torch.optim.LBFGS):
        with pytest.raises(Unsupported, match="cannot be peeked"):
            start(rank, by_name("slimgc", **PLAIN), lambda p, kind=kind: kind(p, lr=0.1))
    # Its step is not tried where the local one is plain SGD.
    start(rank, by_name("slimgc", **PLAIN, local="sgd"), lambda p: Odd(p, lr=0.1)).close()
    # Clipping would be of the local gradient, and too late for the mean.
    training = start(rank, by_name("slimgc", **PLAIN), sgd)
    training.backward(0)
    torch.nn.utils.clip_grad_norm_(training.ddp.parameters(), 1e-3)
    with pytest.raises(Unsupported, match="max_grad_norm"):
        training.optimizer.step()
    # What the user does to parameters between steps would be lost: it is said, and after a flush it holds.
    training = start(rank, by_name("slimgc", **PLAIN, sync_steps=0), sgd)
    ddp, attachment = training.ddp, training.attachment
    training.take_steps([0])
    with torch.no_grad():
        next(ddp.parameters()).zero_()
    with pytest.raises(Unsupported, match="flush"):
        from_one(ddp, rank, 1)
    attachment.flush()
    with torch.no_grad():
        next(ddp.parameters()).zero_()
    training.take_steps([1])
    attachment.flush()
    assert float(next(ddp.parameters()).abs().max()) < 0.2
    # A NaN travels as in synchronous training: all ranks have it, after the next step.
    training.take_steps([2], math.nan if rank == 0 else 1.0)
    attachment.flush()
    assert bool(next(ddp.parameters()).isnan().any())


def die_between_push_and_pull(rank: int, world_size: int) -> None:
    scheme = by_name("slimgc", codec="one-bit", threshold_bytes=0, pull="raw", backup=True, sync_steps=0)
    training = start(rank, scheme, timeout_s=1_000)
    ddp, attachment = training.ddp, training.attachment
    for step in range(6):
        training.take_steps([step])
        if step == 2:
            attachment.flush()
            complete = hash_parameters(ddp.module)
            if rank == 1:
                # What owners answer with is called back, being no codec of the core's.
                RawCodec.encode = lambda *_: os._exit(9)  # type: ignore[method-assign]
        try:
            if step > 2:
                attachment.flush()
        except PeerLost:
            assert hash_parameters(ddp.module) == complete, "the last complete global weights are left"
            raise


def test_death_between_push_and_pull_is_a_lost_peer_and_leaves_complete_weights() -> None:
    outcomes = try_ranks(die_between_push_and_pull, 3)
    for outcome in (outcomes[0], outcomes[2]):
        assert type(outcome.error) is PeerLost, outcome
