"""One bucket's reduction by a plan, on the lane: fp_buf raw, bit_buf through the codec, residuals staged for the step."""

from __future__ import annotations

import logging

import torch

from gradwire.core.bucket import Bucket
from gradwire.core.feedback import Feedback, holds_nonzero
from gradwire.core.session import Session
from gradwire.exchange.engine import Importance
from gradwire.exchange.groups import Cut
from gradwire.schemes.gcomp.importance import QuantisationMetric
from gradwire.schemes.plain import start_plain_mean
from gradwire.schemes.selection import TensorSpan
from gradwire.schemes.slimgc.exchange import CutSelection, FusedExchange, Source
from gradwire.stepping.owner_step import Owned, OwnerStep
from gradwire.telemetry.recorder import BucketRecord
from gradwire.wire.communicator import Communicator, ring_bytes
from gradwire.wire.facts import Facts
from gradwire.wire.futures import then
from gradwire.wire.lane import Continuation

_log = logging.getLogger(__name__)
_FALLBACK = "non-finite gradient: this bucket was sent uncompressed"


class RawSum:
    """The tensors that travel raw, (n + 1,) on their way to their mean, and behind them a flag: not 0 if one is not finite."""

    def __init__(self, communicator: Communicator, values: torch.Tensor, record: BucketRecord) -> None:
        self._communicator, self._values, self._record = communicator, values, record
        self._summed = communicator.start_all_reduce(values)
        self._is_finite: bool | None = None

    def finish(self) -> bool:
        """Whether all ranks' gradients were finite: the same answer on all of them; the sum is there then.

        Asked again, it answers from memory: the values may be the next bucket's by then.
        """
        if self._is_finite is None:
            with self._record.timing("communicate"):
                self._communicator.finish(self._summed)
            self._is_finite = not bool(self._values[-1])
            n_bytes = self._values.numel() * self._values.element_size()
            self._record.count_exchanged(ring_bytes(n_bytes, self._communicator.world_size))
        return self._is_finite


