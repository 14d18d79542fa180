"""Packed sums on the late device, of gradients that are sparse: the bits of the CPU, and what is not finite or was changed."""

import functools
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from late import LikeNccl
from late_cases import CPU, Place, begin_with_kernels, end, sgd, training_at, waits_of_hooks
from test_on_device import by_name
from torch import Tensor, nn

import gradwire
from gradwire.codecs import packed_values
from gradwire.codecs.packed_values import HEAD_WORDS
from gradwire.schemes.homomorphic import learnt
from gradwire.wire.communicator import Communicator
from gradwire.wire.device_wire import DeviceWire, Reading
from ranks import on_ranks, patience, run_ranks
from small_training import Training

N_WORDS, N_STEPS = 700, 9
N_VALUES = N_WORDS * 12 + 12 * 3 + 3  # of all parameters: one bucket, once DDP has made its buckets anew
OPTIONS: dict[str, dict[str, Any]] = {
    "all": {},
    "largest": {"sparsifier": "top-k", "density": 0.02},
    "largest without feedback": {"sparsifier": "top-k", "density": 0.02, "error_feedback": False},
}


class Words(nn.Module):
    """Of whose rows a batch uses few; in some steps all of them, which is too dense to gain."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.embedding, self.head = nn.Embedding(N_WORDS, 12).to(dtype), nn.Linear(12, 3).to(dtype)

    def forward(self, words: Tensor) -> Tensor:
        return self.head(self.embedding(words))


def words_of(rank: int, step: int, place: Place) -> Tensor:
    generator = torch.Generator().manual_seed(1_000 * rank + step)
    some = torch.randint(N_WORDS, (20,), generator=generator)
    return (torch.arange(N_WORDS) if step == 3 else some).to(place.device)


def training_of(rank: int, place: Place, name: str, lr: float = 0.1, dtype: torch.dtype = torch.float32) -> Training:
    scheme = by_name("homomorphic", index="bitmap", **OPTIONS[name])
    optimizer = functools.partial(sgd, lr=lr)
    return training_at(rank, place, scheme, optimizer, Words(dtype), lambda out: out.float().square().sum(), words_of)


def train(
    rank: int, place: Place, name: str, dtype: torch.dtype = torch.float32, bad_step: int | None = None
) -> tuple[Tensor, dict[str, Any]]:
    """The parameters after some steps, and stats; in `bad_step` rank 1's gradient is not finite, and nobody steps."""
    training = training_of(rank, place, name, 2.0**-8, dtype)
    for step in range(N_STEPS):
        training.backward(step, float("inf") if (rank, step) == (1, bad_step) else 1.0)
        if step != bad_step:
            training.optimizer.step()
    training.attachment.stats()  # which waits until the last step is settled
    stats = training.attachment.scheme.stats()
    return end(training), stats


@pytest.mark.parametrize(
    ("world_size", "dtypes"),
    [(1, [torch.float32]), (2, [torch.float32, torch.bfloat16, torch.float16]), (3, [torch.float32])],
)
@on_ranks(timeout_s=170)
def test_bits_are_the_cpus(rank: int, world_size: int, library: Path, dtypes: list[torch.dtype]) -> dict[Any, Tensor]:
    late, device = begin_with_kernels(library)
    learnt._STEPS_BETWEEN_TRIES = 3
    trained = {}
    for dtype in dtypes:
        for name in OPTIONS:
            for bad_step in (None, 2, 5) if dtype == torch.float32 and world_size > 1 else (None,):
                late.set_lateness_us(0)
                expected, on_cpu = train(rank, Place(CPU), name, dtype, bad_step)
                late.set_lateness_us(200)
                with waits_of_hooks(late) as waits:
                    found, on_device = train(rank, device, name, dtype, bad_step)
                assert set(waits) == {0}, "autograd's thread waited for the device"
                assert torch.equal(found, expected), f"{name}, {dtype}: off by {(found - expected).abs().max()}"
                assert bool(found.isfinite().all())
                for key in ("n_buckets_too_dense", "n_steps_not_finite"):
                    assert on_device[key] == on_cpu[key], (key, name, bad_step)
                assert on_device["n_buckets_too_dense"] >= (world_size > 1 and name == "all")
                # In step 5 the bucket may be known to be dense, and so be sent without an index.
                assert on_device["n_steps_not_finite"] == (bad_step is not None)
                trained[dtype, name, bad_step] = found
    assert late.n_waits_with_gil() == 0, "a thread waited for the device and held up all others"
    return trained


# ---- bad input


@on_ranks(2)
def test_an_index_that_is_changed_on_its_way(rank: int, world_size: int, library: Path) -> None:
    """A word of the ranks' heads is changed on its way to both of them, and then a bit past the end."""
    _, place = begin_with_kernels(library)
    all_gather = LikeNccl._allgather_base

    for at, error, says in (
        (0, gradwire.RankMismatch, "a message was altered on its way"),
        (HEAD_WORDS + N_VALUES // 32, gradwire.CorruptMessage, f"past its {N_VALUES} values"),
    ):
        training = training_of(rank, place, "all")
        training.backward(0)

        def change(group: LikeNccl, output: Tensor, tensor: Tensor, opts: Any = None, at: int = at) -> Any:
            work = all_gather(group, output, tensor, opts)
            work.wait()
            if output.numel() > at:
                output[at] = -1
            return work

        with mock.patch.object(LikeNccl, "_allgather_base", change), pytest.raises(error, match=says):
            training.backward(1)


def plant(rank: int, world_size: int, library: Path) -> dict[str, bool]:
    """Which faults made a difference."""
    late, place = begin_with_kernels(library)
    expected, _ = train(rank, Place(CPU), "largest")
    late.set_lateness_us(int(3_000 * patience()))
    assert torch.equal(train(rank, place, "largest")[0], expected)
    seen = {}
    read, pack = DeviceWire.read, packed_values.pack

    def read_too_soon(wire: DeviceWire, *numbers: Tensor) -> list[int]:
        with mock.patch.object(Reading, "wait", lambda reading: reading.on_host):
            return read(wire, *numbers)

    def read_one_less(wire: DeviceWire, *numbers: Tensor) -> list[int]:
        *others, count = read(wire, *numbers)
        return [*others, count - (count > 0)]

    def pack_elsewhere(*tensors: Tensor) -> None:
        with torch.Stream(device=place.device):
            pack(*tensors)

    for name, patch in {
        "one value less": mock.patch.object(DeviceWire, "read", read_one_less),
        "another stream": mock.patch.object(packed_values, "pack", pack_elsewhere),
    }.items():
        with patch:
            seen[name] = not torch.equal(train(rank, place, "largest")[0], expected)
    wire = DeviceWire(Communicator(), [place.device])
    late.set_lateness_us(int(30_000 * patience()))
    with wire.stream:
        numbers = torch.full((3,), 5, dtype=torch.int64, device=place.device)
        assert wire.read(numbers) == [5, 5, 5]
        numbers.fill_(6)
        seen["number read too soon"] = read_too_soon(wire, numbers) != [6, 6, 6]
    dist.barrier()  # rank 0 serves the store, in which rank 1 may still look for a group's addresses
    return seen


def test_each_planted_fault_is_seen(library: Path) -> None:
    by_rank = run_ranks(plant, 2, library, timeout_s=170)
    assert all(any(seen[name] for seen in by_rank) for name in by_rank[0])
