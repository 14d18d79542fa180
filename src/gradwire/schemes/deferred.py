"""A block's step just before the block's next forward pass, so that communication may go on until then."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch

from gradwire.core.bucket import Bucket
from gradwire.core.session import Session
from gradwire.errors import GradwireError, InvalidArgument, Unsupported
from gradwire.schemes.base import Scheme
from gradwire.stepping.blocks import Block, Division, check_division, find_blocks, hash_blocks
from gradwire.stepping.demands import inner_of, refuse_join, stepped_parameters
from gradwire.stepping.finiteness import FiniteFlag, clip_factor, own_gradient
from gradwire.stepping.frozen_step import FrozenStep
from gradwire.stepping.interception import Interceptor
from gradwire.telemetry.stopwatch import Stopwatch
from gradwire.wire.preamble import Preamble


@dataclass
class OpenBlock:
    """One block under way.

    Attributes:
        gradient: (n,) this rank's gradient of the block, copied out of DDP's buckets; then the mean over the ranks.
        parts: each parameter's part of `gradient`, in its shape.
        step: the reduction that `gradient` belongs to.
        done: completed when `gradient` holds the mean; None if nothing is under way.
        frozen: the user's call for this step; None as long as there was none.
    """

    block: Block
    gradient: torch.Tensor
    parts: dict[torch.Tensor, torch.Tensor]
    n_missing: int
    step: int = -1
    done: torch.futures.Future | None = None
    frozen: FrozenStep | None = None


class DeferredScheme(Scheme):
    """Base of schemes that step a block when its next forward pass needs it.

    A subclass starts the reduction of a block in `_start_block`; everything else is here: blocks, the user's step with
    its hyper-parameters, clipping of the mean, AMP, and flushing.

    Args:
        blocks: as in `find_blocks`.
        max_grad_norm: clip the norm of the mean gradient, as clip_grad_norm_ does. Its norm is known only when all blocks
            have arrived, so the next forward pass then waits for all of them.
    """

    owns_step: bool = True

    def __init__(self, blocks: Division = 4, max_grad_norm: float | None = None) -> None:
        self._division = check_division(blocks)
        if max_grad_norm is not None and not max_grad_norm > 0:
            raise InvalidArgument(f"max_grad_norm must be positive, got {max_grad_norm}")
        self.max_grad_norm = max_grad_norm
        self._slots: list[OpenBlock] = []
        self._home: dict[torch.Tensor, OpenBlock] = {}
        self._interceptor: Interceptor | None = None
        self._flag: FiniteFlag | None = None
        self._waited = Stopwatch()
        self._is_told = False  # whether what failed was raised to the user
        self._clip: tuple[int, torch.Tensor] | None = None  # step, factor

    @property
    def configuration(self) -> dict[str, Any]:
        return {"blocks": self._division, "max_grad_norm": self.max_grad_norm}

    # ---- beginning and end

    def bind(self, session: Session) -> None:
        """Raises: InvalidArgument (no model or optimizer), Unsupported (parameters that the optimizer does not step)."""
        reduced = stepped_parameters(session, f"scheme {self.name!r}")
        super().bind(session)
        assert session.module is not None
        blocks = find_blocks(inner_of(session.module), reduced, self._division)
        self.blocks_hash = hash_blocks(blocks)
        self._slots = [_make_slot(block) for block in blocks]
        self._home = {parameter: slot for slot in self._slots for parameter in slot.block.parameters}
        self._in_order = reduced
        if session.has_scaler:
            self._flag = FiniteFlag(session.communicator)

    def take_over(self) -> None:
        """Put this scheme between the user and the optimizer; after `bind`. Raises: Unsupported."""
        session = self.session
        assert session.module is not None
        assert session.optimizer is not None
        self._interceptor = Interceptor(
            session.module,
            inner_of(session.module),
            session.optimizer,
            [slot.block for slot in self._slots],
            self,
            dict(session.names),
            session.has_scaler,
        )

    def close(self) -> None:
        """Take the steps that were called for, then let the model and the optimizer go."""
        interceptor, self._interceptor = self._interceptor, None
        was_told = self._is_told  # then the user may be closing for that reason; what this flush fails of is news
        try:
            if interceptor is not None:
                self.flush()
        except GradwireError:
            if not was_told:
                raise
        finally:
            if interceptor is not None:
                interceptor.remove()
            if self._flag is not None:
                self._flag.close()
                self._flag = None
            self._slots, self._home = [], {}

    # ---- the backward pass

    def preamble(self, bucket: Bucket) -> Preamble:
        """The blocks belong to the layout: ranks that cut the model differently find out before the first payload."""
        return super().preamble(bucket)._replace(layout=bucket.layout_hash ^ self.blocks_hash)

    def begin_step(self, step: int) -> None:
        """Raises: Unsupported (ddp.join)."""
        assert self._interceptor is not None
        refuse_join(self.session.module, f"scheme {self.name!r}", "a scheme that leaves the step to the optimizer")
        self._interceptor.begin_reduction()
        if self._flag is not None:
            self._flag.begin_step()
        self._begin_round(step)

    def reduce(self, bucket: Bucket) -> torch.futures.Future:
        """Copy the bucket into its blocks, start those that are complete; DDP goes on with this rank's own gradient."""
        bucket.wait_for_all()
        if self._flag is not None:
            self._flag.see(bucket.buffer)
        for parameter, offset in zip(bucket.parameters, bucket.offsets, strict=True):
            part = bucket.buffer[offset : offset + parameter.numel()]
            slot = self._home[parameter]
            if slot.n_missing == len(slot.parts):
                self._vacate(slot, part, bucket.step)
            slot.parts[parameter].copy_(part.view(parameter.shape))
            slot.n_missing -= 1
            if slot.n_missing == 0:
                slot.n_missing = len(slot.parts)
                slot.done = self._start_block(slot)
        return own_gradient(bucket, self._flag)

    def _vacate(self, slot: OpenBlock, coming: torch.Tensor, step: int) -> None:
        """Make room for the next gradient: the step before is taken, or was not called for."""
        if slot.frozen is not None:
            # Nothing called for it in this forward pass. That is fine for a block that nothing used.
            if bool(coming.any()):
                raise Unsupported(
                    f"block {slot.block.name!r} was used in the forward pass of step {step} without a forward call of its "
                    "modules, so its last step was missed: name its modules' common parent in one block "
                    "(blocks=[[...], ...]), or attach a scheme that leaves the step to the optimizer"
                )
            self._settle(slot)
        elif slot.done is not None:
            slot.done.wait()
        slot.step, slot.done = step, None

    def end_backward(self, step: int) -> int:
        """Called when DDP has ended its part; returns how long the forward pass before waited for blocks, in ns."""
        if self._interceptor is not None:
            self._interceptor.end_backward()
        return self._waited.take_ns()

    # ---- what the user calls for

    def take_step(self, frozen: FrozenStep) -> None:
        for slot in self._slots:
            slot.frozen = frozen

    def drop_step(self) -> None:
        """Under AMP: the reduction goes on, and its result is not used."""

    def begin_forward(self) -> None:
        """A forward pass in training begins."""

    def before_forward(self, block: Block) -> None:
        slot = self._slots[block.index]
        if slot.frozen is not None:
            self._settle(slot)

    def flush(self) -> None:
        """Take every step that was called for. Raises: what the reduction failed of."""
        for slot in self._slots:
            if slot.frozen is not None:
                self._settle(slot)

    # ---- one block's step

    def _settle(self, slot: OpenBlock) -> None:
        frozen = slot.frozen
        assert frozen is not None
        factor = None if self.max_grad_norm is None else self._clip_factor(frozen, self.max_grad_norm)
        self._wait(slot)
        if factor is None and frozen.inverse_scale is not None:
            slot.gradient.mul_(frozen.inverse_scale.to(slot.gradient.dtype))
        elif factor is not None:
            slot.gradient.mul_(factor.to(slot.gradient.dtype))
        slot.frozen = slot.done = None
        frozen.apply(slot.parts)

    def _wait(self, slot: OpenBlock) -> None:
        if slot.done is not None and not slot.done.done():
            with self._waited:
                self._wait_or_tell(slot.done)
            self._note_wait(slot)
        elif slot.done is not None:
            self._wait_or_tell(slot.done)

    def _wait_or_tell(self, done: torch.futures.Future) -> None:
        """Raises: what the reduction failed of."""
        try:
            done.wait()
        except GradwireError:
            self._is_told = True
            raise

    def _note_wait(self, slot: OpenBlock) -> None:
        """The last lap of `_waited` was spent on this block."""

    def _clip_factor(self, frozen: FrozenStep, max_norm: float) -> torch.Tensor:
        """What to multiply the mean by, so that its norm is at most `max_norm`."""
        if self._clip is None or self._clip[0] != frozen.step:
            for slot in self._slots:
                self._wait(slot)
                if frozen.inverse_scale is not None:
                    slot.gradient.mul_(frozen.inverse_scale.to(slot.gradient.dtype))
            gradients = [self._home[p].parts[p] for p in self._in_order if p in frozen.parameters]
            if not gradients:
                return torch.ones(())
            self._clip = (frozen.step, clip_factor(gradients, max_norm))
        return self._clip[1]

    # ---- for the subclass

    @abstractmethod
    def _start_block(self, slot: OpenBlock) -> torch.futures.Future:
        """Start replacing slot.gradient by its mean over the ranks; on whatever thread DDP's hook runs. Never blocks."""

    def _begin_round(self, step: int) -> None:
        """The first bucket of `step` is there."""


def _make_slot(block: Block) -> OpenBlock:
    dtypes = {parameter.dtype for parameter in block.parameters}
    if len(dtypes) > 1:
        raise Unsupported(
            f"block {block.name!r} holds parameters of several dtypes ({', '.join(sorted(map(str, dtypes)))}): name the "
            "modules of each dtype in blocks of their own (blocks=[[...], ...])"
        )
    gradient = torch.zeros(block.n_elements, dtype=dtypes.pop())
    return OpenBlock(block, gradient, dict(_parts(block, gradient)), len(block.parameters))


def _parts(block: Block, gradient: torch.Tensor) -> Iterable[tuple[torch.Tensor, torch.Tensor]]:
    offset = 0
    for parameter in block.parameters:
        yield parameter, gradient[offset : offset + parameter.numel()].view(parameter.shape)
        offset += parameter.numel()
