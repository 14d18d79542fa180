"""slimgc on the late device: features with the CPU's bits, its table by the device's own times, what it refuses."""

from __future__ import annotations

import functools
import time
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from late_cases import CPU, Place, attach, batch, bits_of, build_model
from test_ddp_on_device import (
    Feature,
    accumulate_and_clip,
    mix_dtypes,
    scale_the_loss,
    stop_and_resume,
    view_buckets,
)
from test_on_device import SCHEMES, begin_with_kernels, by_name
from torch import Tensor

import gradwire
from gradwire.wire.device_wire import DeviceTimes
from ranks import on_ranks

WARMUP = 4

FEATURES: dict[Feature, str] = {
    view_buckets: "slimgc",
    mix_dtypes: "slimgc of all, qsgd",
    accumulate_and_clip: "slimgc that measures",
    scale_the_loss: "slimgc",
    stop_and_resume: "slimgc",
}


@on_ranks(2, timeout_s=170)
def test_features_of_ddp_have_their_bits_of_the_cpu(rank: int, world_size: int, library: Path) -> None:
    late, device = begin_with_kernels(library)
    late.set_lateness_us(500)
    for feature, name in FEATURES.items():
        expected = feature(rank, Place(CPU), SCHEMES[name]())
        with mock.patch.object(gradwire, "attach", functools.partial(gradwire.attach, placement="device")):
            found = feature(rank, device, SCHEMES[name]())
        assert torch.equal(found, expected), f"{feature.__name__}, {name}: off by {(found - expected).abs().max()}"


class Run:
    """One attachment's training on the device."""

    def __init__(self, rank: int, place: Place, **options: Any) -> None:
        self.rank, self.place = rank, place
        self.ddp = place.model(build_model())
        self.optimizer = torch.optim.AdamW(self.ddp.parameters(), lr=1e-3, foreach=False)
        self.scheme: Any = by_name("slimgc", **options)
        self.attachment = attach(self.ddp, self.optimizer, self.scheme, placement="device")

    def step(self, step: int, factor: float = 1.0) -> None:
        self.optimizer.zero_grad()
        (self.ddp(batch(self.rank, step, self.place)) * factor).square().mean().backward()
        self.optimizer.step()


@on_ranks(2)
def test_the_table_is_measured_by_the_device_and_shared(
    rank: int, world_size: int, library: Path
) -> tuple[Tensor, list[Any], int]:
    """A table after the warm-up, and another one after it was asked for, on all ranks by one of them."""
    late, place = begin_with_kernels(library)
    late.set_lateness_us(200)
    run = Run(rank, place, warmup_steps=WARMUP, drift_every=3, drift_factor=1e9)
    tables = []
    for step in range(12):
        run.step(step)
        stats = run.attachment.stats()
        # Step 4 begins with the table of the warm-up; step 6 with a look, and step 7 with what step 6 has measured.
        assert stats["threshold_measured"] == (step >= WARMUP) + (step >= 7), step
        if step == WARMUP:
            tables.append(stats["threshold_table"])
            if rank == 0:
                run.scheme.remeasure()
        if step == 7:
            tables.append(stats["threshold_table"])
    assert run.attachment.state_dict()["state"]["measuring"]["sample"].device == CPU
    threshold = run.attachment.stats()["threshold_bytes"]
    run.attachment.close()
    for table in tables:
        assert [row["size_bytes"] for row in table] == [12, 240, 720, 4_800, 14_400]
        assert all(row["raw_s"] > 0 and row["compressed_s"] > 0 and row["codec_s"] > 0 for row in table)
    assert tables[0] != tables[1]
    return bits_of(run.ddp), tables, threshold


@on_ranks(1)
def test_times_are_the_devices(rank: int, world_size: int, library: Path) -> None:
    late, place = begin_with_kernels(library)
    times = DeviceTimes(place.device)
    with times.timing("encode"):
        late.enqueue(0, 0, functools.partial(time.sleep, 0.5))
    ((_, begun, ended),) = times._spans
    with pytest.raises(RuntimeError, match="must be completed"):  # as a GPU says it: who takes them has to wait
        begun.elapsed_time(ended)
    with times.timing("encode"), times.timing("communicate"):
        late.enqueue(0, 0, functools.partial(time.sleep, 0.02))
    taken = times.take()
    assert taken["encode"] >= taken["communicate"] + 0.5
    assert taken["communicate"] >= 0.02
    assert times.take() == {}


@on_ranks(2)
def test_a_nan_is_nan_on_all_ranks(rank: int, world_size: int, library: Path) -> Tensor:
    """A NaN on rank 1 in step 1: NaN on all ranks, and the residuals of step 0 stay."""
    _, place = begin_with_kernels(library)
    run = Run(rank, place, threshold_bytes=4_000)
    run.optimizer = torch.optim.SGD(run.ddp.parameters(), lr=0.0)
    for step in range(2):
        kept = run.attachment.state_dict()["state"]["residuals"] if step else {}
        run.step(step, float("nan") if step == rank == 1 else 1.0)
    gradient = torch.cat([p.grad.view(-1).cpu() for p in run.ddp.parameters() if p.grad is not None])
    assert run.attachment.stats()["n_steps_not_finite"] == 1
    assert bool(gradient.isnan().any())
    after = run.attachment.state_dict()["state"]["residuals"]
    assert kept
    assert all(torch.equal(after[name], values) for name, values in kept.items())
    run.attachment.close()
    return gradient.nan_to_num(nan=12345.0)


@on_ranks(1)
def test_what_needs_the_host_says_so(rank: int, world_size: int, library: Path) -> None:
    _, place = begin_with_kernels(library)
    for options, says in (
        ({"update": "owner", "pull": "raw"}, 'update="owner" works on host memory'),
        ({"pull": "raw"}, 'pull="raw"'),
        ({"topology": "all-reduce"}, 'topology="all-reduce"'),
        ({"codec": "gcomp"}, "with one-bit, two-bit and qsgd, not with gcomp"),
    ):
        with pytest.raises(gradwire.Unsupported, match=says):
            Run(rank, place, **options)
