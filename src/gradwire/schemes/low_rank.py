"""Low-rank schemes: each gradient matrix is approximated by P Q^T, and factors are summed in its place.

An algorithm (`acp_sgd.py`, `power_sgd.py`) is one function: what becomes of the matrices of one bucket. `LowRank` is the scheme
around it, and `Fusion` runs it for all buckets of a step, so that sums are fused and overlap the backward pass.
"""

import contextlib
import functools
import logging
import math
import zlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch.futures import Future

from gradwire import checks
from gradwire.core.bucket import Bucket, Layout, Slot, offsets_of
from gradwire.core.feedback import Unused
from gradwire.core.session import Session
from gradwire.errors import InvalidArgument, Unsupported
from gradwire.gpu.kernels import kernels_for
from gradwire.schemes.compressed import Compressed
from gradwire.schemes.matrices import MatrixShape, checksum, draw_factor, highest_rank, matrix_shape, orthogonalise
from gradwire.schemes.momenta import Momenta, Momentum
from gradwire.schemes.plain_steps import PlainSteps, is_beside_adam
from gradwire.schemes.selection import ByName, Names, embeddings_and_heads
from gradwire.wire.communicator import ring_bytes
from gradwire.wire.device_wire import DeviceWire
from gradwire.wire.preamble import compare_preambles, name_other_factors
from gradwire.wire.wire import Wire

_log = logging.getLogger(__name__)
_WIRE_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
_MAX_RANKS_BFLOAT16 = 256  # fingerprints are counts of ranks, and bfloat16 holds integers up to here
_MIB = float(1 << 20)
# What one factor leaves out comes late, and an optimizer's momentum multiplies it: docs/systems/acp-sgd.md.
_MOST_MOMENTUM, _DECAY_BESIDE_MOMENTUM = 0.5, 0.5

# What an algorithm does when it goes on: send more, write the mean, or keep factors for the next step. Before "send" and
# "write" all that it has sent must have come back as its mean, before "keep" the step must count.
Next = Literal["send", "write", "keep"]


@dataclass(frozen=True)
class Options:
    """The options of low-rank schemes.

    Attributes:
        rank: of the approximation; a matrix with fewer rows or columns uses that many.
        min_compression_rate: a matrix n x m is sent as it is if n m / what a step sends of it is below: (n + m) rank, or, of
            one factor a step, half of that. 0: compress all.
        start_step: steps before this one are reduced plainly. None: 0, but 100 for acp-sgd beside all but SGD.
        error_feedback: add what compression left out to the next gradient.
        feedback_decay: the share of a residual that is kept for the next step. None: 1, but 0.5 for acp-sgd beside SGD with a
            momentum above 0.5, which multiplies what comes late.
        reuse: begin with the factor of the step before; False draws a new one every step.
        overlap: compress during the backward pass; False waits for its end, so that nothing competes with it.
        buffer_mb: tensor fusion: buffers are summed when they hold what stands for this much gradient (MiB x the
            share of the model that is sent). 0: every tensor alone; inf: all at the end. Buffers join successive buckets, and
            what fills early is sent early; for compression in smaller portions lower DDP's own bucket_cap_mb.
        factor_dtype: "float32" or "bfloat16", of everything on the wire. Rounding of factors is fed back,
            that of uncompressed parameters is not.
        seed: of the factors that training starts with; the same on all ranks.
        exempt, only: tensors that are not, or that alone are, compressed, by name. exempt=None: none, but under Adam
            the embeddings and the heads, whose rows are words, most of them of none of a batch's.
    Raises: InvalidArgument (a value out of range).
    """

    rank: int = 4
    min_compression_rate: float = 2.0
    start_step: int | None = None
    error_feedback: bool = True
    feedback_decay: float | None = None
    reuse: bool = True
    overlap: bool = True
    buffer_mb: float = 25.0
    factor_dtype: str = "float32"
    seed: int = 0
    exempt: Names | None = None
    only: Names | None = None

    def __post_init__(self) -> None:
        checks.count("rank", self.rank)
        rate = self.min_compression_rate
        if not rate >= 0:
            raise InvalidArgument(f"min_compression_rate must be at least 0 (compress all), got {rate}")
        if self.feedback_decay is not None:
            checks.share("feedback_decay", self.feedback_decay)
        if math.isnan(self.buffer_mb) or self.buffer_mb < 0:
            raise InvalidArgument(f"buffer_mb must be 0 (no fusion), a size or inf, got {self.buffer_mb}")
        checks.choice("factor_dtype", self.factor_dtype, _WIRE_DTYPES)
        for name in ("min_compression_rate", "buffer_mb"):
            object.__setattr__(self, name, float(getattr(self, name)))


