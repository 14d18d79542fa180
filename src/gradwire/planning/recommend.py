"""`gradwire.recommend`: a minute on the user's own model and network, before the run."""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from gradwire import schemes
from gradwire.core.optimizers import Optimizers
from gradwire.doors.attachment import attach
from gradwire.errors import InvalidArgument, Unsupported
from gradwire.planning.plan import Plan
from gradwire.schemes.auto.costs import look_for_zeros, measure_profile
from gradwire.schemes.auto.fidelity import LEVELS, TABLE, levels_to, needed, row_of
from gradwire.schemes.auto.law import PLAIN
from gradwire.telemetry.stopwatch import Lap, StepClock, Stopwatch
from gradwire.wire.communicator import Communicator
from gradwire.wire.device_wire import DeviceWire, serves
from gradwire.wire.link_probe import probe_pairs
from gradwire.wire.wire import Wire

_WARMUP, _FEWEST, _MOST = 2, 3, 10
_PLAIN_SHARE, _TRIAL_SHARE = 0.2, 0.7  # of the time
_N_TRIED = 4


def recommend(
    ddp: DistributedDataParallel,
    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
    step_function: Callable[[], Any],
    *,
    seconds: float = 60.0,
    fidelity: str = "any",
) -> Plan:
    """Measure links, codecs and a few steps of a model, and recommend a scheme. Collective.

    On GPUs that DDP's own backend joins, the bus between them and the schemes of `placement="device"` are measured.
    Parameters, gradients, buffers and random states are restored; no optimizer step is taken. Call it before `attach`.

    Args:
        optimizer: the one that steps the model, or a list of all.
        step_function: one forward and backward pass of `ddp`, without the optimizer's step.
        seconds: approximate time to spend; a few steps are taken in any case.
        fidelity: the least faithful class that may be recommended; the table shows all.
    Raises: InvalidArgument, Unsupported, PeerLost.
    """
    levels_to(fidelity)  # its complaint, now
    if not seconds > 0:
        raise InvalidArgument(f"seconds must be positive, got {seconds}")
    parameters = [parameter for parameter in ddp.parameters() if parameter.requires_grad]
    families = Optimizers(optimizer).families(parameters)
    elapsed = Stopwatch()
    with (
        _restored(ddp),
        contextlib.closing(Communicator(ddp.process_group)) as communicator,
        _wire_of(ddp, parameters, communicator) as wire,
    ):
        ddp.train()
        plain_s, waited_s = _time_steps(ddp, step_function, communicator, _PLAIN_SHARE * seconds)
        density = look_for_zeros(p.grad for p in parameters)()  # of DDP's means: the same on all ranks
        rows = needed([row for row in TABLE if row.holds_under(families) and density <= row.densest])
        if wire.on_device:
            working = [row for row in rows[1:] if schemes.by_name(row.scheme).works_on_device]
            rows = [rows[0], *(row.on_device() for row in working)]
        measured_profile = communicator.submit(measure_profile, wire, rows, parameters).wait()
        profile = replace(measured_profile, density=density)
        links = [] if wire.on_device else communicator.submit(probe_pairs, communicator).wait()
        plan = Plan(profile, plain_s - waited_s, plain_s, {}, fidelity, families != {"sgd"}, tuple(links))
        measured = {PLAIN: plain_s}
        for spec in _worth_trying(plan):
            if _is_over(communicator, elapsed, (_PLAIN_SHARE + _TRIAL_SHARE) * seconds) and len(measured) > 1:
                break
            row = row_of(spec)
            try:
                placement = "device" if row.is_on_device else "staged"
                attachment = attach(ddp, optimizer, schemes.by_name(row.scheme), placement=placement)
            except (Unsupported, InvalidArgument):
                continue
            with contextlib.closing(attachment):
                limit_s = _TRIAL_SHARE * seconds / _N_TRIED
                measured[spec], _ = _time_steps(ddp, step_function, communicator, limit_s)
    return replace(plan, measured_s=measured)


def _wire_of(
    ddp: DistributedDataParallel, parameters: Sequence[torch.Tensor], communicator: Communicator
) -> contextlib.AbstractContextManager[Wire]:
    """The wire to measure: between the devices that DDP's own group joins, else in host memory."""
    devices = {parameter.device for parameter in parameters}
    if communicator.world_size == 1 or len(devices) > 1 or not serves(ddp.process_group, *devices):
        return contextlib.nullcontext(Wire(communicator))
    return contextlib.closing(DeviceWire(communicator, list(devices)))


def _worth_trying(plan: Plan) -> list[str]:
    """Of each level what is predicted to be fastest, if that is at all promising. The same on all ranks."""
    promising = [
        f for f in plan.forecasts() if f.spec != PLAIN and not f.by_name_only and f.step_s < 1.3 * plan.plain_s
    ]
    # What was asked for comes first.
    levels = sorted(LEVELS, key=lambda level: level != plan.fidelity)
    of_level = [[f.spec for f in promising if f.level == level] for level in levels]
    return [specs[i] for i in range(2) for specs in of_level if len(specs) > i]


def _time_steps(
    ddp: DistributedDataParallel, step: Callable[[], Any], communicator: Communicator, limit_s: float
) -> tuple[float, float]:
    """(seconds a step on the slowest rank, seconds it waits on the rank that waits least): medians of some steps, which all
    ranks take at once."""
    elapsed, laps = Stopwatch(), list[Lap]()
    with contextlib.closing(StepClock(ddp, ddp, lambda: None, laps.append)):
        for n_done in range(1, _WARMUP + _MOST + 1):
            ddp.zero_grad(set_to_none=True)
            step()
            if len(laps) != n_done:
                raise InvalidArgument(
                    "step_function has to run one forward and one backward pass of the model that recommend was given"
                )
            if n_done >= _WARMUP + _FEWEST and _is_over(communicator, elapsed, limit_s):
                break
    read = [lap.read() for lap in laps[_WARMUP:]]
    rows = torch.tensor([(took / 1e9, -waited / 1e9) for took, waited in read], dtype=torch.float64, device="cpu")
    communicator.submit(communicator.all_reduce, rows, dist.ReduceOp.MAX).wait()
    took, waited = rows.median(dim=0).values.tolist()
    return took, min(-waited, took)


def _is_over(communicator: Communicator, elapsed: Stopwatch, limit_s: float) -> bool:
    """Return whether the slowest rank's watch has passed the limit: alike on all ranks, which take the same steps."""
    spent = torch.tensor([elapsed.elapsed_ns], dtype=torch.int64, device="cpu")
    communicator.submit(communicator.all_reduce, spent, dist.ReduceOp.MAX).wait()
    return int(spent) / 1e9 > limit_s


@contextlib.contextmanager
def _restored(ddp: DistributedDataParallel) -> Iterator[None]:
    """Put back afterwards what steps change: tensors, gradients, random state and mode."""
    tensors = {name: tensor.detach().clone() for name, tensor in ddp.module.state_dict().items()}
    gradients = [None if p.grad is None else p.grad.detach().clone() for p in ddp.parameters()]
    random, was_training = torch.get_rng_state(), ddp.training
    try:
        yield
    finally:
        ddp.train(was_training)
        with torch.no_grad():
            for name, tensor in ddp.module.state_dict().items():
                tensor.copy_(tensors[name])
        for parameter, gradient in zip(ddp.parameters(), gradients, strict=True):
            parameter.grad = gradient
        torch.set_rng_state(random)
