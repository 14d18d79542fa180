"""A step ahead: any scheme that only reduces, whose means the training does not wait for (`attach(..., ahead=1)`).

The next step starts at once, on local weights: those that all ranks share, moved by this rank's own gradient. When the mean
is there, it moves what the ranks share in its place (`gradwire.stepping.look_ahead`; formula 8 of SlimGC, whose `backup` this
is). So a whole step hides what a scheme sends, and gradients are one step old in what they know of other ranks.

When not to use this: where nothing waits for the network; where every step has to be exactly synchronous training's; and
beside large learning rates, which stale gradients bear least.
"""

from __future__ import annotations

from dataclasses import asdict, fields, replace
from typing import Any

import torch

from gradwire.core.bucket import Bucket
from gradwire.core.checkpoint import not_the_state
from gradwire.core.session import Session
from gradwire.errors import InvalidArgument, Unsupported
from gradwire.schemes.base import Scheme
from gradwire.stepping.look_ahead import LookAhead, LookAheadOptions
from gradwire.wire.preamble import Preamble, hash_configuration

OPTIONS = tuple(field.name for field in fields(LookAheadOptions))
_LEAST_SYNC_STEPS = 2  # in which DDP rebuilds its buckets


class Ahead(Scheme):
    """`inner`, a step ahead. It is known by the inner scheme's name, whose state and figures it has beside its own.

    Args:
        inner: a scheme that only reduces, and reads neither parameters nor the optimizer's state.
        ahead: 1, the steps that may start before a mean is there.
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
        _refuse(inner)
        self.inner, self._options = inner, LookAheadOptions(**options)
        self.name, self.per_rank_state = inner.name, inner.per_rank_state
        self.state_is_per_world = inner.state_is_per_world
        self._stepper: LookAhead | None = None
        self._last_stats: dict[str, Any] | None = None

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
        self.inner.is_ahead = True
        self.inner.bind(replace(session, loss_scale=lambda: self._loss_scale))
        self.session = session
        shared = {**self.configuration, "optimizers": str(session.optimizers)}
        self.configuration_hash = self.inner.configuration_hash = hash_configuration(self.name, shared)

    def take_over(self) -> None:
        """Raises: InvalidArgument, Unsupported (an optimizer or a model that cannot look ahead)."""
        self.inner.take_over()
        self._stepper = LookAhead(self.session, self.inner.reduce, self.options)

    @property
    def _bound(self) -> LookAhead:
        assert self._stepper is not None, "a scheme at work has taken the step over"
        return self._stepper

    # ---- a step

    def begin_at(self, step: int) -> None:
        self.inner.begin_at(step)

    def begin_step(self, step: int) -> None:
        """Raises: Unsupported (ddp.join)."""
        self._bound.begin_step(step)
        self.inner.begin_step(step)

    def reduce(self, bucket: Bucket) -> torch.futures.Future:
        """DDP goes on with this rank's own gradient; the mean is used by the next step."""
        if bucket.index == 0 and self.session.has_scaler:
            # The lane may come to this step's buckets when GradScaler has changed its scale already.
            self.session.communicator.submit(self._take_scale, self.session.loss_scale())
        return self._bound.reduce(bucket)

    def _take_scale(self, loss_scale: float) -> None:
        self._loss_scale = loss_scale

    def end_buckets(self, step: int) -> None:
        self.inner.end_buckets(step)

    def settle(self) -> None:
        self.inner.settle()

    def end_step(self, step: int) -> None:
        self.inner.end_step(step)

    def end_backward(self, step: int) -> int:
        return self._bound.end_backward() + self.inner.end_backward(step)

    def step_figures(self) -> dict[str, float]:
        return self.inner.step_figures()

    def flush(self) -> None:
        if self._stepper is not None:
            self._stepper.flush()

    def hand_over(self) -> None:
        self.inner.hand_over()

    def preamble(self, bucket: Bucket) -> Preamble:
        return self.inner.preamble(bucket)

    # ---- between steps

    def stats(self) -> dict[str, Any]:
        """The inner scheme's, the steps that started the next one without waiting, and the bytes of the backup."""
        if self._last_stats is not None:
            return self._last_stats
        return {**self.inner.stats(), **({} if self._stepper is None else self._stepper.stats())}

    def state_dict(self) -> dict[str, Any]:
        """After a flush: nothing is on its way."""
        return {**self.inner.state_dict(), "stepping": self._bound.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Raises: InvalidArgument."""
        stepping = state.get("stepping")
        if not isinstance(stepping, dict):
            raise not_the_state(f"scheme {self.name} with ahead=1", "it lacks stepping")
        self._bound.load_state_dict(stepping)
        self.inner.load_state_dict({name: value for name, value in state.items() if name != "stepping"})

    def close(self) -> None:
        """Take the step that was called for, then let go of the model and the optimizer."""
        self._last_stats = self.stats()
        stepper, self._stepper = self._stepper, None
        try:
            if stepper is not None:
                stepper.close()
        finally:
            self.inner.close()
            self.inner.unbind()
            self.inner.is_ahead = False


def _refuse(inner: Scheme) -> None:
    """Raises: Unsupported (a scheme that does more than reduce, or reads what local weights change)."""
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
