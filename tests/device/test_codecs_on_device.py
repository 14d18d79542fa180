"""Schemes through a codec on the late device: DDP's features, what travels, and messages that are not whole."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from late import LikeNccl
from late_cases import attach, batch, build_model
from test_ddp_on_device import (
    Feature,
    join_with_uneven_inputs,
    keep_graph_static,
    leave_parameters_unused,
    meet_nan,
    mix_dtypes,
    scale_the_loss,
    stop_and_resume,
    view_buckets,
)
from test_on_device import SCHEMES, begin_with_kernels, compare_features, train
from test_staged_schemes import counting_waits_of_hooks

import gradwire
from gradwire.wire.communicator import Communicator
from gradwire.wire.device_group import DeviceGroup
from ranks import run_ranks

FLOATS: dict[Feature, list[str]] = {
    view_buckets: ["embedded-float"],
    keep_graph_static: ["truncated-float at random"],
    leave_parameters_unused: ["truncated-float at random"],
    mix_dtypes: ["truncated-float at random", "embedded-float direct"],
    join_with_uneven_inputs: ["truncated-float"],
    scale_the_loss: ["truncated-float"],
    meet_nan: ["truncated-float", "embedded-float direct"],
    stop_and_resume: ["truncated-float at random"],
}


def test_features_of_ddp_have_their_bits_of_the_cpu(library: Path) -> None:
    run_ranks(compare_features, 2, library, FLOATS, timeout_s=170)


# ---- what travels


def count_collectives(rank: int, world_size: int, library: Path) -> None:
    late, place = begin_with_kernels(library)
    for name, per_bucket in (("truncated-float", world_size), ("embedded-float direct", 2)):
        with counting_waits_of_hooks(late) as waits:
            train(rank, place, SCHEMES[name]())
        assert LikeNccl.made[-1].n_started == per_bucket * len(waits)


def test_an_exchange_for_each_hop_and_a_gather(library: Path) -> None:
    run_ranks(count_collectives, 3, library)


def send_more_than_is_awaited(rank: int, world_size: int, library: Path) -> None:
    _, place = begin_with_kernels(library)
    group = DeviceGroup(Communicator(), place.device)
    for n_awaited, is_right in ((5, True), (4, False), (6, False)):
        sent, received = (torch.full((n,), rank, dtype=torch.uint8, device=place.device) for n in (5, n_awaited))
        nothing = sent[:0]
        came, gone = ([nothing, tensor] if rank == 0 else [tensor, nothing] for tensor in (received, sent))
        group.exchange(came, gone)
        assert bool((received.cpu() == 1 - rank).all()) == is_right


def test_the_group_like_nccl_refuses_a_message_of_another_length(library: Path) -> None:
    run_ranks(send_more_than_is_awaited, 2, library)


# ---- messages that are not whole


def meet_a_changed_message(rank: int, world_size: int, library: Path, names: list[str]) -> None:
    """Rank 1 gets a changed byte of what rank 0 sent: NaN on all ranks in this step, an error on all in the next one."""
    _, place = begin_with_kernels(library)
    for name in names:
        ddp = place.model(build_model())
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.0)
        attachment = attach(ddp, optimizer, SCHEMES[name](), placement="device")

        def backward(step: int, ddp: Any = ddp, optimizer: Any = optimizer) -> bool:
            optimizer.zero_grad()
            ddp(batch(rank, step, place)).square().mean().backward()
            return bool(torch.cat([p.grad.view(-1).cpu() for p in ddp.parameters()]).isnan().any())

        assert not backward(0)
        exchange = LikeNccl.alltoall

        def change(group: LikeNccl, received: Any, *others: Any, exchange: Any = exchange) -> Any:
            work = exchange(group, received, *others)
            work.wait()
            if rank == 1:
                received[0][-1] ^= 1
            return work

        with mock.patch.object(LikeNccl, "alltoall", change):
            assert backward(1), "a mean without what rank 0 sent was handed out"

        def go_on(backward: Any = backward) -> None:
            for step in range(2, 4):  # the other ranks hear of it in the same step, or in the next
                backward(step)

        with pytest.raises(gradwire.CorruptMessage, match="checksum"):
            go_on()
        attachment.close()


def test_a_message_that_is_changed_on_its_way(library: Path) -> None:
    run_ranks(meet_a_changed_message, 2, library, ["embedded-float", "embedded-float direct"])
