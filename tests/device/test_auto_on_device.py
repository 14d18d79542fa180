"""`auto` on the late device: it chooses, switches, follows and resumes there and in host memory, with the CPU's bits."""

import contextlib
import functools
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from late_cases import CPU, Place, batch, begin_with_kernels, end, momentum, square_off_one, training_at, waits_of_hooks
from test_steps_on_device import READING, Asked
from torch import Tensor

import gradwire
from awkward_models import build_model
from gradwire.planning.recommend import recommend
from gradwire.schemes.auto import costs
from gradwire.schemes.auto.scheme import Auto, ResidualHandover
from gradwire.telemetry.stopwatch import Lap
from gradwire.wire import link_probe
from ranks import on_ranks
from small_training import Training

sys.path.insert(0, str(Path(__file__).parents[1] / "distributed"))
from auto_cases import Quick

# One with error feedback, one that goes round a ring in host memory, one that the device's backend sums.
SPECS = ["one-bit", "embedded-float:bits=8", "bf16"]
ON_DEVICE = ["one-bit@device", "embedded-float:bits=8,topology=direct@device", "bf16@device"]


def training_under(rank: int, place: Place, scheme: Auto, placement: str | None = None) -> Training:
    """On the device with a placement, or with none."""
    return training_at(rank, place._replace(placement=placement), scheme, momentum, loss=square_off_one)


def end_auto(training: Training) -> tuple[Tensor, Any]:
    stats = training.attachment.stats()["auto"]
    return end(training), stats


def small_probes() -> Any:
    """Less is measured: an emulated kernel takes a thousand times as long as a GPU's."""
    return mock.patch.multiple(costs, _DEVICE_SAMPLE=1 << 12, DEVICE_PROBE_ELEMENTS=1 << 14)


def begin(library: Path, lateness_us: int = 1_000) -> tuple[Any, Place]:
    late, place = begin_with_kernels(library, lateness_us)
    link_probe.DEVICE_PROBE_ELEMENTS = 1 << 14
    return late, place


@contextlib.contextmanager
def nobody_waits(late: Any) -> Iterator[None]:
    """DDP's hook stands still for nothing. The device's own operators do, as they are emulated: what adds residuals to
    gradients is looked at operator by operator."""
    add, asked, in_add = ResidualHandover.add_to, Asked(), [0]

    def watched(*arguments: Any, **options: Any) -> None:
        before = late.n_waits_here()
        with asked:
            add(*arguments, **options)
        in_add[0] += late.n_waits_here() - before

    with mock.patch.object(ResidualHandover, "add_to", watched), waits_of_hooks(late) as waits:
        # Waits of transparent steps are not among those of hooks.
        yield
    assert waits
    assert sum(waits) <= in_add[0], "autograd's thread waited for the device"
    assert "add_" in asked.names
    assert not [name for name in asked.names if name in READING or name.endswith("to the host")]
    assert late.n_waits_with_gil() == 0, "a thread waited for the device and held up all others"


def on_cpu(schedule: list[tuple[int, str]]) -> list[tuple[int, str]]:
    """The same schedule for a run on the CPU."""
    return [(step, spec.removesuffix("@device")) for step, spec in schedule]


def specs_of(schedule: list[tuple[int, str]]) -> list[str]:
    return sorted({spec for _, spec in schedule} - {"plain"})


def repeat_on_cpu(rank: int, schedule: list[tuple[int, str]], n_steps: int) -> Tensor:
    schedule = on_cpu(schedule)
    training = training_under(rank, Place(CPU), Auto(fidelity=specs_of(schedule), replay=schedule))
    training.take_steps(range(n_steps))
    return end_auto(training)[0]


# ---- between devices


