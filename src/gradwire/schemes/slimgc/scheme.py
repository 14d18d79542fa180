"""SlimGC (Bai, Yu and Dong, Chinese Journal of Computers, 2025). Reads like the paper's section 3.

Per bucket: tensors below the communication threshold are fused and sent in full precision (fp_buf), the others go
through the codec (bit_buf), to the rank that owns them and back, all of it on the lane, off the training thread. The
threshold comes from a table of benefits that is measured while the training warms up (3.3).
"""

from __future__ import annotations

import functools
import logging
import time
import zlib
from typing import Any

import torch

from gradwire import codecs
from gradwire.bucket import Bucket
from gradwire.codecs import Codec
from gradwire.codecs.general import RawCodec
from gradwire.collectives.chunk_codec import Importance
from gradwire.collectives.frames import Facts
from gradwire.collectives.parts import CHUNK_ELEMENTS
from gradwire.collectives.push_pull import Cut
from gradwire.communicator import ring_bytes
from gradwire.control.threshold import NEVER, check_threshold
from gradwire.errors import InvalidArgument
from gradwire.preamble import Preamble, compare_preambles
from gradwire.schemes.base import Scheme, Session
from gradwire.schemes.gcomp.importance import QuantisationMetric
from gradwire.schemes.plain import all_reduce_plainly, start_plain_mean
from gradwire.schemes.slimgc.exchange import Exchange
from gradwire.schemes.slimgc.feedback import Feedback
from gradwire.schemes.slimgc.measuring import Measuring
from gradwire.schemes.slimgc.plan import Plan, tensors_of
from gradwire.schemes.through_codec import ThroughCodec
from gradwire.step_check import StepCheck
from gradwire.telemetry.recorder import BucketRecord

_log = logging.getLogger(__name__)
_FALLBACK = "non-finite gradient: this bucket was sent uncompressed"

TOPOLOGIES = ("server", "all-reduce")
PULLS = ("compressed", "raw")


