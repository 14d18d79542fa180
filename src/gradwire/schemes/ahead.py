"""A step ahead: a scheme's means, which the training does not wait for (`attach(..., ahead=1)`).

The next step starts at once, on local weights: those that all ranks share, moved by this rank's own gradient. When the mean
is there, it moves what the ranks share in its place (SlimGC's model backup, section 3.5).

At the user's step i, in this order:

    1. the global weights are put back from the backup,
    2. the aggregate of step i-1, which had a whole step to arrive, moves them, with *its* step's hyper-parameters,
    3. they are backed up,
    4. this rank's own gradient of step i moves them on: the local weights, on which step i+1 computes (formula 8).

So a gradient is computed on weights that lack one aggregate, never more. With one rank and no compression the local and
the global step are the same step, and training is bit for bit synchronous.

When not to use this: where nothing waits for the network; where every step has to be exactly synchronous training's; and
beside large learning rates, which stale gradients bear least.
"""

import contextlib
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any

import torch

from gradwire.checks import count as check_count
from gradwire.core.bucket import Bucket, shape_like
from gradwire.core.session import Session
from gradwire.errors import InvalidArgument, Unsupported
from gradwire.schemes.base import Scheme
from gradwire.stepping.interception import (
    FiniteFlag,
    FrozenStep,
    Interceptor,
    StepOwner,
    clip_factor,
    refuse_join,
    stepped_parameters,
)
from gradwire.stepping.look_ahead import LocBuf, LookAheadOptions, check_peekable, in_chunks, on_copies_of_the_state
from gradwire.telemetry.stopwatch import Stopwatch
from gradwire.wire.preamble import Preamble

OPTIONS = tuple(option.name for option in fields(LookAheadOptions))
_LEAST_SYNC_STEPS = 2  # in which DDP rebuilds its buckets


@dataclass
class Aggregate:
    """One step's gradients on their way: grad_buf, replaced in place by the mean."""

    step: int  # the reduction
    buckets: list[Bucket] = field(default_factory=list)  # copies of DDP's buckets; `done`: one future for each
    done: list[torch.futures.Future] = field(default_factory=list)
    frozen: FrozenStep | None = None  # the user's call of that step; None as long as there was none

    def wait(self) -> None:
        """Return when the mean is there."""
        for done in self.done:
            done.wait()


