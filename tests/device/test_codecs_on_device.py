"""Schemes through a codec on the late device: what travels, messages that are not whole, and what is gcomp's own."""

import functools
from pathlib import Path
from unittest import mock

import pytest
import torch
from late import LikeNccl
from late_cases import CPU, Place, begin_with_kernels, counting_waits_of_hooks, sgd, still, train, training_at
from test_on_device import SCHEMES

import gradwire
from gradwire.wire.device_wire import DeviceWire
from ranks import on_ranks

# ---- what travels


@on_ranks(3)
def test_an_exchange_for_each_hop_and_a_gather(rank: int, world_size: int, library: Path) -> None:
    late, place = begin_with_kernels(library)
    for name, per_bucket in (
        ("truncated-float", world_size),
        ("embedded-float direct", 2),
        ("gcomp, nothing left out", world_size),
        ("gcomp direct", 2),
    ):
        with counting_waits_of_hooks(late) as waits:
            train(rank, place, SCHEMES[name]())
        assert LikeNccl.made[-1].n_started == per_bucket * len(waits)


# ---- messages that are not whole


@on_ranks(2)
def test_other_importance_is_told(rank: int, world_size: int, library: Path) -> None:
    """Learning rates differ: no rank gets values, and all hear why in the next step."""
    _, place = begin_with_kernels(library)
    training = training_at(rank, place, SCHEMES["gcomp"](), functools.partial(sgd, lr=1e-3 * 1_000**rank))
    training.backward(0)
    assert bool(training.gradient().isnan().any())
    with pytest.raises(gradwire.RankMismatch, match="other importance bytes"):
        training.backward(1)
    training.attachment.close()


@on_ranks(2)
def test_a_length_that_no_message_has(rank: int, world_size: int, library: Path) -> None:
    _, place = begin_with_kernels(library)
    training = training_at(rank, place, SCHEMES["gcomp, nothing left out"](), still)
    read = DeviceWire.read

    def lie(site: DeviceWire, values: torch.Tensor) -> list[int]:
        return [1 << 40 if rank else length for length in read(site, values)]

    with (
        mock.patch.object(DeviceWire, "read", lie),
        pytest.raises(gradwire.CorruptMessage, match="rank 1 has a message of 1099511627776 bytes"),
    ):
        training.backward(0)
    training.attachment.close()


# ---- gcomp's own


@on_ranks(2)
def test_tables_are_made_of_the_counts_of_all_ranks(rank: int, world_size: int, library: Path) -> None:
    _, device = begin_with_kernels(library)
    found = []
    for place in (Place(CPU), device):
        training = training_at(rank, place, SCHEMES["gcomp"]())
        training.take_steps(range(6))
        stats = training.attachment.stats()
        found.append({field: value for field, value in stats.items() if field.startswith(("table_id", "table_ref"))})
        training.attachment.close()
    on_cpu, on_device = found
    assert on_cpu["table_refreshes"] == 2
    assert on_device == on_cpu


@on_ranks(2)
def test_gradients_that_are_scaled_up_are_noticed_later(rank: int, world_size: int, library: Path) -> None:
    late, place = begin_with_kernels(library)
    late.set_lateness_us(1_000)
    training = training_at(rank, place, SCHEMES["gcomp"]())

    def train_on() -> None:
        for step in range(30):
            training.backward(step)
            for parameter in training.ddp.parameters():
                assert parameter.grad is not None
                parameter.grad.mul_(3)
            training.optimizer.step()
            torch.accelerator.synchronize()

    with pytest.raises(gradwire.Unsupported, match="gradients are 3 times as large"):
        train_on()
    training.attachment.close()


@on_ranks(2)
def test_uneven_inputs_are_refused_beside_importance(rank: int, world_size: int, library: Path) -> None:
    _, place = begin_with_kernels(library)
    training = training_at(rank, place, SCHEMES["gcomp"]())
    with pytest.raises(gradwire.Unsupported, match=r'ddp\.join\(\) with importance="paper"'), training.ddp.join():
        training.backward(0)
    training.attachment.close()
