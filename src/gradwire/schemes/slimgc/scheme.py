"""SlimGC (Bai, Yu and Dong, Chinese Journal of Computers, 2025). Reads like the paper's section 3.

Per bucket: tensors below the communication threshold are fused and sent in full precision (fp_buf), the others go
through the codec (bit_buf), to the rank that owns them and back, all of it on the lane, off the training thread. The
threshold comes from a table of benefits that is measured while the training warms up (3.3). That the next step waits for none
of it (3.5, backup=True) is `gradwire.schemes.ahead` around it.
"""

import contextlib
import functools
import statistics
import zlib
from collections import Counter, deque
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ReduceOp

from gradwire import codecs
from gradwire.checks import choice as check_choice
from gradwire.checks import count as check_count
from gradwire.codecs import Codec
from gradwire.codecs.quantised import OneBit, Quantised
from gradwire.core.bucket import Bucket
from gradwire.core.feedback import Part
from gradwire.core.session import Session
from gradwire.errors import GradwireError, InvalidArgument, Unsupported
from gradwire.exchange.parts import CHUNK_ELEMENTS, QUANTISED_CHUNK_ELEMENTS, Cut
from gradwire.exchange.ring import Importance
from gradwire.registry import parse_spec
from gradwire.schemes.base import Scheme
from gradwire.schemes.compressed import Compressed
from gradwire.schemes.gcomp.importance import Promise, QuantisationMetric
from gradwire.schemes.plain import start_plain_mean
from gradwire.schemes.plain_steps import PlainSteps, is_beside_adam
from gradwire.schemes.selection import Selection, tensors_of
from gradwire.schemes.slimgc.exchange import CutSelection, FusedExchange
from gradwire.schemes.slimgc.measuring import DeviceClock, HostClock, Later, Measuring
from gradwire.schemes.slimgc.threshold import NEVER, BucketSizes, Choice, check_threshold, choose
from gradwire.telemetry.stopwatch import Stopwatch
from gradwire.wire.communicator import then
from gradwire.wire.device_wire import DeviceWire
from gradwire.wire.preamble import FORMAT_VERSION, Preamble, compare_preambles
from gradwire.wire.wire import Wire

# What is chosen among beside Adam, from the finest on; the last is nearest to plain of those with two bits.
CODECS_BESIDE_ADAM = ("embedded-float:bits=8", "embedded-float:bits=5", "two-bit:levels=4,scale_values=64")
_MEASURED = ("warmup_steps", "method", "drift_every", "drift_factor")  # options of the table: the rest is the codec's
_READY_STEPS = 16  # of which the typical one says when a bucket is ready


class ChosenCodecs(Selection):
    """The decision for one bucket layout: which tensors travel raw (0 in `choice`), and the selection of each codec used.

    Attributes:
        made_for: the layout's hash, and the threshold or what stands for it.
        sizes: bytes of each tensor.
        is_flushed: nothing that was left out of the raw tensors waits any more.
    """

    def __init__(
        self, bucket: Bucket, threshold: int, sizes: tuple[int, ...], choice: Choice, parts: list[CutSelection]
    ) -> None:
        codecs = iter(choice)
        super().__init__(bucket, lambda *_: next(codecs) != 0)
        self.made_for, self.sizes, self.parts, self.is_flushed = (bucket.layout_hash, threshold), sizes, parts, False


