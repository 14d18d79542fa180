"""The frame of most schemes: what happens to a bucket before and after `step`, which is the scheme's own.

The frame adds error feedback, plain first steps and tensors that travel as they are, and keeps one rule for what is not
finite: all ranks get NaN for the message that it was in, and residuals and momenta of the step are dropped.
"""

import logging
from collections.abc import Callable
from typing import Any, ClassVar

import torch

from gradwire.codecs import Codec, choose_feedback
from gradwire.core.bucket import Bucket
from gradwire.core.feedback import Feedback, Part, Unused
from gradwire.core.session import Session
from gradwire.errors import InvalidArgument, Unsupported
from gradwire.exchange.owners import Owners
from gradwire.exchange.ring import Ring
from gradwire.exchange.shards import Scatter
from gradwire.gpu.kernels import kernels_on
from gradwire.gpu.launching import raise_error
from gradwire.schemes.base import Scheme
from gradwire.schemes.frozen_adam import FrozenAdam
from gradwire.schemes.plain_steps import PlainSteps
from gradwire.schemes.selection import ByName, Selection
from gradwire.wire.preamble import StepCheck, compare_preambles
from gradwire.wire.wire import Wire

_log = logging.getLogger(__name__)


class Compressed(Scheme):
    """A scheme that reduces bucket by bucket on the lane. With one rank the mean is the gradient: nothing is sent.

    Args:
        collective: what takes the mean of a part through a codec (`Owners`: one of the quantisers; `Ring`: any codec, without
            error feedback); None: the scheme's own `step` does.
        error_feedback: add what was not sent to the next gradient; not with a codec that does not want it (`feeds_back`).
        momenta: keep a momentum of every slot, each rank its own, as residuals are kept.
        plain: the first steps, which are reduced plainly.
        select: which tensors are compressed; the others are reduced plainly. Those that it spares take their mean beside
            the bucket, in which they are zeros.
        adam: the user's optimizer, for a scheme of its momenta: only tensors whose variance is frozen are compressed.
    """

    works_on_device = True
    acts_alone = False  # whether one rank's gradient is changed too
    settles_plainly = True  # whether the steps before it is settled are reduced plainly
    shared: ClassVar[tuple[str, ...]] = ()  # the names of its own options, which ranks must have alike
    _agreed_step = -1  # in which ranks have compared where they are

    def __init__(
        self,
        *,
        collective: Owners | Ring | Scatter | None = None,
        error_feedback: bool = False,
        momenta: bool = False,
        plain: PlainSteps | None = None,
        select: ByName | None = None,
        adam: FrozenAdam | None = None,
    ) -> None:
        if error_feedback and isinstance(collective, Ring):
            raise InvalidArgument("a ring rounds sums of several ranks: nothing of it is one rank's to feed back")
        self.collective: Owners | Ring | Scatter | None = collective
        self.error_feedback = bool(error_feedback)
        self.momenta = Feedback() if momenta else None
        self.state_is_per_world = self.error_feedback or momenta
        self.per_rank_state = ("residuals", "momenta") if momenta else ("residuals",)
        # Beside a frozen Adam none are plain by their number: a tensor is until its own variance is frozen.
        self.plain = plain or PlainSteps(self.name, "warmup_steps" if adam is None else "freeze_step")
        self.select = ByName(()) if select is None else select
        self.adam = adam
        self.n_not_finite = 0
        self._kept: dict[str, Feedback] = {}  # by its name in a checkpoint, what counts from the end of a step on

    @property
    def configuration(self) -> dict[str, Any]:
        return {**{name: getattr(self, name) for name in self.shared}, **self.frame_configuration}

    @property
    def frame_configuration(self) -> dict[str, Any]:
        """The collective's options, and of the frame's own those that are not as published."""
        shared: dict[str, Any] = {self.plain.option: self.plain.n} if self.plain.n else {}
        for part in (self.collective, self.select, self.adam):
            if part is not None:
                shared |= part.configuration
        return shared

    @property
    def settling_steps(self) -> int:
        """Steps that are reduced plainly; beside a frozen Adam, unless the optimizer has taken them before."""
        return self.plain.n if self.adam is None else self.adam.freeze_step

    @property
    def is_settled(self) -> bool:
        """True if the next step is compressed."""
        return self.plain.last + 1 >= self.plain.n if self.adam is None else bool(self.adam.frozen_at)

    def bind(self, session: Session) -> None:
        """Raises: InvalidArgument (names of no tensor; error feedback that the codec does not want), Unsupported (no Adam for a
        scheme of its momenta; on a device: error feedback where DDP looks for unused parameters; no kernels for the codec)."""
        codec: Codec | None = getattr(self, "codec", None) or getattr(self.collective, "codec", None)
        if self.error_feedback and codec is not None:
            choose_feedback(codec, True)
        if self.adam is not None:
            self.adam.check(session)
        is_kept = self.error_feedback or self.momenta is not None
        if session.wire.on_device and is_kept and getattr(session.module, "find_unused_parameters", False):
            raise Unsupported(
                "find_unused_parameters=True: which parameters a rank used is known to the host only; leave placement out"
            )
        self.plain.bind(session)
        self.select.bind(session)
        super().bind(session)
        kept = {"residuals": session.feedback if self.error_feedback else None, "momenta": self.momenta}
        self._kept = {name: feedback for name, feedback in kept.items() if feedback is not None}
        if self.collective is not None:
            self.collective.bind(session.wire)
        elif session.wire.on_device:
            kernels_on(session.wire.device)
        self._check = StepCheck(session.communicator)
        self.n_not_finite, self._agreed_step = 0, -1
        if self.adam is not None:
            self.adam.bind(session)
        if self.settles_plainly:
            self.plain.tell(self)

    def divide_kept(self, by: float) -> None:
        for feedback in self._kept.values():
            feedback.divide(by)

    def begin_step(self, step: int) -> None:
        self.plain.last = step
        self.session.communicator.submit(self._begin_on_lane)

    def _begin_on_lane(self) -> None:
        """Keep what the step before has staged; nothing of one that was given up half-way may live on."""
        self.settle()
        self.discard()
        self.session.wire.begin_step()

    def reduce(self, bucket: Bucket) -> torch.futures.Future:
        self.select.look_for_small(bucket)
        return self.session.communicator.submit(self._reduce_on_lane, bucket)

    def _reduce_on_lane(self, bucket: Bucket) -> torch.futures.Future | None:
        """Replace the bucket by its mean; or return the future of it, for which the lane need not wait."""
        wire = self.wire(bucket)
        if wire.world_size == 1 and not self.acts_alone:
            return None
        if wire.on_device and bucket.is_last:
            self._check.start(self.preamble(bucket), bucket.record)
            self._check.fail_early()
        if bucket.n_elements == 0:
            return None
        self._agree_while_settling(bucket, wire)
        with bucket.at_work():
            if bucket.step < self.plain.n:
                wire.mean(bucket.buffer)
                return None
            chosen = self.choose(bucket)
            if chosen is None:
                self._send(bucket, wire)
            else:
                self._send_chosen(bucket, chosen, wire)
        return None

    def _agree_while_settling(self, bucket: Bucket, wire: Wire) -> None:
        """Compare where ranks are before the first bucket of a step, as long as other steps send messages of other lengths: one
        that is longer than awaited would end a process of the backend's. Raises: RankMismatch."""
        # Once more when they have settled, also where a state that was loaded has gone past that step.
        is_settling = min(bucket.step, self._agreed_step + 1) <= self.settling_steps > 0 and wire.world_size > 1
        if is_settling and not wire.on_device and bucket.step != self._agreed_step:
            self._agreed_step = bucket.step
            compare_preambles(wire.communicator, self.preamble(bucket), bucket.record)

    def _send_chosen(self, bucket: Bucket, chosen: Selection, wire: Wire) -> None:
        """Reduce the chosen tensors compressed, and the others plainly."""
        if chosen.n_compressed:
            dtype = bucket.buffer.dtype if self.adam is None else torch.float32  # of momenta
            part = Bucket(
                wire.scratch("chosen", chosen.n_compressed, dtype), chosen.slots, chosen.offsets,
                index=bucket.index, step=bucket.step, record=bucket.record, resident=bucket.resident,
            )  # fmt: skip
            self.fill(part, bucket, chosen)
            self._send(part, wire)
            self.take(part, bucket, chosen)
        if chosen.n_raw:
            raw = wire.scratch("others", chosen.n_raw, bucket.buffer.dtype)
            torch.cat([run.in_bucket(bucket.buffer) for run in chosen.raw_runs], out=raw)
            wire.mean(raw)
            wire.note(wire.all_finite(raw))
            for run in chosen.raw_runs:
                run.in_bucket(bucket.buffer).copy_(run.in_fused(raw))

    def _send(self, bucket: Bucket, wire: Wire) -> None:
        """Replace the bucket by its mean, and stage what was not sent."""
        feedback = self.session.feedback
        residual, unsent = feedback.pair(bucket) if self.error_feedback else (None, None)
        part = Part(bucket, wire, residual, unsent, self.session.loss_scale())
        unused = Unused((), (), bucket.buffer) if residual is None else Unused(bucket.spans, part.is_used, residual)
        put_back_small = self._take_out_small(part, wire)
        try:
            self.step(part, wire)
            put_back_small()
        finally:
            unused.put_back()
        if part.unsent is not None:
            unused.keep(part.unsent, part.used_by_any or part.is_used, part.counted)
            feedback.stage_bucket(bucket, part.unsent)
        wire.conclude(bucket.buffer)
        if self.error_feedback and bucket.buffer.dtype == torch.float16:
            wire.note(wire.all_finite(bucket.buffer))  # a mean may leave float16's range although no message did

    def _take_out_small(self, part: Part, wire: Wire) -> Callable[[], None]:
        """Start the sum of the values that are spared, which travels beside the others, and leave zeros; what is returned puts
        their mean there."""
        places = self.select.places_of_small(part.bucket, wire)
        if places is None:
            return lambda: None
        if not isinstance(self.collective, Ring | Scatter):  # which do not ask
            _ = part.is_used  # looked up before there are zeros, which the host, unlike a device, takes for unused
        small = part.values.index_select(0, places)
        if part.residual is not None:  # of a state in which they were compressed
            small = small.float().add_(part.residual.index_select(0, places), alpha=part.loss_scale)
        sent = wire.scratch("small", places.numel(), self.small_dtype(part.values.dtype))
        sent.copy_(small.mul_(1.0 / wire.world_size))
        part.values.index_fill_(0, places, 0.0)
        wait = wire.start_sum_of_few(sent, part.values.nbytes)

        def put_back() -> None:
            wait()
            wire.note(wire.all_finite(sent))
            part.values.index_copy_(0, places, sent.to(part.values.dtype))
            if part.unsent is not None:
                part.unsent.index_fill_(0, places, 0.0)

        return put_back

    def small_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """The dtype in which spared values of a bucket of `dtype` are summed: bfloat16, if the others have 8 bits or less."""
        is_fine = getattr(getattr(self.collective, "codec", None), "bits", 0) > 8
        return dtype if is_fine or dtype.itemsize == 2 else torch.bfloat16

    def step(self, part: Part, wire: Wire) -> None:
        """Replace `part.values` by their mean over the ranks, and write what was not sent to `part.unsent`."""
        assert self.collective is not None, "a scheme without a collective has a step of its own"
        self.collective.mean(part, wire)

    def choose(self, bucket: Bucket) -> Selection | None:
        """Choose which of the bucket's tensors are compressed; None: all."""
        if self.adam is not None:
            return self.adam.choose(bucket, self.select)
        chosen = Selection(bucket, self.select) if self.select else None
        return chosen if chosen is not None and chosen.raw else None

    def fill(self, part: Bucket, bucket: Bucket, chosen: Selection) -> None:
        """Write what is sent of the chosen tensors, one after the other, to `part`."""
        torch.cat([run.in_bucket(bucket.buffer) for run in chosen.compressed_runs], out=part.buffer)

    def take(self, part: Bucket, bucket: Bucket, chosen: Selection) -> None:
        """Write the means in `part` to where the chosen tensors lie."""
        for run in chosen.compressed_runs:
            run.in_bucket(bucket.buffer).copy_(run.in_fused(part.buffer))

    def end_step(self, step: int) -> None:
        self.session.wire.end_step()
        if not self.session.wire.on_device:
            self.settle()

    def settle(self) -> None:
        """Keep what the step that ended last has staged, if all of it was finite. Raises: CorruptMessage and its kin."""
        outcome = self.session.wire.outcome()
        if outcome is None:
            return
        if outcome.error:
            raise_error(outcome.error, self.name, self.session.wire.device)
        if outcome.is_finite:
            with self.session.wire.at_work():
                self.commit()
            return
        self.discard()
        for kept in self._kept.values():
            kept.forget_nonfinite()
        if not self.n_not_finite:
            _log.warning(
                "gradwire %s: a gradient was not finite: all ranks get NaN for the messages that it was in", self.name
            )
        self.n_not_finite += 1

    def commit(self) -> None:
        """The step counts."""
        for kept in self._kept.values():
            kept.commit()

    def discard(self) -> None:
        """The step does not count, or was given up half-way."""
        for kept in self._kept.values():
            kept.discard()

    def close(self) -> None:
        """The model is let go: what is bound again begins anew, without residuals."""
        if self.settles_plainly:
            self.plain.tell_unused(self)
        for kept in self._kept.values():
            kept.clear()
        self.select.release()
        if self.adam is not None:
            self.adam.close()

    def stats(self) -> dict[str, Any]:
        """Steps in which something was not finite (through a ring it travels as any value does), spared values, and frozen
        variances."""
        steps: dict[str, Any] = {} if isinstance(self.collective, Ring) else {"n_steps_not_finite": self.n_not_finite}
        if self.select.spares:
            steps |= {"n_spared_values": self.select.n_spared, "spared_share": self.select.spared_share}
        return steps if self.adam is None else {**steps, "n_frozen": len(self.adam.frozen_at)}

    def state_dict(self) -> dict[str, Any]:
        kept = {name: kept.state_by_name(self.session.slots) for name, kept in self._kept.items()}
        return kept if self.adam is None else {**kept, **self.adam.state_by_name(self.session.slots)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Raises: InvalidArgument."""
        for name, kept in self._kept.items():
            kept.load_by_name(state[name], self.session.slots)
        if self.adam is not None:
            self.adam.load_by_name(state, self.session.slots)


def count_of(share: float, n_elements: int) -> int:
    """Count of `n_elements` that are sent: at least one, as long as there is one."""
    return min(n_elements, max(1, round(share * n_elements)))
