"""A step ahead (SlimGC's model backup, section 3.5): the next step starts on local weights while gradients are aggregated.

At the user's step i, in this order:

    1. the global weights are put back from the backup,
    2. the aggregate of step i-1, which had a whole step to arrive, moves them, with *its* step's hyper-parameters,
    3. they are backed up,
    4. this rank's own gradient of step i moves them on: the local weights, on which step i+1 computes (formula 8).

So a gradient is computed on weights that lack one aggregate, never more. With one rank and no compression the local and
the global step are the same step, and training is bit for bit synchronous.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from gradwire.checks import choice as check_choice
from gradwire.core.bucket import Bucket
from gradwire.core.session import Session
from gradwire.errors import InvalidArgument, Unsupported
from gradwire.stepping.interception import (
    FiniteFlag,
    FrozenStep,
    Interceptor,
    StepOwner,
    clip_factor,
    model_and_optimizer,
    refuse_join,
    stepped_parameters,
    takes_step_of,
)
from gradwire.telemetry.stopwatch import Stopwatch

LOCALS = ("peek", "sgd")
# Optimizers whose whole state lies in `optimizer.state[parameter]`, elementwise: it can be copied and thrown away.
_PEEKABLE = (
    "ASGD", "Adadelta", "Adagrad", "Adam", "AdamW", "Adamax", "NAdam", "RAdam", "RMSprop", "Rprop", "SGD",
)  # fmt: skip


@dataclass(frozen=True)
class LookAheadOptions:
    """Options of a step that starts before the one before it is complete.

    Attributes:
        local: "peek": the user's own rule, on a copy of its state that is thrown away; "sgd": weights - local_rate x
            gradient.
        local_rate: of "sgd"; None: each group's own learning rate.
        sync_steps: steps from the beginning that wait for their aggregate, as without; None: as its owner says.
        max_grad_norm: clip the norm of the mean gradient, as clip_grad_norm_ does; and of the local one for its step.
    Raises: InvalidArgument.
    """

    local: str = "peek"
    local_rate: float | None = None
    sync_steps: int | None = None
    max_grad_norm: float | None = None

    def __post_init__(self) -> None:
        local, rate = check_choice("local", self.local, LOCALS), self.local_rate
        if rate is not None and (local != "sgd" or not (math.isfinite(rate) and rate > 0)):
            raise InvalidArgument(
                f'local_rate is a positive learning rate for local="sgd", got {rate!r} with {local!r}'
            )
        if self.sync_steps is not None and self.sync_steps < 0:
            raise InvalidArgument(f"sync_steps is 0 or more, got {self.sync_steps}")
        if self.max_grad_norm is not None and not self.max_grad_norm > 0:
            raise InvalidArgument(f"max_grad_norm must be positive, got {self.max_grad_norm}")


@contextlib.contextmanager
def on_copies_of_the_state(optimizer: torch.optim.Optimizer, parameters: Iterable[torch.Tensor]) -> Iterator[None]:
    """Have the optimizer work on copies of these parameters' state; afterwards it is as it was."""
    state = optimizer.state
    kept = {parameter: state[parameter] for parameter in parameters if parameter in state}
    for parameter, own in kept.items():
        state[parameter] = {key: one.clone() if isinstance(one, torch.Tensor) else one for key, one in own.items()}
    try:
        yield
    finally:
        state.update(kept)
        for parameter in parameters:
            if parameter not in kept:
                state.pop(parameter, None)


def check_peekable(optimizer: torch.optim.Optimizer) -> None:
    """Raises: Unsupported for an optimizer whose step cannot be tried and thrown away."""
    if not takes_step_of(optimizer, _PEEKABLE):
        raise Unsupported(
            f'{type(optimizer).__name__} cannot be peeked: local="peek" tries its step on a copy of its state, which it '
            f'knows how to copy for torch.optim\'s {", ".join(_PEEKABLE)}; use local="sgd", or leave ahead out'
        )
    for group in optimizer.param_groups:
        for option in ("differentiable", "capturable"):
            if group.get(option):
                raise Unsupported(f'local="peek" does not serve {option}=True: use local="sgd", or leave ahead out')