@on_ranks([2, 3], timeout_s=170)
def test_it_chooses_switches_and_follows_with_the_bits_of_the_cpu(
    rank: int, world_size: int, library: Path
) -> tuple[Tensor, Any]:
    late, place = begin(library)
    gains = {"one-bit@device": 3.0, "bf16@device": 1.5}
    with small_probes(), nobody_waits(late):
        auto = Quick(rank, gains, fidelity=["one-bit", "bf16"])
        training = training_under(rank, place, auto, "device")
        training.take_steps(range(60))
        late.set_lateness_us(0)
        gains.update({"one-bit@device": 0.6, "bf16@device": 2.0})  # the bus is another now
        training.take_steps(range(60, 160))
        found, stats = end_auto(training)
    kinds = [decision["kind"] for decision in stats["decisions"]]
    assert {"try", "switch", "drift"} <= set(kinds)
    assert stats["scheme"] == "bf16@device"
    assert "one-bit@device" in [spec for _, spec in stats["schedule"]]
    assert torch.equal(found, repeat_on_cpu(rank, stats["schedule"], 160))
    return found, (stats["schedule"], stats["decisions"])


@pytest.mark.parametrize(
    ("specs", "placement"),
    [
        (ON_DEVICE, "device"),
        # Where it is not said, residuals go from device to host memory and back.
        (["one-bit@device", "bf16", "one-bit", ON_DEVICE[1], SPECS[1], "bf16@device"], None),
    ],
)
@on_ranks([2, 3], timeout_s=170)
def test_every_switch_hands_residuals_over_as_on_the_cpu(
    rank: int, world_size: int, library: Path, specs: list[str], placement: str | None
) -> Tensor:
    late, place = begin(library)
    order = ["plain", *specs, "plain", *reversed(specs)]
    schedule = [(3 * place_in_order, spec) for place_in_order, spec in enumerate(order)]
    n_steps = 3 * len(order) + 9
    auto = Auto(fidelity=specs_of(schedule), replay=schedule)
    with small_probes(), nobody_waits(late):
        training = training_under(rank, place, auto, placement)
        training.take_steps(range(n_steps))
        found, stats = end_auto(training)
    assert stats["schedule"] == schedule
    expected = repeat_on_cpu(rank, schedule, n_steps)
    assert torch.equal(found, expected), f"off by {float((found - expected).abs().max())}"
    return found


@on_ranks(2, timeout_s=170)
def test_it_resumes_with_the_bits_of_the_cpu(rank: int, world_size: int, library: Path) -> None:
    _, place = begin(library)
    schedule = [(0, "plain"), (3, "one-bit@device"), (6, "bf16@device"), (12, "one-bit@device")]
    for stop in (5, 8):  # with residuals, and while they are handed over
        ends = []
        of_cpu = Place(CPU), None, on_cpu(schedule), SPECS
        for where, placement, plan, allowed in (of_cpu, (place, "device", schedule, ON_DEVICE)):
            with small_probes():
                training = training_under(rank, where, Auto(fidelity=allowed, replay=plan), placement)
                training.take_steps(range(stop))
                state = training.attachment.state_dict()
                model = {name: tensor.cpu() for name, tensor in training.ddp.state_dict().items()}
                momenta = training.optimizer.state_dict()
                training.attachment.close()
                resumed = training_under(rank, where, Auto(fidelity=allowed, replay=plan), placement)
                resumed.ddp.load_state_dict(model)
                resumed.optimizer.load_state_dict(momenta)
                resumed.attachment.load_state_dict(state)
                carried = state["state"]["carried"]
                assert bool(carried) == (stop == 8)
                assert all(tensor.device == CPU for tensor in carried.values())
                resumed.take_steps(range(stop, 18))
                ends.append(end_auto(resumed)[0])
        assert torch.equal(*ends), f"stopped at {stop}: off by {float((ends[0] - ends[1]).abs().max())}"


# ---- what it measures