class MatrixGroup:
    """The matrices of one shape in one bucket, stacked, so that one batched product compresses them all."""

    total: Tensor  # (k, n_rows, n_columns) float32: gradient + residual; less what of it is sent, the new residual

    def __init__(self, shape: MatrixShape, members: Sequence[tuple[Slot, str, tuple[int, int]]], device: torch.device):
        self.shape = shape
        self.slots, self.keys, self.spans = map(list, zip(*members, strict=True))
        # Transposed, so that row after row they are contiguous. Zeros, so that ranks agree on the other factors even where
        # their turn comes before they were ever summed.
        self.p = torch.zeros(len(members), shape.rank, shape.n_rows, dtype=torch.float32, device=device)
        self.q = torch.zeros(len(members), shape.rank, shape.n_columns, dtype=torch.float32, device=device)

    @functools.cached_property
    def new_q(self) -> Tensor:
        """As q, for a Q that is made while the last one still counts."""
        return torch.empty_like(self.q)

    def incoming(self, turn: str) -> Tensor:
        """(k, rank, n): the factors that come in when `turn`, "p" or "q", is computed."""
        return self.q if turn == "p" else self.p

    def in_bucket(self, flat: Tensor) -> list[Tensor]:
        """k times (n_rows, n_columns): the matrices in the bucket's values."""
        return [flat[start:end].view(self.shape.n_rows, self.shape.n_columns) for start, end in self.spans]

    def redraw(self, factors: Tensor, options: Options, step: int) -> None:
        """Draw `factors` anew; with `reuse` only those that are zero: they would stay so, whatever the gradients."""
        # Which a device is asked for, and waited for, only if it matters.
        are_kept = factors.flatten(1).any(1).tolist() if options.reuse else [False] * len(self.keys)
        for factor, key, is_kept in zip(factors, self.keys, are_kept, strict=True):
            if not is_kept:
                factor.copy_(draw_factor(options.seed, key, step, *factor.shape))


class BucketPlan:
    """How the buckets of one layout are compressed: matrices in groups by shape, and the spans of what travels `dense`."""

    def __init__(self, groups: list[MatrixGroup], dense: list[tuple[int, int]], device: torch.device) -> None:
        self.groups, self.dense = groups, dense
        self.checksum = 0  # of the factors that come in next, for ranks to compare
        self.spans = [span for group in groups for span in group.spans]
        slots = [slot for group in groups for slot in group.slots]
        *offsets, n = offsets_of(slots)
        # A bucket of the matrices alone, group by group: as residuals are kept. Its values are nobody's.
        values = torch.empty(1, dtype=torch.float32, device=device).expand(n)
        self.matrices = Bucket(values, Layout(values, slots, offsets))

    def incoming(self, turn: str) -> Iterator[tuple[Slot, Tensor]]:
        """The factor (rank, n) of each slot that comes in when `turn` is computed."""
        for group in self.groups:
            yield from zip(group.slots, group.incoming(turn), strict=True)

    def keep(self, turn: str) -> None:
        """The factors that come in for `turn` are those of the next step."""
        self.checksum = 0
        for group in self.groups:
            self.checksum = checksum(group.incoming(turn), self.checksum)


