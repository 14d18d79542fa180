"""Staged schemes on the late device: every one of them, DDP's features, and errors; the CPU's bits, or the CPU's errors."""

import contextlib
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from late_cases import CPU, N_STEPS, SCHEMES, Place, begin, end, momentum, sgd, states_of, train_on_both, training_at
from torch import Tensor, nn

import gradwire
from awkward_models import Branches, Mixed, build_model
from gradwire.core import staging
from gradwire.core.bucket import Slot
from gradwire.reducer import Reducer
from gradwire.schemes import Scheme
from ranks import on_ranks
from small_training import adamw

Feature = Callable[[int, Place, Scheme], Tensor]


def run(
    rank: int, place: Place, scheme: Scheme, model: Callable[[], nn.Module] = build_model, **options: Any
) -> Tensor:
    training = training_at(rank, place, scheme, momentum, model(), **options)
    training.take_steps(range(N_STEPS))
    return end(training)


def accumulate_and_clip(rank: int, place: Place, scheme: Scheme) -> Tensor:
    training = training_at(rank, place, scheme, loss=lambda outputs: (10 * outputs).square().mean())
    for step in range(2 * N_STEPS):
        with training.ddp.no_sync() if step % 2 == 0 else contextlib.nullcontext():
            training.loss(training.ddp, rank, step).backward()
        if step % 2:
            torch.nn.utils.clip_grad_norm_(training.ddp.parameters(), 0.5)
            training.optimizer.step()
            training.optimizer.zero_grad()
    return end(training)


def join_with_uneven_inputs(rank: int, place: Place, scheme: Scheme) -> Tensor:
    training = training_at(rank, place, scheme, sgd)
    with training.ddp.join():
        training.take_steps(range(N_STEPS + 2 * rank))
    return end(training)


class Half(nn.Sequential):
    """The forward pass in float16, parameters and gradients in float32, as autocast has it."""

    def forward(self, values: Tensor) -> Tensor:
        for layer in self:
            half = [parameter.half() for parameter in layer.parameters()]
            values = nn.functional.linear(values.half(), *half) if half else layer(values)
        return values.float()


def scale_the_loss(rank: int, place: Place, scheme: Scheme) -> Tensor:
    """float16 with a GradScaler; an Inf on rank 1 in step 1, which every rank skips."""
    scaler = torch.amp.GradScaler(place.device.type, init_scale=2.0**10)
    training = training_at(rank, place, scheme, momentum, Half(*build_model()), scaler=scaler)
    for step in range(N_STEPS):
        training.optimizer.zero_grad()
        loss = training.loss(training.ddp, rank, step)
        scaler.scale(loss * float("inf") if (rank, step) == (1, 1) else loss).backward()
        if not scheme.owns_step:
            scaler.unscale_(training.optimizer)
        scaler.step(training.optimizer)
        scaler.update()
    assert scaler.get_scale() == 2.0**9
    return end(training)


def meet_nan(rank: int, place: Place, scheme: Scheme) -> Tensor:
    """A NaN on one rank, without a scaler: the messages that hold it are NaN altogether, as on the CPU."""
    training = training_at(rank, place, scheme, sgd)
    for step in range(2):
        training.backward(step, float("nan") if rank == step == 1 else 1.0)
        training.optimizer.step()
    parameters = end(training)
    assert bool(parameters.isnan().any())
    return torch.nan_to_num(parameters, nan=12345.0)


def stop_and_resume(rank: int, place: Place, scheme: Scheme) -> Tensor:
    """Saved after two steps, loaded into another model; a switch to `plain` and the end of the attachment after that."""
    training = training_at(rank, place, scheme)
    training.take_steps(range(2))
    of_model, of_optimizer, of_attachment = states_of(training)
    model = build_model(seed=5)
    model.load_state_dict(of_model)

    def resumed_adamw(parameters: Any) -> torch.optim.Optimizer:
        optimizer = adamw(parameters)
        optimizer.load_state_dict(of_optimizer)
        return optimizer

    resumed = training_at(rank, place, scheme, resumed_adamw, model)
    resumed.attachment.load_state_dict(of_attachment)
    resumed.take_steps(range(2, 4))
    resumed.attachment.switch("plain")
    resumed.take_steps([4])
    resumed.attachment.close()
    resumed.take_steps([5])  # DDP's own all-reduce
    return resumed.flat()


FEATURES: dict[str, tuple[Feature, list[str]]] = {
    "view_buckets": (partial(run, gradient_as_bucket_view=True), ["one-bit", "gcomp", "slimgc"]),
    "keep_graph_static": (partial(run, static_graph=True), ["terngrad", "gcomp"]),
    "leave_parameters_unused": (
        partial(run, model=Branches, find_unused_parameters=True), ["one-bit", "gcomp", "power-sgd", "slimgc"],
    ),
    "mix_dtypes": (partial(run, model=Mixed), ["two-bit", "gcomp", "plain", "slimgc gcomp"]),
    "accumulate_and_clip": (accumulate_and_clip, ["one-bit", "homomorphic exact", "slimgc"]),
    "join_with_uneven_inputs": (join_with_uneven_inputs, ["one-bit", "gcomp", "slimgc"]),
    "scale_the_loss": (scale_the_loss, ["one-bit", "gcomp", "plain", "slimgc", "slimgc backup", "broadcast"]),
    "meet_nan": (meet_nan, ["one-bit", "gcomp", "plain", "slimgc"]),
    "stop_and_resume": (stop_and_resume, ["one-bit", "gcomp", "acp-sgd", "slimgc"]),
}  # fmt: skip