class SlimGC(Scheme):
    """Any codec, used only where it pays.

    All ranks get the same bits. What the codec loses is kept by the rank that encoded it and added to its next gradient.

    When not to use this: where every tensor is small or the network faster than the codec. The table then says "never",
    and `plain` does the same with less to carry.

    Args:
        codec: a codec's registry name, a codec, or a scheme that is one codec in a ring (GComp()).
        threshold_bytes: tensors of fewer bytes travel raw. None: measured, in `warmup_steps` steps. 0 compresses all.
        topology: "server" (every rank owns a part: push to it, pull from it; a scale belongs to one tensor) or
            "all-reduce" (a ring over all compressed tensors of a bucket, encoded anew at every hop).
        pull: what an owner answers with: "compressed", or "raw" in full precision (server only).
        error_feedback: keep what the codec lost for the next step.
        warmup_steps, method, drift_every, drift_factor: of the table; see `Measuring`.
        group_elements: values encoded and sent at a time.
        **codec_options: for a codec given by name.
    Raises: InvalidArgument.
    """

    name = "slimgc"
    state_is_per_world = True

    def __init__(
        self,
        codec: str | Codec | ThroughCodec = "one-bit",
        threshold_bytes: int | None = None,
        topology: str = "server",
        pull: str = "compressed",
        error_feedback: bool = True,
        warmup_steps: int = 10,
        method: str = "fit",
        drift_every: int = 50,
        drift_factor: float = 1.5,
        group_elements: int = CHUNK_ELEMENTS,
        **codec_options: Any,
    ) -> None:
        if topology not in TOPOLOGIES:
            raise InvalidArgument(f"topology is one of {', '.join(TOPOLOGIES)}, not {topology!r}")
        if pull not in PULLS:
            raise InvalidArgument(f"pull is one of {', '.join(PULLS)}, not {pull!r}")
        if pull == "raw" and topology != "server":
            raise InvalidArgument('pull="raw" needs topology="server": in a ring nobody owns the result')
        if group_elements < 1:
            raise InvalidArgument(f"group_elements must be at least 1, got {group_elements}")
        self.codec = _codec_of(codec, codec_options)
        self.threshold_bytes = None if threshold_bytes is None else check_threshold(threshold_bytes)
        self.topology, self.pull, self.error_feedback = topology, pull, bool(error_feedback)
        self.group_elements = group_elements
        self._make_measuring = functools.partial(Measuring, warmup_steps, method, drift_every, drift_factor)
        self._reset()

    def _reset(self) -> None:
        self._measuring = self._make_measuring()
        self._last_stats: dict[str, Any] | None = None
        self._threshold = NEVER if self.threshold_bytes is None else self.threshold_bytes
        self._feedback = Feedback()
        self._plans: dict[int, tuple[int, int, Plan]] = {}  # by bucket: layout, threshold, plan
        self._under_way: list[torch.futures.Future] = []
        self._records: list[BucketRecord] = []
        self._is_step_finite = True
        self._has_loaded = False
        self._n_redone = 0
        self._metric: QuantisationMetric | None = None

    @property
    def configuration(self) -> dict[str, Any]:
        measuring = self._measuring
        return {
            "codec": self.codec.name,
            "codec_options": _options_of(self.codec),
            "threshold_bytes": self.threshold_bytes,
            "topology": self.topology,
            "pull": self.pull,
            "error_feedback": self.error_feedback,
            "warmup_steps": measuring.warmup_steps,
            "method": measuring.method,
            "drift_every": measuring.drift_every,
            "drift_factor": measuring.drift_factor,
            "group_elements": self.group_elements,
        }

    def bind(self, session: Session) -> None:
        """Raises: InvalidArgument, Unsupported (a codec that reads the optimizer, and none, or another, was given)."""
        metric = None
        if getattr(self.codec, "importance", None) == "paper":
            if session.optimizer is None:
                raise InvalidArgument(
                    'this codec reads the optimizer (importance="paper"), and none was given: pass HookState(scheme, '
                    'optimizer=optimizer), or choose importance="none"'
                )
            metric = QuantisationMetric(session.optimizer, session.communicator.world_size)
        super().bind(session)
        self._reset()
        self._metric = metric
        pull_codec = self.codec if self.pull == "compressed" else RawCodec()
        self._exchange = Exchange(session.communicator, self.codec, pull_codec, self.topology, self.group_elements)
        self._check = StepCheck(session.communicator)

    # ---- one bucket, on the lane

    def reduce(self, bucket: Bucket) -> torch.futures.Future:
        done: torch.futures.Future = torch.futures.Future()

        def forward(finished: torch.futures.Future) -> None:
            try:
                later = finished.wait()
            except Exception as error:
                done.set_exception(error)
                return
            if isinstance(later, torch.futures.Future):
                later.add_done_callback(forward)
            else:
                done.set_result(bucket.buffer)

        self.session.communicator.submit(self._reduce_on_lane, bucket).add_done_callback(forward)
        return done

    def _reduce_on_lane(self, bucket: Bucket) -> torch.futures.Future | None:
        """Replace the bucket by its mean; a future where the lane need not wait for it."""
        if bucket.index == 0:
            self._feedback.discard()
            self._is_step_finite = True
            self._records.clear()
        communicator = self.session.communicator
        if communicator.world_size == 1 or bucket.n_elements == 0:
            return None
        self._records.append(bucket.record)
        if self._has_loaded:  # the layout may have been compared before, with the table that was there then
            self._has_loaded = False
            compare_preambles(communicator, self.preamble(bucket), bucket.record)
        if bucket.is_last:
            self._check.start(self.preamble(bucket), bucket.record)
        plan = self._plan_of(bucket)
        if not plan.compressed:
            return self._start_raw(bucket, plan)
        self._reduce_compressed(bucket, plan)
        return None

    def _plan_of(self, bucket: Bucket) -> Plan:
        """The decision for each tensor of the bucket (algorithm 2), made anew when layout or threshold change."""
        threshold = self._threshold
        if self.threshold_bytes is None and self._measuring.is_warming_up(bucket.step):
            self._measuring.see([bucket.buffer[offset : offset + n] for _, offset, n in tensors_of(bucket)])
            threshold = 0 if self._measuring.is_compressed_warmup(bucket.step) else NEVER
        known = self._plans.get(bucket.index)
        if known is None or known[:2] != (bucket.layout_hash, threshold):
            plan = Plan(bucket, threshold, self.session.communicator.world_size, self.group_elements)
            known = self._plans[bucket.index] = (bucket.layout_hash, threshold, plan)
        return known[2]

    def _start_raw(self, bucket: Bucket, plan: Plan) -> torch.futures.Future:
        """Nothing is worth compressing: the backend's all-reduce, which the lane does not wait for."""
        if self._feedback.holds_any(plan.raw):
            loss_scale = self.session.loss_scale()
            self._feedback.stage_flushed(plan.raw, bucket.buffer)
            for span in plan.raw:
                gradient = span.in_bucket(bucket.buffer)
                self._feedback.write_sum(span, gradient, gradient, loss_scale)
        done: torch.futures.Future = torch.futures.Future()

        def note(finished: torch.futures.Future) -> None:
            try:
                finished.wait()
            except Exception as error:
                done.set_exception(error)
                return
            # The sum is the same on all ranks, so all of them see the same.
            if not _is_finite(bucket.buffer):
                self._is_step_finite = False
            done.set_result(None)

        start_plain_mean(self.session.communicator, bucket).add_done_callback(note)
        self._under_way.append(done)
        return done

    def _reduce_compressed(self, bucket: Bucket, plan: Plan) -> None:
        communicator, record, loss_scale = self.session.communicator, bucket.record, self.session.loss_scale()
        started = time.perf_counter_ns()
        bit_buf = communicator.scratch("bit_buf", 4 * plan.n_compressed).view(torch.float32)
        for span in plan.compressed:
            self._feedback.write_sum(span, span.in_bucket(bucket.buffer), span.in_fused(bit_buf), loss_scale)
        is_finite = _is_finite(bit_buf)
        fp_buf = self._fill_fp_buf(bucket, plan, is_finite, loss_scale)
        record.add("encode", started, time.perf_counter_ns())
        if not is_finite:
            bit_buf.zero_()  # all ranks will throw the exchange away: no codec has to know what to do with NaN
        summed = communicator.start_all_reduce(fp_buf)
        left_out = self._feedback.buffer_for(bucket.index, plan)
        self._exchange.mean(bit_buf, left_out, plan.cut, self.facts(bucket), record, self._importance_of(bucket, plan))
        started = time.perf_counter_ns()
        communicator.finish(summed)
        record.add("communicate", started, time.perf_counter_ns())
        n_bytes = ring_bytes(fp_buf.numel() * fp_buf.element_size(), communicator.world_size)
        record.count_sent(n_bytes)
        record.count_received(n_bytes)
        if bool(fp_buf[-1] != 0):  # a rank's gradient was not finite: the sum, and so this branch, is the same on all
            self._redo_plainly(bucket)
            return
        started = time.perf_counter_ns()
        self._is_step_finite &= _is_finite(fp_buf)
        if self.error_feedback:
            self._feedback.stage_flushed(plan.raw, bucket.buffer)
            self._feedback.stage(plan, bucket.buffer, left_out, loss_scale)
        for run in plan.raw_runs:
            run.in_bucket(bucket.buffer).copy_(run.in_fused(fp_buf))
        for span in plan.compressed:
            span.in_bucket(bucket.buffer).copy_(span.in_fused(bit_buf))
        record.add("decode", started, time.perf_counter_ns())

    def _fill_fp_buf(self, bucket: Bucket, plan: Plan, is_finite: bool, loss_scale: float) -> torch.Tensor:
        """(n_raw + 1,) of the bucket's dtype: the small tensors / N, and last a flag, for what is not finite."""
        communicator, element_bytes = self.session.communicator, bucket.buffer.element_size()
        fp_buf = communicator.scratch("fp_buf", (plan.n_raw + 1) * element_bytes).view(bucket.buffer.dtype)
        if self._feedback.holds_any(plan.raw):
            for span in plan.raw:
                self._feedback.write_sum(span, span.in_bucket(bucket.buffer), span.in_fused(fp_buf), loss_scale)
        else:
            for run in plan.raw_runs:
                run.in_fused(fp_buf).copy_(run.in_bucket(bucket.buffer))
        fp_buf.mul_(1.0 / communicator.world_size)
        fp_buf[-1] = 0.0 if is_finite else 1.0
        return fp_buf

    def _redo_plainly(self, bucket: Bucket) -> None:
        if not self._n_redone:
            _log.warning("gradwire %s: %s (step %d)", self.name, _FALLBACK, bucket.step)
        self._n_redone += 1
        self._is_step_finite = False
        bucket.record.fallbacks.append(_FALLBACK)
        all_reduce_plainly(self.session.communicator, bucket)

    def _importance_of(self, bucket: Bucket, plan: Plan) -> Importance | None:
        """For a codec that weighs values by the optimizer: asked for windows of the fused buffer."""
        metric = self._metric
        if metric is None or not plan.parameters:
            return None
        loss_scale = self.session.loss_scale()

        def importance(start: int, end: int) -> torch.Tensor:
            started = time.perf_counter_ns()
            out = self.session.communicator.scratch("importance", end - start)
            metric.write_window(plan.parameters, plan.offsets, start, out, loss_scale, bucket.buffer.dtype)
            bucket.record.add("importance", started, time.perf_counter_ns())
            return out

        return importance

    # ---- the end of a step, on the lane

    def end_step(self, step: int) -> None:
        under_way, self._under_way = self._under_way, []
        for done in under_way:
            done.wait()
        if self._is_step_finite:
            self._feedback.commit()
        else:
            self._feedback.discard()
        if self.threshold_bytes is not None or self.session.communicator.world_size == 1:
            return
        communicate_s = sum(record.communicate_ns for record in self._records) / 1e9
        record: list[BucketRecord] = []

        def open_record() -> BucketRecord:
            record.append(self.session.recorder.open_bucket(step, -1, 0))
            return record[0]

        is_new = self._measuring.end_step(step, communicate_s, self.session.communicator, open_record, self._probe)
        for opened in record:
            self.session.recorder.close_bucket(opened)
        if is_new:
            assert self._measuring.table is not None
            self._threshold = self._measuring.table.threshold_bytes(self._measuring.method)

    def _probe(self, values: torch.Tensor, is_compressed: bool, record: BucketRecord) -> None:
        """Send one tensor by itself; what comes of it is thrown away."""
        communicator, n = self.session.communicator, values.numel()
        if not is_compressed:
            buffer = communicator.scratch("probe", n * values.element_size()).view(values.dtype)
            buffer.copy_(values).mul_(1.0 / communicator.world_size)
            communicator.all_reduce(buffer)
            n_bytes = ring_bytes(n * values.element_size(), communicator.world_size)
            record.count_sent(n_bytes)
            record.count_received(n_bytes)
            return
        memory = communicator.scratch("probe", 8 * n).view(torch.float32)
        probed, left_out = memory[:n], memory[n:]
        probed.copy_(values)
        cut = Cut([n], communicator.world_size, self.group_elements)
        facts = Facts(self.configuration_hash, n, record.step & 0xFFFFFFFF, 0)
        importance: Importance | None = None
        if self._metric is not None:
            every = communicator.scratch("importance", n).zero_()
            importance = lambda start, end: every[start:end]  # noqa: E731
        self._exchange.mean(probed, left_out, cut, facts, record, importance)

    # ---- what ranks compare

    def facts(self, bucket: Bucket) -> Facts:
        return super().facts(bucket)._replace(configuration=self._shared_hash())

    def preamble(self, bucket: Bucket) -> Preamble:
        return super().preamble(bucket)._replace(configuration=self._shared_hash())

    def _shared_hash(self) -> int:
        """32 bits over the options and the threshold: ranks with different tables must not meet in a collective."""
        return zlib.crc32(repr((self.configuration_hash, self._threshold)).encode())

    # ---- between steps

    def remeasure(self) -> None:
        """Have the table measured again, by all ranks, at the next look at the network (`drift_every` steps).

        Raises: InvalidArgument (the threshold was given, or drift_every=0: no rank would look).
        """
        if self.threshold_bytes is not None or not self._measuring.drift_every:
            raise InvalidArgument(
                "there is no table to measure again: leave threshold_bytes out, and let drift_every be more than 0"
            )
        self._measuring.request()

    def stats(self) -> dict[str, Any]:
        """The threshold in bytes, its table (Fig. 6), and what the decisions came to at the last step."""
        if self._last_stats is not None:
            return self._last_stats
        plans = [plan for _, _, plan in self._plans.values()]
        return {
            "threshold_bytes": self._threshold,
            **self._measuring.stats(),
            "n_tensors_compressed": sum(len(plan.compressed) for plan in plans),
            "n_tensors_raw": sum(len(plan.raw) for plan in plans),
            "share_compressed": _share(
                sum(p.n_compressed for p in plans), sum(p.n_compressed + p.n_raw for p in plans)
            ),
            "n_buckets_redone": self._n_redone,
        }

    def state_dict(self) -> dict[str, Any]:
        return {
            "residuals": self._feedback.state_by_name(self.session.names),
            "threshold_bytes": self._threshold,
            "measuring": self._measuring.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Raises: InvalidArgument. Ranks that load different tables get RankMismatch before their next gradients."""
        residuals, measuring = state.get("residuals"), state.get("measuring")
        if not isinstance(residuals, dict) or not isinstance(measuring, dict):
            raise InvalidArgument("this is not the state of scheme slimgc: it lacks residuals or the threshold table")
        threshold = check_threshold(state.get("threshold_bytes"))
        feedback = Feedback()
        feedback.load_by_name(residuals, self.session.names)
        self._measuring.load_state_dict(measuring)
        self._feedback, self._threshold = feedback, threshold
        self._plans.clear()
        self._has_loaded = True

    def close(self) -> None:
        """The model is let go; the table stays, to be read. What is bound again begins anew, without both."""
        self._last_stats = self.stats()
        self._feedback = Feedback()
        self._plans.clear()
        self._metric = None


def _codec_of(codec: Any, options: dict[str, Any]) -> Codec:
    if isinstance(codec, str):
        return codecs.by_name(codec, **options)
    if options:
        raise InvalidArgument(f"{', '.join(options)}: options are for a codec given by name; make the codec with them")
    inner = codec.codec if isinstance(codec, ThroughCodec) else codec
    if not all(callable(getattr(inner, method, None)) for method in ("encode", "decode", "max_encoded_bytes")):
        raise InvalidArgument(
            f"codec is a name ({', '.join(codecs.names())}), a codec, or a scheme that is a codec in a ring, "
            f"not {type(codec).__name__}"
        )
    checked: Codec = inner
    return checked


def _options_of(codec: Codec) -> dict[str, Any]:
    """A codec's options, as plain values: what ranks compare."""
    plain = (bool, int, float, str, type(None))
    return {k: v for k, v in sorted(vars(codec).items()) if not k.startswith("_") and isinstance(v, plain)}


def _is_finite(values: torch.Tensor) -> bool:
    return bool(values.sum(dtype=torch.float32).isfinite())


def _share(part: int, whole: int) -> float:
    return part / whole if whole else 0.0