class Plans:
    """A plan for every bucket layout in use, and factors of slots that are in none: buckets are rebuilt."""

    def __init__(self, scheme: "LowRank") -> None:
        self._scheme = scheme
        self._plans: dict[Layout, BucketPlan] = {}
        self.keys: dict[Slot, str] = {}  # of all that were in any bucket: what their factors are drawn from
        self._n_elements = {"p": 0, "q": 0, "": 0}  # sent of the model so far, dense tensors included, and in all
        self._loose: dict[Slot, Tensor] = {}

    def find(self, bucket: Bucket, turn: str) -> BucketPlan:
        """The plan of this bucket; in a new one what comes in is that of earlier steps, or drawn."""
        if bucket.layout in self._plans:
            return self._plans[bucket.layout]
        for layout, old in list(self._plans.items()):  # those that share a slot with it are of an old layout, and go
            if not layout.slots or not set(bucket.slots).isdisjoint(layout.slots):
                del self._plans[layout]
                self._loose.update(old.incoming(turn))
        plan = self._plans[bucket.layout] = self._make(bucket)
        for slot, factor in plan.incoming(turn):
            if slot in self._loose:
                factor.copy_(self._loose.pop(slot))
                continue
            factor.copy_(draw_factor(self._scheme.options.seed, self.keys[slot], 0, *factor.shape))
            if self._scheme.takes_turns:
                orthogonalise(self._scheme.kernels, factor[None])
        plan.keep(turn)
        return plan

    def factors(self, turn: str) -> dict[Slot, Tensor]:
        """(rank, n) by slot: what comes in next."""
        return dict(pair for plan in self._plans.values() for pair in plan.incoming(turn)) | self._loose

    def load(self, factors: dict[Slot, Tensor]) -> None:
        """Begin with these."""
        self._plans, self._loose = {}, factors

    def rate_of(self, side: str) -> float:
        """Elements sent / elements of the gradient, over the whole model as far as it has been seen."""
        return self._n_elements[side] / self._n_elements[""] if self._n_elements[""] else 1.0

    def _make(self, bucket: Bucket) -> BucketPlan:
        dense = [] if bucket.slots else [(0, bucket.n_elements)]
        members: dict[MatrixShape, list[tuple[Slot, str, tuple[int, int]]]] = {}
        for slot, (start, end) in zip(bucket.slots, bucket.spans, strict=True):
            shape = self._scheme.shape_of(slot)
            if slot not in self.keys:
                # Without names: the order in which slots first appear, which is the same on all ranks.
                self.keys[slot] = slot.name or f"#{len(self.keys)}"
                n = slot.numel()
                n_p, n_q = (shape.rank * shape.n_rows, shape.rank * shape.n_columns) if shape else (n, n)
                for side, n_sent in (("", n), ("p", n_p), ("q", n_q)):
                    self._n_elements[side] += n_sent
            if shape is not None:
                members.setdefault(shape, []).append((slot, self.keys[slot], (start, end)))
            elif start < end:
                dense.append((start, end))
        device = bucket.buffer.device
        return BucketPlan([MatrixGroup(*group, device) for group in members.items()], dense, device)


@dataclass(eq=False)
class Work:
    """One bucket on its way through an algorithm."""

    bucket: Bucket
    wire: Wire  # the bucket's end of it
    done: Future  # that the mean is there
    plan: BucketPlan
    loss_scale: float
    steps: Iterator[Next] = field(init=False)  # the algorithm, which pauses where it waits; `next` is what it does then
    next: Next = "send"
    fingerprint: Tensor | None = None  # what ranks must share; None on a device, where no host would read its mean
    n_awaited: int = 0  # tensors that are still to be summed
    total: Tensor = field(init=False)  # the totals of all groups, one after the other
    # what is expected of each matrix's gradient, and is no part of its total
    expected: list[Momentum] = field(default_factory=list)
    unused: Unused | None = None  # residuals of matrices that wait


class _FusedBuffer(NamedTuple):
    """Tensors that share one all-reduce, and `values`, all of them."""

    tensors: list[tuple[Work, Tensor]]
    values: Tensor
    wait: Callable[[], None]  # until it is summed; on a device: has the stream wait
    is_summed: Callable[[], bool] = lambda: True