def compare_features(
    rank: int, place: Place, makers: dict[str, Callable[[], Scheme]], features: dict[str, list[str]]
) -> list[Tensor]:
    """The features with the schemes of these names."""
    all_found = []
    for feature, names in features.items():
        use, _ = FEATURES[feature]
        for name in names:
            expected, found = (use(rank, where, makers[name]()) for where in (Place(CPU), place))
            assert torch.equal(found, expected), f"{feature}, {name}: off by {(found - expected).abs().max()}"
            all_found.append(found)
    return all_found


@pytest.mark.parametrize(("world_size", "delays_us"), [(1, [1_000]), (2, [0, 5_000]), (3, [1_000])])
@on_ranks(timeout_s=170)
def test_every_scheme_has_its_bits_of_the_cpu(rank: int, world_size: int, library: Path, delays_us: list[int]) -> None:
    late, device = begin(library)
    train_on_both(rank, late, device, SCHEMES, delays_us)


@on_ranks(2, timeout_s=170)
def test_features_of_ddp_have_their_bits_of_the_cpu(rank: int, world_size: int, library: Path) -> None:
    _, device = begin(library, 1_000)
    compare_features(rank, device, SCHEMES, {feature: names for feature, (_, names) in FEATURES.items()})


class OnTwoDevices(nn.Module):
    def __init__(self, second: torch.device) -> None:
        super().__init__()
        model = build_model()
        self.front, self.back = model[:3], model[3:].to(second)
        self.second = second

    def to(self, device: torch.device) -> "OnTwoDevices":  # type: ignore[override]
        self.front.to(device)
        return self

    def forward(self, values: Tensor) -> Tensor:
        return self.back(self.front(values).to(self.second))


@on_ranks(2)
def test_a_model_on_two_devices(rank: int, world_size: int, library: Path) -> None:
    _, on_late = begin(library, 1_000)
    ends = []
    for place, second in ((Place(CPU), CPU), (on_late, torch.device("late", 1))):
        # Buckets are other ones than on the CPU, so schemes that do not depend on them.
        for name in ("plain", "gcomp direct", "zlib"):
            training = training_at(rank, place, SCHEMES[name](), model=OnTwoDevices(second), bucket_cap_mb=0.005)
            training.take_steps(range(N_STEPS))
            ends.append(end(training))
    assert all(map(torch.equal, ends[:3], ends[3:]))


@on_ranks(2)
def test_a_bucket_that_moves_and_ranks_that_count_devices_otherwise(rank: int, world_size: int, library: Path) -> None:
    """The same gradient comes from another device in every step, and from another one on every rank."""
    begin(library, 1_000)
    means = []
    for devices in ([CPU, CPU], [torch.device("late", 0), torch.device("late", 1)]):
        reducer = Reducer("one-bit", timeout_s=30)
        slot = Slot("weight", (5_000,))
        for step in range(4):
            generator = torch.Generator().manual_seed(10 * rank + step)
            gradient = torch.randn(5_000, generator=generator).to(devices[(rank + step) % 2])
            reducer.reduce(gradient, [slot], [0], 0, True).wait()
            reducer.close_pass(step, 0)
            means.append(gradient.cpu())
        reducer.close()
    assert all(map(torch.equal, means[:4], means[4:]))


@on_ranks(2)
def test_full_memory_is_said_and_training_goes_on_without_gradwire(rank: int, world_size: int, library: Path) -> None:
    """At attach and in the first step: a clear error, and DDP by itself goes on."""
    late, place = begin(library)
    alone, beside = (training_at(rank, place, None) for _ in range(2))
    late.set_limits(1 << 40, 1_000)
    with pytest.raises(gradwire.errors.OutOfMemory, match="could not be pinned"):
        gradwire.attach(beside.ddp, beside.optimizer, SCHEMES["one-bit"](), timeout_s=30)
    late.set_limits(1 << 40, 1 << 40)
    for training in (alone, beside):
        training.take_steps(range(2))
    assert torch.equal(beside.flat(), alone.flat())

    attachment = gradwire.attach(beside.ddp, beside.optimizer, SCHEMES["gcomp"](), timeout_s=30)
    compute = staging._Device.compute

    def compute_without_memory(device: Any, function: Any) -> Tensor:
        return compute(device, lambda: torch.empty(1 << 41, device=place.device))

    with (
        mock.patch.object(staging._Device, "compute", compute_without_memory),
        pytest.raises(gradwire.errors.OutOfMemory, match="no memory left"),
    ):
        beside.backward(2)
    attachment.close()
    for training in (alone, beside):
        training.take_steps(range(3, 5))
    assert torch.equal(beside.flat(), alone.flat())