class SlimGC(Compressed):
    """Any codec, used only where it pays.

    All ranks get the same bits. What the codec loses is kept by the rank that encoded it and added to its next gradient.

    When not to use this: where every tensor is small or the network faster than the codec. The table then says "never",
    and `plain` does the same with less to carry.

    Args:
        codec: a codec's registry name, a codec, or a scheme that is one (OneBit(), GComp()). Several, in a list or joined by
            "+", from the finest to the coarsest, each with its options ("embedded-float:bits=5"): of these and raw each tensor
            gets one, by the time that it adds to a step (`threshold.py`). None: one-bit; beside Adam and its kin those of
            `CODECS_BESIDE_ADAM`, or with a threshold the last of them.
        threshold_bytes: tensors of fewer bytes travel raw. None: measured, in `warmup_steps` steps. 0 compresses all.
        topology: "server" (every rank owns a part: push to it, pull from it; a scale belongs to one tensor) or
            "all-reduce" (a ring over all compressed tensors of a bucket, encoded anew at every hop).
        pull: what an owner answers with: "compressed", or "raw" in full precision (server only).
        error_feedback: keep what the codec lost for the next step. None: if the codec wants it; qsgd and ternary do not.
        plain_steps: the first steps of the training, which are reduced plainly. None: 50 beside Adam and its kin where codec is
            left out too, else 0.
        warmup_steps, method, drift_every, drift_factor: of the table; see `Measuring`.
        group_elements: values encoded and sent at a time. None: as many as suit the codec.
        **options: those, and of a codec that is given by name.
    Raises: InvalidArgument.
    """

    name = "slimgc"
    waits_by_tensor = True
    settles_plainly = False

    def __init__(
        self,
        codec: str | Codec | Scheme | Sequence[Any] | None = None,
        threshold_bytes: int | None = None,
        error_feedback: bool | None = None,
        plain_steps: int | None = None,
        topology: str = "server",
        pull: str = "compressed",
        group_elements: int | None = None,
        **options: Any,
    ) -> None:
        self._measured = {name: options.pop(name) for name in _MEASURED if name in options}
        check_choice("topology", topology, ("server", "all-reduce"))
        check_choice("pull", pull, ("compressed", "raw"))
        if pull == "raw" and topology != "server":
            raise InvalidArgument('pull="raw" needs topology="server": in a ring nobody owns the result')
        self._is_open = codec is None and not options  # the optimizer chooses the codec
        self.codecs = _read_codecs("one-bit" if codec is None else codec, options)
        if len(self.codecs) > 1 and threshold_bytes is not None:
            raise InvalidArgument("several codecs are chosen by time: leave threshold_bytes out")
        super().__init__(
            error_feedback=all(codecs.choose_feedback(codec, error_feedback) for codec in self.codecs),
            plain=PlainSteps(self.name, "plain_steps", plain_steps if plain_steps is not None or self._is_open else 0),
        )
        self.threshold_bytes = None if threshold_bytes is None else check_threshold(threshold_bytes)
        if group_elements is None:
            are_all = all(isinstance(one, Quantised) for one in self.codecs)
            group_elements = QUANTISED_CHUNK_ELEMENTS if are_all else CHUNK_ELEMENTS
        self._exchanging: dict[str, Any] = {
            "topology": topology,
            "pull": pull,
            "group_elements": check_count("group_elements", group_elements),
        }
        self.state_is_per_world = True
        self._clock: HostClock | DeviceClock | None = None  # None: no table is measured
        self._metric: QuantisationMetric | None = None
        self._reset()

    def _reset(self) -> None:
        self._chooses = len(self.codecs) > 1
        self._measuring = Measuring(len(self.codecs), **self._measured)
        self._last_stats: dict[str, Any] | None = None
        self._threshold = NEVER if self.threshold_bytes is None else self.threshold_bytes
        self._plans: dict[int, ChosenCodecs] = {}  # by bucket
        # With several codecs: what is chosen, by layout; the buckets of a step; when each was ready, after the first.
        self._choices: dict[int, Choice] = {}
        self._buckets: dict[int, tuple[int, tuple[int, ...], int]] = {}
        self._ready_s: dict[int, deque[float]] = {}
        self._under_way: list[torch.futures.Future] = []  # sums of raw buckets, which the lane does not wait for
        self._has_loaded = False

    @property
    def settling_steps(self) -> int:
        """The table's warm-up, then two steps: new buffers are made."""
        return max(0 if self.threshold_bytes is not None else self._measuring.warmup_steps + 2, self.plain.n)

    @property
    def is_settled(self) -> bool:
        """True once there is a threshold: given, or from a table. One rank has nothing to measure."""
        is_alone = self.is_bound and self.session.communicator.world_size == 1
        return super().is_settled and (self.threshold_bytes is not None or bool(self._measuring.tables) or is_alone)

    @property
    def codec(self) -> Codec:
        """The only codec, or the coarsest."""
        return self.codecs[-1]

    @property
    def reads_optimizer(self) -> bool:
        return any(getattr(codec, "importance", None) == "paper" for codec in self.codecs)

    @property
    def configuration(self) -> dict[str, Any]:
        return {
            "codec": "+".join(codec.name for codec in self.codecs),
            "codec_options": [*map(_options_of, self.codecs)] if len(self.codecs) > 1 else _options_of(self.codec),
            "threshold_bytes": self.threshold_bytes,
            "error_feedback": self.error_feedback,
            self.plain.option: self.plain.n,
            **self._exchanging,
            **{name: getattr(self._measuring, name) for name in _MEASURED},
        }

    def bind(self, session: Session) -> None:
        """Raises: InvalidArgument, Unsupported (a codec that reads the optimizer, and none, or another, was given; on a
        device, options that need the host)."""
        wire, metric = session.wire, None
        if self._is_open:
            self.codecs = self._codecs_beside(session)
        if self.reads_optimizer:
            codec: Any = self.codec
            promise = Promise(rounding=codec.rounding, format=codec.format, is_alike=True)
            metric = QuantisationMetric.beside(session, promise)
        if wire.on_device:
            for codec in self.codecs:
                _refuse_on_device(codec, **self._exchanging)
        super().bind(session)
        self._metric = metric
        if self.plain.n:
            self.plain.tell(self)
        self._reset()
        self._exchanges = [FusedExchange(wire, codec, **self._exchanging) for codec in self.codecs]
        if self.threshold_bytes is None and wire.world_size > 1:
            self._clock = DeviceClock(wire) if isinstance(wire, DeviceWire) else HostClock()

    def _codecs_beside(self, session: Session) -> list[Codec]:
        if not is_beside_adam(session):
            return [OneBit()]
        is_single = self.threshold_bytes is not None or session.wire.on_device
        if not is_single and self._exchanging["group_elements"] == QUANTISED_CHUNK_ELEMENTS:
            self._exchanging["group_elements"] = CHUNK_ELEMENTS
        return [_made(spec, {}) for spec in CODECS_BESIDE_ADAM[-1 if is_single else 0 :]]

    # ---- one bucket

    def _begin_on_lane(self) -> None:
        super()._begin_on_lane()
        if isinstance(self._clock, DeviceClock):  # what the step before has measured may make a table
            self._take_times()

    def reduce(self, bucket: Bucket) -> torch.futures.Future:
        return then(self.session.communicator.submit(self._reduce_on_lane, bucket, may_overtake=True), lambda _: None)

    def _reduce_on_lane(self, bucket: Bucket) -> torch.futures.Future | None:
        """Reduce one bucket; or return the future of its mean, for which the lane need not wait."""
        wire, preamble = self.wire(bucket), self.preamble(bucket)
        if wire.world_size == 1:
            return None
        if self._has_loaded:  # the layout may have been compared before, with the table that was there then
            self._has_loaded = False
            compare_preambles(wire.communicator, preamble, bucket.record)
        if isinstance(self._clock, HostClock):
            self._clock.begin_bucket(bucket.record)
        with bucket.at_work():
            plan = self._plan_of(bucket) if bucket.n_elements else None
            if bucket.is_last and (wire.on_device or plan is None or not plan.parts):  # else messages say it
                self._check.start(preamble, bucket.record)
                if wire.on_device:
                    self._check.fail_early()
            summed = None if plan is None else self._reduce_by_plan(bucket, plan, wire)
            if isinstance(wire, DeviceWire) and bucket.is_last:
                flags = wire.flags.clone()  # what probes find is thrown away with them
                self._probe(bucket.step)
                wire.flags.copy_(flags)
        return summed

    def _plan_of(self, bucket: Bucket) -> ChosenCodecs:
        """The decision for each tensor of the bucket (algorithm 2), made anew when layout or threshold change."""
        threshold = self._threshold
        mode = None if self.threshold_bytes is not None else self._measuring.warmup_mode(bucket.step)
        if mode is not None:
            bucket.wait_for_all()
            self._measuring.see([bucket.buffer[offset : offset + n] for _, offset, n in tensors_of(bucket)])
            threshold = 0 if mode and not self._chooses else NEVER
        if bucket.step < self.plain.n:
            threshold = NEVER
        plan = self._plans.get(bucket.index)
        if plan is None or plan.made_for != (bucket.layout_hash, threshold):
            sizes = tuple(n * bucket.buffer.element_size() for _, _, n in tensors_of(bucket))
            choice = tuple(int(size >= max(1, threshold)) for size in sizes)
            if self._chooses and threshold != NEVER:
                if bucket.layout_hash not in self._choices:  # buckets have changed
                    self._measuring.is_requested = True
                choice = self._choices.get(bucket.layout_hash, (0,) * len(sizes))
            world_size = self.session.communicator.world_size
            parts = [
                CutSelection(bucket, choice, codec, world_size, self._exchanges[codec - 1])
                for codec in sorted({*choice} - {0})
            ]
            plan = self._plans[bucket.index] = ChosenCodecs(bucket, threshold, sizes, choice, parts)
        if self._chooses:  # note what is in the bucket, and when it was ready
            if bucket.index == 0:
                self._buckets.clear()
            started_ns = bucket.record.started_ns
            self._buckets[bucket.index] = bucket.layout_hash, plan.sizes, started_ns
            since_s = (started_ns - self._buckets.get(0, (0, (), started_ns))[2]) / 1e9
            self._ready_s.setdefault(bucket.layout_hash, deque(maxlen=_READY_STEPS)).append(max(0.0, since_s))
        return plan

    def _choose(self) -> int:
        """Choose a codec for every tensor of the last step's buckets, by the new tables and by when all ranks are
        ready. Returns: what stands for the choice in place of a threshold."""
        layouts = [self._buckets[index] for index in sorted(self._buckets)]
        ready = [statistics.median(self._ready_s[layout]) for layout, _, _ in layouts]
        ready_s = torch.tensor(ready, dtype=torch.float64, device="cpu")
        self.session.communicator.all_reduce(ready_s, ReduceOp.MIN)  # of the rank that hides least
        buckets = [BucketSizes(at, sizes) for at, (_, sizes, _) in zip(ready_s.tolist(), layouts, strict=True)]
        tables = self._measuring.tables
        before = [self._choices.get(layout, ()) for layout, _, _ in layouts]
        is_known = all(len(one) == len(bucket.tensor_bytes) for one, bucket in zip(before, buckets, strict=True))
        chosen = choose(buckets, [tables[0].raw, *(table.compressed for table in tables)], before if is_known else None)
        self._choices = {layout: choice for (layout, _, _), choice in zip(layouts, chosen, strict=True)}
        self._plans.clear()
        return zlib.crc32(repr(sorted(self._choices.items())).encode())

    def _reduce_by_plan(self, bucket: Bucket, plan: ChosenCodecs, wire: Wire) -> torch.futures.Future | None:
        if not plan.parts:
            return self._mean_raw(bucket, plan, wire)
        with wire.timing("encode"):
            part = self._part_of(bucket, plan.parts[0], wire)
            self._flush_residuals(bucket, plan, wire)
            fp_buf = wire.scratch("fp_buf", plan.n_raw, bucket.buffer.dtype)  # the small tensors / N
            for run in plan.raw_runs:
                run.in_fused(fp_buf).copy_(run.in_bucket(bucket.buffer))
            fp_buf.mul_(1.0 / wire.world_size)
        # In host memory small tensors travel beside the large ones; on a device all is timed in one order.
        start_raw = functools.partial(wire.start_sum_of_few, fp_buf, 4 * plan.n_compressed)
        finish_raw = start_raw() if plan.n_raw and not wire.on_device else None
        for cut in plan.parts:
            if cut is not plan.parts[0]:
                wire.communicator.run_deferred()
                with wire.timing("encode"):
                    part = self._part_of(bucket, cut, wire)
            self._sent = cut
            self._send(part, wire)
            if not wire.on_device:  # behind what the exchange has deferred
                wire.communicator.defer(functools.partial(self._take_mean, bucket, cut, part, wire))
        if finish_raw is not None:
            finish_raw()
        elif plan.n_raw:
            start_raw()()
        wire.note(wire.all_finite(fp_buf))
        for run in plan.raw_runs:
            run.in_bucket(bucket.buffer).copy_(run.in_fused(fp_buf))
        for cut in plan.parts if wire.on_device else ():
            self._take_mean(bucket, cut, part, wire)
        return None

    def _mean_raw(self, bucket: Bucket, plan: ChosenCodecs, wire: Wire) -> torch.futures.Future | None:
        """Nothing is worth compressing: the backend's all-reduce, which in host memory the lane does not wait for."""
        self._flush_residuals(bucket, plan, wire)
        if wire.on_device:
            wire.mean(bucket.buffer)
            wire.note(wire.all_finite(bucket.buffer))
            return None
        summed = start_plain_mean(wire.communicator, bucket)
        self._under_way.append(then(summed, lambda mean: wire.note(wire.all_finite(mean))))
        return self._under_way[-1]

    def _part_of(self, bucket: Bucket, plan: CutSelection, wire: Wire) -> Bucket:
        """The large tensors, where they lie in the bucket or fused in bit_buf (n_bit_buf,) float32."""
        buffer = bucket.buffer
        if wire.on_device or (plan.keeps_places and plan.dtype == torch.float32):
            bucket.wait_for_all()
        else:  # two by turns: the results of one bucket still travel when the next one is begun
            buffer = wire.scratch(f"bit_buf {bucket.index % 2} {plan.codec}", plan.n_bit_buf)
            for span in plan.compressed:
                bucket.wait_for(span.position)
                span.in_fused(buffer).copy_(span.in_bucket(bucket.buffer))
        part = Bucket(
            buffer, plan.part_layout or plan.slots, plan.offsets, index=bucket.index, step=bucket.step,
            record=bucket.record, staged=bucket.staged, resident=bucket.resident,
        )  # fmt: skip
        plan.part_layout = part.layout
        return part

    def _flush_residuals(self, bucket: Bucket, plan: ChosenCodecs, wire: Wire) -> None:
        """Add to tensors that travel raw what was left out of them, where this rank has a gradient."""
        feedback, was_flushed = self.session.feedback, plan.is_flushed
        plan.is_flushed = True
        for span in plan.raw:
            bucket.wait_for(span.position)
            kept = None if was_flushed else feedback.of(span.slot)
            if kept is None or span.slot is None:
                continue
            plan.is_flushed = False  # it counts at the end of the step, or not at all
            gradient = span.in_bucket(bucket.buffer)
            if all(wire.used(gradient, [(0, span.n_elements)])):
                gradient.add_(kept.to(gradient.device).view(-1), alpha=self.session.loss_scale())
                feedback.stage(span.slot, None)

    def step(self, part: Part, wire: Wire) -> None:
        """Push the large tensors, encoded, to their owners, and pull the means; or send them round the ring."""
        plan, importance = self._sent, None
        part.used_by_any = [True] * len(plan.slots)  # ranks do not ask each other
        if self._metric is not None and plan.slots:
            with wire.record.timing("importance"):
                importance = self._metric.of_bucket(
                    plan.slots, plan.offsets, part.loss_scale, plan.dtype, part.bucket.staged
                )
        self._exchanges[plan.codec - 1].mean(
            wire, plan.cut, part.values, part.residual, part.unsent, part.loss_scale, importance
        )

    def _take_mean(self, bucket: Bucket, plan: CutSelection, part: Bucket, wire: Wire) -> None:
        """Write the means of the large tensors to where these lie."""
        with wire.timing("decode"):
            for run in plan.compressed_runs:
                mean = run.in_bucket(bucket.buffer)
                if part.buffer is not bucket.buffer:
                    mean.copy_(run.in_fused(part.buffer))
                if plan.firsts is None and not wire.on_device:  # there the messages say so
                    wire.note(wire.all_finite(mean))
            if plan.firsts is not None:
                firsts = wire.scratch("firsts", plan.firsts.numel())
                wire.note(wire.all_finite(torch.index_select(part.buffer, 0, plan.firsts, out=firsts)))

    def end_step(self, step: int) -> None:
        under_way, self._under_way = self._under_way, []
        for done in under_way:
            done.wait()
        super().end_step(step)
        if isinstance(self._clock, HostClock):
            self._probe(step)
            self._take_times()
            if self._measuring.is_due:  # the network has changed
                self._probe(step)
                self._take_times()

    def _probe(self, step: int) -> None:
        if self._clock is not None:
            self._measuring.probe(step, self.session.wire.device, functools.partial(self._send_alone, step))

    def _send_alone(self, step: int, values: Tensor, mode: int) -> Later:
        """Send one tensor, and throw away what comes of it."""
        n, recorder, wire = values.numel(), self.session.recorder, self.session.wire
        record = recorder.open_bucket(step, -1, 0)
        wire = wire.for_bucket(Preamble(FORMAT_VERSION, 0, self.name, self._shared_hash(), n, step, n), record)
        dtype = torch.float32 if mode and not wire.on_device else values.dtype
        sent, left_out = wire.scratch("probe", n, dtype).copy_(values), wire.scratch("left out of it", n)

        def send() -> None:
            if not mode:
                return wire.mean(sent)
            cut = Cut([(0, n)], wire.world_size, self._exchanging["group_elements"])
            importance = None if self._metric is None else Importance([], 0)
            self._exchanges[mode - 1].mean(wire, cut, sent, left_out=left_out, importance=importance)
            wire.communicator.run_deferred()

        assert self._clock is not None
        took = self._clock.time(wire, send)
        recorder.close_bucket(record)
        return took

    def _take_times(self) -> None:
        """Take the threshold of a new table, if what was measured makes one."""
        assert self._clock is not None
        threshold = self._measuring.conclude(self._clock.take_communicate_s(), self.session.communicator)
        if threshold is not None:
            self._threshold = self._choose() if self._chooses else threshold

    def end_backward(self, step: int) -> int:
        """Wait for the probes of a step that measures, which are part of it; after other steps for nothing."""
        watch = Stopwatch()
        if isinstance(self._clock, HostClock) and self._measuring.may_probe(step, self.is_ahead):
            # An error of the lane is raised with its own type by whoever called this.
            with contextlib.suppress(GradwireError), watch:
                self.session.communicator.submit(lambda: None).wait()
        return watch.total_ns

    def preamble(self, bucket: Bucket) -> Preamble:
        return super().preamble(bucket)._replace(configuration=self._shared_hash())

    def _shared_hash(self) -> int:
        """32 bits over the options and the threshold: ranks with different tables must not meet in a collective."""
        return zlib.crc32(repr((self.configuration_hash, self._threshold)).encode())

    def stats(self) -> dict[str, Any]:
        """The threshold in bytes, its table (Fig. 6), and what the decisions came to at the last step."""
        if self._last_stats is not None:
            return self._last_stats
        plans = list(self._plans.values())
        used = Counter(
            self.codecs[part.codec - 1].name for plan in plans for part in plan.parts for _ in part.compressed
        )
        n_compressed, n_raw = sum(plan.n_compressed for plan in plans), sum(plan.n_raw for plan in plans)
        return {
            **({"codecs": dict(used)} if self._chooses else {"threshold_bytes": self._threshold}),
            **self._measuring.stats(),
            "n_tensors_compressed": sum(len(plan.compressed) for plan in plans),
            "n_tensors_raw": sum(len(plan.raw) for plan in plans),
            "share_compressed": n_compressed / max(1, n_compressed + n_raw),
            **super().stats(),
        }

    def state_dict(self) -> dict[str, Any]:
        return {
            "residuals": self.session.feedback.state_by_name(self.session.slots),
            "threshold_bytes": self._threshold,
            "choices": {layout: list(choice) for layout, choice in self._choices.items()},
            "measuring": self._measuring.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Raises: InvalidArgument. Ranks that load different tables get RankMismatch before their next gradients."""
        self._measuring.load_state_dict(state["measuring"])
        self.session.feedback.load_by_name(state["residuals"], self.session.slots)
        self._threshold = check_threshold(state["threshold_bytes"])
        self._choices = {int(layout): tuple(choice) for layout, choice in state["choices"].items()}
        self._plans.clear()
        self._has_loaded = True

    def close(self) -> None:
        """The model is let go; the table stays, to be read. What is bound again begins anew, without both."""
        clock, self._last_stats = self._clock, self.stats()
        self._clock = self._metric = None  # of these the metric holds the optimizer
        self._plans.clear()
        if isinstance(clock, DeviceClock):
            clock.close()
        super().close()


def _read_codecs(codec: Any, options: dict[str, Any]) -> list[Codec]:
    """The codecs, made by name with their options, given, or a scheme's. Raises: InvalidArgument."""
    several = codec.split("+") if isinstance(codec, str) else codec
    several = list(several) if isinstance(several, Sequence) else [codec]
    if not several or (len(several) > 1 and options):
        raise InvalidArgument(
            'of several codecs each has its own options, "embedded-float:bits=5"; and one there must be'
        )
    return [_made(one, options) for one in several]


def _made(codec: Any, options: dict[str, Any]) -> Codec:
    if isinstance(codec, str):
        name, written = parse_spec(codec)
        return codecs.by_name(name, **written, **options)
    if options:
        raise InvalidArgument(f"{', '.join(options)}: options are for a codec given by name; make the codec with them")
    inner: Any = getattr(codec, "codec", None) if isinstance(codec, Scheme) else codec
    if not all(callable(getattr(inner, method, None)) for method in ("encode", "decode", "max_encoded_bytes")):
        raise InvalidArgument(
            f"codec is a name ({', '.join(codecs.names())}), a codec, or a scheme that is one, "
            f"not {type(codec).__name__}"
        )
    checked: Codec = inner
    return checked


def _options_of(codec: Codec) -> dict[str, Any]:
    """A codec's options, as plain values: what ranks compare."""
    plain = (bool, int, float, str, type(None))
    return {k: v for k, v in sorted(vars(codec).items()) if not k.startswith("_") and isinstance(v, plain)}


def _refuse_on_device(codec: Codec, topology: str, pull: str, **_: Any) -> None:
    """Raises: Unsupported (what needs the host)."""
    if topology != "server" or pull != "compressed":
        option = f'topology="{topology}"' if topology != "server" else f'pull="{pull}"'
        raise Unsupported(f"slimgc with {option} works on host memory: leave that or placement out")
    if not isinstance(codec, Quantised):
        raise Unsupported(
            f"slimgc works on devices with one-bit, two-bit and qsgd, not with {codec.name}: take one of these, or leave "
            "placement out"
        )
