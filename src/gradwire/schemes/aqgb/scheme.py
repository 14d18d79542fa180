"""The schemes `aqgb` and `broadcast`: every rank broadcasts its quantised gradients, block by block, to all others.

Luo et al., "Approximate gradient synchronization with adaptive quantized gradient broadcast". The paper simulates; here
its control law (law.py) runs live. A block's step is taken just before the block's next forward pass, so that communication
may go on until then.
"""

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

from gradwire import _native
from gradwire.checks import choice as check_choice
from gradwire.checks import count as check_count
from gradwire.codecs.embedded_float import DEFAULT_PARTITION, FORMATS
from gradwire.codecs.tensors import PARTITIONS, dtype_code
from gradwire.core.bucket import Bucket, inner_of, shape_like, slot_of
from gradwire.core.session import Session
from gradwire.errors import GradwireError, InvalidArgument, Unsupported
from gradwire.schemes.aqgb.broadcasting import BlockExchange, OpenBlock
from gradwire.schemes.aqgb.law import DEFAULT_FLOOR, DEFAULT_MAX_CONTENTION, MIN_BITS, PROFILED_ROUNDS, WORD_BITS
from gradwire.schemes.aqgb.overlap import OverlapFigures
from gradwire.schemes.aqgb.pacing import DEFAULT_CONFIDENCE, Clock, Pacing, PacingLimits, read_core_times
from gradwire.schemes.base import Scheme
from gradwire.stepping.blocks import Block, Division, check_division, find_blocks, hash_blocks
from gradwire.stepping.interception import (
    FiniteFlag,
    FrozenStep,
    Interceptor,
    clip_factor,
    refuse_join,
    stepped_parameters,
)
from gradwire.telemetry.stopwatch import Stopwatch, now_s
from gradwire.wire.communicator import completed
from gradwire.wire.preamble import FORMAT_VERSION, Preamble, compare_preambles

_TOPOLOGIES = ("fan-out", "ring", "owners")  # as exchange::Topology