class Reduction:
    """The reductions of one session, and what of them is not finished or committed yet.

    Attributes:
        n_redone: buckets that were sent again, uncompressed, because a gradient was not finite.
        owner_step: who keeps the means that stay with their owners; None: all ranks get them all.
    """

    def __init__(
        self, session: Session, exchange: FusedExchange, metric: QuantisationMetric | None, error_feedback: bool
    ) -> None:
        self.n_redone = 0
        self.owner_step: OwnerStep | None = None
        self._means: dict[int, torch.Tensor] = {}  # of this rank's parts, by bucket
        self._feedback: Feedback = session.feedback
        self._session, self._exchange, self._metric = session, exchange, metric
        self._error_feedback = error_feedback
        self._under_way: list[torch.futures.Future] = []
        self._is_step_finite = True

    def begin_step(self) -> None:
        """The first bucket of a step is there: what the last one staged and did not commit is void."""
        self._feedback.discard()
        self._is_step_finite = True

    def reduce(self, bucket: Bucket, plan: CutSelection, facts: Facts) -> torch.futures.Future | Continuation | None:
        """Replace the bucket by its mean; a future where the lane need not wait for it, or the rest of the lane's work."""
        if not plan.compressed:
            self._keep_mean(bucket, plan, None)
            return self._start_raw(bucket, plan)
        return self._reduce_compressed(bucket, plan, facts)

    def end_step(self) -> None:
        """Commit the residuals, if all means are finite."""
        under_way, self._under_way = self._under_way, []
        for done in under_way:
            done.wait()
        if self._is_step_finite:
            self._feedback.commit()
        else:
            self._feedback.discard()

    def _start_raw(self, bucket: Bucket, plan: CutSelection) -> torch.futures.Future:
        """Nothing is worth compressing: the backend's all-reduce, which the lane does not wait for."""
        bucket.wait_for_all()
        if self._holds_any(plan.raw):
            loss_scale = self._session.loss_scale()
            self._stage_flushed(plan.raw, bucket.buffer)
            for span in plan.raw:
                gradient = span.in_bucket(bucket.buffer)
                self._write_sum(span, gradient, gradient, loss_scale)

        def note(_: torch.Tensor) -> None:
            # The sum is the same on all ranks, so all of them see the same. On a thread of the backend's, beside the lane:
            # what is written is never True, which would undo what the other has found.
            if not _are_all_finite(bucket.buffer):
                self._is_step_finite = False

        done = then(start_plain_mean(self._session.communicator, bucket), note)
        self._under_way.append(done)
        return done

    def _reduce_compressed(self, bucket: Bucket, plan: CutSelection, facts: Facts) -> Continuation | None:
        communicator, record, loss_scale = self._session.communicator, bucket.record, self._session.loss_scale()
        with record.timing("encode"):
            source = self._source_in_place(bucket, plan, loss_scale)
            bit_buf = self._fill_bit_buf(bucket, plan, loss_scale) if source is None else source.gradient
            is_finite = (source is not None and _has_finite_sum(bit_buf)) or all(
                _has_finite_sum(run.in_fused(bit_buf)) for run in plan.compressed_runs
            )
            fp_buf = self._fill_fp_buf(bucket, plan, is_finite, loss_scale)
            if not is_finite:  # all ranks will throw the exchange away: no codec has to know what to do with NaN
                source, bit_buf = None, self._bit_buf(bucket, plan).zero_()
            elif self.owner_step is not None:
                bit_buf = self._bit_buf(bucket, plan)
        raw = RawSum(communicator, fp_buf, record)
        left_out = self._feedback.room(bucket.index, plan.n_bit_buf)
        finish_exchange = self._exchange.mean(
            bit_buf, left_out, plan.cut, facts, record, self._importance_of(bucket, plan), source, raw.finish,
            self.owner_step is not None,
        )  # fmt: skip
        if not raw.finish():
            finish_exchange()
            self._redo_plainly(bucket, plan)
            return None
        if not _are_all_finite(fp_buf):
            self._is_step_finite = False
        if self._error_feedback:
            self._stage_flushed(plan.raw, bucket.buffer)
        for run in plan.raw_runs:
            run.in_bucket(bucket.buffer).copy_(run.in_fused(fp_buf))
        is_in_place = source is not None and bit_buf is source.gradient

        def finish() -> None:
            finish_exchange()
            with record.timing("decode"):
                if self._error_feedback:
                    self._stage(plan, None if is_in_place else bucket.buffer, left_out, loss_scale)
                if self.owner_step is None and not is_in_place:
                    for run in plan.compressed_runs:
                        run.in_bucket(bucket.buffer).copy_(run.in_fused(bit_buf))
                self._keep_mean(bucket, plan, bit_buf)

        return Continuation(finish)

    def _bit_buf(self, bucket: Bucket, plan: CutSelection) -> torch.Tensor:
        """(n_bit_buf,) float32 of work space: the results of one bucket still travel when the next one is begun."""
        name = f"bit_buf {bucket.index % 2}"
        return self._session.communicator.scratch(name, 4 * plan.n_bit_buf).view(torch.float32)

    def _fill_bit_buf(self, bucket: Bucket, plan: CutSelection, loss_scale: float) -> torch.Tensor:
        """(n_bit_buf,) float32: gradients + residuals of the large tensors."""
        bit_buf = self._bit_buf(bucket, plan)
        for span in plan.compressed:
            bucket.wait_for(span.position)
            self._write_sum(span, span.in_bucket(bucket.buffer), span.in_fused(bit_buf), loss_scale)
        return bit_buf

    def _source_in_place(self, bucket: Bucket, plan: CutSelection, loss_scale: float) -> Source | None:
        """Gradient and residuals where DDP and the last step put them, if they lie as in bit_buf: nothing is copied.

        Not where a parameter is unused on this rank: its residual has to stay out of the sum.
        """
        if (
            not (plan.keeps_places or plan.n_compressed == bucket.n_elements)
            or bucket.buffer.dtype != torch.float32
            or loss_scale != 1.0
            or not self._exchange.takes_source
        ):
            return None
        has_residuals = self._holds_any(plan.compressed)
        residual = None
        if has_residuals and len(plan.slots) == len(plan.compressed):
            residual = self._feedback.lying_at(plan.slots, plan.offsets, plan.n_bit_buf)
        if has_residuals and residual is None:
            return None
        bucket.wait_for_all()
        if residual is not None and not all(holds_nonzero(span.in_bucket(bucket.buffer)) for span in plan.compressed):
            return None
        return Source(bucket.buffer, residual)

    def _keep_mean(self, bucket: Bucket, plan: CutSelection, fused: torch.Tensor | None) -> None:
        """With the step at the owner: hand over this rank's part of `fused` (n_compressed,), where the means are."""
        if self.owner_step is None:
            return
        rank, edges = self._session.communicator.rank, plan.part_edges
        n_own = edges[rank + 1] - edges[rank]
        mean = self._means.get(bucket.index)
        if mean is None or mean.numel() != n_own:
            mean = self._means[bucket.index] = torch.empty(n_own)
        if fused is not None:
            mean.copy_(fused[edges[rank] : edges[rank + 1]])
        whole = tuple(
            span.slot.parameter for span in plan.raw if span.slot is not None and span.slot.parameter is not None
        )
        cut = tuple(
            (span.slot.parameter, span.fused)
            for span in plan.compressed
            if span.slot is not None and span.slot.parameter is not None
        )
        self.owner_step.keep(bucket.index, Owned(whole, cut, edges, mean))

    def _fill_fp_buf(self, bucket: Bucket, plan: CutSelection, is_finite: bool, loss_scale: float) -> torch.Tensor:
        """(n_raw + 1,) of the bucket's dtype: the small tensors / N, and last a flag, for what is not finite."""
        communicator, element_bytes = self._session.communicator, bucket.buffer.element_size()
        fp_buf = communicator.scratch("fp_buf", (plan.n_raw + 1) * element_bytes).view(bucket.buffer.dtype)
        for span in plan.raw:
            bucket.wait_for(span.position)
        if self._holds_any(plan.raw):
            for span in plan.raw:
                self._write_sum(span, span.in_bucket(bucket.buffer), span.in_fused(fp_buf), loss_scale)
        else:
            for run in plan.raw_runs:
                run.in_fused(fp_buf).copy_(run.in_bucket(bucket.buffer))
        fp_buf.mul_(1.0 / communicator.world_size)
        fp_buf[-1] = 0.0 if is_finite else 1.0
        return fp_buf

    def _redo_plainly(self, bucket: Bucket, plan: CutSelection) -> None:
        if not self.n_redone:
            _log.warning("gradwire slimgc: %s (step %d)", _FALLBACK, bucket.step)
        self.n_redone += 1
        bucket.record.fallbacks.append(_FALLBACK)
        bucket.buffer.mul_(1.0 / self._session.communicator.world_size)
        with bucket.record.timing("communicate"):
            self._session.communicator.all_reduce(bucket.buffer)
        bucket.record.count_exchanged(ring_bytes(bucket.original_bytes, self._session.communicator.world_size))
        if not _are_all_finite(bucket.buffer):
            self._is_step_finite = False
        if self.owner_step is not None:
            bit_buf = self._bit_buf(bucket, plan)
            for run in plan.compressed_runs:
                run.in_fused(bit_buf).copy_(run.in_bucket(bucket.buffer))
            self._keep_mean(bucket, plan, bit_buf)

    # ---- residuals: of compressed tensors kept, of raw ones flushed; of tensors that are unused on this rank neither

    def _holds_any(self, spans: tuple[TensorSpan, ...]) -> bool:
        """Whether a residual waits for one of these tensors."""
        return any(self._feedback.of(span.slot) is not None for span in spans)

    def _write_sum(self, span: TensorSpan, gradient: torch.Tensor, out: torch.Tensor, loss_scale: float) -> None:
        """out (n,) = gradient + residual x loss_scale; of an unused tensor the residual waits."""
        kept = self._feedback.of(span.slot)
        if kept is None or not holds_nonzero(gradient):
            out.copy_(gradient)
        elif gradient.dtype == out.dtype == kept.values.dtype:
            torch.add(gradient, kept.values, alpha=loss_scale, out=out)
        else:
            out.copy_(gradient).add_(kept.values, alpha=loss_scale)

    def _stage(
        self, plan: CutSelection, bucket: torch.Tensor | None, left_out: torch.Tensor, loss_scale: float
    ) -> None:
        """Keep `left_out`, which is aligned with bit_buf; `bucket`: the gradients, or None if all tensors were used."""
        if loss_scale != 1.0:
            left_out.div_(loss_scale)
        for span in plan.compressed:
            if span.slot is None:
                continue
            unsent, kept = span.in_fused(left_out), self._feedback.of(span.slot)
            if bucket is not None and kept is not None and not holds_nonzero(span.in_bucket(bucket)):
                unsent.add_(kept.values)
            self._feedback.stage(span.slot, unsent)

    def _stage_flushed(self, spans: tuple[TensorSpan, ...], bucket: torch.Tensor) -> None:
        """The residuals of these tensors go out with their raw gradients; `bucket`: the gradients before that."""
        for span in spans:
            if span.slot is None or self._feedback.of(span.slot) is None:
                continue
            if holds_nonzero(span.in_bucket(bucket)):
                self._feedback.stage(span.slot, None)

    def _importance_of(self, bucket: Bucket, plan: CutSelection) -> Importance | None:
        """Of the fused buffer, for a codec that weighs values by the optimizer."""
        metric = self._metric
        if metric is None or not plan.slots:
            return None
        loss_scale = self._session.loss_scale()
        with bucket.record.timing("importance"):
            importance = metric.of_bucket(plan.slots, plan.offsets, loss_scale, bucket.buffer.dtype, bucket.staged)
        return importance

    def probe(self, values: torch.Tensor, is_compressed: bool, record: BucketRecord) -> None:
        """Send one tensor by itself; what comes of it is thrown away."""
        communicator, n = self._session.communicator, values.numel()
        if not is_compressed:
            buffer = communicator.scratch("probe", n * values.element_size()).view(values.dtype)
            buffer.copy_(values).mul_(1.0 / communicator.world_size)
            communicator.all_reduce(buffer)
            n_bytes = ring_bytes(n * values.element_size(), communicator.world_size)
            record.count_exchanged(n_bytes)
            return
        memory = communicator.scratch("probe", 8 * n).view(torch.float32)
        probed, left_out = memory[:n], memory[n:]
        probed.copy_(values)
        cut = Cut([(0, n)], communicator.world_size, self._exchange.group_elements)
        facts = Facts(0, n, record.step & 0xFFFFFFFF, 0)
        importance = None if self._metric is None else Importance([])
        self._exchange.mean(probed, left_out, cut, facts, record, importance)()


def _has_finite_sum(values: torch.Tensor) -> bool:
    """Whether all values are finite, and not so large that a codec's sums are not."""
    return bool(values.sum(dtype=torch.float32).isfinite())


def _are_all_finite(values: torch.Tensor) -> bool:
    return _has_finite_sum(values) or bool(values.isfinite().all())
