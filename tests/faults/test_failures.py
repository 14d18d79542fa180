"""Whatever goes wrong on one rank, every surviving rank gets a typed error that says what and where; nothing hangs."""

import itertools
import os
import re
import time
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import gradwire
from flipping import flip_what_comes
from float_messages import Tapped
from gradwire import schemes
from gradwire.codecs.huffman import HuffmanTable
from gradwire.core.bucket import Bucket
from ranks import Outcome, bits_of, on_ranks, patience, try_ranks
from small_training import Training

N_STEPS, BAD_STEP = 4, 2


def train(
    rank: int,
    world_size: int,
    scheme: Any,
    fault: Any = None,
    faulty: int = 1,
    width: int = 100,
    timeout_s: float = max(10.0, patience()),
    attached: list[Any] | None = None,
) -> None:
    """A few steps; `fault(attachment)` may do harm on the rank `faulty`, before the backward pass of BAD_STEP."""
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(20, width), nn.ReLU(), nn.Linear(width, 3))
    ddp = DistributedDataParallel(model, bucket_cap_mb=0.01)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    attachment = gradwire.attach(ddp, optimizer, scheme, timeout_s=timeout_s)
    if attached is not None:
        attached.append(attachment)
    for step in range(N_STEPS):
        optimizer.zero_grad()
        loss = ddp(torch.randn(8, 20)).square().mean()
        if fault and (rank, step) == (faulty, BAD_STEP):
            fault(attachment)
        loss.backward()
        optimizer.step()


def check_all_raised(outcomes: list[Outcome], error: type[Exception], *words: str, dead: tuple[int, ...] = ()) -> None:
    for rank, outcome in enumerate(outcomes):
        if rank in dead:
            continue
        assert type(outcome.error) is error, f"rank {rank}: {outcome}"
        for word in words:
            assert re.search(word, str(outcome.error)), f"rank {rank}: {outcome.error}"


def die(attachment: Any) -> None:
    os._exit(9)


def count_a_step_too_many(attachment: Any) -> None:
    state = attachment.state_dict()
    attachment.load_state_dict({**state, "step": state["step"] + 1})


def sleep(seconds: float, attachment: Any) -> None:
    time.sleep(seconds)


def leave_a_note(note: str, attachment: Any) -> None:
    communicator = attachment.communicator
    communicator._store.set(communicator._name + "/failure", note)
    os._exit(9)


@pytest.mark.parametrize(
    ("world_size", "scheme"),
    [
        (2, "plain"), (3, "gcomp"), (4, "gcomp"), (3, "gcomp:topology=direct"), (3, "acp-sgd"), (2, "power-sgd"),
        (3, "power-sgd-overlap"), (2, "sign-sgd"), (3, "top-k"), (3, "one-bit"), (3, "slimgc:threshold_bytes=0"),
        (2, "slimgc:threshold_bytes=0,codec=zlib"),
    ],
)  # fmt: skip
def test_death_of_a_rank_raises_peer_lost_on_the_others(world_size: int, scheme: str) -> None:
    # Survivors notice by the closed connection: with this timeout, a rank that waited for it would hang the test.
    outcomes = try_ranks(partial(train, scheme=scheme, fault=die, timeout_s=1_000), world_size)
    assert outcomes[1].exit_code == 9
    check_all_raised(outcomes, gradwire.PeerLost, "restart from the last checkpoint", dead=(1,))


def train_until_all_are_told(rank: int, world_size: int, scheme: str, here: Path) -> None:
    try:
        train(rank, world_size, scheme, die, timeout_s=1_000)
    finally:
        (here / str(rank)).touch()
        while len(list(here.iterdir())) < world_size - 1:
            time.sleep(0.01)


@pytest.mark.parametrize(("world_size", "scheme"), [(4, "plain"), (4, "top-k"), (5, "acp-sgd")])
def test_a_death_is_noticed_by_all_although_those_who_know_of_it_live_on(
    world_size: int, scheme: str, tmp_path: Path
) -> None:
    """Not by their end, which closes their connections too: also the one after whom the dead rank comes closes its own."""
    outcomes = try_ranks(train_until_all_are_told, world_size, scheme, tmp_path)
    check_all_raised(outcomes, gradwire.PeerLost, dead=(1,))