class BlockBroadcast(Scheme):
    """Every rank broadcasts its quantised blocks, every rank adds all copies in rank order, its own quantised one too.

    A subclass says by its limits how many bits a block is sent with first, and how many are added to it later.

    Args:
        blocks: how many, or lists of module names, as in `find_blocks`.
        max_grad_norm: clip the norm of the mean gradient, as clip_grad_norm_ does. Its norm is known only when all blocks
            have arrived, so the next forward pass then waits for all of them.
        partition, format: of `EmbeddedFloat`.
        topology: "fan-out" to all peers, "ring": each passes on what comes from the left, or "owners": an all-reduce. There
            each rank is sent its part of a block, adds it, and answers with as many bits of the sum.
        error_feedback: keep what was never sent for the next step (off in the paper).
        clock: seconds, for the control law; must not run backwards.
    """

    owns_step: bool = True
    limits: PacingLimits  # of the subclass

    def __init__(
        self, blocks: Division = 4, max_grad_norm: float | None = None, partition: int = DEFAULT_PARTITION,
        topology: str = "fan-out", error_feedback: bool = False, clock: Clock = now_s, format: int = 2,
    ) -> None:  # fmt: skip
        self._division = check_division(blocks)
        if max_grad_norm is not None and not max_grad_norm > 0:
            raise InvalidArgument(f"max_grad_norm must be positive, got {max_grad_norm}")
        self.max_grad_norm = max_grad_norm
        self._partition = check_choice("partition", partition, PARTITIONS)
        self._format = check_choice("format", format, FORMATS)
        self.topology = check_choice("topology", topology, _TOPOLOGIES)
        self.error_feedback = self.state_is_per_world = error_feedback
        self._clock = clock
        self._open: list[OpenBlock] = []
        self._home: dict[torch.Tensor, OpenBlock] = {}  # of each parameter
        self._exchange: BlockExchange | None = None  # None with one rank
        self._interceptor: Interceptor | None = None
        self._flag: FiniteFlag | None = None
        self._waited = Stopwatch()
        self._is_told = False  # whether what failed was raised to the user
        self._clip: tuple[int, torch.Tensor] | None = None  # step, factor

    @property
    def configuration(self) -> dict[str, Any]:
        of_codec = {"partition": self._partition, "format": self._format}
        own = {"blocks": self._division, "max_grad_norm": self.max_grad_norm, "topology": self.topology}
        return {**own, **of_codec, "error_feedback": self.error_feedback}

    def _make_pacing(self, rank: int, world_size: int, block_elements: list[int]) -> Pacing:
        core_times = read_core_times if self.limits.max_contention < 1 else None
        return Pacing(rank, world_size, block_elements, self._clock, self.limits, core_times)

    # ---- beginning and end

    def bind(self, session: Session) -> None:
        """Raises: InvalidArgument (no model or optimizer), Unsupported (parameters that the optimizer does not step)."""
        self._in_order = stepped_parameters(session, f"scheme {self.name!r}")
        super().bind(session)
        assert session.module is not None
        blocks = find_blocks(inner_of(session.module), self._in_order, self._division)
        self.blocks_hash = hash_blocks(blocks)
        self._open = [_make_open_block(block) for block in blocks]
        self._home = {parameter: one for one in self._open for parameter in one.parts}
        self._flag = FiniteFlag(session)
        communicator, sizes = session.communicator, [block.n_elements for block in blocks]
        # To each receiver: the block, or its part and the answer's.
        each = [-(-2 * n // communicator.world_size) if self.topology == "owners" else n for n in sizes]
        self.pacing = self._make_pacing(communicator.rank, communicator.world_size, each)
        self.figures = OverlapFigures([block.name for block in blocks], sizes, self._clock)
        if communicator.world_size > 1:
            # Before ranks connect: one with another scheme compares first what it is, and has to meet the like. It counts
            # as little as the connections' own making.
            mine = Preamble(FORMAT_VERSION, 0, self.name, self.configuration_hash, 0, 0, 0)
            never_closed = session.recorder.open_bucket(0, -1, 0)
            communicator.submit(compare_preambles, communicator, mine, never_closed, session.optimizers).wait()
            native = communicator.submit(self._connect).wait()
            feedback = session.feedback if self.error_feedback else None
            self._exchange = BlockExchange(
                session, native, self._open, self.pacing, self.figures, feedback, self.topology == "owners"
            )

    def _connect(self) -> _native.Broadcast:
        communicator = self.session.communicator
        shapes = [(one.block.name, one.block.n_elements, dtype_code(one.gradient.dtype)) for one in self._open]
        return _native.Broadcast(
            *communicator.open_exchange(), _TOPOLOGIES.index(self.topology), shapes, self._partition,
            self._format, self.configuration_hash, self.blocks_hash,
        )  # fmt: skip

    def take_over(self) -> None:
        """Put this scheme between the user and the optimizer; after `bind`. Raises: Unsupported."""
        self._interceptor = Interceptor(self.session, self._in_order, self, [one.block for one in self._open])

    def close(self) -> None:
        """Take the steps that were called for, then let the model and the optimizer go."""
        interceptor = self._interceptor
        was_told = self._is_told  # then the user may be closing for that reason; what this flush fails of is news
        try:
            if interceptor is not None:
                self.flush()
        except GradwireError:
            if not was_told:
                raise
        finally:
            self._interceptor = None
            if interceptor is not None:
                interceptor.remove()
            if self._flag is not None:
                self._flag.close()
            if self._exchange is not None:
                self._exchange.close()
            self._open, self._home, self._flag, self._exchange = [], {}, None, None
            self.session.feedback.clear()

    # ---- the backward pass

    def preamble(self, bucket: Bucket) -> Preamble:
        """The blocks belong to the layout: ranks that cut the model differently find out before the first payload."""
        return super().preamble(bucket)._replace(layout=bucket.layout_hash ^ self.blocks_hash)

    def begin_step(self, step: int) -> None:
        """Raises: Unsupported (ddp.join)."""
        assert self._interceptor is not None
        assert self._flag is not None
        refuse_join(self.session.module, f"scheme {self.name!r}", "use a scheme that leaves the step to the optimizer")
        self._interceptor.begin_reduction()
        self._flag.begin_step()
        if self._exchange is not None:
            self._exchange.begin(step)

    def reduce(self, bucket: Bucket) -> torch.futures.Future:
        """Copy the bucket into its blocks, start those that are complete; DDP goes on with this rank's own gradient."""
        assert self._flag is not None
        bucket.wait_for_all()
        for parameter, offset in zip(bucket.parameters, bucket.offsets, strict=True):
            part = bucket.buffer[offset : offset + parameter.numel()]
            one = self._home[parameter]
            if one.n_missing == len(one.parts):
                self._vacate(one, part, bucket.step)
            one.parts[parameter].copy_(shape_like(part, parameter))
            one.n_missing -= 1
            if one.n_missing == 0:
                one.n_missing = len(one.parts)
                one.done = completed(None) if self._exchange is None else self._exchange.start(one)
        return self._flag.own_gradient(bucket)

    def _vacate(self, one: OpenBlock, coming: torch.Tensor, step: int) -> None:
        """Make room for the next gradient: the step before is taken, or was not called for."""
        if one.frozen is not None:
            # Nothing called for it in this forward pass. That is fine for a block that nothing used.
            if bool(coming.any()):
                raise Unsupported(
                    f"block {one.block.name!r} was used in the forward pass of step {step} without a forward call of its "
                    "modules, so its last step was missed: name its modules' common parent in one block "
                    "(blocks=[[...], ...]), or attach a scheme that leaves the step to the optimizer"
                )
            self._settle(one)
        elif one.done is not None:
            one.done.wait()
        one.step, one.done = step, None

    def end_backward(self, step: int) -> int:
        """Called when DDP has ended its part; returns how long the forward pass before waited for blocks, in ns."""
        self.figures.end_backward()
        if self._interceptor is not None:
            self._interceptor.end_backward()
        return self._waited.take_ns()

    # ---- what the interceptor asks (StepOwner)

    def take_step(self, frozen: FrozenStep) -> None:
        """Keep the user's call until each block's next forward pass."""
        for one in self._open:
            one.frozen = frozen

    def drop_step(self) -> None:
        """Do nothing, under AMP: the reduction goes on, and its result is not used."""

    def begin_forward(self) -> None:
        with self._failing_everywhere():
            self.pacing.begin_forward()
        self.figures.begin_forward()

    def before_forward(self, block: Block) -> None:
        """Have the block's step taken: a module that uses it begins its forward pass."""
        with self._failing_everywhere():
            arrived_s, waited_before_ns = self.pacing.now(), self._waited.total_ns
            if self._open[block.index].frozen is not None:
                self._settle(self._open[block.index])
            self.pacing.note_forward(block.index, arrived_s, (self._waited.total_ns - waited_before_ns) / 1e9)

    def flush(self) -> None:
        """Take every step that was called for. Raises: what the reduction failed of."""
        if self._interceptor is not None:
            self._interceptor.end_step()
        for one in self._open:
            if one.frozen is not None:
                self._settle(one)

    @contextlib.contextmanager
    def _failing_everywhere(self) -> Iterator[None]:
        """Tell the other ranks what goes wrong on this training thread: they would wait for it."""
        try:
            yield
        except GradwireError as error:
            (self._exchange or self.session.communicator).fail(error)
            raise

    # ---- one block's step

    def _settle(self, one: OpenBlock) -> None:
        frozen = one.frozen
        assert frozen is not None
        factor = frozen.inverse_scale if self.max_grad_norm is None else self._clip_factor(frozen, self.max_grad_norm)
        self._wait(one)
        if factor is not None:
            one.gradient.mul_(factor.to(one.gradient.dtype))
        one.frozen = one.done = None
        frozen.apply(one.parts)
        if self.error_feedback:
            self.session.feedback.commit(map(slot_of, one.parts))

    def _wait(self, one: OpenBlock) -> None:
        """Raises: what the reduction failed of."""
        if one.done is None:
            return
        was_done = one.done.done()
        try:
            if was_done:
                one.done.wait()
            else:
                with self._waited:
                    one.done.wait()
        except GradwireError:
            self._is_told = True
            raise
        if not was_done:
            self.figures.note("wait", self._waited.end_ns - self._waited.start_ns)

    def _clip_factor(self, frozen: FrozenStep, max_norm: float) -> torch.Tensor:
        """The factor that brings the norm of the mean down to `max_norm`; takes the loss scale off the mean before."""
        if self._clip is None or self._clip[0] != frozen.step:
            for one in self._open:
                self._wait(one)
                if frozen.inverse_scale is not None:
                    one.gradient.mul_(frozen.inverse_scale.to(one.gradient.dtype))
            gradients = [self._home[p].parts[p] for p in self._in_order if p in frozen.parameters]
            if not gradients:
                return torch.ones((), dtype=torch.float32, device="cpu")
            self._clip = (frozen.step, clip_factor(gradients, max_norm))
        return self._clip[1]

    # ---- between steps

    def stats(self) -> dict[str, Any]:
        """Bits per value and block, b, rounds whose bits cores bound (`rounds_held`), and how well communication hides
        (this rank's ROW, the group's since attaching, T_wait, OSF, utilisation)."""
        if not hasattr(self, "figures"):
            return {}
        return {"rate_bps": self.pacing.rate_bps, "rounds_held": self.pacing.n_rounds_held, **self.figures.as_dict()}

    def step_figures(self) -> dict[str, float]:
        """Bits sent of each value in the last step, all of them and in the first stage, and what bounds them."""
        return self.figures.last_bits() | self.pacing.figures()

    def state_dict(self) -> dict[str, Any]:
        return {"residuals": self.session.feedback.state_by_name(self.session.slots)} if self.error_feedback else {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Raises: InvalidArgument."""
        if self.error_feedback:
            self.session.feedback.load_by_name(state["residuals"], self.session.slots)


def _make_open_block(block: Block) -> OpenBlock:
    """Make room for a block's gradient. Raises: Unsupported (parameters of several dtypes)."""
    dtypes = {parameter.dtype for parameter in block.parameters}
    if len(dtypes) > 1:
        raise Unsupported(
            f"block {block.name!r} holds parameters of several dtypes ({', '.join(sorted(map(str, dtypes)))}): name the "
            "modules of each dtype in blocks of their own (blocks=[[...], ...])"
        )
    gradient = torch.zeros(block.n_elements, dtype=dtypes.pop(), device="cpu")
    parts = gradient.split([parameter.numel() for parameter in block.parameters])
    views = {p: shape_like(part, p) for p, part in zip(block.parameters, parts, strict=True)}
    return OpenBlock(block, gradient, views, len(views))


class Aqgb(BlockBroadcast):
    """Compress only as much as it takes for communication not to be waited for.

    First stage: each block leaves when its gradient appears, newest first, with as many bits as pass until the next one
    appears (the floor for the last). Second stage: what time is left before a block's next forward pass refines it. The
    optimizer steps a block just before that pass; read parameters in between only after `Attachment.flush()`.

    When not to use this: on more than about 8 ranks, since a broadcast sends every gradient to every rank (at 4 bits
    a value and 16 ranks as much as an uncompressed ring), but for `topology="owners"`; where a forward pass is too short
    to hide anything; where two runs must give the same bits, as what is sent depends on the network's speed.

    Args:
        floor, ceiling, confidence, max_contention: see PacingLimits.
        blocks: how many, or lists of module names; DDP's buckets (`bucket_cap_mb`) should be no larger than a block.
        options: see BlockBroadcast.
    """

    name = "aqgb"

    def __init__(
        self, floor: float = DEFAULT_FLOOR, ceiling: float = 1.0, blocks: Division = 4,
        confidence: float = DEFAULT_CONFIDENCE, max_contention: float = DEFAULT_MAX_CONTENTION, **options: Any,
    ) -> None:  # fmt: skip
        super().__init__(blocks, **options)
        self.limits = PacingLimits(floor, ceiling, confidence, max_contention)

    @property
    def settling_steps(self) -> int:
        """DDP's first step, with one bucket, then as many rounds as its timetable is the median of, and one to use it."""
        return PROFILED_ROUNDS + 2

    @property
    def configuration(self) -> dict[str, Any]:
        return super().configuration | {"floor": float(self.limits.floor), "ceiling": float(self.limits.ceiling)}


class Broadcast(BlockBroadcast):
    """Every gradient to every rank with `bits` of each value, 2 to 32; 32: as it is. What AQGB is measured against.

    When not to use this: with more than 2 ranks uncompressed, since a ring sends 2/N as much; with few bits where `aqgb`
    would find the time for more.

    Options: see BlockBroadcast.
    """

    name = "broadcast"

    def __init__(self, bits: int = 4, blocks: Division = 4, max_grad_norm: float | None = None, **options: Any) -> None:
        super().__init__(blocks, max_grad_norm, **options)
        if not MIN_BITS <= check_count("bits", bits) <= WORD_BITS:
            raise InvalidArgument(f"bits is from {MIN_BITS} to {WORD_BITS}, not {bits}")
        self.bits, all_at_once = bits, bits / WORD_BITS
        self.limits = PacingLimits(all_at_once, all_at_once, max_contention=1)

    @property
    def configuration(self) -> dict[str, Any]:
        return super().configuration | {"bits": self.bits}
