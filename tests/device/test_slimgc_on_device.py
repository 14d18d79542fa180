"""slimgc on the late device: its table by the device's own times, and what is not finite."""

import functools
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from late_cases import CPU, begin_with_kernels, end, still, training_at
from test_on_device import by_name
from torch import Tensor

from gradwire.wire.device_wire import DeviceTimes
from ranks import on_ranks

WARMUP = 4


@on_ranks(2)
def test_the_table_is_measured_by_the_device_and_shared(
    rank: int, world_size: int, library: Path
) -> tuple[Tensor, list[Any], int]:
    """A table after the warm-up, and another one after it was asked for, on all ranks by one of them."""
    late, place = begin_with_kernels(library)
    late.set_lateness_us(200)
    scheme: Any = by_name("slimgc", warmup_steps=WARMUP, drift_every=3, drift_factor=1e9)
    run = training_at(rank, place, scheme, functools.partial(torch.optim.AdamW, lr=1e-3, foreach=False))
    tables = []
    for step in range(12):
        run.take_steps([step])
        stats = run.attachment.stats()
        # Step 4 begins with the table of the warm-up; step 6 with a look, and step 7 with what step 6 has measured.
        assert stats["threshold_measured"] == (step >= WARMUP) + (step >= 7), step
        if step == WARMUP:
            tables.append(stats["threshold_table"])
            if rank == 0:
                scheme.remeasure()
        if step == 7:
            tables.append(stats["threshold_table"])
    assert run.attachment.state_dict()["state"]["measuring"]["sample"].device == CPU
    threshold = run.attachment.stats()["threshold_bytes"]
    parameters = end(run)
    for table in tables:
        assert [row["size_bytes"] for row in table] == [12, 240, 720, 4_800, 14_400]
        assert all(row["raw_s"] > 0 and row["compressed_s"] > 0 and row["codec_s"] > 0 for row in table)
    assert tables[0] != tables[1]
    return parameters, tables, threshold


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
    run = training_at(rank, place, by_name("slimgc", threshold_bytes=4_000), still)
    for step in range(2):
        kept = run.attachment.state_dict()["state"]["residuals"] if step else {}
        run.backward(step, float("nan") if step == rank == 1 else 1.0)
        run.optimizer.step()
    gradient = run.gradient()
    assert run.attachment.stats()["n_steps_not_finite"] == 1
    assert bool(gradient.isnan().any())
    after = run.attachment.state_dict()["state"]["residuals"]
    assert kept
    assert all(after[name].equal(values) for name, values in kept.items())
    run.attachment.close()
    return gradient.nan_to_num(nan=12345.0)
