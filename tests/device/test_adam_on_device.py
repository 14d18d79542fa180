"""one-bit-adam and power-momentum on the late device: when a variance is frozen, what the host reads of it, as on the CPU."""

import contextlib
import functools
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from late_cases import CPU, Place, batch, begin_with_kernels, states_of, training_at
from test_ddp_on_device import scale_the_loss, stop_and_resume
from test_on_device import by_name
from torch import Tensor, nn

from gradwire.schemes.frozen_adam import _BegunVariances
from gradwire.wire.device_wire import Reading
from logs import log_of
from ranks import on_ranks, patience
from small_training import Training

FREEZE, N_STEPS = 2, 7
make_scheme = functools.partial(by_name, "one-bit-adam", freeze_step=FREEZE)


class Gated(nn.Module):
    """`behind` begins to train after some steps, and `turned` lies in another memory order."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.first, self.behind = nn.Linear(20, 40), nn.Linear(20, 40)
        self.turned = nn.Parameter(torch.randn(40, 9).t())
        self.empty = nn.Parameter(torch.empty(0, 7))

    def forward(self, values: Tensor) -> Tensor:
        values, gate = values.split([20, 1], 1)
        hidden = self.first(values).relu() + self.behind(values) * gate
        return hidden @ self.turned.t() + self.empty.sum()


def gated_training(rank: int, place: Place) -> Training:
    gates = [torch.full((4, 1), float(step >= 3), device=place.device) for step in range(20)]
    # The host waits here, and not in a step.
    batches = [torch.cat([batch(rank, step, place), gate], 1) for step, gate in enumerate(gates)]
    optimizer = functools.partial(torch.optim.AdamW, lr=1e-3, foreach=False)
    return training_at(rank, place, make_scheme(), optimizer, Gated(), inputs=lambda rank, step, place: batches[step])


def counts_of(training: Training) -> dict[str, dict[str, int]]:
    scheme: Any = training.attachment.scheme
    counts: dict[str, dict[str, int]] = scheme.adam.state_by_name(scheme.session.slots)
    return counts


@contextlib.contextmanager
def refusing_reads() -> Iterator[None]:
    """No thread may ask a device for a value and wait for the answer."""

    def refuse(method: Any, tensor: Tensor, *rest: Any) -> Any:
        assert tensor.device.type == "cpu", "the host waited for the device"
        return method(tensor, *rest)

    with contextlib.ExitStack() as patches:
        for name in ("item", "tolist", "__float__", "__bool__", "__int__"):
            refusing = functools.partialmethod(functools.partial(refuse, getattr(Tensor, name)))
            patches.enter_context(mock.patch.object(Tensor, name, refusing))
        yield


@on_ranks(2)
def test_a_parameter_that_trains_late_is_frozen_late(rank: int, world_size: int, library: Path) -> None:
    late, device = begin_with_kernels(library)
    for lateness_us in (0, 2_000):
        late.set_lateness_us(lateness_us)
        ends = []
        for place in (Place(CPU), device):
            run = gated_training(rank, place)
            with refusing_reads() if place.device != CPU else contextlib.nullcontext():
                run.take_steps(range(N_STEPS))
            ends.append((counts_of(run), run.flat()))
        (counts, expected), (found_counts, found) = ends
        assert found_counts == counts
        frozen_at = counts["frozen_at"]
        assert frozen_at["first.weight"] == FREEZE
        assert frozen_at["behind.weight"] == 3 + FREEZE
        assert "empty" not in frozen_at
        assert torch.equal(found, expected), f"{lateness_us} us: off by {(found - expected).abs().max()}"


@on_ranks(1)
def test_a_host_that_reads_too_soon_is_seen(rank: int, world_size: int, library: Path) -> None:
    """A host that does not wait for what it reads of the variances takes one for another."""
    late, place = begin_with_kernels(library)
    variances = {torch.empty(1): torch.full((3,), value).to(place.device) for value in (0.0, 1.0, 0.0)}
    late.set_lateness_us(0)
    late.set_stream_lateness_us(0, 0, int(20_000 * patience()))
    for wait, expected in ((Reading.wait, [False, True, False]), (lambda self: self.on_host, [True, True, True])):
        begun = _BegunVariances()
        begun.look(variances)
        with mock.patch.object(Reading, "wait", wait):
            assert [begun.has(p, v) for p, v in variances.items()] == expected
            assert not begun.has(torch.empty(1), torch.empty(0, device=place.device))


@on_ranks(2)
def test_resume_has_the_bits_of_the_cpu(rank: int, world_size: int, library: Path) -> None:
    """Saved before the late parameter trains, and after it; the optimizer's state is another tensor then."""
    _, device = begin_with_kernels(library, 1_000)
    for at in (2, 4):
        ends = []
        for place in (Place(CPU), device):
            run = gated_training(rank, place)
            run.take_steps(range(at))
            saved = states_of(run)
            run = gated_training(rank, place)
            for one, state in zip((run.ddp.module, run.optimizer, run.attachment), saved, strict=True):
                one.load_state_dict(state)
            run.take_steps(range(at, N_STEPS))
            ends.append((counts_of(run), run.flat()))
        assert ends[0][0] == ends[1][0]
        assert torch.equal(ends[0][1], ends[1][1])


@on_ranks(2)
def test_an_overflow_is_skipped_and_a_checkpoint_goes_on(rank: int, world_size: int, library: Path) -> None:
    """float16 behind a GradScaler, an Inf in step 1; and features that do not depend on the optimizer's class."""
    _, device = begin_with_kernels(library, 1_000)

    def adamw_instead(parameters: Any, **_: Any) -> torch.optim.Optimizer:
        return torch.optim.AdamW(parameters, lr=1e-3, foreach=False)

    behind = functools.partial(by_name, "power-momentum", rank=2, min_compression_rate=0)
    for feature, scheme in (
        (scale_the_loss, functools.partial(make_scheme, freeze_step=1)),
        *((stop_and_resume, functools.partial(make_scheme, freeze_step=n)) for n in (1, 3)),
        (scale_the_loss, behind), (stop_and_resume, behind),
    ):  # fmt: skip
        with mock.patch.object(torch.optim, "SGD", adamw_instead):
            expected, found = (feature(rank, place, scheme()) for place in (Place(CPU), device))
        assert torch.equal(found, expected), f"{feature.__name__}: off by {(found - expected).abs().max()}"


@on_ranks(2)
def test_gradients_that_outgrow_the_variance_are_told_once(rank: int, world_size: int, library: Path) -> None:
    _, device = begin_with_kernels(library, 1_000)
    said = log_of("gradwire", logging.WARNING)
    run = gated_training(rank, device)
    for step in range(20):  # updates are looked at every 16 steps, and what was found comes a step later
        run.backward(step, 1e3 if step >= FREEZE else 1.0)
        run.optimizer.step()
    run.attachment.close()
    assert sum("frozen too early" in text for text in said) == 1
