"""The frame of the low-rank schemes: options, the way of a bucket, and what is kept of a step."""

from __future__ import annotations

import contextlib
import logging
import math
import zlib
from abc import abstractmethod
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.futures import Future

from gradwire.checks import choice as check_choice
from gradwire.core.bucket import Bucket
from gradwire.core.checkpoint import not_the_state
from gradwire.core.session import Session
from gradwire.core.slot import Slot
from gradwire.errors import InvalidArgument, Unsupported
from gradwire.gpu.kernels import kernels_for
from gradwire.schemes.compressed import Compressed
from gradwire.schemes.low_rank.fusion import Fusion, Work
from gradwire.schemes.low_rank.matrices import MatrixShape, Plans, matrix_shape
from gradwire.schemes.plain_steps import PlainSteps, is_beside_adam
from gradwire.schemes.selection import ByName, Names, embeddings_and_heads
from gradwire.wire.futures import then
from gradwire.wire.preamble import compare_preambles
from gradwire.wire.step_check import name_other_factors

_log = logging.getLogger(__name__)
_WIRE_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
_MAX_RANKS_BFLOAT16 = 256  # fingerprints are counts of ranks, and bfloat16 holds integers up to here
_MIB = float(1 << 20)


class LowRank(Compressed):
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

    options_of = ByName
    n_waits: ClassVar[int] = 1  # how often `steps` waits for sums
    # Whether a step sends the one or the other factor; what comes in was summed a step ago, and is orthonormal.
    takes_turns: ClassVar[bool] = False

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
        super().__init__(
            error_feedback=error_feedback,
            plain=PlainSteps(self.name, "start_step", start_step),
            select=ByName(**{key: value for key, value in names.items() if value is not None}),
        )
        self.rank, self.min_compression_rate, self.reuse, self.seed = rank, float(min_compression_rate), reuse, seed
        self.overlap, self.buffer_mb, self.factor_dtype = overlap, float(buffer_mb), factor_dtype
        self._exempts_words = names.get("exempt") is None
        self.wire_dtype = _WIRE_DTYPES[factor_dtype]

    @property
    def configuration(self) -> dict[str, Any]:
        names = ("rank", "min_compression_rate", "error_feedback", "reuse", "overlap", "buffer_mb", "factor_dtype",
                 "seed")  # fmt: skip
        shared = {name: getattr(self, name) for name in names} | {self.plain.option: self.plain.n}
        return shared | self.select.configuration

    def bind(self, session: Session) -> None:
        """Raises: Unsupported (more ranks than bfloat16 can count), InvalidArgument (names of no tensor)."""
        n_ranks = session.communicator.world_size
        if self.wire_dtype == torch.bfloat16 and n_ranks > _MAX_RANKS_BFLOAT16:
            raise Unsupported(
                f'factor_dtype="bfloat16" takes up to {_MAX_RANKS_BFLOAT16} ranks, this run has '
                f'{n_ranks}; use factor_dtype="float32"'
            )
        super().bind(session)
        if self._exempts_words and is_beside_adam(session):
            self._exempt_words(session)
        kernels_for(session.wire.device)
        self._begin_anew(session)

    def _begin_anew(self, session: Session) -> None:
        self.turn = "p"  # the factor that a step computes first; the other one comes in
        self._works: list[Work] = []  # all compressed buckets of this step, in order
        buffer_bytes = self.buffer_mb * _MIB * (self.wire_dtype.itemsize / 4)
        self._plans = Plans(self._shape_of, session.feedback, self.seed, self.takes_turns)
        self.fusion = Fusion(session, self._plans, self.wire_dtype, buffer_bytes, self.overlap)

    def _exempt_words(self, session: Session) -> None:
        words = embeddings_and_heads(session.module)
        self.select.bind(session, words)
        if words:
            whole = {name: slot.numel() for name, slot in session.slots.items() if not self.select(slot)}
            share = sum(whole.values()) / max(1, sum(slot.numel() for slot in session.slots.values()))
            _log.info(
                "gradwire %s: sent whole, under Adam: %s, %.0f %% of the gradient; exempt=() compresses them",
                self.name, ", ".join(whole), 100 * share,
            )  # fmt: skip

    def _shape_of(self, slot: Slot) -> MatrixShape | None:
        return matrix_shape(slot, self.rank, self.min_compression_rate) if self.select(slot) else None

    @abstractmethod
    def steps(self, work: Work) -> Iterator[None]:
        """The algorithm for one bucket, which is to hold its mean in the end.

        It yields `n_waits` times for what it has sent, which then is the mean over the ranks; and when the bucket is written,
        until all of the step counts.
        """

    # ---- a step

    def reduce(self, bucket: Bucket) -> Future:
        """Compress on the lane. The future may complete with a later bucket, at the latest with the last one."""
        taken = self.session.communicator.submit(self._take, bucket)
        taken.add_done_callback(self._fail_open)
        return then(taken, lambda _: bucket.buffer)

    def _fail_open(self, taken: Future) -> None:
        """If a bucket has failed, no other of the step is waited for any longer."""
        try:
            taken.wait()
        except Exception as error:
            for work in self._works:
                if not work.done.done():
                    work.done.set_exception(error)

    def _take(self, bucket: Bucket) -> Future | None:
        wire = self.wire(bucket)
        if wire.world_size == 1:  # the mean of one is itself: nothing to send, so nothing to lose
            return None
        if not wire.on_device:
            self._agree_while_settling(bucket)
        with bucket.at_work():
            if bucket.step < self.plain.n:
                self._start_check(bucket)
                wire.mean(bucket.buffer)
                return None
            work = Work(bucket, wire, self._plans.find(bucket, self.turn), self.session.loss_scale(), self.n_waits)
            work.steps = self.steps(work)
            self._works.append(work)
            work.dense = [bucket.buffer[start:end] for start, end in work.plan.dense]
            if not wire.on_device:
                # 32 bits as floats: their means are 0 or 1 if ranks share them. bfloat16 counts up to 256 exactly.
                facts = (self.configuration_hash, bucket.layout_hash, bucket.step, work.plan.checksum)
                bits = zlib.crc32(repr(facts).encode())
                work.fingerprint = torch.tensor(
                    [float(bits >> place & 1) for place in range(32)], dtype=torch.float32, device="cpu"
                )
                work.dense.insert(0, work.fingerprint)
            self._start_check(bucket)
            self.fusion.take(work)
            if not bucket.is_last:
                return work.done
            self._compare_fingerprints()
            return None

    def _start_check(self, bucket: Bucket) -> None:
        """On a device, where no host reads a fingerprint: compare, one step behind, what all ranks must share."""
        if bucket.is_last and self.session.wire.on_device:
            held = zlib.crc32(repr([work.plan.checksum for work in self._works]).encode())
            self._check.start(self.preamble(bucket), bucket.record, held)
            self._check.fail_early()

    def _compare_fingerprints(self) -> None:
        """After the last sum, at a point that all ranks share. Raises: RankMismatch."""
        for work in self._works:
            shares = work.fingerprint
            if shares is not None and not bool(((shares == 0) | (shares == 1)).all()):
                mine = self.preamble(work.bucket)
                compare_preambles(self.session.communicator, mine, work.bucket.record)
                name_other_factors(self.session.communicator, mine, work.plan.checksum)

    def commit(self) -> None:
        """Residuals and factors of the step are those of the next."""
        if not self._works:  # in plain steps, and with one rank
            return
        on_device = self.session.wire.on_device
        record = self.session.recorder.open_bucket(self._works[0].bucket.step, -1, 0)
        with contextlib.nullcontext() if on_device else record.timing("encode"):
            super().commit()
            for work in self._works:
                next(work.steps, None)
            if self.takes_turns:
                self.turn = "q" if self.turn == "p" else "p"
            for work in self._works:
                self._plans.keep(work.plan, self.turn)
        self.session.recorder.close_bucket(record)

    def discard(self) -> None:
        super().discard()
        self._works.clear()
        self.fusion.drop()

    def close(self) -> None:
        super().close()
        self.session.feedback.clear()
        self._begin_anew(self.session)

    # ---- between steps

    def stats(self) -> dict[str, Any]:
        """Matrices compressed, elements sent / elements by side, buffers summed, steps in which something was not finite."""
        return {
            "n_matrices": len(self._plans.factors),
            "compression_rate_p": self._plans.rate_of("p"),
            "compression_rate_q": self._plans.rate_of("q"),
            "n_fused_buffers": self.fusion.n_buffers,
            **super().stats(),
        }

    def state_dict(self) -> dict[str, Any]:
        """Copies: {"residuals": {name: (n_rows, n_columns)}, "factors": {name: (rank, n)}}, float32."""
        slots = self.session.slots
        names = {slot: name for name, slot in slots.items()}
        residuals = {
            name: residual.view(shape.n_rows, shape.n_columns)
            for name, residual in self.session.feedback.state_by_name(slots).items()
            if (shape := self._shape_of(slots[name])) is not None
        }
        factors = {names[slot]: factor.to("cpu", copy=True) for slot, factor in self._plans.factors.items()}
        turn = {"is_step_for_p": self.turn == "p"} if self.takes_turns else {}
        return {"residuals": residuals, "factors": factors, **turn}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Raises: InvalidArgument (another model or rank, fields missing)."""
        is_step_for_p = state.get("is_step_for_p") if self.takes_turns else True
        if not isinstance(is_step_for_p, bool):
            raise not_the_state(f"scheme {self.name}", "it lacks is_step_for_p")
        residuals, saved = state.get("residuals"), state.get("factors")
        if not isinstance(residuals, Mapping) or not isinstance(saved, Mapping):
            raise not_the_state("a low-rank scheme", "it lacks residuals or factors")
        factors = {}
        for kind, tensors in (("residual", residuals), ("factor", saved)):
            for name, tensor in sorted(tensors.items()):
                slot = self.session.slots.get(name)
                shape = None if slot is None else self._shape_of(slot)
                if slot is None or shape is None:
                    has = "has no such parameter" if slot is None else "does not compress it"
                    raise InvalidArgument(
                        f"the checkpoint holds low-rank state for {name!r}, but this run {has}; load the checkpoint into "
                        "the model that wrote it"
                    )
                n_rows, n_columns, rank = shape
                expected = (n_rows, n_columns) if kind == "residual" else (rank, n_columns if is_step_for_p else n_rows)
                if not isinstance(tensor, Tensor) or tensor.shape != expected or tensor.dtype != torch.float32:
                    found = (
                        f"{tuple(tensor.shape)} {tensor.dtype}" if isinstance(tensor, Tensor) else type(tensor).__name__
                    )
                    raise InvalidArgument(
                        f"the checkpoint's {kind} of {name!r} is {found}, expected {expected} torch.float32; attach the "
                        "scheme with the rank, and load into the model, of the saved run"
                    )
                if kind == "factor":
                    factors[slot] = tensor.clone()
        self.session.feedback.load_by_name(residuals, self.session.slots)
        self._plans.load(factors)
        self.turn = "p" if is_step_for_p else "q"