class Ahead(Scheme, StepOwner):
    """`inner`, a step ahead. It is known by the inner scheme's name, whose state and figures it has beside its own.

    Args:
        inner: a scheme that only reduces, and reads neither parameters nor the optimizer's state.
        options: see `LookAheadOptions`.
    Raises: InvalidArgument, Unsupported (a scheme that does more than reduce).
    """

    waits_by_tensor = True
    owns_step = True

    def __init__(self, inner: Scheme, ahead: int = 1, **options: Any) -> None:
        if ahead != 1 or isinstance(ahead, bool):
            raise InvalidArgument(f"ahead is 1 step, or 0: none starts early; got {ahead!r}")
        unknown = next((name for name in options if name not in OPTIONS), None)
        if unknown:
            raise InvalidArgument(f"ahead=1 has no option {unknown!r}; there are: {', '.join(OPTIONS)}")
        why = (
            "takes the optimizer's step itself" if inner.owns_step
            else "exchanges the optimizer's momenta, which are a step behind" if inner.needs_momenta
            else "leaves ranks with different results" if inner.replicas_may_differ
            else "watches DDP's own steps; name a scheme" if inner.is_transparent
            else "reads parameters and the optimizer's state, which are this rank's own for a step; for gcomp take "
            'importance="none" or "uniform"' if inner.reads_optimizer
            else None
        )  # fmt: skip
        if why is not None:
            raise Unsupported(
                f"ahead=1 takes a scheme that only reduces, and {inner.name!r} {why}; leave one of the two out"
            )
        self.inner, self._options = inner, LookAheadOptions(**options)
        self.name, self.per_rank_state = inner.name, inner.per_rank_state
        self.state_is_per_world = inner.state_is_per_world
        self._last_stats: dict[str, Any] | None = None
        self._begin_anew()

    def _begin_anew(self) -> None:
        self._undo = contextlib.ExitStack()  # lets go of the model and the optimizer
        self._flag: FiniteFlag | None = None
        self._interceptor: Interceptor | None = None  # DDP's hook, which lives as long as the model, must not hold it
        self._parameters: list[torch.Tensor] = []
        self.loc_buf = LocBuf(())
        self._grad_bufs: list[dict[int, torch.Tensor]] = [{}, {}]  # of the step under way, and of the one before
        self._arriving: Aggregate | None = None  # of the backward pass that runs or ran last
        self._pending: Aggregate | None = None  # called for, and not in the global weights yet
        self._n_taken = self._n_ahead = 0
        self._waited = Stopwatch()

    @property
    def options(self) -> LookAheadOptions:
        """Those of the steps, `sync_steps` said: the first steps, and as long as the inner scheme measures or is plain."""
        n = self._options.sync_steps
        return replace(self._options, sync_steps=max(_LEAST_SYNC_STEPS, self.inner.settling_steps) if n is None else n)

    @property
    def configuration(self) -> dict[str, Any]:
        return {**self.inner.configuration, "ahead": 1, **asdict(self.options)}

    @property
    def settling_steps(self) -> int:
        """The inner scheme's, and two after those that wait: new buffers are made."""
        return max(self.inner.settling_steps, (self.options.sync_steps or 0) + 2)

    @property
    def is_settled(self) -> bool:
        return self.inner.is_settled

    def bind(self, session: Session) -> None:
        """Raises: Unsupported (gradients that stay on their device), and what the inner scheme does."""
        if session.wire.on_device:
            raise Unsupported("ahead=1 works on host memory: leave that or placement out")
        self._loss_scale, self._last_stats = 1.0, None
        self._begin_anew()
        self.inner.is_ahead = True
        self.inner.bind(replace(session, loss_scale=lambda: self._loss_scale))
        super().bind(session)
        self.inner.configuration_hash = self.configuration_hash

    def take_over(self) -> None:
        """Raises: InvalidArgument, Unsupported (an optimizer or a model that cannot look ahead)."""
        self._parameters = stepped_parameters(self.session, "ahead=1", of_one=True)
        if self._options.local == "peek":
            check_peekable(*self.session.optimizers)
        self._n_waiting = self.options.sync_steps or 0  # steps
        self.loc_buf = LocBuf(self._parameters)
        self._flag = FiniteFlag(self.session)
        self._undo.callback(self._flag.close)
        self._interceptor = Interceptor(self.session, self._parameters, self)
        self._undo.callback(self._interceptor.remove)

    def begin_step(self, step: int) -> None:
        """Raises: Unsupported (ddp.join)."""
        refuse_join(self.session.module, "ahead=1", "leave ahead out")
        assert self._interceptor is not None
        self._interceptor.begin_reduction()
        assert self._flag is not None
        self._flag.begin_step()
        if self._arriving is not None:
            self._arriving.wait()  # the user never called for its step; its memory is used again
        self._arriving = Aggregate(step)
        self.inner.begin_step(step)

    def reduce(self, bucket: Bucket) -> torch.futures.Future:
        """Copy the bucket to grad_buf and send that; DDP goes on with this rank's own gradient."""
        assert self._arriving is not None
        if bucket.index == 0 and self.session.has_scaler:
            # The lane may come to this step's buckets when GradScaler has changed its scale already.
            self.session.communicator.submit(setattr, self, "_loss_scale", self.session.loss_scale())
        bucket.wait_for_all()
        # The aggregate of the step before is still needed, so two sets of buffers take turns.
        buffers, own = self._grad_bufs[bucket.step % 2], bucket.buffer
        buffer = buffers.get(bucket.index)
        if buffer is None or buffer.shape != own.shape or buffer.dtype != own.dtype:
            buffer = buffers[bucket.index] = torch.empty_like(own, memory_format=torch.contiguous_format)
        buffer.copy_(own)
        # The hook closes its own record at the end of the backward pass; this traffic goes on after that.
        recorder, record = self.session.recorder, self.session.recorder.open_bucket(bucket.step, -1, 0)
        place: Any = {"index": bucket.index, "step": bucket.step, "is_last": bucket.is_last}
        copied = Bucket(buffer, bucket.layout, record=record, **place)
        done = self.inner.reduce(copied)
        done.add_done_callback(lambda _: recorder.close_bucket(copied.record))
        self._arriving.buckets.append(copied)
        self._arriving.done.append(done)
        assert self._flag is not None
        return self._flag.own_gradient(bucket)

    def settle(self) -> None:
        self.inner.settle()

    def end_step(self, step: int) -> None:
        self.inner.end_step(step)

    def preamble(self, bucket: Bucket) -> Preamble:
        return self.inner.preamble(bucket)

    def end_backward(self, step: int) -> int:
        if self._interceptor is not None:
            self._interceptor.end_backward()
        return self._waited.take_ns() + self.inner.end_backward(step)

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
        self._n_taken += 1
        self._pending = arrived
        if self._n_taken <= self._n_waiting:
            self.flush()
            return
        self._n_ahead += 1
        if not frozen.parameters:
            return  # nothing will move: there is nothing to back up
        self.loc_buf.back_up()
        own = {p: p.grad for p in self._parameters if p.grad is not None and p in frozen.parameters}
        gradients, (optimizer,) = self._prepare(own, frozen, in_place=False), self.session.optimizers
        if self._options.local == "sgd":
            rates = {p: float(group["lr"]) for group in optimizer.param_groups for p in group["params"]}
            for parameter, gradient in gradients.items():
                parameter.add_(gradient, alpha=-(self._options.local_rate or rates[parameter]))
        else:
            for chunk in in_chunks(gradients):
                with on_copies_of_the_state(optimizer, chunk):
                    frozen.apply({p: gradients[p] for p in chunk})
        self.loc_buf.note_local()

    @torch.no_grad()
    def drop_step(self) -> None:
        """Skip this step, under AMP: the one before must not become two steps old."""
        dropped, self._arriving = self._arriving, None
        self.flush()
        if dropped is not None:
            dropped.wait()

    @torch.no_grad()
    def flush(self) -> None:
        """Put the global weights back and take the pending step on them. Raises: what the aggregation failed of."""
        pending, self._pending = self._pending, None
        try:
            if pending is not None:
                with self._waited:
                    pending.wait()
        finally:
            # Also if the aggregation failed: the parameters then hold the last global weights that are complete.
            self.loc_buf.put_back()
        if pending is not None:
            assert pending.frozen is not None
            gradients = {
                parameter: shape_like(bucket.buffer[offset : offset + parameter.numel()], parameter).to(
                    parameter.device
                )
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

    def stats(self) -> dict[str, Any]:
        """The inner scheme's, and the steps that started the next one without waiting."""
        return self._last_stats or {**self.inner.stats(), "steps_ahead": self._n_ahead}

    def state_dict(self) -> dict[str, Any]:
        """After a flush: nothing is on its way."""
        return {**self.inner.state_dict(), "stepping": {"n_taken": self._n_taken}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Raises: InvalidArgument."""
        n_taken = state["stepping"]["n_taken"]
        self._n_taken = check_count("the checkpoint's number of steps taken", n_taken, at_least=0)
        self.inner.load_state_dict({name: value for name, value in state.items() if name != "stepping"})

    def close(self) -> None:
        """Take the step that was called for, then let go of the model and the optimizer."""
        self._last_stats = self.stats()
        try:
            self.flush()
        finally:
            self._undo.close()
            self._begin_anew()
            self.inner.close()
            self.inner.unbind()
            self.inner.is_ahead = False