class Fusion:
    """Runs the algorithm for a step's buckets on the lane: fused sums in an order that all ranks share, beside what is still
    compressed."""

    def __init__(self, session: Session, plans: Plans, options: Options) -> None:
        self._communicator, self._wire, self._plans = session.communicator, session.wire, plans
        self._dtype, self._overlaps = _WIRE_DTYPES[options.factor_dtype], options.overlap
        # Of a fused buffer, if nothing were compressed.
        self._buffer_bytes = options.buffer_mb * _MIB * (self._dtype.itemsize / 4)
        self.drop()

    def drop(self) -> None:
        """Forget everything, after a failure."""
        self._held: list[Work] = []  # for the end of the backward pass
        self._half_sent: list[Work] = []  # they have sums to wait for before they send the rest
        self._filling: list[tuple[Work, Tensor]] = []
        self._filling_bytes = 0
        self._started: deque[_FusedBuffer] = deque()
        self._is_end = False  # the last bucket has come: the lane waits for all sums that are started

    def take(self, work: Work) -> None:
        """Have a bucket send what it has, now or at the end of the backward pass; with the last one all of the step
        ends. What waits for a first sum goes on when the next bucket has come, so that all ranks keep one order of
        sums."""
        self._is_end = is_last = work.bucket.is_last
        self._held.append(work)
        if not (self._overlaps or is_last):
            return
        before = self._half_sent
        for held in self._held:
            self._go_on(held)
        self._half_sent = [held for held in self._held if held.next == "send"]
        self._held = []
        if self._half_sent:
            self.flush()
        for works in [before, self._half_sent] if is_last else [before]:
            for half_sent in works:
                while half_sent.n_awaited:
                    self._finish_first()
                self._go_on(half_sent)
            if works:
                self.flush()
        if is_last:
            self.flush()
            while self._started:
                self._finish_first()
        elif self._wire.on_device:
            self._finish_summed()

    def _go_on(self, work: Work) -> None:
        """Run a bucket's algorithm up to where it waits for its sums."""
        with work.wire.timing("encode"):
            work.next = next(work.steps)
        self._write_if_summed(work)

    def _write_if_summed(self, work: Work) -> None:
        if work.next != "write" or work.n_awaited:
            return
        mean = work.bucket.buffer
        with work.wire.timing("decode"):
            work.next = next(work.steps)
        work.wire.conclude(mean)
        if mean.dtype == torch.float16:
            work.wire.note(work.wire.all_finite(mean))  # it may leave float16's range although no sum did
        if not work.bucket.is_last:  # the last one is there when all ranks are known to agree
            work.done.set_result(mean)

    def send(self, work: Work, tensors: Iterable[Tensor], side: str) -> None:
        """Have tensors replaced by their means over the ranks, in buffers of the size for `side`, "p" or "q"."""
        cap_bytes = self._buffer_bytes * self._plans.rate_of(side)
        for tensor in tensors:
            work.n_awaited += 1
            self._filling.append((work, tensor.view(-1)))
            self._filling_bytes += tensor.numel() * self._dtype.itemsize
            if self._filling_bytes >= cap_bytes and tensor is not work.fingerprint:
                self.flush()

    def flush(self) -> None:
        """Start to sum what is left."""
        if not self._filling:
            return
        n, tensors = self._filling_bytes // self._dtype.itemsize, self._filling
        values = torch.empty(n, dtype=self._dtype, device=self._wire.device)
        torch.cat([tensor for _, tensor in tensors], out=values)
        self._filling, self._filling_bytes = [], 0
        if isinstance(self._wire, DeviceWire):
            self._started.append(_FusedBuffer(tensors, values, self._wire.group.start_reduce(values)))
            return
        timing = tensors[-1][0].bucket.record.timing("communicate")
        summed = self._communicator.start_all_reduce(values)
        finish = functools.partial(self._communicator.finish, summed)
        self._started.append(_FusedBuffer(tensors, values, finish, summed.done))

        def note_end(_: Future) -> None:
            timing.end()
            if not self._is_end:
                with contextlib.suppress(InvalidArgument):  # closed since
                    self._communicator.submit(self._finish_summed)

        summed.add_done_callback(note_end)

    def _finish_summed(self) -> None:
        """Hand out the buffers, from the first on, that are summed already."""
        while self._started and self._started[0].is_summed():
            self._finish_first()

    def _finish_first(self) -> None:
        buffer = self._started.popleft()
        buffer.wait()
        mean = self._wire.divide(buffer.values.to(torch.float32), self._wire.world_size)
        sizes: dict[Work, int] = {}  # of what each has in it, one after the other
        parts = mean.split([tensor.numel() for _, tensor in buffer.tensors])
        for (work, tensor), part in zip(buffer.tensors, parts, strict=True):
            tensor.copy_(part)
            work.n_awaited -= 1
            sizes[work] = sizes.get(work, 0) + part.numel()
        for work, part in zip(sizes, mean.split(list(sizes.values())), strict=True):
            n_bytes = part.numel() * self._dtype.itemsize
            work.bucket.record.count_exchanged(ring_bytes(n_bytes, self._wire.world_size))
            work.wire.note_message(self._wire.all_finite(part))  # the same bits, and so the same verdict, on all ranks
            self._write_if_summed(work)


