"""What `bench train` times: a workload under one scheme, under PyTorch's own hooks, or under DDP alone."""

import contextlib
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

import gradwire
from gradwire import codecs, schemes
from gradwire.codecs.quantised import OneBit, Quantised, TwoBit
from gradwire.core.threads import use_fair_share_of_cores
from gradwire.errors import GradwireError, InvalidArgument
from gradwire.registry import parse_spec
from gradwire.schemes.aqgb.overlap import Interval, length_s, overlap_s, without
from gradwire.telemetry.recorder import BucketRecord, StepRecord
from gradwire.wire.communicator import completed, ring_bytes
from gradwire_lab.bench.driver import make_scheme
from gradwire_lab.training import sharding, torch_hooks
from gradwire_lab.training.sharding import OVER_ALL, PRECISION, Sharded
from gradwire_lab.workloads import Workload

# Bare quantisers that encode and decode on the training thread; `all` does not mean them.
TRAINING_THREAD: dict[str, type[Quantised]] = {"ddp-one-bit": OneBit, "ddp-two-bit": TwoBit}
BASELINES = ("ddp", "ddp-fp16", "ddp-bf16", "ddp-powersgd", "ddp-quant8", "hsdp", "fully-shard", *TRAINING_THREAD)
# Several ranks a node: two levels under DDP, FSDP2 in the nodes with torch's all-reduce between them (HSDP) or a scheme's.
SHARDED = ("hsdp", "fsdp2", *OVER_ALL)
BY_NAME_ONLY = ("two-level", *SHARDED, *TRAINING_THREAD)
# Options that baselines take in a spec. `bucket_mb`: DDP's bucket_cap_mb, 0 a bucket for every tensor, inf one for all.
# `start`: steps that powerSGD_hook leaves to the plain all-reduce.
_BASELINE_OPTIONS = {"ddp": ("bucket_mb",), "ddp-powersgd": ("rank", "start")}
# PowerSGD's own documentation starts with rank 1 or 2 and compresses from the first steps on only with a warm start;
# bench runs are short, so it starts at once.
_POWER_SGD = {"rank": 2, "start": 2}


@dataclass(frozen=True)
class StepTimes:
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


@dataclass
class Timeline:
    """What of communication and codec work hides behind computation (SlimGC, Fig. 13); a sink of gradwire's recorder.

    Attributes: intervals on `time.perf_counter`, in seconds; they may overlap.
        computing: forward and backward passes, up to the last gradient.
        waiting: from there to the end of the optimizer's step.
        communicating: time in which this rank waited for messages or a collective was under way.
        training_codec, other_codec: codec work on the training thread, and on others beside it.
    """

    wants_spans = True

    computing: list[Interval] = field(default_factory=list)
    waiting: list[Interval] = field(default_factory=list)
    communicating: list[Interval] = field(default_factory=list)
    training_codec: list[Interval] = field(default_factory=list)
    other_codec: list[Interval] = field(default_factory=list)
    training_thread: int = field(default_factory=threading.get_ident)

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
                is_training = span.thread == self.training_thread
                (self.training_codec if is_training else self.other_codec).append(interval)

    def close(self) -> None:
        """Nothing is left to write."""

    def measure(self, since_s: float, until_s: float) -> dict[str, float]:
        """Sums over the steps that began in [since_s, until_s), in seconds.

        Returns:
            overlap_s: computation and communication at once. Codec work on the training thread is not computation.
            exposed_codec_s: codec work that training stood still for: all of it on the training thread; of the rest what
                fell after a step's last gradient.
        """
        computing, waiting, training_codec = (
            [interval for interval in intervals if since_s <= interval[0] < until_s]
            for intervals in (self.computing, self.waiting, self.training_codec)
        )
        return {
            "overlap_s": overlap_s(without(computing, training_codec), self.communicating),
            "exposed_codec_s": length_s(training_codec) + overlap_s(waiting, self.other_codec),
        }


