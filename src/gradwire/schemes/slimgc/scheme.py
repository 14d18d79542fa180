"""SlimGC (Bai, Yu and Dong, Chinese Journal of Computers, 2025). Reads like the paper's section 3.

Per bucket: tensors below the communication threshold are fused and sent in full precision (fp_buf), the others go
through the codec (bit_buf), to the rank that owns them and back, all of it on the lane, off the training thread. The
threshold comes from a table of benefits that is measured while the training warms up (3.3). With backup=True the next
step does not wait for any of it (3.5).
"""

from __future__ import annotations

import contextlib
import zlib
from dataclasses import asdict
from typing import Any

import torch

from gradwire.codecs import Codec
from gradwire.codecs.general import RawCodec
from gradwire.control.threshold import NEVER, check_threshold
from gradwire.core.bucket import Bucket
from gradwire.core.checkpoint import not_the_state
from gradwire.core.session import Session
from gradwire.core.site import DeviceSite, ResidentBucket
from gradwire.errors import GradwireError, InvalidArgument, Unsupported
from gradwire.schemes.base import Scheme
from gradwire.schemes.gcomp.importance import QuantisationMetric
from gradwire.schemes.on_device import Placing, StepsOnDevice
from gradwire.schemes.selection import tensors_of
from gradwire.schemes.slimgc.exchange import CutSelection, FusedExchange
from gradwire.schemes.slimgc.measuring import Measuring
from gradwire.schemes.slimgc.measuring_on_device import MeasuringOnDevice
from gradwire.schemes.slimgc.on_device import SlimGCOnDevice, check_codec
from gradwire.schemes.slimgc.options import Measured, Stepping, Transport, codec_of, options_of, take
from gradwire.schemes.slimgc.reduction import Reduction
from gradwire.stepping.look_ahead import LookAhead
from gradwire.stepping.owner_step import OwnerStep
from gradwire.telemetry.recorder import BucketRecord
from gradwire.telemetry.stopwatch import Stopwatch
from gradwire.wire.facts import Facts
from gradwire.wire.futures import then
from gradwire.wire.lane import Continuation
from gradwire.wire.preamble import Preamble, compare_preambles
from gradwire.wire.step_check import StepCheck


