"""What `bench train` times: a workload under one scheme, under PyTorch's own hooks, or under DDP alone."""

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from gradwire import codecs
from gradwire.codecs.quantised import OneBit, Quantised, TwoBit
from gradwire.core.threads import use_fair_share_of_cores
from gradwire.errors import GradwireError, InvalidArgument
from gradwire.registry import parse_spec
from gradwire.schemes.aqgb.overlap import Interval, length_s, overlap_s, without
from gradwire.telemetry.recorder import BucketRecord, StepRecord
from gradwire.wire.communicator import completed
from gradwire_lab.bench.driver import published
from gradwire_lab.training import TrainConfig, sharding, torch_hooks
from gradwire_lab.training.session import TrainingSession
from gradwire_lab.training.sharding import PRECISION, SHARDED
from gradwire_lab.workloads import Workload

# Bare quantisers that encode and decode on the training thread; `all` does not mean them.
TRAINING_THREAD: dict[str, type[Quantised]] = {"ddp-one-bit": OneBit, "ddp-two-bit": TwoBit}
BASELINES = ("ddp", "ddp-fp16", "ddp-bf16", "ddp-powersgd", "ddp-quant8", "hsdp", "fully-shard", *TRAINING_THREAD)
BY_NAME_ONLY = ("two-level", *SHARDED, *TRAINING_THREAD)
# PowerSGD's own documentation starts with rank 1 or 2 and compresses from the first steps on only with a warm start;
# bench runs are short, so it starts at once.
_POWER_SGD = {"rank": 2, "start": 2}


class StepTimes(NamedTuple):
    """One step on one rank, in seconds: iteration = local + waiting + update, data loading left out.

    `local_s` is forward and backward up to the last gradient; `waiting_s` from there to the end of the backward pass,
    which is communication that no computation hid, and slower ranks; `update_s` the optimizer's step.
    """

    local_s: float
    waiting_s: float
    update_s: float

    @property
    def iteration_s(self) -> float:
        return self.local_s + self.waiting_s + self.update_s


_LENGTH_BYTES = 8  # before every message: how long it is, as an int64
_CODEC_KINDS = ("encode", "decode", "importance", "table")


class Timeline:
    """What hides behind computation (SlimGC, Fig. 13), a sink of the recorder: intervals of `time.perf_counter` in seconds."""

    wants_spans = True

    def __init__(self) -> None:
        self.computing: list[Interval] = []  # forward and backward passes, up to the last gradient
        self.waiting: list[Interval] = []  # from there to the end of the optimizer's step
        self.communicating: list[Interval] = []  # this rank waited for messages, or a collective was under way
        # Codec work on the training thread, and on others beside it.
        self.training_codec: list[Interval] = []
        self.other_codec: list[Interval] = []
        self._training_thread = threading.get_ident()

    def note_step(self, started_s: float, last_gradient_s: float, ended_s: float) -> None:
        """One step of the training thread."""
        self.computing.append((started_s, max(started_s, last_gradient_s)))
        self.waiting.append((max(started_s, last_gradient_s), ended_s))

    def extend_last(self, ended_s: float) -> None:
        """The last step's work went on until then: what had been put off was done."""
        self.waiting[-1] = (self.waiting[-1][0], ended_s)

    def write_step(self, step_record: StepRecord | None, bucket_records: Sequence[BucketRecord]) -> None:
        """Keep the spans of a closed step, or of buckets that are in none yet."""
        for span in (span for record in bucket_records for span in record.spans or ()):
            interval = (span.start_ns / 1e9, span.end_ns / 1e9)
            if span.kind == "communicate":
                self.communicating.append(interval)
            elif span.kind in _CODEC_KINDS:
                is_training = span.thread == self._training_thread
                (self.training_codec if is_training else self.other_codec).append(interval)

    def close(self) -> None:
        """Nothing is left to write."""

    def measure(self, since_s: float, until_s: float) -> dict[str, float]:
        """Sums over the steps that began in [since_s, until_s), in seconds. overlap_s: computation and communication at
        once; codec work on the training thread is not computation. exposed_codec_s: codec work that training stood
        still for: on its thread all, of the rest what fell after a step's last gradient."""
        computing, waiting, training_codec = (
            [interval for interval in intervals if since_s <= interval[0] < until_s]
            for intervals in (self.computing, self.waiting, self.training_codec)
        )
        return {
            "overlap_s": overlap_s(without(computing, training_codec), self.communicating),
            "exposed_codec_s": length_s(training_codec) + overlap_s(waiting, self.other_codec),
        }