@on_ranks(2)
def test_steps_and_links_are_timed_by_the_device(rank: int, world_size: int, library: Path) -> None:
    late, place = begin(library, lateness_us=0)
    laps: list[Lap] = []
    waits: list[int] = []

    class Watched(Auto):
        def choose(self, step: int) -> None:
            before = late.n_waits_here()
            super().choose(step)
            waits.append(late.n_waits_here() - before)

        def end_watched_step(self, step: int, *lap: Any) -> None:
            laps.append(Lap(*lap))
            before = late.n_waits_here()
            super().end_watched_step(step, *lap)
            waits.append(late.n_waits_here() - before)

    with small_probes():
        training = training_under(rank, place, Watched(budget=0, fidelity=["bf16", "one-bit"]))
        rows = training.attachment.scheme._rows
        between, staged = training.attachment.scheme._profiles
        assert between.machine.on_device
        assert not staged.machine.on_device
        assert min(between.link.rate, between.link.message_s, staged.link.rate) > 0
        assert set(between.shapes) == {"plain", "bf16@device", "one-bit@device"}
        assert set(staged.shapes) == {"bf16", "one-bit"}
        assert all(cost.encode_s > 0 and cost.decode_s > 0 for cost in between.codecs.values())
        training.take_steps(range(3))
        torch.accelerator.synchronize()
        late.set_lateness_us(20_000)
        waits.clear()
        training.take_steps(range(3, 6))
        assert waits == [0] * 6, "the training thread waited for the device to watch it"
        late.set_lateness_us(0)
        end_auto(training)
    took, waited = laps[-1].read()
    assert took > 0
    assert 0 <= waited <= took
    assert [row.spec for row in rows] == ["plain", "bf16@device", "bf16", "one-bit@device", "one-bit"]
    stream, marks = torch.accelerator.current_stream(place.device), []
    for rest_s in (0.0, 0.05, 0.03):
        late.enqueue(0, stream.stream_id, functools.partial(time.sleep, rest_s))
        marks.append(torch.Event(device=place.device, enable_timing=True))
        marks[-1].record(stream)
    took, waited = Lap(1, 1, tuple(marks)).read()
    assert waited >= 30e6
    assert took - waited >= 50e6


@on_ranks(2)
def test_what_does_not_work_there_is_left_out_and_says_why(rank: int, world_size: int, library: Path) -> None:
    _, place = begin(library)
    with small_probes():
        staged = training_under(rank, place, Auto(fidelity=["bf16", "top-k"]), "staged")
        assert [row.spec for row in staged.attachment.scheme._rows] == ["plain", "bf16", "top-k"]
        end_auto(staged)
        kernels = "gradwire.codecs.floats.kernels_on"
        with mock.patch(kernels, side_effect=gradwire.Unsupported("there are kernels for cuda")):
            training = training_under(rank, place, Auto(fidelity=SPECS))
        candidates = {one["spec"]: one["excluded"] for one in end_auto(training)[1]["candidates"]}
    assert "there are kernels for cuda" in candidates[ON_DEVICE[1]]
    assert [spec for spec, why in candidates.items() if not why] == [
        "plain", "one-bit@device", "one-bit", "embedded-float:bits=8", "bf16@device", "bf16",
    ]  # fmt: skip


@on_ranks(2, timeout_s=170)
def test_recommend_measures_the_bus_and_names_what_runs_on_it(rank: int, world_size: int, library: Path) -> list[str]:
    _, place = begin(library)
    ddp = place.model(build_model())
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.05)
    with small_probes():
        plan = recommend(ddp, optimizer, lambda: ddp(batch(rank, 0, place)).square().mean().backward(), seconds=0.1)
    assert plan.profile.machine.on_device
    assert plan.profile.link.rate > 0
    assert not plan.links, "links of host memory are not the bus"
    forecasts = {forecast.spec: forecast for forecast in plan.forecasts()}
    assert any(forecast.is_measured for spec, forecast in forecasts.items() if spec != "plain")
    assert {"plain", "bf16@device", ON_DEVICE[1]} <= set(forecasts)
    assert all(spec == "plain" or spec.endswith("@device") for spec in forecasts)
    return sorted(forecasts)


@on_ranks(1)
def test_one_rank_has_nobody_to_save_bytes_for(rank: int, world_size: int, library: Path) -> None:
    _, place = begin(library)
    ends = []
    for where, placement in ((Place(CPU), None), (place, "device"), (place, None)):
        training = training_under(rank, where, Auto(fidelity=SPECS), placement)
        training.take_steps(range(4))
        found, stats = end_auto(training)
        assert [one["spec"] for one in stats["candidates"]] == ["plain"]
        ends.append(found)
    assert torch.equal(ends[0], ends[1])
    assert torch.equal(ends[0], ends[2])
