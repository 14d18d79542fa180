"""SlimGC's error feedback: residuals by parameter, in host memory, flushed when a tensor stops being compressed.

What a rank's encodings lose goes back into its own next gradient. That covers both ends: an owner that compresses the
sum it answers with keeps what that loses as its own, so that mean(result) + mean(residual) = mean(gradient + old
residual) at every step, whichever rank owned a value before. New residuals are staged, and count from `commit` on.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from gradwire.core.slot import Slot
from gradwire.errors import InvalidArgument
from gradwire.schemes.slimgc.plan import Plan, Span


class Feedback:
    """The residuals of one rank: float32, free of the loss scale, a view of one flat buffer per bucket."""

    def __init__(self) -> None:
        self._current: dict[Slot, torch.Tensor] = {}
        self._staged: dict[Slot, torch.Tensor | None] = {}  # None: flushed
        # Two buffers a bucket that change places: what is staged never overwrites what counts.
        self._buffers: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def holds_any(self, spans: tuple[Span, ...]) -> bool:
        """Whether a residual waits to be flushed into one of these tensors."""
        return bool(self._current) and any(span.slot in self._current for span in spans)

    def buffer_for(self, bucket: int, plan: Plan) -> torch.Tensor:
        """(plan.n_bit_buf,) float32 to write what is left out into; `stage` takes it."""
        buffers = self._buffers.get(bucket)
        if buffers is None or buffers[0].numel() != plan.n_bit_buf:
            buffers = (torch.empty(plan.n_bit_buf), torch.empty(plan.n_bit_buf))
        self._buffers[bucket] = buffers
        used = {r.untyped_storage().data_ptr() for r in (self._current.get(p) for p in plan.slots) if r is not None}
        for buffer in buffers:
            if buffer.untyped_storage().data_ptr() not in used:
                return buffer
        fresh = torch.empty(plan.n_bit_buf)  # parameters moved between buckets: both still hold some that count
        self._buffers[bucket] = (fresh, buffers[0])
        return fresh

    def write_sum(self, span: Span, gradient: torch.Tensor, out: torch.Tensor, loss_scale: float) -> None:
        """out (n,) = gradient + residual x loss_scale.

        A parameter whose gradient is all zero (unused on this rank) keeps its residual: out is zero there. If the
        parameter is unused on every rank, DDP throws its result away, and the residual would go with it.
        """
        residual = None if span.slot is None else self._current.get(span.slot)
        if residual is None or not is_used(gradient):
            out.copy_(gradient)
        elif gradient.dtype == out.dtype == residual.dtype:
            torch.add(gradient, residual, alpha=loss_scale, out=out)
        else:
            out.copy_(gradient)
            out.add_(residual, alpha=loss_scale)

    def whole_of(self, plan: Plan) -> torch.Tensor | None:
        """(plan.n_bit_buf,) the residuals of all compressed tensors, if they lie as in the fused buffer."""
        flat: torch.Tensor | None = None
        for span in plan.compressed:
            mine = None if span.slot is None else self._current.get(span.slot)
            if mine is None:
                return None
            if flat is None:
                flat = mine._base if mine._base is not None else mine
                if flat.numel() != plan.n_bit_buf:
                    return None
            if mine.data_ptr() != flat.data_ptr() + 4 * span.fused:
                return None
        return flat

    def stage(self, plan: Plan, bucket: torch.Tensor | None, left_out: torch.Tensor, loss_scale: float) -> None:
        """Keep `left_out`, which `buffer_for` gave, from the next `commit` on.

        `bucket`: the gradients, still as they were; None: every tensor that has a residual was used.
        """
        if loss_scale != 1.0:
            left_out.div_(loss_scale)
        for span in plan.compressed:
            if span.slot is None:
                continue
            mine = span.in_fused(left_out)
            kept = self._current.get(span.slot)
            if bucket is not None and kept is not None and not is_used(span.in_bucket(bucket)):
                mine.add_(kept)
            self._staged[span.slot] = mine

    def stage_flushed(self, spans: tuple[Span, ...], bucket: torch.Tensor) -> None:
        """The residuals of these tensors went out with their raw gradients; `bucket`: the gradients before that."""
        for span in spans:
            if span.slot in self._current and is_used(span.in_bucket(bucket)):
                self._staged[span.slot] = None

    def commit(self) -> None:
        """Make what was staged in this step count."""
        for slot, residual in self._staged.items():
            if residual is None:
                self._current.pop(slot, None)
            else:
                self._current[slot] = residual
        self._staged.clear()

    def discard(self) -> None:
        """Forget what was staged in this step."""
        self._staged.clear()

    def state_by_name(self, slots: Mapping[str, Slot]) -> dict[str, torch.Tensor]:
        """Copies of the residuals, by name."""
        names = {slot: name for name, slot in slots.items()}
        return {names[slot]: residual.clone() for slot, residual in self._current.items()}

    def load_by_name(self, state: Mapping[str, torch.Tensor], slots: Mapping[str, Slot]) -> None:
        """Take residuals back. Raises: InvalidArgument (a name that the model lacks, another size or dtype)."""
        loaded = {}
        for name, residual in state.items():
            slot = slots.get(name)
            if (
                not isinstance(residual, torch.Tensor)
                or slot is None
                or (residual.dtype, residual.numel()) != (torch.float32, slot.numel())
            ):
                raise InvalidArgument(
                    f"the checkpoint's residual for {name!r} does not fit this model; load it into the model that wrote it"
                )
            loaded[slot] = residual.detach().clone().view(-1)
        self._current, self._buffers = loaded, {}
        self._staged.clear()


def is_used(values: torch.Tensor) -> bool:
    """Whether a value is not zero; of a gradient in use, the first or the last is, which saves the pass over it."""
    return values.numel() > 0 and (bool(values[0] != 0) or bool(values[-1] != 0) or bool(values.any()))
