"""Steps on the late device: checkpoints, what the host and the backend are asked for, and what is gcomp's and slimgc's own."""

import functools
import time
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from late import LikeNccl
from late_cases import CPU, Place, begin_with_kernels, end, sgd, still, train, training_at, waits_of_hooks
from test_on_device import SCHEMES, by_name
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import gradwire
from gradwire.gpu import kernels
from gradwire.schemes.compressed import Compressed
from gradwire.wire.communicator import Communicator
from gradwire.wire.device_wire import DeviceTimes, DeviceWire
from ranks import on_ranks, patience

# ---- what a checkpoint holds


@on_ranks(2)
def test_states_are_the_cpus(rank: int, world_size: int, library: Path) -> None:
    _, device = begin_with_kernels(library, 1_000)
    for name in ("one-bit", "top-k", "dgc", "dgc by bucket"):
        states = []
        for place in (Place(CPU), device):
            training = training_at(rank, place, SCHEMES[name]())
            for step in range(3):
                training.backward(step)
            states.append(training.attachment.state_dict()["state"])
        on_cpu, on_device = states
        assert set(on_cpu) == set(on_device) == {"residuals", *(["momenta"] if "dgc" in name else [])}
        for kind, tensors in on_cpu.items():
            assert set(tensors) == set(on_device[kind])
            assert any(bool(tensor.any()) for tensor in tensors.values())
            for slot, tensor in tensors.items():
                assert on_device[kind][slot].device == CPU
                assert torch.equal(on_device[kind][slot], tensor), f"{name}: other {kind} of {slot}"


# ---- what the host asks of the device

# Operators whose result the host has to have before it goes on.
READING = {"_local_scalar_dense", "nonzero", "masked_select", "equal", "is_nonzero", "unique", "_unique2"}


class Asked(TorchDispatchMode):
    """What the lane enqueues."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, function: Any, types: Any, arguments: Any = (), options: Any = None) -> Any:
        result = function(*arguments, **(options or {}))
        name = function.__name__.split(".")[0]
        of_device = [one for one in arguments if isinstance(one, Tensor) and one.device != CPU]
        is_copied = bool(of_device) and isinstance(result, Tensor) and result.device == CPU
        self.names.append(f"{name} to the host" if is_copied else name if of_device else "")
        return result


@on_ranks(2)
def test_the_host_reads_nothing_within_a_step(rank: int, world_size: int, library: Path) -> None:
    _, place = begin_with_kernels(library)
    reduce, asked = Compressed._reduce_on_lane, Asked()

    def watched(*arguments: Any) -> Any:
        with asked:
            return reduce(*arguments)

    with mock.patch.object(Compressed, "_reduce_on_lane", watched):
        for name in SCHEMES:
            if any(part in name for part in ("one-bit", "sign-sgd", "top-k", "dgc")):
                train(rank, place, SCHEMES[name](), n_steps=2)
    read = [name for name in asked.names if name in READING or name.endswith("to the host")]
    assert {"masked_fill_", "copy_", "linalg_vector_norm"} <= set(asked.names), set(asked.names)
    assert not read, f"the host waits for {sorted(set(read))}"
    with asked:
        bool(torch.ones(1, device=place.device).any())
    assert asked.names[-1] in READING


# ---- what the host gives to the device


@on_ranks(1)
def test_what_the_device_has_not_read_is_kept(rank: int, world_size: int, library: Path) -> None:
    late, place = begin_with_kernels(library)
    site = DeviceWire(Communicator(), [place.device])
    late.set_lateness_us(0)
    late.set_stream_lateness_us(0, site.stream.stream_id, int(50_000 * patience()))
    with site.stream:
        first = site.place(torch.arange(3))
        assert len(kernels._uploads) == 1
        site.place(torch.arange(4))
        assert len(kernels._uploads) == 2, "memory was given up that the device has not read yet"
        site.stream.synchronize()
        site.place(torch.arange(5))
    assert len(kernels._uploads) == 1
    site.stream.synchronize()
    assert first.tolist() == [0, 1, 2]


# ---- what the backend is asked for


TWICE = (
    "one-bit", "one-bit in small messages", "qsgd", "terngrad", "thc", "one-bit by group, two means", "qsgd, raw sums",
)  # fmt: skip
HOPS = ("truncated-float", "gcomp, nothing left out")  # one for each hop and a gather


@pytest.mark.parametrize(
    ("world_size", "collectives"),
    [(2, {1: ("plain", "sign-sgd", "top-k"), 2: TWICE}), (3, {2: ("embedded-float direct", "gcomp direct"), 3: HOPS})],
)
@on_ranks()
def test_how_many_collectives_a_bucket_takes(
    rank: int, world_size: int, library: Path, collectives: dict[int, tuple[str, ...]]
) -> None:
    late, place = begin_with_kernels(library)
    for per_bucket, name in ((n, name) for n, names in collectives.items() for name in names):
        n_groups = len(LikeNccl.made)
        train(rank, place, SCHEMES[name](), n_steps=0)
        (own,) = LikeNccl.made[n_groups:]
        assert own.n_started == 0, name
        with waits_of_hooks(late) as waits:
            train(rank, place, SCHEMES[name]())
        assert LikeNccl.made[-1].n_started == per_bucket * len(waits), name


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
    on_cpu, on_device = found
    assert on_cpu["table_refreshes"] == 2
    assert on_device == on_cpu


@on_ranks(2)
def test_gradients_that_are_scaled_up_are_noticed_later(rank: int, world_size: int, library: Path) -> None:
    _, place = begin_with_kernels(library, 1_000)
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


@on_ranks(2)
def test_uneven_inputs_are_refused_beside_importance(rank: int, world_size: int, library: Path) -> None:
    _, place = begin_with_kernels(library)
    training = training_at(rank, place, SCHEMES["gcomp"]())
    with pytest.raises(gradwire.Unsupported, match=r'ddp\.join\(\) with importance="paper"'), training.ddp.join():
        training.backward(0)


# ---- slimgc's table


@on_ranks(2)
def test_the_table_is_measured_by_the_device_and_shared(
    rank: int, world_size: int, library: Path
) -> tuple[Tensor, list[Any], int]:
    """A table after the warm-up, and another one after it was asked for, on all ranks by one of them."""
    _, place = begin_with_kernels(library, 200)
    scheme: Any = by_name("slimgc", warmup_steps=4, drift_every=3, drift_factor=1e9)
    run = training_at(rank, place, scheme, functools.partial(torch.optim.AdamW, lr=1e-3, foreach=False))
    tables = []
    for step in range(12):
        run.take_steps([step])
        stats = run.attachment.stats()
        # Step 4 begins with the table of the warm-up; step 6 with a look, and step 7 with what step 6 has measured.
        assert stats["threshold_measured"] == (step >= 4) + (step >= 7), step
        if step == 4:
            tables.append(stats["threshold_table"])
            if rank == 0:
                scheme._measuring.is_requested = True
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
    return gradient.nan_to_num(nan=12345.0)
