"""The frame of the low-rank schemes: which buckets are compressed when, what happens to non-finite ones, what is kept."""

from __future__ import annotations

import contextlib
import logging
import math
import zlib
from abc import abstractmethod
from typing import Any, ClassVar

import torch

from gradwire.control.checks import choice as check_choice
from gradwire.core.bucket import Bucket
from gradwire.core.session import Session
from gradwire.core.site import DeviceSite
from gradwire.core.slot import Slot
from gradwire.errors import InvalidArgument, Unsupported
from gradwire.gpu.kernels import kernels_on
from gradwire.schemes.low_rank.factors import orthogonalise, redraw_factors
from gradwire.schemes.low_rank.fusion import Fusion, Parcel, Work, fingerprint_of, ranks_agree
from gradwire.schemes.low_rank.matrices import MatrixGroup, MatrixShape, matrix_shape
from gradwire.schemes.low_rank.plan import LowRankPlan, Plans
from gradwire.schemes.low_rank.state import load_states, states_by_name
from gradwire.schemes.on_device import refuse_unused_parameters
from gradwire.schemes.plain_first import PlainFirst, is_beside_adam
from gradwire.schemes.selection import ByName, Names, embeddings_and_heads
from gradwire.wire.preamble import compare_preambles
from gradwire.wire.step_check import StepCheck, name_other_factors

_log = logging.getLogger(__name__)
_WIRE_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
_MAX_RANKS_BFLOAT16 = 256  # fingerprints are counts of ranks, and bfloat16 holds integers up to here
_MIB = float(1 << 20)
_FALLBACK = "non-finite gradient: this bucket was sent uncompressed"