class LocBuf:
    """loc_buf: the last complete global weights, from which every local step departs (SlimGC, section 3.6).

    `is_local` is the paper's flag: 1 after a local update, when the parameters hold this rank's own weights and the
    global ones lie here; 0 after the global weights were put back. Every read and write asserts it, so that neither can
    be taken for the other. While local weights are in place, nobody else may write to the parameters: their versions
    are noted, and a change is an error instead of a loss.
    """

    def __init__(self, parameters: Iterable[torch.Tensor]) -> None:
        self._parameters = tuple(parameters)
        self._backup: list[torch.Tensor] = []
        self._versions: list[int] = []
        self.is_local = False

    @property
    def n_bytes(self) -> int:
        """Memory held by the backup."""
        return sum(tensor.numel() * tensor.element_size() for tensor in self._backup)

    def back_up(self) -> None:
        """Copy the global weights, which the parameters hold, to the backup."""
        assert not self.is_local, "the parameters hold local weights"
        if not self._backup:
            self._backup = [torch.empty_like(parameter) for parameter in self._parameters]
        torch._foreach_copy_(self._backup, [parameter.detach() for parameter in self._parameters])

    def note_local(self) -> None:
        """The parameters have been moved by this rank's own gradient."""
        assert not self.is_local, "a local update on top of a local update"
        self.is_local = True
        self._versions = [parameter._version for parameter in self._parameters]

    def put_back(self) -> None:
        """Put the global weights into the parameters again, unless they are there."""
        if not self.is_local:
            return
        self.check_untouched()
        torch._foreach_copy_([parameter.detach() for parameter in self._parameters], self._backup)
        self.is_local = False

    def check_untouched(self) -> None:
        """Raises: Unsupported if somebody wrote to the parameters while they hold local weights."""
        if not self.is_local:
            return
        for parameter, version in zip(self._parameters, self._versions, strict=True):
            if parameter._version != version:
                # Without this the error would come up again when the pending step is taken.
                self._versions = [parameter._version for parameter in self._parameters]
                raise Unsupported(
                    f"a parameter of shape {tuple(parameter.shape)} was changed while it held this rank's local weights, "
                    "which the next step throws away: call attachment.flush() first (load_state_dict of the module does "
                    "so by itself), then change it on every rank"
                )


# Parameters whose state is copied at a time: 16 MB of float32 a moment, instead of the whole optimizer's state again.
_CHUNK_ELEMENTS = 1 << 22

Mean = Callable[[Bucket], torch.futures.Future]


@dataclass
class Aggregate:
    """One step's gradients on their way: grad_buf, replaced in place by the mean.

    Attributes:
        step: the reduction.
        buckets: copies of DDP's buckets; `done`: one future for each.
        frozen: the user's call of that step; None as long as there was none.
    """

    step: int
    buckets: list[Bucket]
    done: list[torch.futures.Future]
    frozen: FrozenStep | None = None


