"""Schemes through a codec on the late device: DDP's features, what travels, and messages that are not whole."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from late import LikeNccl
from late_cases import CPU, Place, adamw, attach, batch, build_model
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
from test_on_device import SCHEMES, begin_with_kernels, compare_features, placement_on, train
from test_staged_schemes import counting_waits_of_hooks

import gradwire
from gradwire import schemes
from gradwire.codecs.general import RawCodec
from gradwire.exchange.ring import Ring
from gradwire.wire.device_wire import DeviceWire
from ranks import on_ranks, run_ranks

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
GCOMP: dict[Feature, list[str]] = {
    view_buckets: ["gcomp"],
    keep_graph_static: ["gcomp"],
    leave_parameters_unused: ["gcomp"],
    mix_dtypes: ["gcomp", "gcomp, nothing left out", "gcomp direct"],
    join_with_uneven_inputs: ["gcomp of ten bits"],
    scale_the_loss: ["gcomp"],
    meet_nan: ["gcomp", "gcomp, nothing left out"],
    stop_and_resume: ["gcomp"],
}


@pytest.mark.parametrize("features", [FLOATS, GCOMP])
def test_features_of_ddp_have_their_bits_of_the_cpu(library: Path, features: dict[Feature, list[str]]) -> None:
    run_ranks(compare_features, 2, library, features, timeout_s=170)


def test_a_codec_that_works_on_host_memory_is_refused() -> None:
    with pytest.raises(gradwire.Unsupported, match="codec 'raw' works on host memory"):
        Ring(RawCodec()).bind(DeviceWire.__new__(DeviceWire))


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
    ddp = place.model(build_model())
    optimizer = torch.optim.SGD(ddp.parameters(), lr=1e-3 * 1_000**rank)
    attachment = attach(ddp, optimizer, SCHEMES["gcomp"](), placement="device")

    def backward(step: int) -> None:
        optimizer.zero_grad()
        ddp(batch(rank, step, place)).square().mean().backward()

    backward(0)
    assert bool(torch.cat([p.grad.view(-1).cpu() for p in ddp.parameters() if p.grad is not None]).isnan().any())
    with pytest.raises(gradwire.RankMismatch, match="other importance bytes"):
        backward(1)
    attachment.close()


@on_ranks(2)
def test_a_length_that_no_message_has(rank: int, world_size: int, library: Path) -> None:
    _, place = begin_with_kernels(library)
    ddp = place.model(build_model())
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.0)
    attachment = attach(ddp, optimizer, SCHEMES["gcomp, nothing left out"](), placement="device")
    read = DeviceWire.read

    def lie(site: DeviceWire, values: torch.Tensor) -> list[int]:
        return [1 << 40 if rank else length for length in read(site, values)]

    with (
        mock.patch.object(DeviceWire, "read", lie),
        pytest.raises(gradwire.CorruptMessage, match="rank 1 has a message of 1099511627776 bytes"),
    ):
        ddp(batch(rank, 0, place)).square().mean().backward()
    attachment.close()


# ---- gcomp's own


def refresh_tables(rank: int, world_size: int, library: Path) -> list[dict[str, Any]]:
    """How many tables were made, and which are in use, here and there."""
    _, device = begin_with_kernels(library)
    found = []
    for place in (Place(CPU), device):
        ddp = place.model(build_model())
        optimizer = adamw(ddp)
        attachment = attach(ddp, optimizer, SCHEMES["gcomp"](), **placement_on(place))
        for step in range(6):
            optimizer.zero_grad()
            ddp(batch(rank, step, place)).square().mean().backward()
            optimizer.step()
        stats = attachment.stats()
        found.append({field: value for field, value in stats.items() if field.startswith(("table_id", "table_ref"))})
        attachment.close()
    return found


def test_tables_are_made_of_the_counts_of_all_ranks(library: Path) -> None:
    for on_cpu, on_device in run_ranks(refresh_tables, 2, library):
        assert on_cpu["table_refreshes"] == 2
        assert on_device == on_cpu


@on_ranks(2)
def test_gradients_that_are_scaled_up_are_noticed_later(rank: int, world_size: int, library: Path) -> None:
    late, place = begin_with_kernels(library)
    late.set_lateness_us(1_000)
    ddp = place.model(build_model())
    optimizer = adamw(ddp)
    attachment = attach(ddp, optimizer, SCHEMES["gcomp"](), placement="device")

    def train_on() -> None:
        for step in range(30):
            optimizer.zero_grad()
            ddp(batch(rank, step, place)).square().mean().backward()
            for parameter in ddp.parameters():
                assert parameter.grad is not None
                parameter.grad.mul_(3)
            optimizer.step()
            torch.accelerator.synchronize()

    with pytest.raises(gradwire.Unsupported, match="gradients are 3 times as large"):
        train_on()
    attachment.close()


@on_ranks(2)
def test_uneven_inputs_are_refused_beside_importance(rank: int, world_size: int, library: Path) -> None:
    _, place = begin_with_kernels(library)
    ddp = place.model(build_model())
    attachment = attach(ddp, adamw(ddp), SCHEMES["gcomp"](), placement="device")
    with pytest.raises(gradwire.Unsupported, match=r'ddp\.join\(\) with importance="paper"'), ddp.join():
        ddp(batch(rank, 0, place)).square().mean().backward()
    attachment.close()


@on_ranks(1)
def test_format_1_is_refused(rank: int, world_size: int, library: Path) -> None:
    _, place = begin_with_kernels(library)
    ddp = place.model(build_model())
    with pytest.raises(gradwire.Unsupported, match="leave format=1 out"):
        attach(ddp, adamw(ddp), schemes.by_name("gcomp", format=1), placement="device")