class TrainMethod:
    """A model of its own in training; methods of one run start from the same weights and see the same batches."""

    def __init__(
        self, spec: str, workload: Workload, seed: int, has_timeline: bool = False, as_published: bool = True
    ) -> None:
        self.name, self.options = parse_spec(spec)
        options = {**(_POWER_SGD if self.name == "ddp-powersgd" else {}), **self.options}
        # DDP's bucket size is no option of the scheme's: those that work by block want buckets no larger than blocks.
        bucket_mb, codec = options.pop("bucket_mb", None), None
        if self.name in TRAINING_THREAD:
            codec, options = TRAINING_THREAD[self.name](**options), {}
        config = TrainConfig(
            scheme="ddp" if codec is not None else self.name,
            scheme_options=published(self.name, options) if as_published else options,
            seed=seed,
            bucket_cap_mb=None if bucket_mb is None or self.name in SHARDED else float(bucket_mb),
        )
        self.session = TrainingSession(config, workload, torch.device("cpu"))
        self.session.wrap()
        if self.session.attachment is not None and self.name not in SHARDED:
            self.session.note_gradients()
        self.n_parameters, self.attachment = self.session.n_parameters, self.session.attachment
        self._owns_step = self.attachment is not None and self.attachment.scheme.owns_step
        # Until it works as it will, which are not to be counted.
        self.settling_steps = 0 if self.attachment is None else self.attachment.scheme.settling_steps
        self._timeline = Timeline() if has_timeline else None
        self._quantiser: TrainingThreadQuantiser | None = None
        if codec is not None:
            self._quantiser = TrainingThreadQuantiser(
                codec, getattr(self.session.model, "occupy", None), self._timeline
            )
            self._quantiser.register(self.session.ddp)
        elif self.attachment is not None and self._timeline is not None:
            self.attachment.recorder.add_sink(self._timeline)
        self.losses: list[float] = []
        self.times: list[StepTimes] = []

    def step(self) -> None:
        """One training step; its times and loss are kept."""
        session, number, rank = self.session, len(self.times), dist.get_rank()
        workload, seed = session.workload, session.config.seed
        batch = workload.batch_at(number, rank, dist.get_world_size(), workload.batch_size, seed)
        # Dropout must not depend on which methods ran before.
        torch.manual_seed((seed * 1_000_003 + number) * 1_009 + rank)
        started = time.perf_counter()
        session.zero_grad()
        loss = workload.loss(session.ddp, batch)
        loss.backward()
        # Behind FSDP2 nobody says when a gradient is there: what communication was not hidden stays in `local_s`.
        waiting_s, reduced = session.since_last_gradient_s(), time.perf_counter()
        session.update()
        ended = time.perf_counter()
        if self._timeline is not None:
            self._timeline.note_step(started, reduced - waiting_s, ended)
        if self._owns_step:
            # The forward pass, too, stood still for blocks of the step before.
            waiting_s = max(waiting_s, self.attachment.recorder.steps[-1].exposed_ns / 1e9)
        self.times.append(StepTimes(reduced - started - waiting_s, waiting_s, ended - reduced))
        self.losses.append(float(loss.detach()))

    def fixed_as(self, spec: str) -> str:
        """The spec of a method that does all the time what `auto` here may do, which it calls `spec`."""
        precision = "".join(f",{key}={self.options[key]}" for key in PRECISION if key in self.options)
        return spec if self.name == "auto" else f"{self.name}:{spec}{precision}"

    def own_stats(self) -> dict[str, Any]:
        """gradwire's own figures; empty for a baseline."""
        return {} if self.attachment is None else self.attachment.stats()

    def finish_turn(self) -> None:
        """What a scheme has put off is done before the next method's turn, on the last step's account."""
        if not self._owns_step:
            return
        started = time.perf_counter()
        self.attachment.flush()
        last, ended = self.times[-1], time.perf_counter()
        self.times[-1] = last._replace(waiting_s=last.waiting_s + ended - started)
        if self._timeline is not None:
            self._timeline.extend_last(ended)

    def check(self) -> None:
        """Raises: GradwireError if the scheme is still measuring after its `settling_steps`."""
        self.own_stats()  # waits for what is under way
        if self.attachment is not None and not self.attachment.scheme.is_settled:
            raise GradwireError(
                f"{self.name} still measures after {len(self.times)} steps, and what it does now is not what it will do: "
                "raise --warmup"
            )

    def overlap(self, since_s: float, until_s: float) -> dict[str, float] | None:
        """`Timeline.measure` of the steps begun between these moments; None without a timeline, or a count of spans."""
        if self._timeline is None or (self.attachment is None and self._quantiser is None):
            return None
        if self.attachment is not None:
            self._timeline.write_step(None, self.attachment.recorder.unsummed_buckets())
        return self._timeline.measure(since_s, until_s)

    def stats(self) -> dict[str, float]:
        """`sent_bytes` so far, by gradwire's count or what a baseline's hook must send, and where a hook tells,
        `codec_s`. That is busy time, hidden or not; of it `decode_s` grows with the messages received, the rest with
        those sent."""
        if own := self.own_stats():
            codec_s = float(sum(own[f"{kind}_s"] for kind in _CODEC_KINDS))
            return {"sent_bytes": float(own["bytes_sent"]), "codec_s": codec_s, "decode_s": float(own["decode_s"])}
        if self._quantiser is not None:
            busy_s, sent_bytes = self._quantiser.busy_s, float(self._quantiser.sent_bytes)
            return {"sent_bytes": sent_bytes, "codec_s": sum(busy_s.values()), "decode_s": busy_s["decode"]}
        sent = {"sent_bytes": self.session.computed_bytes(len(self.times))}
        return {**sent, "codec_s": 0.0, "decode_s": 0.0} if self.name == "ddp" else sent

    def close(self) -> None:
        """Let gradwire go, and the model: autograd holds its hooks where the garbage collector does not look. Collective."""
        self.session.close()