class LookAhead(StepOwner):
    """Stands between the user and the optimizer; all of it on the training thread.

    Args:
        session: with model and optimizer.
        start_mean: starts replacing a bucket by its mean; the future is done when it is. Never blocks.
    Raises: InvalidArgument, Unsupported (an optimizer that cannot be peeked, parameters that it does not step).
    """

    def __init__(self, session: Session, start_mean: Mean, options: LookAheadOptions) -> None:
        self._wrapper, self._optimizer = model_and_optimizer(session, "ahead=1")
        self._session, self._start_mean, self._options = session, start_mean, options
        if options.local == "peek":
            check_peekable(self._optimizer)
        self._parameters = stepped_parameters(session, "ahead=1")
        self.loc_buf = LocBuf(self._parameters)
        self._chunks = _chunks(self._parameters)
        self._grad_bufs: list[dict[int, torch.Tensor]] = [{}, {}]  # of the step under way, and of the one before
        self._arriving: Aggregate | None = None  # of the backward pass that runs or ran last
        self._pending: Aggregate | None = None  # called for, and not in the global weights yet
        self._n_taken = 0
        self._waited = Stopwatch()
        self._n_ahead = 0
        self._flag = FiniteFlag(session)
        self._interceptor = Interceptor(session, self._parameters, self)

    # ---- the backward pass

    def reduce(self, bucket: Bucket) -> torch.futures.Future:
        """Copy the bucket to grad_buf and send that; DDP goes on with this rank's own gradient."""
        assert self._arriving is not None
        bucket.wait_for_all()
        copied = self._copy(bucket)
        self._arriving.buckets.append(copied)
        done = self._start_mean(copied)
        done.add_done_callback(lambda _: self._session.recorder.close_bucket(copied.record))
        self._arriving.done.append(done)
        return self._flag.own_gradient(bucket)

    def begin_step(self, step: int) -> None:
        """A backward pass has its first gradients."""
        refuse_join(self._wrapper, "ahead=1", "leave ahead out")
        self._interceptor.begin_reduction()
        self._flag.begin_step()
        if self._arriving is not None:
            _wait(self._arriving)  # the user never called for its step; its memory is used again
        self._arriving = Aggregate(step, [], [])

    def _copy(self, bucket: Bucket) -> Bucket:
        # The aggregate of the step before is still needed, so two sets of buffers take turns.
        buffers = self._grad_bufs[bucket.step % 2]
        copied = buffers.get(bucket.index)
        if copied is None or copied.shape != bucket.buffer.shape or copied.dtype != bucket.buffer.dtype:
            copied = buffers[bucket.index] = torch.empty_like(bucket.buffer, memory_format=torch.contiguous_format)
        copied.copy_(bucket.buffer)
        # The hook closes its own record at the end of the backward pass; this traffic goes on after that.
        record = self._session.recorder.open_bucket(bucket.step, -1, 0)
        return Bucket(
            copied, bucket.layout, index=bucket.index, step=bucket.step, is_last=bucket.is_last,
            record=record,
        )  # fmt: skip

    def end_backward(self) -> int:
        """DDP has ended its part; returns how long the step before waited for its aggregate, in ns."""
        self._interceptor.end_backward()
        return self._waited.take_ns()

    # ---- what the interceptor asks (StepOwner)

    def begin_forward(self) -> None:
        self.loc_buf.check_untouched()

    @torch.no_grad()
    def take_step(self, frozen: FrozenStep) -> None:
        arrived, self._arriving = self._arriving, None
        assert arrived is not None
        arrived.frozen = frozen
        # Staleness: at most the aggregate of the step taken before this one is outstanding.
        assert self._pending is None or self._pending.step < arrived.step
        self.flush()
        assert self._pending is None
        self._n_taken += 1
        self._pending = arrived
        if self._n_taken <= (self._options.sync_steps or 0):
            self.flush()
            return
        self._n_ahead += 1
        if not frozen.parameters:
            return  # nothing will move: there is nothing to back up
        self.loc_buf.back_up()
        self._step_locally(frozen)
        self.loc_buf.note_local()

    @torch.no_grad()
    def drop_step(self) -> None:
        """Skip this step, under AMP: the one before must not become two steps old."""
        dropped, self._arriving = self._arriving, None
        self.flush()
        if dropped is not None:
            _wait(dropped)

    # ---- the global step

    @torch.no_grad()
    def flush(self) -> None:
        """Put the global weights back and take the pending step on them. Raises: what the aggregation failed of."""
        pending, self._pending = self._pending, None
        try:
            if pending is not None:
                with self._waited:
                    _wait(pending)
        finally:
            # Also if the aggregation failed: the parameters then hold the last global weights that are complete.
            self.loc_buf.put_back()
        if pending is not None:
            assert pending.frozen is not None
            gradients = {
                parameter: bucket.buffer[offset : offset + parameter.numel()].view(parameter.shape).to(parameter.device)
                for bucket in pending.buckets
                for parameter, offset in zip(bucket.parameters, bucket.offsets, strict=True)
            }
            pending.frozen.apply(self._prepare(gradients, pending.frozen, in_place=True))

    def _prepare(
        self, gradients: dict[torch.Tensor, torch.Tensor], frozen: FrozenStep, in_place: bool
    ) -> dict[torch.Tensor, torch.Tensor]:
        """The gradients without the loss scale, and clipped."""
        scale = None if frozen.inverse_scale is None else float(frozen.inverse_scale)
        chosen = {p: gradients[p] for p in self._parameters if p in frozen.parameters and p in gradients}
        if (scale is None and self._options.max_grad_norm is None) or not chosen:
            return chosen
        values = list(chosen.values())
        if not in_place:
            values = list(torch._foreach_mul(values, 1.0 if scale is None else scale))
        elif scale is not None:
            torch._foreach_mul_(values, scale)
        if self._options.max_grad_norm is not None:
            torch._foreach_mul_(values, clip_factor(values, self._options.max_grad_norm))
        return dict(zip(chosen, values, strict=True))

    # ---- the local step

    def _step_locally(self, frozen: FrozenStep) -> None:
        own = {p: p.grad for p in self._parameters if p.grad is not None and p in frozen.parameters}
        gradients = self._prepare(own, frozen, in_place=False)
        if self._options.local == "sgd":
            rates = {p: float(group["lr"]) for group in self._optimizer.param_groups for p in group["params"]}
            for parameter, gradient in gradients.items():
                parameter.add_(gradient, alpha=-(self._options.local_rate or rates[parameter]))
            return
        for chunk in self._chunks:
            chosen = {p: gradients[p] for p in chunk if p in gradients}
            with on_copies_of_the_state(self._optimizer, chosen):
                frozen.apply(chosen)

    # ---- beginning and end

    def state_dict(self) -> dict[str, Any]:
        """After a flush: nothing is pending."""
        return {"n_taken": self._n_taken}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Raises: InvalidArgument."""
        n_taken = state.get("n_taken")
        if not isinstance(n_taken, int) or isinstance(n_taken, bool) or n_taken < 0:
            raise InvalidArgument(f"the number of steps taken is a whole number, not {n_taken!r}")
        self._n_taken = n_taken

    def stats(self) -> dict[str, Any]:
        """Count the steps that started the next one without waiting, and the bytes of the backup."""
        return {"steps_ahead": self._n_ahead, "backup_bytes": self.loc_buf.n_bytes}

    def close(self) -> None:
        """Take what was called for, then let the model and the optimizer go."""
        try:
            self.flush()
        finally:
            self._interceptor.remove()
            self._flag.close()


def _chunks(parameters: Sequence[torch.Tensor]) -> list[list[torch.Tensor]]:
    chunks: list[list[torch.Tensor]] = []
    room = 0
    for parameter in parameters:
        if not chunks or parameter.numel() > room:
            chunks.append([])
            room = _CHUNK_ELEMENTS
        chunks[-1].append(parameter)
        room -= parameter.numel()
    return chunks


def _wait(aggregate: Aggregate) -> None:
    for done in aggregate.done:
        done.wait()