class SlimGC(Placing):
    """Any codec, used only where it pays.

    All ranks get the same bits. What the codec loses is kept by the rank that encoded it and added to its next gradient.

    When not to use this: where every tensor is small or the network faster than the codec. The table then says "never",
    and `plain` does the same with less to carry.

    Args:
        codec: a codec's registry name, a codec, or a scheme that is one (OneBit(), GComp()).
        threshold_bytes: tensors of fewer bytes travel raw. None: measured, in `warmup_steps` steps. 0 compresses all.
        topology: "server" (every rank owns a part: push to it, pull from it; a scale belongs to one tensor) or
            "all-reduce" (a ring over all compressed tensors of a bucket, encoded anew at every hop).
        pull: what an owner answers with: "compressed", or "raw" in full precision (server only).
        update: who takes the optimizer's step: every "worker", or the "owner" of each value, from which all then pull
            parameters instead of gradients (server and raw pull only; element-wise optimizers: SGD, Adam, AdamW). The
            optimizer's state then lies with the owners: `state_dict` of each rank holds its share. Needs `attach`.
        max_grad_value: with update="owner", in place of clip_grad_value_, which would clip the wrong gradient.
        error_feedback: keep what the codec lost for the next step.
        warmup_steps, method, drift_every, drift_factor: of the table; see `Measuring`.
        group_elements: values encoded and sent at a time. None: as many as suit the codec.
        backup: do not wait for the aggregation: start the next step on local weights (gradwire.stepping.look_ahead).
            Gradients are then one step old in what they know of the other ranks. Needs `attach`.
        local: with backup, how the local weights come about: "peek" (the user's own rule) or "sgd" (`local_rate`).
        sync_steps: with backup, steps at the beginning that wait all the same; None: the warm-up's and two more.
        max_grad_norm: with backup, in place of clip_grad_norm_, which would clip the wrong gradient.
        transport, measured, stepping: the options above by groups, as objects; or name the options singly.
        **options: those, and of a codec that is given by name.
    Raises: InvalidArgument.
    """

    name = "slimgc"
    state_is_per_world = True
    waits_by_tensor = True

    def __init__(
        self,
        codec: str | Codec | Scheme = "one-bit",
        threshold_bytes: int | None = None,
        error_feedback: bool = True,
        *,
        transport: Transport | None = None,
        measured: Measured | None = None,
        stepping: Stepping | None = None,
        **options: Any,
    ) -> None:
        self.transport = take(Transport, options) if transport is None else transport
        self.measured = take(Measured, options) if measured is None else measured
        self.stepping = take(Stepping, options) if stepping is None else stepping
        self.stepping.check(self.transport)
        self.codec = codec_of(codec, options)
        self.group_elements = self.transport.elements_for(self.codec)
        self.threshold_bytes = None if threshold_bytes is None else check_threshold(threshold_bytes)
        self.error_feedback = bool(error_feedback)
        self.backup, self.update = bool(self.stepping.backup), self.stepping.update
        self.owns_step = self.backup or self.update == "owner"
        if self.update == "owner":
            self.per_rank_state = None  # its shards of the optimizer's state are cut for so many ranks
        self._look_ahead = self.stepping.look_ahead(2 + (self.measured.warmup_steps if threshold_bytes is None else 0))
        self._stepper: LookAhead | OwnerStep | None = None
        self._reset()

    def _reset(self) -> None:
        is_on_device = self.is_bound and self.session.site is not None
        self._measuring = (MeasuringOnDevice if is_on_device else Measuring)(**asdict(self.measured))
        self._last_stats: dict[str, Any] | None = None
        self._threshold = NEVER if self.threshold_bytes is None else self.threshold_bytes
        self._plans: dict[int, tuple[int, int, CutSelection]] = {}  # by bucket: layout, threshold, plan
        self._records: list[BucketRecord] = []
        self._has_loaded = False
        self._loaded = 0  # what ranks that loaded shards of the optimizer's state must have alike

    @property
    def settling_steps(self) -> int:
        """The table's warm-up, then two steps: new buffers are made, and with backup nothing looks ahead before that."""
        measured = 0 if self.threshold_bytes is not None else self._measuring.warmup_steps + 2
        return max(measured, self._look_ahead.sync_steps + 2 if self.backup else 0)

    @property
    def is_settled(self) -> bool:
        """Whether there is a threshold: one that was given, or follows from a table. One rank has nothing to measure."""
        return self.threshold_bytes is not None or self._measuring.table is not None or self._is_alone

    @property
    def _is_alone(self) -> bool:
        return self.is_bound and self.session.communicator.world_size == 1

    @property
    def configuration(self) -> dict[str, Any]:
        return {
            "codec": self.codec.name,
            "codec_options": options_of(self.codec),
            "threshold_bytes": self.threshold_bytes,
            "error_feedback": self.error_feedback,
            **asdict(self.transport),
            **asdict(self.measured),
            **asdict(self.stepping),
            **asdict(self._look_ahead),
            "group_elements": self.group_elements,
            "backup": self.backup,
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
            if self.update == "owner":
                raise Unsupported(
                    'importance="paper" reads the optimizer\'s whole state, and with update="owner" no rank has it: choose '
                    'importance="none", or update="worker"'
                )
            metric = QuantisationMetric(session.optimizer, session.communicator.world_size)
        super().bind(session)
        if session.site is None:
            self._reset()
        pull_codec = self.codec if self.transport.pull == "compressed" else RawCodec()
        exchange = FusedExchange(
            session.communicator, self.codec, pull_codec, self.transport.topology, self.group_elements
        )
        # What one native call encodes where it lies need not lie together; the ring and an owner's step want it so.
        self._keeps_places = exchange.takes_source and self.update == "worker"
        self._reduction = Reduction(session, exchange, metric, self.error_feedback)
        self._check = StepCheck(session.communicator)

    # ---- on a device

    def _go_to(self, site: DeviceSite, session: Session) -> StepsOnDevice:
        """Raises: Unsupported (options that need the host)."""
        codec = check_codec(self.codec, self.transport, self.stepping)
        self._reset()
        measuring = self._measuring if self.threshold_bytes is None else None
        assert measuring is None or isinstance(measuring, MeasuringOnDevice)
        return SlimGCOnDevice(session, site, codec, self.group_elements, self.error_feedback, self._plan_of, measuring)

    def _begin_on_device(self) -> None:
        """What the step before has measured may have made a table."""
        measuring = self._measuring if self.threshold_bytes is None else None
        if isinstance(measuring, MeasuringOnDevice) and measuring.begin(self.session.communicator):
            self._take_threshold()

    def _reduce_on_device(self, steps: StepsOnDevice, bucket: Bucket, resident: ResidentBucket) -> None:
        """On the lane, where the threshold is known by which ranks compare."""
        preamble = self.preamble(bucket)
        if self._has_loaded and not self._is_alone:
            self._has_loaded = False
            compare_preambles(self.session.communicator, preamble, bucket.record)
        steps.reduce(bucket, resident, preamble, False, ())

    # ---- one bucket, on the lane

    def take_over(self) -> None:
        """Raises: InvalidArgument, Unsupported (an optimizer or a model that backup, or the owner's step, cannot serve)."""
        if self.backup:
            self._stepper = LookAhead(self.session, self._start_mean, self._look_ahead)
        elif self.update == "owner":
            self._stepper = self._reduction.owner_step = OwnerStep(
                self.session, self._start_mean, self.stepping.max_grad_value
            )

    def begin_step(self, step: int) -> None:
        """Raises: Unsupported (ddp.join, where the step is not the optimizer's)."""
        super().begin_step(step)
        if self._on_device is not None:
            self.session.communicator.submit(self._begin_on_device)
            return
        if self._stepper is not None:
            self._stepper.begin_step(step)
        self.session.communicator.submit(self._begin_on_lane)

    def _begin_on_lane(self) -> None:
        self._reduction.begin_step()
        self._records.clear()

    def reduce(self, bucket: Bucket) -> torch.futures.Future:
        """With backup, DDP goes on with this rank's own gradient, and the mean is used by the next step."""
        if self._on_device is not None and bucket.resident is not None:
            submit, steps = self.session.communicator.submit, self._on_device
            return submit(self._reduce_on_device, steps, bucket, bucket.resident)
        return self._start_mean(bucket) if self._stepper is None else self._stepper.reduce(bucket)

    def _start_mean(self, bucket: Bucket) -> torch.futures.Future:
        begun = self.session.communicator.submit(self._reduce_on_lane, bucket, may_overtake=True)
        return then(begun, lambda _: bucket.buffer)

    def _reduce_on_lane(self, bucket: Bucket) -> torch.futures.Future | Continuation | None:
        """Replace the bucket by its mean; a future where the lane need not wait for it, or the rest of the lane's work."""
        communicator = self.session.communicator
        if communicator.world_size == 1 or bucket.n_elements == 0:
            return None
        self._records.append(bucket.record)
        if self._has_loaded:  # the layout may have been compared before, with the table that was there then
            self._has_loaded = False
            compare_preambles(communicator, self.preamble(bucket), bucket.record)
        if bucket.is_last:
            self._check.start(self.preamble(bucket), bucket.record)
        return self._reduction.reduce(bucket, self._plan_of(bucket), self.facts(bucket))

    def _plan_of(self, bucket: Bucket) -> CutSelection:
        """The decision for each tensor of the bucket (algorithm 2), made anew when layout or threshold change."""
        threshold = self._threshold
        if self.threshold_bytes is None and self._measuring.is_warming_up(bucket.step):
            bucket.wait_for_all()
            self._measuring.see([bucket.buffer[offset : offset + n] for _, offset, n in tensors_of(bucket)])
            threshold = 0 if self._measuring.is_compressed_warmup(bucket.step) else NEVER
        known = self._plans.get(bucket.index)
        if known is None or known[:2] != (bucket.layout_hash, threshold):
            world_size = self.session.communicator.world_size
            plan = CutSelection(bucket, threshold, world_size, self.group_elements, self._keeps_places)
            known = self._plans[bucket.index] = (bucket.layout_hash, threshold, plan)
        return known[2]

    # ---- the end of a step, on the lane

    def end_step(self, step: int) -> None:
        if self._on_device is not None:
            self._on_device.end()
            return
        self._reduction.end_step()
        if self.threshold_bytes is not None or self.session.communicator.world_size == 1:
            return
        communicate_s = sum(record.busy_ns["communicate"] for record in self._records) / 1e9
        record: list[BucketRecord] = []

        def open_record() -> BucketRecord:
            record.append(self.session.recorder.open_bucket(step, -1, 0))
            return record[0]

        is_new = self._measuring.end_step(
            step, communicate_s, self.session.communicator, open_record, self._reduction.probe
        )
        for opened in record:
            self.session.recorder.close_bucket(opened)
        if is_new:
            self._take_threshold()

    def _take_threshold(self) -> None:
        assert self._measuring.table is not None
        self._threshold = self._measuring.table.threshold_bytes(self._measuring.method)

    def end_backward(self, step: int) -> int:
        """What a step that measures sends is part of it, so it does not end before its probes; the others wait for nothing."""
        waited_ns = 0 if self._stepper is None else self._stepper.end_backward()
        is_measured = self.threshold_bytes is None and self._on_device is None
        if is_measured and self._measuring.may_probe(step, is_ahead=self.backup):
            watch = Stopwatch()
            # An error of the lane is raised with its own type by whoever called this.
            with contextlib.suppress(GradwireError), watch:
                self.session.communicator.submit(lambda: None).wait()
            waited_ns += watch.total_ns
        return waited_ns

    def flush(self) -> None:
        if self._stepper is not None:
            self._stepper.flush()

    def hand_over(self) -> None:
        """The optimizer gets back the state that its owners hold, whole on every rank."""
        if isinstance(self._stepper, OwnerStep):
            self._stepper.give_state_back()

    # ---- what ranks compare

    def facts(self, bucket: Bucket) -> Facts:
        return super().facts(bucket)._replace(configuration=self._shared_hash())

    def preamble(self, bucket: Bucket) -> Preamble:
        return super().preamble(bucket)._replace(configuration=self._shared_hash())

    def _shared_hash(self) -> int:
        """32 bits over the options and the threshold: ranks with different tables must not meet in a collective."""
        return zlib.crc32(repr((self.configuration_hash, self._threshold, self._loaded)).encode())

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
            "n_buckets_redone": self._reduction.n_redone,
            **({} if self._stepper is None else self._stepper.stats()),
            **({} if self._on_device is None else {"n_steps_not_finite": self._on_device.n_not_finite}),
        }

    def state_dict(self) -> dict[str, Any]:
        return {
            "residuals": self.session.feedback.state_by_name(self.session.slots),
            "threshold_bytes": self._threshold,
            "measuring": self._measuring.state_dict(),
            "stepping": {} if self._stepper is None else self._stepper.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Raises: InvalidArgument. Ranks that load different tables get RankMismatch before their next gradients."""
        residuals, measuring = state.get("residuals"), state.get("measuring")
        if not isinstance(residuals, dict) or not isinstance(measuring, dict):
            raise not_the_state("scheme slimgc", "it lacks residuals or the threshold table")
        threshold = check_threshold(state.get("threshold_bytes"))
        if self._stepper is not None:
            self._stepper.load_state_dict(state.get("stepping", {}))
            if isinstance(self._stepper, OwnerStep):
                self._loaded = zlib.crc32(repr(self._stepper.state.describe()).encode())
        self._measuring.load_state_dict(measuring)
        self.session.feedback.load_by_name(residuals, self.session.slots)
        self._threshold = threshold
        self._plans.clear()
        self._has_loaded = True

    def close(self) -> None:
        """The model is let go; the table stays, to be read. What is bound again begins anew, without both."""
        stepper = self._stepper
        self._last_stats, self._stepper = self.stats(), None
        self._on_device = None
        self._plans.clear()
        try:
            if stepper is not None:
                stepper.close()
        finally:
            self.session.feedback.clear()
            del self._reduction  # which holds the optimizer


def _share(part: int, whole: int) -> float:
    return part / whole if whole else 0.0