# ---- the quantiser on the training thread


class _Exchange:
    """One bucket layout's buffers, and what of the bucket is under way."""

    def __init__(self, n: int, world_size: int, codec: Quantised) -> None:
        edges = [n * part // world_size for part in range(world_size + 1)]
        self.parts = list(map(slice, edges, edges[1:]))
        largest = -(-n // world_size)
        # A whole number of int64: slots lie behind one another.
        slot = -(-(_LENGTH_BYTES + codec.max_encoded_bytes(largest, torch.float32)) // 8) * 8
        # What this rank's messages have left out so far is `residual`; messages to and from every rank, everyone's answers.
        self.residual, self.total, self.decoded = torch.zeros(n), torch.empty(largest), torch.empty(largest)
        self.pushes, self.pushed, self.pulls = torch.zeros(3, world_size, slot, dtype=torch.uint8)
        self.answer = torch.zeros(slot, dtype=torch.uint8)
        self.work: dist.Work
        self.bucket: torch.Tensor
        self.done: torch.futures.Future


class TrainingThreadQuantiser:
    """A bare quantiser with its codec on the training thread, one a model: what SlimGC's Fig. 13 is measured against.

    Each bucket is encoded, with error feedback, where DDP hands it over, and pushed to the owners of its parts. When the
    last gradient is there the same thread decodes and adds what it owns, encodes the sums, and decodes the answers. Bytes
    and arithmetic are those of the schemes `one-bit` and `two-bit`; only who works when differs.

    When not to use this: in training. Its residuals belong to buckets, and the first step's are lost when DDP rebuilds them.
    """

    def __init__(
        self, codec: Quantised, occupy: Callable[[float], None] | None = None, timeline: Timeline | None = None
    ) -> None:
        use_fair_share_of_cores()
        self._codec, self._occupy = codec, occupy
        self._rank, self._world_size = dist.get_rank(), dist.get_world_size()
        self._exchanges: dict[int, _Exchange] = {}
        self._under_way: list[_Exchange] = []
        timeline = timeline or Timeline()
        self.codec_spans, self.communicate_spans = timeline.training_codec, timeline.communicating
        self.busy_s = {"encode": 0.0, "decode": 0.0}  # so far
        self.sent_bytes = 0

    def register(self, model: Any) -> None:
        """Make it the hook of `model`."""
        # A lambda: DDP would compare annotations.
        model.register_comm_hook(
            self, lambda state, bucket: state.start(bucket.index(), bucket.buffer(), bucket.is_last())
        )

    def start(self, index: int, buffer: torch.Tensor, is_last: bool) -> torch.futures.Future:
        """Encode a bucket, (n,) float32, and push it; the future is done at the end of the backward pass."""
        if self._world_size == 1:  # the mean of one is itself
            return completed(buffer)
        exchange = self._exchanges.get(index)
        if exchange is None or exchange.residual.numel() != buffer.numel():
            exchange = self._exchanges[index] = _Exchange(buffer.numel(), self._world_size, self._codec)
        exchange.bucket, exchange.done = buffer, torch.futures.Future()
        before_s = self.busy_s["encode"]
        with self._working("encode"):
            for owner, part in enumerate(exchange.parts):
                if owner != self._rank:
                    self._encode(buffer[part], exchange.residual[part], exchange.pushes[owner])
        if self._occupy is not None:
            self._occupy(self.busy_s["encode"] - before_s)
        exchange.work = self._watch(dist.all_to_all_single(exchange.pushed, exchange.pushes, async_op=True))
        self.sent_bytes += (self._world_size - 1) * exchange.pushes.shape[1]
        self._under_way.append(exchange)
        if is_last:
            torch.autograd.Variable._execution_engine.queue_callback(self._finish)
        return exchange.done

    def _finish(self) -> None:
        """The gradients are computed, and DDP is about to wait: add, answer, adopt, bucket by bucket."""
        under_way, self._under_way = self._under_way, []
        for exchange in under_way:
            exchange.work.wait()
            self._answer(exchange)
            gathered = list(exchange.pulls.unbind(0))
            exchange.work = self._watch(dist.all_gather(gathered, exchange.answer, async_op=True))
            self.sent_bytes += (self._world_size - 1) * exchange.answer.numel()
        for exchange in under_way:
            exchange.work.wait()
            with self._working("decode"):
                for part, pull in zip(exchange.parts, exchange.pulls, strict=True):
                    self._decode(pull, exchange.bucket[part])
                exchange.bucket.div_(self._world_size)
            exchange.done.set_result(exchange.bucket)

    def _answer(self, exchange: _Exchange) -> None:
        """Add up this rank's part, in rank order, its own values exactly; what encoding the sum loses stays here."""
        part = exchange.parts[self._rank]
        residual = exchange.residual[part]
        total, decoded = exchange.total[: residual.numel()], exchange.decoded[: residual.numel()]
        with self._working("decode"):
            total.zero_()
            for source in range(self._world_size):
                if source == self._rank:
                    total.add_(exchange.bucket[part]).add_(residual)
                else:
                    self._decode(exchange.pushed[source], decoded)
                    total.add_(decoded)
        with self._working("encode"):
            residual.zero_()
            self._encode(total, residual, exchange.answer)

    def _encode(self, values: torch.Tensor, residual: torch.Tensor, slot: torch.Tensor) -> None:
        n_bytes = self._codec.encode(values, slot[_LENGTH_BYTES:], residual=residual)
        slot[:_LENGTH_BYTES].view(torch.int64).fill_(n_bytes)

    def _decode(self, slot: torch.Tensor, out: torch.Tensor) -> None:
        n_bytes = int(slot[:_LENGTH_BYTES].view(torch.int64))
        self._codec.decode(slot[_LENGTH_BYTES : _LENGTH_BYTES + n_bytes], out)

    @contextlib.contextmanager
    def _working(self, kind: str) -> Iterator[None]:
        started = time.perf_counter()
        yield
        ended = time.perf_counter()
        self.codec_spans.append((started, ended))
        self.busy_s[kind] += ended - started

    def _watch(self, work: dist.Work | None) -> dist.Work:
        assert work is not None
        started = time.perf_counter()
        work.get_future().add_done_callback(lambda _: self.communicate_spans.append((started, time.perf_counter())))
        return work


# ---- names and options


def check_baseline_options(name: str, options: dict[str, Any]) -> None:
    """Raises: InvalidArgument (what a baseline does not take); schemes check their own options."""
    if name in TRAINING_THREAD:  # the codec's own
        codecs.by_name(name.removeprefix("ddp-"), **options)
    elif name == "fully-shard":
        sharding.check_options(name, options)
    elif name in BASELINES:
        bucket_mb = options.get("bucket_mb", 0)
        if name == "ddp" and (isinstance(bucket_mb, bool | str) or not bucket_mb >= 0):
            raise InvalidArgument(f"{name}:bucket_mb={bucket_mb}: expected a number of 0 or more")
        more = {key: value for key, value in options.items() if name != "ddp" or key != "bucket_mb"}
        torch_hooks.check_options(name, more, starts=range(_POWER_SGD["start"] + 1))


def describe(method: TrainMethod) -> str:
    """The options, as written in a spec, and what was done to run it at all."""
    words = [f"{key}={value}" for key, value in method.options.items()]
    return ",".join([*words, "one bucket"] if method.name in torch_hooks.ONE_BUCKET else words)