@pytest.mark.parametrize(
    ("note", "words"),
    [
        ("no note", "rank 1"),
        ("5", "rank 1"),
        ('{"rank": 0}', "rank 1"),
        ('{"rank": 7, "type": "PeerLost", "message": "x"}', "rank 1"),
        ('{"rank": 1, "type": "annotations", "message": "no error of ours"}', "no error of ours"),
        ('{"rank": 1, "type": "__class__", "message": "no error of ours"}', "no error of ours"),
    ],
)
def test_note_that_no_rank_of_ours_wrote_is_still_a_typed_error(note: str, words: str) -> None:
    outcomes = try_ranks(partial(train, scheme="gcomp", fault=partial(leave_a_note, note)), 2)
    assert outcomes[1].exit_code == 9, outcomes[1].traceback
    check_all_raised(outcomes, gradwire.PeerLost, words, dead=(1,))


def raise_error(message: torch.Tensor, n_bytes: int) -> int:
    raise ZeroDivisionError("a bug in a codec")


def flip_a_bit(message: torch.Tensor, n_bytes: int) -> int:
    message[n_bytes // 2] ^= 4
    return n_bytes


def fill_all(message: torch.Tensor, n_bytes: int) -> int:
    return message.fill_(7).numel()


# Gloo ends the process of a rank that gets more than the receive that it posted. Who notices first varies: rank 1 may be the
# first to decode its own message, and then its own error is not said to be another rank's.
HARMS: dict[str, tuple[Callable[[torch.Tensor, int], int], int, type[Exception], str]] = {
    "error": (raise_error, 0, gradwire.RankMismatch, "rank 1 failed: ZeroDivisionError: a bug in a codec"),
    "flipped": (flip_a_bit, 0, gradwire.CorruptMessage, ""),
    "longer": (
        fill_all, 5_000_000, gradwire.CorruptMessage, "rank 1 announced message.*at most|(^|rank 1 raised: )GComp message"
    ),
}  # fmt: skip


def train_sabotaged(rank: int, world_size: int, how: str, topology: str) -> None:
    scheme = schemes.by_name("truncate", topology=topology)
    if rank == 1:
        harm, more_bytes, *_ = HARMS[how]
        calls = itertools.count(1)

        def harm_from_the_fifth_on(message: torch.Tensor, n_bytes: int) -> int:
            return harm(message, n_bytes) if next(calls) >= 5 else n_bytes

        scheme.collective.codec = Tapped(scheme.collective.codec, harm_from_the_fifth_on, more_bytes)
    train(rank, world_size, scheme)


@pytest.mark.parametrize("topology", ["ring", "direct"])
@pytest.mark.parametrize("how", HARMS)
def test_what_goes_wrong_in_one_ranks_codec_is_raised_on_all_of_them(how: str, topology: str) -> None:
    check_all_raised(try_ranks(train_sabotaged, 3, how, topology), *HARMS[how][2:])


@on_ranks(2, raises=gradwire.CorruptMessage, match="written with Huffman table")
def test_message_with_an_unknown_table_names_the_table_on_all_ranks(rank: int, world_size: int) -> None:
    scheme = schemes.by_name("gcomp", refresh_every=0)
    if rank == 1:
        histogram = torch.zeros(256, dtype=torch.int64)
        histogram[100:130] = 1
        scheme.collective.codec.use_table(HuffmanTable.from_histogram(histogram))
    train(rank, world_size, scheme)


@pytest.mark.parametrize(
    ("scheme", "world_size", "late"), [("plain", 3, 1), ("gcomp", 3, 1), ("one-bit", 2, 1), ("plain", 2, 0)]
)
def test_rank_that_does_not_come_ends_in_peer_lost_after_the_timeout(scheme: str, world_size: int, late: int) -> None:
    outcomes = try_ranks(partial(train, scheme=scheme, fault=partial(sleep, 8), faulty=late, timeout_s=2), world_size)
    check_all_raised(outcomes, gradwire.PeerLost, "timeout_s=2")
    if world_size == 2:  # of more, the others hear of each other's end
        words = f"rank {late}", r"pass attach\(\.\.\., timeout_s=\) more"
        check_all_raised(outcomes, gradwire.PeerLost, *words, dead=(late,))
    # Not since it asked, which `plain` does when the sum should have been there long ago.
    for rank in {*range(world_size)} - {late}:
        assert re.search(r"waited [2-7]\.\d s", str(outcomes[rank].error)), outcomes[rank]


@pytest.mark.parametrize(
    ("others", "own"),
    [
        *(("gcomp", own) for own in ("truncate", "one-bit")),
        ("gcomp:refresh_every=50", "gcomp:refresh_every=10"),
        ("homomorphic:seed=1", "homomorphic:seed=0"),
        ("homomorphic:batch_values=512", "homomorphic:batch_values=1024"),
        *((f"{name}:seed=0", f"{name}:seed=1") for name in ("terngrad", "thc", "dgc")),
    ],
)
@on_ranks(
    3,
    raises=gradwire.RankMismatch,
    match="disagree on (scheme before bucket 0 of step 0: rank 1: (truncate|one-bit); .*What to do: pass the same scheme to "
    r"attach\(\)|configuration.*rank 1.*What to do:)",
)
def test_ranks_with_other_schemes_or_options_are_named(rank: int, world_size: int, others: str, own: str) -> None:
    train(rank, world_size, own if rank == 1 else others)


@pytest.mark.parametrize("scheme", ["gcomp", "plain"])
@on_ranks(3, raises=gradwire.RankMismatch, match="disagree on step.*What to do:")
def test_ranks_in_other_steps_are_named_on_all_of_them(rank: int, world_size: int, scheme: str) -> None:
    train(rank, world_size, scheme, count_a_step_too_many)


@on_ranks(2, raises=gradwire.RankMismatch, match="disagree on layout.*rank 1")
def test_models_that_differ_are_named_on_all_ranks(rank: int, world_size: int) -> None:
    """DDP itself compares shapes when it is built, so a layout mismatch needs a group per rank to get past it."""
    state = gradwire.HookState(schemes.by_name("gcomp", importance="none"), timeout_s=10)
    bucket = Bucket(torch.ones(100 + rank))
    state.communicator.submit(state._compare_layout, bucket).wait()


@on_ranks(2)
def test_a_new_attachment_works_after_a_failure(rank: int, world_size: int) -> None:
    with pytest.raises(gradwire.RankMismatch):
        train_sabotaged(rank, world_size, "error", "ring")
    train(rank, world_size, "truncate")  # a new attachment over the same ranks starts with connections of its own


def train_and_close_alone(rank: int, world_size: int, scheme: str) -> None:
    def close(attachment: Any) -> None:
        attachment.close()
        dist.barrier()  # the others have closed, too, when this rank asks

    attached: list[Any] = []
    try:
        train(rank, world_size, scheme, close, timeout_s=60, attached=attached)
    except gradwire.PeerLost:
        attached[0].close()
        dist.barrier()
        raise
    finally:  # rank 0 holds the store, where the others read who has closed
        dist.monitored_barrier()


@pytest.mark.parametrize(("scheme", "world_size"), [("plain", 2), ("gcomp", 3), ("acp-sgd", 3), ("broadcast", 2)])
def test_rank_that_closes_alone_is_told_and_so_are_the_others(scheme: str, world_size: int) -> None:
    outcomes = try_ranks(train_and_close_alone, world_size, scheme)
    told = f"this rank closed its attachment at step {BAD_STEP}, the others did not"
    check_all_raised([outcomes.pop(1)], gradwire.RankMismatch, told)
    check_all_raised(outcomes, gradwire.PeerLost, f"rank 1 closed its attachment at step {BAD_STEP}")


def attach_on_rank_0_only(rank: int, world_size: int) -> None:
    ddp = DistributedDataParallel(nn.Linear(3, 2))
    if rank == 0:
        gradwire.attach(ddp, torch.optim.SGD(ddp.parameters(), lr=0.1), "plain", timeout_s=2)
    else:
        time.sleep(4)  # its connections stay open meanwhile


def test_rank_that_attaches_alone_is_told_that_every_rank_calls_attach() -> None:
    outcomes = try_ranks(attach_on_rank_0_only, 2)
    check_all_raised(outcomes, gradwire.PeerLost, r"Every rank of the model calls attach\(\)", dead=(1,))


@on_ranks(2)
def test_timeout_is_the_process_groups_own_unless_it_is_given(rank: int, world_size: int) -> None:
    model = nn.Linear(3, 2)
    for group, expected_s in ((None, 1_800.0), (dist.new_group(timeout=timedelta(seconds=77)), 77.0)):
        ddp = DistributedDataParallel(model, process_group=group)
        attachment = gradwire.attach(ddp, torch.optim.SGD(ddp.parameters(), lr=0.1), "plain")
        assert attachment.communicator.timeout_s == expected_s


@pytest.mark.parametrize(
    "scheme",
    [
        "dgc:share=0.01,warmup_steps=3",
        "top-k:share=0.01,warmup_steps=3",
        "one-bit:warmup_steps=3",
        "acp-sgd:rank=1,start_step=3",
    ],
)
@on_ranks(3, raises=gradwire.RankMismatch, match="disagree on step.*rank 0: 3")
def test_ranks_in_other_steps_are_told_where_messages_change_length(rank: int, world_size: int, scheme: str) -> None:
    """The backend ends a process that gets more than it waits for."""
    train(rank, world_size, scheme, count_a_step_too_many, faulty=0, width=20)


# ---- one bit of one message is flipped on its way between two real ranks: it is never taken for what was sent

# What travels without a codec's checksum -> where the bit is flipped, in bytes from rank 1 to rank 0.
FLIPPED: dict[str, tuple[str, dict[str, Any], list[int]]] = {
    "one-bit raw": ("one-bit", {"pull": "raw", "warmup_steps": 0}, [45, 3_000, 9_000]),
    "qsgd raw": ("qsgd", {"pull": "raw"}, [45, 9_000, 14_001]),
    "one-bit": ("one-bit", {"warmup_steps": 0, "exempt": "none"}, [45, 700]),
    "one-bit, small ones beside": ("one-bit", {"warmup_steps": 0}, [45, 1_500, 1_900]),
    "broadcast": ("broadcast", {"bits": 32}, [3_000, 9_000, 20_002]),
}


def train_beside_a_relay(rank: int, world_size: int, case: str, place: int) -> bytes:
    name, options, _ = FLIPPED[case]
    if rank == 0:
        flip_what_comes(place).set()

    def loss(module: nn.Module, rank: int, step: int) -> torch.Tensor:
        torch.manual_seed(10 * step + rank)
        return module(torch.randn(8, 60)).square().sum()

    training = Training(
        rank, name, partial(torch.optim.SGD, lr=0.1), lambda: nn.Linear(60, 50), loss, timeout_s=20, **options
    )
    training.take_steps(range(4))
    training.attachment.close()  # a rank that ends without it may take the last message with it
    return bits_of(training.flat())


@pytest.mark.parametrize(("case", "place"), [(case, place) for case in FLIPPED for place in FLIPPED[case][2]])
def test_flipped_bit_ends_in_an_error_and_never_in_other_replicas(case: str, place: int) -> None:
    outcomes = try_ranks(train_beside_a_relay, 2, case, place)
    assert isinstance(outcomes[0].error, gradwire.CorruptMessage | gradwire.RankMismatch), outcomes
    assert isinstance(outcomes[1].error, gradwire.GradwireError), outcomes


@pytest.mark.parametrize("case", FLIPPED)
def test_without_it_the_replicas_are_equal(case: str) -> None:
    first, second = try_ranks(train_beside_a_relay, 2, case, 1 << 40)
    assert first.error is None, first
    assert first.result == second.result
