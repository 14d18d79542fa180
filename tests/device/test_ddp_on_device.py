"""DDP's features with staged schemes on the late device, errors and deaths: the CPU's bits, or the CPU's errors."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from late_cases import CPU, N_STEPS, SCHEMES, Place, adamw, attach, batch, begin, bits_of, build_model
from torch import Tensor, nn

import gradwire
from gradwire.core.bucket import Slot
from gradwire.reducer import Reducer
from gradwire.schemes import Scheme
from ranks import on_ranks, try_ranks

Feature = Callable[[int, Place, Scheme], Tensor]


def run(rank: int, place: Place, scheme: Scheme, model: nn.Module, **options: Any) -> Tensor:
    ddp = place.model(model, **options)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.05, momentum=0.9, foreach=False)  # as on the CPU
    attachment = attach(ddp, optimizer, scheme)
    for step in range(N_STEPS):
        optimizer.zero_grad()
        ddp(batch(rank, step, place)).float().square().mean().backward()
        optimizer.step()
    attachment.close()
    return bits_of(ddp)


def view_buckets(rank: int, place: Place, scheme: Scheme) -> Tensor:
    return run(rank, place, scheme, build_model(), gradient_as_bucket_view=True)


def keep_graph_static(rank: int, place: Place, scheme: Scheme) -> Tensor:
    return run(rank, place, scheme, build_model(), static_graph=True)


class Branches(nn.Module):
    """`left` or `right` by rank and step; `spare` is never used; one parameter has another memory order."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.trunk, self.left, self.right, self.spare = (nn.Linear(20, 20) for _ in range(4))
        self.turned = nn.Parameter(torch.randn(20, 9).t())
        self.empty = nn.Parameter(torch.empty(0, 7))

    def forward(self, values: Tensor) -> Tensor:
        branch = self.left if float(values[0, 0]) > 0 else self.right
        return branch(self.trunk(values).relu()) @ self.turned.t() + self.empty.sum()


def leave_parameters_unused(rank: int, place: Place, scheme: Scheme) -> Tensor:
    return run(rank, place, scheme, Branches(), find_unused_parameters=True)


class Mixed(nn.Module):
    """Three dtypes in one model: DDP makes buckets for each."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.wide, self.short, self.narrow = nn.Linear(20, 20), nn.Linear(20, 20).bfloat16(), nn.Linear(20, 20).half()

    def forward(self, values: Tensor) -> Tensor:
        return self.narrow(self.short(self.wide(values).bfloat16()).relu().half()).float()


def mix_dtypes(rank: int, place: Place, scheme: Scheme) -> Tensor:
    return run(rank, place, scheme, Mixed())


def accumulate_and_clip(rank: int, place: Place, scheme: Scheme) -> Tensor:
    ddp = place.model(build_model())
    optimizer = adamw(ddp)
    attachment = attach(ddp, optimizer, scheme)
    for step in range(2 * N_STEPS):
        with ddp.no_sync() if step % 2 == 0 else contextlib.nullcontext():
            (10 * ddp(batch(rank, step, place))).square().mean().backward()
        if step % 2:
            torch.nn.utils.clip_grad_norm_(ddp.parameters(), 0.5)
            optimizer.step()
            optimizer.zero_grad()
    attachment.close()
    return bits_of(ddp)


def join_with_uneven_inputs(rank: int, place: Place, scheme: Scheme) -> Tensor:
    ddp = place.model(build_model())
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.05)
    attachment = attach(ddp, optimizer, scheme)
    with ddp.join():
        for step in range(N_STEPS + 2 * rank):
            optimizer.zero_grad()
            ddp(batch(rank, step, place)).square().mean().backward()
            optimizer.step()
    attachment.close()
    return bits_of(ddp)


class Half(nn.Module):
    """The forward pass in float16, parameters and gradients in float32, as autocast has it."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = build_model()

    def forward(self, values: Tensor) -> Tensor:
        for layer in self.layers:
            values = (
                nn.functional.linear(values.half(), layer.weight.half(), layer.bias.half())
                if isinstance(layer, nn.Linear)
                else layer(values)
            )
        return values.float()


