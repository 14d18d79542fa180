"""A model under `auto`: its steps are watched from outside, and DDP gets a communication hook only when a scheme needs one.

Until then, and wherever plain is best, DDP runs as it does without gradwire: the same code, the same bits, the same time.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable

import torch
from torch.nn.parallel import DistributedDataParallel

from gradwire.errors import Unsupported
from gradwire.reducer import Reducer
from gradwire.schemes.auto.scheme import Auto
from gradwire.telemetry.stopwatch import Lap, StepClock
from gradwire.wire.communicator import ring_bytes


class Watch:
    """Tells the scheme `auto` of a state about the steps of its model, and does the book-keeping of those that DDP does.

    Args:
        state: whose scheme may be `auto`, now or after a `switch`; with another one this does nothing.
        called: the model as the user calls it.
        register: puts the hook in; called at most once. Raises: Unsupported where DDP takes none.
    """

    def __init__(
        self, state: Reducer, model: DistributedDataParallel, called: torch.nn.Module, register: Callable[[], None]
    ) -> None:
        self._state, self._model, self._register = state, weakref.ref(model), register
        self._n_bytes = sum(p.numel() * p.element_size() for p in model.parameters() if p.requires_grad)
        self._clock = StepClock(model, called, self._begin, self._end)

    @property
    def _auto(self) -> Auto | None:
        return self._state.scheme if isinstance(self._state.scheme, Auto) and not self._state.closed else None

    @property
    def _is_joining(self) -> bool:
        """True if some ranks may run out of input and see no steps of their own: from the first `ddp.join()` on, for good."""
        return bool(getattr(getattr(self._model(), "_join_config", None), "enable", False))

    def _begin(self) -> None:
        auto, state = self._auto, self._state
        if auto is None or self._is_joining:  # all ranks go on with what they have: some of them cannot vote
            return
        state.note_loss_scale()
        auto.choose(state.step)
        if not auto.is_transparent:
            try:
                self._register()
            except Unsupported as error:
                auto.stay_plain(str(error))

    def _end(self, lap: Lap) -> None:
        auto, state = self._auto, self._state
        if auto is None:
            return
        if auto.is_transparent:
            self._count_plain_step(lap.waited_ns)
        if not self._is_joining:
            # A scheme that steps on the CPU alone need not know of devices' events.
            auto.end_watched_step(state.step - 1, *(lap if lap.on_device else lap[:2]))

    def _count_plain_step(self, waited_ns: int) -> None:
        """Note what the reducer's hook would: DDP has done it. Bytes are those of its ring."""
        state = self._state
        record = state.recorder.open_bucket(state.step, 0, self._n_bytes)
        record.count_exchanged(ring_bytes(self._n_bytes, state.communicator.world_size))
        state.recorder.close_bucket(record)
        state.recorder.close_step(state.step, waited_ns)
        state.step += 1

    def close(self) -> None:
        """Look no more."""
        self._clock.close()
