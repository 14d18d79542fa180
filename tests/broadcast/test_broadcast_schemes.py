"""The broadcast schemes: the same bits on every rank, DDP's bits where nothing is left out, and resumable state."""

import itertools
import random
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from gradwire import schemes
from gradwire.schemes import Scheme
from gradwire.schemes.aqgb.scheme import Aqgb, Broadcast
from gradwire_lab.training.loop import hash_parameters
from ranks import on_ranks
from small_training import Training, copying, small_layers
from training_runs import CASES, find_differences

THREE_BLOCKS = [["0"], ["2"], ["4"]]


def start(rank: int, scheme: Scheme | None, seed: int = 1, dtype: torch.dtype = torch.float32) -> Training:
    sgd = partial(torch.optim.SGD, lr=0.05, momentum=0.9)
    options = {"timeout_s": 100} if scheme else {}
    return Training(rank, scheme, sgd, lambda: small_layers(seed, dtype), copying, {"bucket_cap_mb": 0.01}, **options)


@on_ranks(2)
def test_every_byte_sent_is_in_the_totals_as_soon_as_the_steps_are_taken(rank: int, world_size: int) -> None:
    training, counts = start(rank, Broadcast(bits=8, blocks=THREE_BLOCKS)), []
    for step in range(0, 8, 2):
        training.take_steps([step, step + 1])
        training.attachment.flush()
        counts.append(training.stats()["bytes_sent"])
    training.attachment.close()
    steps = {after - before for before, after in itertools.pairwise(counts[1:])}
    assert counts[0] >= max(steps), counts  # the first two steps lack nothing, and begin with a preamble
    assert training.stats()["bytes_sent"] == counts[3], counts
    assert len(steps) == 1, counts


@pytest.mark.parametrize(
    ("world_size", "topology"),
    [(2, "fan-out"), (3, "ring"), (4, "fan-out"), (2, "owners"), (3, "owners"), (4, "owners")],
)
@on_ranks()
def test_ranks_hold_the_same_bits_after_300_steps_under_random_delays(
    rank: int, world_size: int, topology: str
) -> list[str]:
    options: dict[str, Any] = {"topology": topology}
    if world_size < 4:  # four ranks keep the ceiling that busy cores give them; fewer fill the network
        options["max_contention"] = 1
    training = start(rank, Aqgb(blocks=THREE_BLOCKS, error_feedback=world_size == 4, **options))
    delays, hashes = random.Random(rank), []
    for step in range(300):
        if delays.random() < 0.1:
            time.sleep(0.005 * delays.random())  # a slow forward pass, a late gradient
        training.take_steps([step])
        if delays.random() < 0.1:
            time.sleep(0.005 * delays.random())
        if step % 100 == 99:
            training.attachment.flush()
            hashes.append(hash_parameters(training.ddp))
    bits = [bits for one in training.attachment.scheme.figures.rounds for bits in one["bits"]]
    assert len(set(hashes)) == 3
    assert 4 <= min(bits) <= max(bits) <= 32
    return hashes


# With one rank nothing is exchanged: a case of each kind is enough.
FEW = {name: options for name, options in CASES.items() if name.startswith(("adamw", "unused", "amp", "clip", "load"))}


@on_ranks([1, 2])
def test_all_32_bits_train_as_ddp_does(rank: int, world_size: int) -> None:
    """Bit for bit, whatever the optimizer and the script around it."""
    cases = CASES if world_size > 1 else FEW
    assert find_differences(rank, cases, lambda blocks, norm: Broadcast(32, blocks, norm)) == []


RUNS: dict[str, Callable[[], Scheme | None]] = {
    "plain": lambda: None,
    "exact": lambda: Aqgb(floor=1.0, blocks=THREE_BLOCKS),
    "coarse": lambda: Broadcast(3, THREE_BLOCKS),
    "fed back": lambda: Broadcast(3, THREE_BLOCKS, error_feedback=True),
    "ring": lambda: Broadcast(3, THREE_BLOCKS, topology="ring"),
    "owners": lambda: Aqgb(floor=1.0, blocks=THREE_BLOCKS, topology="owners"),
    "bits of the codec": lambda: Broadcast(31, THREE_BLOCKS),
}


@on_ranks(3)
def test_fewer_bits_stay_near_and_all_ranks_agree(rank: int, world_size: int) -> dict[str, Tensor]:
    ends, stats = {}, {}
    for name, make in RUNS.items():
        training = start(rank, make())
        training.take_steps(range(40))
        stats[name] = training.close()
        ends[name] = training.flat()
    assert torch.equal(ends["ring"], ends["coarse"])  # the way there changes nothing
    for exact in ("exact", "owners"):
        torch.testing.assert_close(ends[exact], ends["plain"], rtol=0, atol=1e-6)  # but for the order of the sum
    torch.testing.assert_close(ends["bits of the codec"], ends["plain"], rtol=0, atol=1e-5)
    distance = {name: float((ends[name] - ends["plain"]).norm()) for name in ("coarse", "fed back")}
    assert 0 < distance["fed back"] < distance["coarse"]
    coarse = stats["coarse"]
    assert set(coarse["bits_per_value"].values()) == {3.0}
    assert 0 < coarse["osf"] <= 1
    assert 0 <= coarse["utilisation"] <= 1
    assert min(coarse["row"], coarse["group_row"]) >= 0
    assert coarse["rate_bps"] > 0
    assert 0 < coarse["bytes_sent"] < stats["exact"]["bytes_sent"]
    assert coarse["encode_s"] > 0 < coarse["decode_s"]
    return ends


@on_ranks(3)
def test_ranks_agree_in_bfloat16_over_lost_steps_and_over_other_schemes(rank: int, world_size: int) -> list[Tensor]:
    short = start(rank, Broadcast(16, THREE_BLOCKS), dtype=torch.bfloat16)
    short.take_steps(range(3))
    short.close()
    training = start(rank, Broadcast(8, THREE_BLOCKS, error_feedback=True, topology="owners"))
    ddp, attachment = training.ddp, training.attachment
    training.take_steps([0])
    training.backward(1)  # a step that is not taken, and then the next one
    training.take_steps([2])
    training.take_steps([3], torch.inf if rank == 1 else 1.0)  # a gradient that is not finite, on one rank
    attachment.flush()
    is_finite = training.flat().isfinite()
    assert not is_finite.all()
    residuals = attachment.state_dict()["state"]["residuals"]
    assert all(bool(residual.isfinite().all()) for residual in residuals.values())
    ddp.load_state_dict({key: torch.ones_like(value) / 10 for key, value in ddp.state_dict().items()})
    training.optimizer.state.clear()
    attachment.switch(schemes.by_name("plain"))
    training.take_steps([3])
    attachment.switch(Aqgb(blocks=2))
    training.take_steps([4])
    training.close()
    return [short.flat(), is_finite, training.flat()]


@on_ranks(2)
def test_a_resumed_run_goes_on_with_the_same_bits(rank: int, world_size: int) -> None:
    def begin(seed: int) -> Training:
        return start(rank, Broadcast(4, THREE_BLOCKS, error_feedback=True), seed)

    training = begin(1)
    training.take_steps(range(4))
    saved = training.state()
    training.take_steps(range(4, 8))
    training.close()
    resumed = begin(2).load(saved)
    assert resumed.attachment.step == 4
    resumed.take_steps(range(4, 8))
    resumed.close()
    assert torch.equal(training.flat(), resumed.flat())