class LowRank(PlainFirst):
    """Options and life cycle that ACP-SGD and Power-SGD share.

    Args:
        rank: of the approximation; a matrix with fewer rows or columns uses that many.
        min_compression_rate: a matrix n x m is sent as it is if n m / ((n + m) rank) is below. 0: compress all.
        start_step: steps before this one are reduced plainly. None: 0, but 100 for acp-sgd beside Adam and its kin.
        error_feedback: add what compression left out to the next gradient.
        reuse: begin with the factor of the step before; False draws a new one every step.
        overlap: compress during the backward pass; False waits for its end, so that nothing competes with it.
        buffer_mb: tensor fusion: buffers are summed when they hold what stands for this much gradient (MiB x the
            model's compression rate). 0: every tensor alone; inf: all at the end. Buffers join successive buckets, and
            what fills early is sent early; for compression in smaller portions lower DDP's own bucket_cap_mb.
        factor_dtype: "float32" or "bfloat16", of everything on the wire. Rounding of factors is fed back,
            that of uncompressed parameters is not.
        seed: of the factors that training starts with; the same on all ranks.
        names: `exempt`, `only`: tensors that are not, or that alone are, compressed, by name. exempt=None: none, but under Adam
            the embeddings and the heads, whose rows are words, most of them of none of a batch's.
    """

    state_is_per_world = True
    works_on_device = True
    options_of = ByName
    settled_by = "start_step"
    incoming_is_orthogonal: ClassVar[bool]  # whether factors are made orthonormal before they come in

    def __init__(
        self,
        rank: int = 4,
        min_compression_rate: float = 2.0,
        start_step: int | None = None,
        error_feedback: bool = True,
        reuse: bool = True,
        overlap: bool = True,
        buffer_mb: float = 25.0,
        factor_dtype: str = "float32",
        seed: int = 0,
        **names: Names | None,
    ) -> None:
        if isinstance(rank, bool) or not isinstance(rank, int) or rank < 1:
            raise InvalidArgument(f"rank must be an integer of at least 1, got {rank!r}")
        if not min_compression_rate >= 0:
            raise InvalidArgument(f"min_compression_rate must be at least 0 (compress all), got {min_compression_rate}")
        if math.isnan(buffer_mb) or buffer_mb < 0:
            raise InvalidArgument(f"buffer_mb must be 0 (no fusion), a size or inf, got {buffer_mb}")
        check_choice("factor_dtype", factor_dtype, _WIRE_DTYPES)
        self.rank = rank
        self.min_compression_rate = float(min_compression_rate)
        self._ask_plain_steps(start_step)
        self.error_feedback = error_feedback
        self.reuse = reuse
        self.overlap = overlap
        self.buffer_mb = float(buffer_mb)
        self.factor_dtype = factor_dtype
        self.seed = seed
        self._exempts_words = names.get("exempt") is None
        self.select = ByName(**{key: value for key, value in names.items() if value is not None})
        self._wire_dtype = _WIRE_DTYPES[factor_dtype]
        self._open: list[Work] = []  # buckets of this step whose futures are not done
        self._uncompressed: list[Work] = []  # of these, the ones that wait for the end of the backward pass
        self._works: list[Work] = []  # all compressed buckets of this step, in order
        self._unfinite: list[Work] = []
        self._is_step_finite = True
        self._is_concluded = False
        self._n_redone = 0
        self._n_not_finite = 0
        self._site: DeviceSite | None = None
        self._device = torch.device("cpu")

    @property
    def configuration(self) -> dict[str, Any]:
        names = ("rank", "min_compression_rate", "error_feedback", "reuse", "overlap", "buffer_mb", "factor_dtype",
                 "seed")  # fmt: skip
        shared = {name: getattr(self, name) for name in names} | {self.settled_by: self.n_plain_steps}
        return shared | self.select.configuration

    def bind(self, session: Session) -> None:
        """Raises: Unsupported (more ranks than bfloat16 can count), InvalidArgument (names of no tensor)."""
        communicator = session.communicator
        if self._wire_dtype == torch.bfloat16 and communicator.world_size > _MAX_RANKS_BFLOAT16:
            raise Unsupported(
                f'factor_dtype="bfloat16" takes up to {_MAX_RANKS_BFLOAT16} ranks, this run has '
                f'{communicator.world_size}; use factor_dtype="float32"'
            )
        exempts = self._exempts_words and is_beside_adam(session)
        words = embeddings_and_heads(session.module) if exempts else []
        self.select.bind(session, words)
        if words:
            whole = {name: slot.numel() for name, slot in session.slots.items() if not self.select(slot)}
            share = sum(whole.values()) / max(1, sum(slot.numel() for slot in session.slots.values()))
            _log.info(
                "gradwire %s: sent whole, under Adam: %s, %.0f %% of the gradient; exempt=() compresses them",
                self.name, ", ".join(whole), 100 * share,
            )  # fmt: skip
        super().bind(session)
        self._site, self._device = session.site, torch.device("cpu")
        if session.site is not None:
            refuse_unused_parameters(session)
            self._device = kernels_on(session.site.device).device
        self._check = StepCheck(communicator)
        self._plans = Plans(self._shape_of, self._device)
        self._fusion = Fusion(communicator, self._wire_dtype, self._on_arrival, session.site)

    def _shape_of(self, slot: Slot) -> MatrixShape | None:
        return matrix_shape(slot, self.rank, self.min_compression_rate) if self.select(slot) else None

    # ---- one bucket

    def reduce(self, bucket: Bucket) -> torch.futures.Future:
        """Compress on the lane. The future may complete with a later bucket, at the latest with the last one."""
        work = Work(bucket, torch.futures.Future())
        self._open.append(work)

        def fail_all_open(taken: torch.futures.Future) -> None:
            try:
                taken.wait()
            except Exception as error:
                self._fusion.drop()
                for waiting in list(self._open):
                    if not waiting.done.done():
                        waiting.done.set_exception(error)

        self.session.communicator.submit(self._take, work).add_done_callback(fail_all_open)
        return work.done

    def _take(self, work: Work) -> None:
        resident = work.bucket.resident
        if self.session.communicator.world_size == 1:  # the mean of one is itself: nothing to send, so nothing to lose
            self._close(work)
            return
        with contextlib.nullcontext() if resident is None else resident.at_work():
            self._enter(work)

    def _enter(self, work: Work) -> None:
        bucket = work.bucket
        if self._site is None:
            self._agree_while_settling(bucket)
        if self._is_plain(bucket):
            self._all_reduce_plainly(work)
            return
        work.plan = self._plans.find(bucket) or self._make_plan(bucket)
        self._works.append(work)
        self._uncompressed.append(work)
        if bucket.is_last and self._site is not None:
            self._start_check(work)
        if self.overlap or bucket.is_last:
            self._compress(self._uncompressed, bucket.is_last)
            self._uncompressed.clear()
            if self._site is not None:
                self._fusion.finish_summed()
        if bucket.is_last:
            self._conclude()

    def begin_step(self, step: int) -> None:
        super().begin_step(step)
        # Nobody waits for those of a backward pass that was given up half-way; for the step before someone may.
        self._open[:] = [other for other in self._open if other.bucket.step >= step - 1]
        self.session.communicator.submit(self._begin_on_lane)

    def _begin_on_lane(self) -> None:
        """Nothing of a backward pass that was given up half-way may live on."""
        self.settle()
        self.session.feedback.discard()
        self._uncompressed.clear()
        self._unfinite.clear()
        self._works.clear()
        self._is_step_finite = True
        self._is_concluded = False
        self._fusion.drop()
        if self._site is not None:
            self._site.begin_step()

    @abstractmethod
    def _compress(self, works: list[Work], is_last: bool) -> None:
        """Compress these buckets and start their sums; on `is_last` finish everything."""

    @abstractmethod
    def _write(self, group: MatrixGroup, bucket: Bucket) -> None:
        """Write the means of the matrices of `group`, whose factors are summed, to the bucket."""

    @abstractmethod
    def _incoming(self, group: MatrixGroup) -> torch.Tensor:
        """(k, rank, n): the factors that `group` is compressed with next."""

    def _make_plan(self, bucket: Bucket) -> LowRankPlan:
        plan = self._plans.make(bucket)
        for group in plan.groups:
            group.begin_with(self._incoming(group), self.seed, self.incoming_is_orthogonal)
        plan.sign_factors(self._incoming)
        return plan

    # ---- pieces of `_compress`

    def _send_uncompressed_part(self, work: Work, cap_bytes: float) -> None:
        """The fingerprint and the dense parameters."""
        work.is_sent = False
        work.dense = torch.empty(work.plan.n_dense, device=self._device)
        if self._site is None:
            work.fingerprint = fingerprint_of(self._facts_of(work))
            self._fusion.add(Parcel(work, work.fingerprint, work.fingerprint, joins_next=True), cap_bytes)
        for span in work.plan.dense:
            parcel = Parcel(work, span.in_bucket(work.bucket.buffer), span.in_fused(work.dense))
            self._fusion.add(parcel, cap_bytes)

    def _send_factors(self, work: Work, factors: torch.Tensor, cap_bytes: float) -> None:
        """Sum (k, rank, n) over the ranks, in place; first rounded to what the wire carries."""
        if self._wire_dtype != torch.float32:
            factors.copy_(factors.to(self._wire_dtype))
        for factor in factors:
            flat = factor.view(-1)
            self._fusion.add(Parcel(work, flat, flat), cap_bytes)

    def _on_arrival(self, work: Work) -> None:
        """Everything that was sent for `work` has been summed: write the means, and let DDP have the bucket."""
        if not work.is_finite:
            self._unfinite.append(work)
            return
        with work.bucket.record.timing("decode"):
            for group in work.plan.groups:
                self._write(group, work.bucket)
        for span in work.plan.dense:
            span.in_bucket(work.bucket.buffer).copy_(span.in_fused(work.dense))
        self._close(work)

    def _close(self, work: Work) -> None:
        """Complete the bucket's future; that of the last one stands for the whole step, and waits for `_conclude`."""
        if work in self._works and work.bucket.is_last and not self._is_concluded:
            return
        self._open.remove(work)
        work.done.set_result(work.bucket.buffer)

    def _cap_bytes(self, side: str) -> float:
        """The size of a fused buffer: buffer_mb of gradient, times how much of it this side's factors are."""
        rate = self._plans.rate_of(side) * self._wire_dtype.itemsize / 4
        return self.buffer_mb * _MIB * rate

    def _start_check(self, work: Work) -> None:
        """On a device, where no host reads a fingerprint: compare, one step behind, what all ranks must share."""
        held = zlib.crc32(repr([other.plan.checksum for other in self._works]).encode())
        self._check.start(self.preamble(work.bucket), work.bucket.record, held)
        self._check.fail_early()

    def _facts_of(self, work: Work) -> int:
        facts = (self.configuration_hash, work.bucket.layout_hash, work.bucket.step, work.plan.checksum)
        return zlib.crc32(repr(facts).encode())

    # ---- the end of a step

    def _conclude(self) -> None:
        """After the last sum, at a point that all ranks share: compare fingerprints, redo what was not finite."""
        for work in self._works:
            if not ranks_agree(work.fingerprint):
                mine = self.preamble(work.bucket)
                compare_preambles(self.session.communicator, mine, work.bucket.record)
                name_other_factors(self.session.communicator, mine, work.plan.checksum)
        for work in self._unfinite:
            if not self._n_redone:
                _log.warning("gradwire %s: %s (step %d)", self.name, _FALLBACK, work.bucket.step)
            self._n_redone += 1
            work.bucket.record.fallbacks.append(_FALLBACK)
            self._all_reduce_plainly(work)
            self._is_step_finite &= bool(work.bucket.buffer.isfinite().all())
            self.session.feedback.reset(work.bucket.slots)
        self._is_concluded = True
        self._close(self._works[-1])

    def _all_reduce_plainly(self, work: Work) -> None:
        bucket = work.bucket
        if self._site is not None:
            self._site.mean(bucket.buffer, bucket.record)
        else:
            self.wire(bucket).mean_plainly(bucket.buffer)
        self._close(work)

    def end_step(self, step: int) -> None:
        """Make residuals and factors of this step those of the next, if all its means are finite.

        On a device, which knows that later, `settle` does.
        """
        if step < self.n_plain_steps or self.session.communicator.world_size == 1 or not self._is_step_finite:
            return
        if self._site is not None:
            self._site.end_step()
            return
        record = self.session.recorder.open_bucket(step, -1, 0)
        with record.timing("encode"):
            self._commit()
        self.session.recorder.close_bucket(record)

    def settle(self) -> None:
        """On a device, wait for the step that ended last, and commit it if all of it was finite."""
        found = self._site.found() if self._site is not None else None
        if found is None or self._site is None:
            return
        if found.is_finite:
            with self._site.stream:
                self._commit()
            return
        for work in self._works:
            self.session.feedback.reset(work.bucket.slots)
        if not self._n_not_finite:
            _log.warning("gradwire %s: a gradient was not finite: its matrix is NaN on all ranks", self.name)
        self._n_not_finite += 1

    def _commit(self) -> None:
        self.session.feedback.commit()
        for work in self._works:
            for group in work.plan.groups:
                factors = self._next_factors(group)
                are_sums = self.reuse and work.is_finite  # those of a bucket that was sent again hold Inf
                redraw_factors(factors, group.keys, self.seed, work.bucket.step + 1, only_zero=are_sums)
                if self.incoming_is_orthogonal:
                    orthogonalise(factors)
                group.commit_factors(factors)
        self._end_of_commit()
        for work in self._works:
            work.plan.sign_factors(self._incoming)

    @abstractmethod
    def _next_factors(self, group: MatrixGroup) -> torch.Tensor:
        """(k, rank, n): which of this step's factors come in next."""

    def _end_of_commit(self) -> None:
        """After all groups of a step are committed."""

    def close(self) -> None:
        """The model is let go: what is bound again begins anew, without residuals."""
        self._site = None
        self._plans = Plans(self._shape_of, torch.device("cpu"))
        self.session.feedback.clear()
        self._works.clear()
        self._open.clear()
        super().close()

    # ---- between steps

    def stats(self) -> dict[str, Any]:
        """Matrices compressed, elements sent / elements by side, buffers summed, buckets redone uncompressed."""
        return {
            "n_matrices": len(self._plans.states),
            "compression_rate_p": self._plans.rate_of("p"),
            "compression_rate_q": self._plans.rate_of("q"),
            "n_fused_buffers": self._fusion.n_buffers,
            "n_buckets_redone": self._n_redone,
            **({"n_steps_not_finite": self._n_not_finite} if self._site is not None else {}),
        }

    def state_dict(self) -> dict[str, Any]:
        return states_by_name(self._plans.states, self.session.feedback, self.session.slots, self._shape_of)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Raises: InvalidArgument (another model or rank, fields missing)."""
        states = load_states(state, self.session.slots, self._shape_of, self._sides_in(state))
        self.session.feedback.load_by_name(state["residuals"], self.session.slots)
        self._plans.states.clear()
        self._plans.states.update(states)
        self._plans.forget_layouts()

    def _sides_in(self, state: dict[str, Any]) -> str:
        """Which factor a state holds: "p" or "q"."""
        return "q"