def scale_the_loss(rank: int, place: Place, scheme: Scheme) -> Tensor:
    """float16 with a GradScaler; an Inf on rank 1 in step 1, which every rank skips."""
    ddp = place.model(Half())
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.05, momentum=0.9, foreach=False)  # as on the CPU
    scaler = torch.amp.GradScaler(place.device.type, init_scale=2.0**10)
    attachment = attach(ddp, optimizer, scheme, scaler=scaler)
    for step in range(N_STEPS):
        optimizer.zero_grad()
        loss = ddp(batch(rank, step, place)).square().mean()
        scaler.scale(loss * float("inf") if (rank, step) == (1, 1) else loss).backward()
        if not scheme.owns_step:
            scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
    assert scaler.get_scale() == 2.0**9
    attachment.flush()
    attachment.close()
    return bits_of(ddp)


def meet_nan(rank: int, place: Place, scheme: Scheme) -> Tensor:
    """A NaN on one rank, without a scaler: the whole step is NaN there, as it is on the CPU."""
    ddp = place.model(build_model())
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.05)
    attachment = attach(ddp, optimizer, scheme)
    for step in range(2):
        optimizer.zero_grad()
        (ddp(batch(rank, step, place)) * (float("nan") if rank == step == 1 else 1.0)).square().mean().backward()
        optimizer.step()
    attachment.close()
    return torch.nan_to_num(bits_of(ddp), nan=12345.0)


def stop_and_resume(rank: int, place: Place, scheme: Scheme) -> Tensor:
    """Saved after two steps, loaded into another model; a switch to `plain` and the end of the attachment after that."""
    ddp = place.model(build_model())
    optimizer = adamw(ddp)
    attachment = attach(ddp, optimizer, scheme)

    def step_once(step: int) -> None:
        optimizer.zero_grad()
        ddp(batch(rank, step, place)).square().mean().backward()
        optimizer.step()

    for step in range(2):
        step_once(step)
    attachment.flush()
    saved = ddp.module.state_dict(), optimizer.state_dict(), attachment.state_dict()
    attachment.close()
    ddp = place.model(build_model(seed=5))
    optimizer = adamw(ddp)
    ddp.module.load_state_dict(saved[0])
    optimizer.load_state_dict(saved[1])
    attachment = attach(ddp, optimizer, scheme)
    attachment.load_state_dict(saved[2])
    for step in range(2, 4):
        step_once(step)
    attachment.switch("plain")
    step_once(4)
    attachment.close()
    step_once(5)  # DDP's own all-reduce
    return bits_of(ddp)


FEATURES: dict[Feature, list[str]] = {
    view_buckets: ["one-bit", "gcomp", "slimgc"],
    keep_graph_static: ["terngrad", "gcomp"],
    leave_parameters_unused: ["one-bit", "gcomp", "power-sgd", "slimgc"],
    mix_dtypes: ["two-bit", "gcomp", "plain", "slimgc gcomp"],
    accumulate_and_clip: ["one-bit", "homomorphic exact", "slimgc"],
    join_with_uneven_inputs: ["one-bit", "gcomp", "slimgc"],
    scale_the_loss: ["one-bit", "gcomp", "plain", "slimgc", "slimgc backup", "broadcast"],
    meet_nan: ["one-bit", "gcomp", "plain", "slimgc"],
    stop_and_resume: ["one-bit", "gcomp", "acp-sgd", "slimgc"],
}


@on_ranks(2, timeout_s=170)
def test_features_of_ddp_have_their_bits_of_the_cpu(rank: int, world_size: int, library: Path) -> None:
    late, device = begin(library)
    late.set_lateness_us(1_000)
    for feature, names in FEATURES.items():
        for name in names:
            expected = feature(rank, Place(CPU), SCHEMES[name]())
            found = feature(rank, device, SCHEMES[name]())
            assert torch.equal(found, expected), f"{feature.__name__}, {name}: off by {(found - expected).abs().max()}"


class OnTwoDevices(nn.Module):
    def __init__(self, first: torch.device, second: torch.device) -> None:
        super().__init__()
        model = build_model()
        self.front, self.back = model[:3].to(first), model[3:].to(second)
        self.second = second

    def forward(self, values: Tensor) -> Tensor:
        return self.back(self.front(values).to(self.second))