Steps = Callable[["LowRank", Work], Iterator[Next]]


class LowRank(Compressed):
    """Mean over the ranks, in low rank, by an algorithm for one bucket: what it sends is the mean when it goes on.

    Args:
        takes_turns: a step sends the one or the other factor; what comes in was summed a step ago, and is orthonormal.
        momenta: what is expected of gradients: of what they differ from it the mean is taken.
    """

    options_of = Options

    def __init__(
        self, name: str, steps: Steps, options: Options, takes_turns: bool = False, /, momenta: Momenta | None = None
    ) -> None:
        self.name = name
        self._steps, self.options, self.takes_turns, self._momenta = steps, options, takes_turns, momenta
        self._n_factors = 1 if takes_turns else 2  # that a step sends
        super().__init__(
            error_feedback=options.error_feedback,
            plain=PlainSteps(name, "start_step", options.start_step),
            select=ByName(options.exempt or (), options.only or ()),
        )
        self.wire_dtype = _WIRE_DTYPES[options.factor_dtype]
        self._decay = 1.0 if options.feedback_decay is None else options.feedback_decay

    @property
    def configuration(self) -> dict[str, Any]:
        chosen = ("start_step", "exempt", "only")
        shared = {name: value for name, value in vars(self.options).items() if name not in chosen}
        return shared | {"feedback_decay": self._decay, "start_step": self.plain.n} | self.select.configuration

    def bind(self, session: Session) -> None:
        """Raises: Unsupported (more ranks than bfloat16 can count; with momenta, none that is known, or DDP that looks for
        unused parameters), InvalidArgument (names of no tensor)."""
        n_ranks = session.communicator.world_size
        if self.wire_dtype == torch.bfloat16 and n_ranks > _MAX_RANKS_BFLOAT16:
            most = f'factor_dtype="bfloat16" takes up to {_MAX_RANKS_BFLOAT16} ranks'
            raise Unsupported(f'{most}, this run has {n_ranks}; use factor_dtype="float32"')
        if self.options.feedback_decay is None:
            momenta = [float(group.get("momentum", 0.0)) for group in session.optimizers.param_groups]
            is_late = self.takes_turns and not is_beside_adam(session) and max(momenta, default=0.0) > _MOST_MOMENTUM
            self._decay = _DECAY_BESIDE_MOMENTUM if is_late else 1.0
        if self._momenta is not None:
            self._momenta.bind(session, self.name)
        super().bind(session)
        if self.options.exempt is None and is_beside_adam(session):
            words = embeddings_and_heads(session.module)
            self.select.bind(session, words)
            if words:
                whole = {name: slot.numel() for name, slot in session.slots.items() if not self.select(slot)}
                share = sum(whole.values()) / max(1, sum(slot.numel() for slot in session.slots.values()))
                text = "gradwire %s: sent whole, under Adam: %s, %.0f %% of the gradient; exempt=() compresses them"
                _log.info(text, self.name, ", ".join(whole), 100 * share)
        self.kernels = kernels_for(session.wire.device)
        self._begin_anew()

    def _begin_anew(self) -> None:
        self.turn = "p"  # or "q": the factor that a step computes first; the other one comes in
        self._is_told = False
        self._works: list[Work] = []  # all compressed buckets of this step, in order
        self.plans = Plans(self)
        self.fusion = Fusion(self.session, self.plans, self.options)

    def shape_of(self, slot: Slot) -> MatrixShape | None:
        """The matrix that a slot is compressed as."""
        rank, rate = self.options.rank, self.options.min_compression_rate
        return matrix_shape(slot, rank, rate, self._n_factors) if self.select(slot) else None

    def reduce(self, bucket: Bucket) -> Future:
        """Compress on the lane. The future may complete with a later bucket, at the latest with the last one."""
        done: Future = Future()

        def fail_open(taken: Future) -> None:  # if a bucket has failed, no other of the step is waited for any longer
            try:
                taken.wait()
            except Exception as error:
                for one in [done, *(work.done for work in self._works)]:
                    if not one.done():
                        one.set_exception(error)

        self.session.communicator.submit(self._take, bucket, done).add_done_callback(fail_open)
        return done

    def _take(self, bucket: Bucket, done: Future) -> None:
        wire = self.wire(bucket)
        if wire.world_size == 1:  # the mean of one is itself: nothing to send, so nothing to lose
            done.set_result(bucket.buffer)
            return
        self._agree_while_settling(bucket, wire)
        with bucket.at_work():
            work = None
            if bucket.step >= self.plain.n:
                work = Work(bucket, wire, done, self.plans.find(bucket, self.turn), self.session.loss_scale())
                work.steps = self._run(work)
                self._works.append(work)
            if wire.on_device and bucket.is_last:  # no host reads a fingerprint there: compared one step behind
                held = zlib.crc32(repr([one.plan.checksum for one in self._works]).encode())
                self._check.start(self.preamble(bucket), bucket.record, held)
                self._check.fail_early()
            if work is None:
                wire.mean(bucket.buffer)
            else:
                self.fusion.take(work)
            if bucket.is_last:
                self._compare_fingerprints()
            if bucket.is_last or work is None:
                done.set_result(bucket.buffer)

    def _run(self, work: Work) -> Iterator[Next]:
        """The algorithm, and what comes before."""
        bucket = work.bucket
        sent = [bucket.buffer[start:end] for start, end in work.plan.dense]
        if not work.wire.on_device:
            # 32 bits as floats: their means are 0 or 1 if ranks share them. bfloat16 counts up to 256 exactly.
            facts = (self.configuration_hash, bucket.layout_hash, bucket.step, work.plan.checksum)
            bits = zlib.crc32(repr(facts).encode())
            ones = [float(bits >> place & 1) for place in range(32)]
            work.fingerprint = torch.tensor(ones, dtype=torch.float32, device="cpu")
            sent.insert(0, work.fingerprint)
        self.fusion.send(work, sent, self.turn)
        if work.plan.groups:
            self._add_residuals(work)
        for pause in self._steps(self, work):
            if pause == "keep" and self._momenta is not None:  # the mean of the differences is written
                for expected, (start, end) in zip(work.expected, work.plan.spans, strict=True):
                    if expected.values is not None:
                        bucket.buffer[start:end].add_(expected.values, alpha=work.loss_scale)
            yield pause

    def _add_residuals(self, work: Work) -> None:
        """total = gradient + residual, both multiplied by the loss scale, of every matrix; the bucket stays as it is.
        An unused parameter sends nothing (`Unused`); on a device, which would have to be asked, it sends its
        residual."""
        matrices, gradient, feedback = work.plan.matrices, work.bucket.buffer, self.session.feedback
        residual = None
        if not self.error_feedback:
            work.total = feedback.room(matrices.layout, matrices.n_elements, device=gradient.device)
        else:
            residual, work.total = feedback.pair(matrices)
            # With momenta a gradient of zeros is one, as it is to the optimizer.
            if self._momenta is None and not all(is_used := work.wire.used(gradient, work.plan.spans)):
                work.unused = Unused(matrices.spans, is_used, residual)
        for (first, last), (start, end) in zip(work.plan.spans, matrices.spans, strict=True):
            values, total = gradient[first:last], work.total[start:end]
            if residual is None:
                total.copy_(values)
            elif values.dtype == torch.float32:
                torch.add(values, residual[start:end], alpha=work.loss_scale, out=total)
            else:
                total.copy_(values).add_(residual[start:end], alpha=work.loss_scale)
        if work.unused is not None:
            work.unused.put_back()
        if self._momenta is not None:
            work.expected = [self._momenta.of(slot) for slot in matrices.slots]
            for expected, (start, end) in zip(work.expected, matrices.spans, strict=True):
                if expected.values is not None:
                    work.total[start:end].sub_(expected.values, alpha=work.loss_scale)
        sizes = [len(group.slots) * group.shape.n_rows * group.shape.n_columns for group in work.plan.groups]
        for group, total in zip(work.plan.groups, work.total.split(sizes), strict=True):
            group.total = total.view(-1, group.shape.n_rows, group.shape.n_columns)

    def keep_totals(self, work: Work) -> None:
        """What is left of the totals are the next residuals, if the step counts."""
        if not work.plan.groups:
            return
        if work.loss_scale != 1:
            work.wire.divide(work.total, work.loss_scale)
        if self._decay != 1:
            work.total.mul_(self._decay)
        for expected, (start, end) in zip(work.expected, work.plan.matrices.spans, strict=bool(work.expected)):
            work.total[start:end].mul_(expected.decay)
        if work.unused is not None:
            work.unused.keep(work.total, [True] * len(work.plan.spans))
        self.session.feedback.stage_bucket(work.plan.matrices, work.total)

    def _compare_fingerprints(self) -> None:
        """After the last sum, at a point that all ranks share. Raises: RankMismatch."""
        for work in self._works:
            shares = work.fingerprint
            if shares is not None and not bool(((shares == 0) | (shares == 1)).all()):
                communicator, mine = self.session.communicator, self.preamble(work.bucket)
                compare_preambles(communicator, mine, work.bucket.record)
                name_other_factors(communicator, mine, work.plan.checksum)

    def commit(self) -> None:
        """Residuals and factors of the step are those of the next."""
        if not self._works:  # in plain steps, and with one rank
            return
        record = self.session.recorder.open_bucket(self._works[0].bucket.step, -1, 0)
        with contextlib.nullcontext() if self.session.wire.on_device else record.timing("encode"):
            super().commit()
            for work in self._works:
                next(work.steps, None)
            if self.takes_turns:
                self.turn = "q" if self.turn == "p" else "p"
            for work in self._works:
                work.plan.keep(self.turn)
        self.session.recorder.close_bucket(record)
        if self._is_told or self.plans.factors(self.turn):
            return
        self._is_told = True  # that no matrix is compressed, and the rank at which one would be
        rate, slots = self.options.min_compression_rate, filter(self.select, self.plans.keys)
        highest = int(max((highest_rank(slot, rate, self._n_factors) for slot in slots), default=0))
        _log.warning(
            "gradwire %s: rank=%d compresses none of %d tensors, all are sent whole: %s",
            self.name, self.options.rank, len(self.plans.keys),
            f"rank={highest} or less compresses some, min_compression_rate=0 all matrices" if highest else
            "none is a matrix that is large enough; take another scheme",
        )  # fmt: skip

    def discard(self) -> None:
        self._works.clear()
        self.fusion.drop()
        super().discard()

    def close(self) -> None:
        super().close()
        self._begin_anew()

    def stats(self) -> dict[str, Any]:
        """Matrices compressed and whole, and steps in which something was not finite."""
        n_matrices = len(self.plans.factors(self.turn))
        n_whole = sum(slot.dim() > 1 and slot.numel() > 0 for slot in self.plans.keys) - n_matrices
        return {"n_matrices": n_matrices, "n_matrices_whole": n_whole, **super().stats()}

    def state_dict(self) -> dict[str, Any]:
        """Copies: {"residuals": {name: (n_rows, n_columns)}, "factors": {name: (rank, n)}}, float32."""
        slots = self.session.slots
        residuals = {
            name: residual.view(shape.n_rows, shape.n_columns)
            for name, residual in super().state_dict().get("residuals", {}).items()
            if (shape := self.shape_of(slots[name])) is not None
        }
        names = {slot: name for name, slot in slots.items()}
        factors = {names[slot]: factor.to("cpu", copy=True) for slot, factor in self.plans.factors(self.turn).items()}
        turn = {"is_step_for_p": self.turn == "p"} if self.takes_turns else {}
        return {"residuals": residuals, "factors": factors, **turn}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Raises: InvalidArgument (another model or rank)."""
        is_step_for_p = bool(state["is_step_for_p"]) if self.takes_turns else True
        factors = {}
        for name, factor in sorted(state["factors"].items()):
            slot = self.session.slots.get(name)
            if slot is None or (shape := self.shape_of(slot)) is None:
                why = "has no such parameter" if slot is None else "does not compress it"
                cure = "load the checkpoint into the model that wrote it"
                raise InvalidArgument(f"the checkpoint holds a factor of {name!r}, but this run {why}; {cure}")
            expected = (shape.rank, shape.n_columns if is_step_for_p else shape.n_rows)
            if factor.shape != expected or factor.dtype != torch.float32:
                found = f"{tuple(factor.shape)} {factor.dtype}, expected {expected} torch.float32"
                cure = "attach the scheme with the rank, and load into the model, of the saved run"
                raise InvalidArgument(f"the checkpoint's factor of {name!r} is {found}; {cure}")
            factors[slot] = factor.clone()
        super().load_state_dict(state)
        self.plans.load(factors)
        self.turn = "p" if is_step_for_p else "q"