class TrainMethod:
    """A model of its own in training; methods of one run start from the same weights and see the same batches.

    Args:
        has_timeline: keep what `overlap` tells.

    Attributes:
        settling_steps: how many steps it takes until it works as it will; those are not to be counted.
    """

    def __init__(
        self, spec: str, workload: Workload, seed: int, has_timeline: bool = False, as_published: bool = True
    ) -> None:
        self.name, self.options = parse_spec(spec)
        self._as_published = as_published
        self._workload, self._seed = workload, seed
        self._rank, self._world_size = dist.get_rank(), dist.get_world_size()
        module = workload.build_model(seed)
        self.n_parameters = sum(parameter.numel() for parameter in module.parameters())
        self._last_gradient_s: float | None = None
        self._hooks: list[Any] = []
        self._model: Any = self._shard(module) if self.name in SHARDED else self._replicate(module)
        self._optimizers = workload.build_optimizers(self._model)
        self._schedulers = workload.build_schedulers(self._optimizers)
        self.attachment: gradwire.Attachment | None = None
        self._quantiser: TrainingThreadQuantiser | None = None
        self._timeline = Timeline() if has_timeline else None
        self._baseline_bytes: Callable[[], float] = lambda: 0.0
        self._owns_step, self.settling_steps = False, 0
        if self.name in BASELINES:
            self._register_baseline()
        else:
            self.attachment = self._attach()
            self._owns_step = self.attachment.scheme.owns_step
            self.settling_steps = self.attachment.scheme.settling_steps
            if self._timeline is not None:
                self.attachment.recorder.add_sink(self._timeline)
        self.losses: list[float] = []
        self.times: list[StepTimes] = []

    def _replicate(self, module: nn.Module) -> DistributedDataParallel:
        trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
        self._hooks = [parameter.register_post_accumulate_grad_hook(self._note_gradient) for parameter in trained]
        ddp_options, whole_mb = self._workload.ddp_options(), 1 + 4 * self.n_parameters // (1 << 20)
        if self.name in torch_hooks.ONE_BUCKET:
            ddp_options["bucket_cap_mb"] = whole_mb
        elif "bucket_mb" in self.options:
            # The least that DDP takes for a size still lets no two tensors share a bucket.
            ddp_options["bucket_cap_mb"] = min(max(float(self.options["bucket_mb"]), 1e-6), whole_mb)
        return DistributedDataParallel(module, **ddp_options)

    def _shard(self, module: nn.Module) -> nn.Module:
        """Whole copies on all nodes and shards inside, or shards over all."""
        if self.name in OVER_ALL:
            sharding.check_options(self.name, self.options)
            self._sharded = Sharded(module, self.options)
        else:
            shape = (self._world_size // ranks_per_node(), ranks_per_node())
            self._sharded = Sharded(module, {}, init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard")))
        return module

    def _attach(self) -> gradwire.Attachment:
        if self.name == "fsdp2-shards":
            return self._sharded.attach(self._optimizers)
        # DDP's bucket size is no option of the scheme's: those that work by block want buckets no larger than blocks.
        options = {key: value for key, value in self.options.items() if key != "bucket_mb"}
        name = options.pop("scheme", "plain") if self.name == "fsdp2" else self.name
        return gradwire.attach(self._model, self._optimizers, make_scheme(name, options, self._as_published))

    def step(self) -> None:
        """One training step; its times and loss are kept."""
        number = len(self.times)
        batch = self._workload.batch_at(number, self._rank, self._world_size, self._workload.batch_size, self._seed)
        # Dropout must not depend on which methods ran before.
        torch.manual_seed((self._seed * 1_000_003 + number) * 1_009 + self._rank)
        started = time.perf_counter()
        self._model.zero_grad(set_to_none=True)
        loss = self._workload.loss(self._model, batch)
        loss.backward()
        reduced = time.perf_counter()
        steps: list[Any] = [*self._optimizers, *self._schedulers]
        for one in steps:
            one.step()
        ended = time.perf_counter()
        # Behind FSDP2 nobody says when a gradient is there: what communication was not hidden stays in `local_s`.
        last_gradient_s = self._last_gradient_s or reduced
        if self._timeline is not None:
            self._timeline.note_step(started, last_gradient_s, ended)
        waiting_s, local_s = reduced - last_gradient_s, last_gradient_s - started
        if self.attachment is not None and self._owns_step:
            # The forward pass, too, stood still for blocks of the step before.
            forward_wait_s = max(0.0, self.attachment.recorder.steps[-1].exposed_ns / 1e9 - waiting_s)
            local_s, waiting_s = local_s - forward_wait_s, waiting_s + forward_wait_s
        self.times.append(StepTimes(local_s, waiting_s, ended - reduced))
        self.losses.append(float(loss.detach()))

    def fixed_as(self, spec: str) -> str:
        """The spec of a method that does all the time what `auto` here may do, which it calls `spec`."""
        precision = "".join(f",{key}={self.options[key]}" for key in PRECISION if key in self.options)
        return spec if self.name == "auto" else f"{self.name}:{spec}{precision}"

    def own_stats(self) -> dict[str, Any]:
        """gradwire's own figures; empty for a baseline."""
        return {} if self.attachment is None else self.attachment.stats()

    def finish_turn(self) -> None:
        """End of a turn: what a scheme has put off is done before the next method's turn, on the last step's account."""
        if self.attachment is None or not self._owns_step:
            return
        started = time.perf_counter()
        self.attachment.flush()
        last, ended = self.times[-1], time.perf_counter()
        self.times[-1] = StepTimes(last.local_s, last.waiting_s + ended - started, last.update_s)
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

    def _note_gradient(self, _: torch.Tensor) -> None:
        # Runs when a gradient is in `.grad` and before DDP's reducer hears of it: the last call of a step is the end of
        # this rank's own computation.
        self._last_gradient_s = time.perf_counter()

    def stats(self) -> dict[str, float]:
        """What it has come to so far on this rank.

        `sent_bytes`, for gradients: gradwire's count, or what a baseline's hook must send; seconds in the codec, hidden or not,
        where a hook tells: `codec_s`, of encoding, decoding and what they need, and of these `decode_s`, which grows with the
        messages received, the rest with those sent.
        """
        if own := self.own_stats():
            codec_s = float(sum(own[f"{kind}_s"] for kind in _CODEC_KINDS))
            return {"sent_bytes": float(own["bytes_sent"]), "codec_s": codec_s, "decode_s": float(own["decode_s"])}
        if self._quantiser is not None:
            busy_s, sent_bytes = self._quantiser.busy_s, float(self._quantiser.sent_bytes)
            return {"sent_bytes": sent_bytes, "codec_s": sum(busy_s.values()), "decode_s": busy_s["decode"]}
        sent = {"sent_bytes": self._baseline_bytes()}
        return {**sent, "codec_s": 0.0, "decode_s": 0.0} if self.name == "ddp" else sent

    def close(self) -> None:
        """Let gradwire go, and the model: autograd holds its hooks where the garbage collector does not look. Collective."""
        for hook in self._hooks:
            hook.remove()
        if self.attachment is not None:
            self.attachment.close()

    def _register_baseline(self) -> None:
        """The hook of a baseline, and what it must send so far: `_baseline_bytes`."""
        n_elements, world_size = self.n_parameters, self._world_size
        if self.name == "hsdp":
            n_nodes, n_shard = world_size // ranks_per_node(), -(-n_elements // ranks_per_node())
            self._baseline_bytes = lambda: float(len(self.times) * ring_bytes(4 * n_shard, n_nodes))
        elif self.name == "fully-shard":
            self._baseline_bytes = lambda: self._sharded.sent_bytes(len(self.times))
        elif self.name in TRAINING_THREAD:
            codec = TRAINING_THREAD[self.name](**self.options)
            self._quantiser = TrainingThreadQuantiser(codec, getattr(self._model.module, "occupy", None))
            self._quantiser.register(self._model)
            if self._timeline is not None:
                self._timeline.communicating = self._quantiser.communicate_spans
                self._timeline.training_codec = self._quantiser.codec_spans
        else:
            defaults = _POWER_SGD if self.name == "ddp-powersgd" else {}
            hook = torch_hooks.TorchHook(self.name, {**defaults, **self.options})
            hook.register(self._model)
            self._baseline_bytes = lambda: hook.sent_bytes(len(self.times))


# ---- the quantiser on the training thread


class _Exchange:
    """One bucket layout's buffers, and what of the bucket is under way.

    Attributes:
        parts: the slice of each rank's part.
        residual: (n,) float32: what this rank's messages have left out so far.
        pushes, pushed: (world, slot) uint8: messages to and from every rank. `pulls`: everyone's answers.
    """

    def __init__(self, n: int, world_size: int, codec: Quantised) -> None:
        edges = [n * part // world_size for part in range(world_size + 1)]
        self.parts = list(map(slice, edges, edges[1:]))
        largest = -(-n // world_size)
        # A whole number of int64: slots lie behind one another.
        slot = -(-(_LENGTH_BYTES + codec.max_encoded_bytes(largest, torch.float32)) // 8) * 8
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

    When not to use this: in training. It exists to be compared with; its residuals belong to buckets, and the first step's
    are lost when DDP rebuilds them.

    Args:
        codec: one-bit or two-bit.
        occupy: told how many seconds of a backward pass the codec took, by an emulated accelerator that has to wait.

    Attributes:
        codec_spans, communicate_spans: (start_s, end_s) on `time.perf_counter`; all codec work, and every collective
            from its start to its end.
        busy_s: seconds in the codec so far, "encode" and "decode".
        sent_bytes: bytes that this rank has sent so far.
    """

    def __init__(self, codec: Quantised, occupy: Callable[[float], None] | None = None) -> None:
        use_fair_share_of_cores()
        self._codec, self._occupy = codec, occupy
        self._rank, self._world_size = dist.get_rank(), dist.get_world_size()
        self._exchanges: dict[int, _Exchange] = {}
        self._under_way: list[_Exchange] = []
        self.codec_spans: list[tuple[float, float]] = []
        self.communicate_spans: list[tuple[float, float]] = []
        self.busy_s = {"encode": 0.0, "decode": 0.0}
        self.sent_bytes = 0

    def register(self, model: DistributedDataParallel) -> None:
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
        n_bytes = self._codec.encode_with_residual(values, residual, slot[_LENGTH_BYTES:])
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
        spans = self.communicate_spans
        work.get_future().add_done_callback(lambda _: spans.append((started, time.perf_counter())))
        return work


# ---- names and options


def ranks_per_node() -> int:
    """How many ranks share this one's node, by LOCAL_WORLD_SIZE."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


def check_baseline_options(name: str, options: dict[str, Any]) -> None:
    """Raises: InvalidArgument (what a baseline does not take); schemes check their own options."""
    if name not in BASELINES:
        return
    if name in TRAINING_THREAD:  # the codec's own
        codecs.by_name(name.removeprefix("ddp-"), **options)
        return
    if name == "fully-shard":
        sharding.check_options(name, options)
        return
    known = _BASELINE_OPTIONS.get(name, ())
    for key, value in options.items():
        if key not in known:
            raise InvalidArgument(f"{name} takes {', '.join(known) or 'no options'} here, not {key}")
        if isinstance(value, bool) or not isinstance(value, int | float) or not value >= 0:
            raise InvalidArgument(f"{name}:{key}={value}: expected a number of 0 or more")
    if options.get("start", 0) > _POWER_SGD["start"] or options.get("rank", 1) < 1:
        raise InvalidArgument(f"{name}: expected start from 0 to {_POWER_SGD['start']} and rank from 1")


def names() -> list[str]:
    """What `all` means: the baselines, then every scheme of the registry that works with any optimizer."""
    return [name for name in [*BASELINES, *schemes.names()] if name not in more()]


def more() -> list[str]:
    """What there is beside these: doors, codecs on the training thread, and schemes of one optimizer."""
    return [*BY_NAME_ONLY, *(name for name in schemes.names() if schemes.needs_momenta(name))]


def describe(method: TrainMethod) -> str:
    """The options, as written in a spec, and what was done to run it at all."""
    words = [f"{key}={value}" for key, value in method.options.items()]
    return ",".join([*words, "one bucket"] if method.name in torch_hooks.ONE_BUCKET else words)