@on_ranks(2)
def test_a_model_on_two_devices(rank: int, world_size: int, library: Path) -> None:
    late, on_late = begin(library)
    late.set_lateness_us(1_000)
    ends = []
    for place, second in ((Place(CPU), CPU), (on_late, torch.device("late", 1))):
        # Buckets are other ones than on the CPU, so schemes that do not depend on them.
        for name in ("plain", "gcomp direct", "zlib"):
            ddp = nn.parallel.DistributedDataParallel(
                OnTwoDevices(place.device, second), process_group=place.group, bucket_cap_mb=0.005
            )
            optimizer = adamw(ddp)
            attachment = attach(ddp, optimizer, SCHEMES[name]())
            for step in range(N_STEPS):
                optimizer.zero_grad()
                ddp(batch(rank, step, place)).square().mean().backward()
                optimizer.step()
            attachment.close()
            ends.append(bits_of(ddp))
    assert all(map(torch.equal, ends[:3], ends[3:]))


@on_ranks(2)
def test_a_bucket_that_moves_and_ranks_that_count_devices_differently(
    rank: int, world_size: int, library: Path
) -> None:
    """The same gradient comes from another device in every step, and from another one on every rank."""
    late, _ = begin(library)
    late.set_lateness_us(1_000)
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

    def take_step(ddp: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
        optimizer.zero_grad()
        ddp(batch(rank, step, place)).square().mean().backward()
        optimizer.step()

    alone, ddp = place.model(build_model()), place.model(build_model())
    optimizer_alone, optimizer = adamw(alone), adamw(ddp)
    late.set_limits(1 << 40, 1_000)
    with pytest.raises(gradwire.errors.OutOfMemory, match="could not be pinned"):
        attach(ddp, optimizer, SCHEMES["one-bit"]())
    late.set_limits(1 << 40, 1 << 40)
    for step in range(2):
        take_step(alone, optimizer_alone, step)
        take_step(ddp, optimizer, step)
    assert torch.equal(bits_of(ddp), bits_of(alone))

    attachment = attach(ddp, optimizer, SCHEMES["gcomp"]())
    optimizer.zero_grad()
    loss = ddp(batch(rank, 2, place)).square().mean()
    compute = gradwire.core.staging.StagedBucket.compute

    def compute_without_memory(self: Any, function: Any) -> Tensor:
        return compute(self, lambda: torch.empty(1 << 41, device=place.device))

    gradwire.core.staging.StagedBucket.compute = compute_without_memory  # type: ignore[method-assign]
    with pytest.raises(gradwire.errors.OutOfMemory, match="no memory left"):
        loss.backward()
    gradwire.core.staging.StagedBucket.compute = compute  # type: ignore[method-assign]
    attachment.close()
    for step in range(3, 5):
        take_step(alone, optimizer_alone, step)
        take_step(ddp, optimizer, step)
    assert torch.equal(bits_of(ddp), bits_of(alone))


def disagree_then_die(rank: int, world_size: int, library: Path) -> str:
    late, place = begin(library)
    late.set_lateness_us(1_000)
    ddp = place.model(build_model())
    optimizer = adamw(ddp)
    attachment = attach(ddp, optimizer, gradwire.schemes.by_name("two-bit" if rank else "one-bit"))
    with pytest.raises(gradwire.RankMismatch):
        ddp(batch(rank, 0, place)).square().mean().backward()
    attachment.close()
    ddp = place.model(build_model())
    optimizer = adamw(ddp)
    attach(ddp, optimizer, SCHEMES["gcomp"]())
    try:
        for step in range(3):
            if (rank, step) == (1, 2):
                os._exit(7)
            optimizer.zero_grad()
            ddp(batch(rank, step, place)).square().mean().backward()
            optimizer.step()
    except gradwire.PeerLost as error:
        return str(error)
    return "not noticed"


def test_ranks_that_disagree_and_a_rank_that_dies(library: Path) -> None:
    survivor, dead = try_ranks(disagree_then_die, 2, library)
    assert survivor.error is None, survivor.traceback
    assert "rank 1" in survivor.result
    assert dead.exit_code == 7


@on_ranks(1)
def test_what_cannot_be_staged_says_what_to_use(rank: int, world_size: int, library: Path) -> None:
    _, place = begin(library)
    ddp = place.model(build_model())
    scheme = gradwire.schemes.by_name("slimgc", pull="raw", update="owner", threshold_bytes=0)
    with pytest.raises(gradwire.Unsupported, match='update="worker"'):
        attach(ddp, adamw(ddp), scheme)
