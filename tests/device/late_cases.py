"""What the tests on the late device share: one training on the CPU or on the device, and the bits of its end."""

import contextlib
import functools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import emulated
import late
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from awkward_models import build_model
from gradwire import schemes
from gradwire.gpu import kernels
from gradwire.reducer import Reducer
from gradwire.schemes import Scheme
from small_training import MakeOptimizer, Training, adamw

N_STEPS = 4
CPU = torch.device("cpu")
Maker = Callable[[], Scheme]

# Every scheme of the registry, with what makes it work within few steps; and those whose options lead elsewhere.
SCHEMES: dict[str, Maker] = {
    **{
        name: lambda name=name: schemes.by_name(name, **schemes.as_published(name, {}))
        for name in schemes.names()
        if name not in ("aqgb", "gcomp", "slimgc") and not schemes.needs_momenta(name)
    },
    "gcomp": lambda: schemes.by_name("gcomp", refresh_every=3),
    "gcomp direct": lambda: schemes.by_name("gcomp", importance="none", topology="direct", chunk_elements=1_000),
    "homomorphic exact": lambda: schemes.by_name("homomorphic", mode="exact", integer_bits=64),
    "slimgc": lambda: schemes.by_name("slimgc", threshold_bytes=4_000),
    "slimgc gcomp": lambda: schemes.by_name("slimgc", codec="gcomp", importance="paper", threshold_bytes=4_000),
    "slimgc ring": lambda: schemes.by_name("slimgc", threshold_bytes=0, topology="all-reduce"),
    "slimgc backup": lambda: schemes.by_name("slimgc", threshold_bytes=0, backup=True, sync_steps=1),
    "one-bit-adam": lambda: schemes.by_name("one-bit-adam", freeze_step=2),
    # Its bits follow the clock, so its floor and its ceiling are one: 4 bits.
    "aqgb": lambda: schemes.by_name("aqgb", floor=0.125, ceiling=0.125),
}


class Place(NamedTuple):
    """Where a training runs: the CPU, or the late device with its group; and the placement that it attaches with."""

    device: torch.device
    group: Any = None
    placement: str | None = None

    def model(self, module: nn.Module, **options: Any) -> DistributedDataParallel:
        """With several buckets, which DDP rebuilds after the first step."""
        module = module.to(self.device)
        return DistributedDataParallel(module, **{"bucket_cap_mb": 0.01, "process_group": self.group, **options})


def begin(library: Path, lateness_us: int | None = None) -> tuple[Any, Place]:
    """In a rank: the device's functions, and the place to train on it, through host memory."""
    functions = late.load(library)
    if lateness_us is not None:
        functions.set_lateness_us(lateness_us)
    return functions, Place(torch.device("late", 0), dist.new_group(backend="like_nccl"))


def begin_with_kernels(library: Path, lateness_us: int | None = None) -> tuple[Any, Place]:
    """And between devices, by emulated kernels."""
    functions, place = begin(library, lateness_us)
    kernels.MAKERS["late"] = functools.partial(emulated.LateKernels, emulated.build(), functions)
    kernels._made.clear()
    return functions, place._replace(placement="device")


def batch(rank: int, step: int, place: Place, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(4, 20, generator=torch.Generator().manual_seed(1_000 * rank + step)).to(place.device, dtype)


def mean_square(outputs: Tensor) -> Tensor:
    return outputs.float().square().mean()


def square_off_one(outputs: Tensor) -> Tensor:
    return (outputs - 1.0).square().mean()


def sgd(parameters: Any, lr: float = 0.05, **options: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=lr, **options)


def momentum(parameters: Any) -> torch.optim.Optimizer:
    return sgd(parameters, momentum=0.9, foreach=False)  # as on the CPU


def still(parameters: Any) -> torch.optim.Optimizer:
    return sgd(parameters, lr=0.0)


def training_at(
    rank: int,
    place: Place,
    scheme: Scheme | str | None,
    optimizer: MakeOptimizer = adamw,
    model: nn.Module | None = None,
    loss: Callable[[Tensor], Tensor] = mean_square,
    inputs: Callable[[int, int, Place], Tensor] = batch,
    scaler: Any = None,
    **ddp: Any,
) -> Training:
    """A training of `model`, with the `loss` of its outputs for what `inputs` gives it on a rank, in a step, at
    `place`. It has several buckets, which DDP rebuilds after the first step."""
    ddp = {"bucket_cap_mb": 0.01, "process_group": place.group, **ddp}
    attaching = {"timeout_s": 30, "scaler": scaler, "placement": place.placement}
    module = (model or build_model()).to(place.device)

    def loss_of(module: nn.Module, rank: int, step: int) -> Tensor:
        return loss(module(inputs(rank, step, place)))

    return Training(rank, scheme, optimizer, lambda: module, loss_of, ddp, **({} if scheme is None else attaching))


def states_of(training: Training) -> list[dict[str, Any]]:
    """Of model, optimizer and attachment, which is closed."""
    training.attachment.flush()
    states = [one.state_dict() for one in (training.ddp.module, training.optimizer, training.attachment)]
    training.attachment.close()
    return states


def end(training: Training) -> Tensor:
    """All parameters, after the attachment was closed."""
    training.attachment.flush()
    training.attachment.close()
    return training.flat()


def train(rank: int, place: Place, scheme: Scheme, n_steps: int = N_STEPS) -> Tensor:
    training = training_at(rank, place, scheme, loss=square_off_one)
    training.take_steps(range(n_steps))
    return end(training)


@contextlib.contextmanager
def waits_of_hooks(late: Any) -> Iterator[list[int]]:
    """How often DDP's hook stood still for the device, call by call."""
    waits: list[int] = []
    reduce = Reducer.reduce

    def counted(reducer: Reducer, *bucket: Any) -> Any:
        before = late.n_waits_here()
        try:
            return reduce(reducer, *bucket)
        finally:
            waits.append(late.n_waits_here() - before)

    with mock.patch.object(Reducer, "reduce", counted):
        yield waits


def train_on_both(
    rank: int, late: Any, place: Place, makers: dict[str, Maker], latenesses_us: list[int], near: tuple[str, ...] = ()
) -> dict[tuple[str, int], Tensor]:
    """What each scheme comes to on the device, with the bits of the CPU; those of names in `near` nearly."""
    trained = {}
    for name, make in makers.items():
        late.set_lateness_us(0)
        expected = train(rank, Place(CPU), make())
        for lateness_us in latenesses_us:
            late.set_lateness_us(lateness_us)
            scheme = make()
            with waits_of_hooks(late) as waits:
                found = train(rank, place, scheme)
            assert len(waits) > N_STEPS or name == "auto"  # which puts its hook in where something is to be won
            is_delayed = scheme.owns_step and place.placement is None
            assert is_delayed or not any(waits), f"{name}: autograd's thread waited for the device"
            off = float((found - expected).abs().max())
            assert off <= (1e-5 if name in near else 0.0), f"{name}, {lateness_us} us: off by {off}"
            trained[name, lateness_us] = found
    assert late.n_waits_with_gil() == 0, "a thread waited for the device and held up all others"
    return trained
