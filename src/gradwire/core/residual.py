"""Error feedback: what compression left out of a gradient, kept for the next step.

Keyed by parameter, never by bucket, because DDP rebuilds its buckets after the first step. New residuals are staged and
take effect only at `commit`, so that a step with a non-finite gradient changes nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch

from gradwire.core.bucket import Bucket
from gradwire.errors import InvalidArgument


class Residual:
    """One flat tensor for every parameter that has been compressed, in the gradient's dtype, free of the loss scale."""

    def __init__(self) -> None:
        # Two tensors a parameter, current and next, that change places at `commit`: no allocation once warm.
        self._current: dict[torch.Tensor, torch.Tensor] = {}
        self._next: dict[torch.Tensor, torch.Tensor] = {}
        self._staged: set[torch.Tensor] = set()
        # For schemes that write residuals in the codec's own sweep: by layout, two flat tensors, of which the above
        # then hold views.
        self._flat: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def add_to(self, bucket: Bucket, loss_scale: float = 1.0) -> None:
        """bucket.buffer += residual x loss_scale."""
        for parameter, gradient in _split(bucket.buffer, bucket):
            residual = self._current.get(parameter)
            if residual is not None:
                gradient.add_(residual, alpha=loss_scale)

    def write_sum(self, bucket: Bucket, out: torch.Tensor, loss_scale: float = 1.0) -> None:
        """out (n,) float32 = bucket.buffer + residual x loss_scale; the bucket stays as it is, to be sent plainly.

        A parameter whose gradient is all zero (unused on this rank) keeps its residual: out is zero there. If the
        parameter is unused on every rank, DDP throws its result away, and the residual would go with it.
        """
        out.copy_(bucket.buffer)
        for parameter, part in _split(out, bucket):
            residual = self._current.get(parameter)
            if residual is not None and part.any():
                part.add_(residual, alpha=loss_scale)

    def keep_unused(self, bucket: Bucket, left_out: torch.Tensor, loss_scale: float = 1.0) -> None:
        """Put back into `left_out` what `write_sum` kept, before it is staged."""
        for (parameter, gradient), (_, part) in zip(
            _split(bucket.buffer, bucket), _split(left_out, bucket), strict=True
        ):
            residual = self._current.get(parameter)
            if residual is not None and not gradient.any():
                part.add_(residual, alpha=loss_scale)

    def stage(self, bucket: Bucket, left_out: torch.Tensor, loss_scale: float = 1.0) -> None:
        """Keep left_out / loss_scale, where left_out (n,) is aligned with the bucket, from the next `commit` on."""
        for parameter, part in _split(left_out, bucket):
            if parameter not in self._next:
                self._next[parameter] = torch.empty_like(part)
            torch.div(part, loss_scale, out=self._next[parameter])
            self._staged.add(parameter)

    def flat_pair(self, bucket: Bucket) -> tuple[torch.Tensor, torch.Tensor]:
        """(current, next), each (n,) float32 and aligned with the bucket, to read and to write in one sweep.

        What is written into `next` counts from `stage_flat` and `commit` on. Without parameters nothing is kept.
        """
        pair = self._flat.get(bucket.layout_hash)
        for current, following in (pair, pair[::-1]) if pair else ():
            if all(self._holds(current, *place) for place in zip(bucket.parameters, bucket.offsets, strict=True)):
                return current, following
        flat, following = torch.zeros(bucket.n_elements), torch.zeros(bucket.n_elements)
        for parameter, part in _split(flat, bucket):
            if parameter in self._current:
                part.copy_(self._current[parameter])
            self._current[parameter] = part
        for parameter, part in _split(following, bucket):
            self._next[parameter] = part
        # Pairs of earlier layouts go as soon as no parameter lies in them.
        self._flat = {
            layout: kept
            for layout, kept in self._flat.items()
            if any(_lies_in(residual, flat) for residual in self._current.values() for flat in kept)
        }
        self._flat[bucket.layout_hash] = flat, following
        return flat, following

    def stage_flat(self, bucket: Bucket) -> None:
        """Keep what `next` of `flat_pair` holds, from the next `commit` on."""
        self._staged.update(bucket.parameters)

    def _holds(self, flat: torch.Tensor, parameter: torch.Tensor, offset: int) -> bool:
        residual = self._current.get(parameter)
        return residual is not None and (
            residual.numel() == 0 or residual.data_ptr() == flat.data_ptr() + offset * flat.element_size()
        )

    def commit(self) -> None:
        """Make what was staged in this step the residual."""
        for parameter in self._staged:
            staged = self._next.pop(parameter)
            if parameter in self._current:
                self._next[parameter] = self._current[parameter]
            self._current[parameter] = staged
        self._staged.clear()

    def discard(self) -> None:
        """Forget what was staged in this step."""
        self._staged.clear()

    def state_by_name(self, names: Mapping[torch.Tensor, str]) -> dict[str, torch.Tensor]:
        """Copies of the residuals, by parameter name."""
        return {names[parameter]: residual.clone() for parameter, residual in self._current.items()}

    def load_by_name(self, state: Mapping[str, torch.Tensor], names: Mapping[torch.Tensor, str]) -> None:
        """Take residuals back. Raises: InvalidArgument (a name that the model lacks, another size)."""
        parameters = {name: parameter for parameter, name in names.items()}
        loaded: dict[torch.Tensor, torch.Tensor] = {}
        for name, residual in state.items():
            parameter = parameters.get(name)
            if parameter is None or parameter.numel() != residual.numel():
                has = "no such parameter" if parameter is None else f"{parameter.numel()} elements"
                raise InvalidArgument(
                    f"the checkpoint holds a residual of {residual.numel()} elements for {name!r}; it has {has}. "
                    "Load the checkpoint into the model that wrote it."
                )
            loaded[parameter] = residual.clone()
        self._current, self._next, self._flat = loaded, {}, {}
        self._staged.clear()


def redistribute(states: list[Mapping[str, torch.Tensor]], world_size: int) -> dict[str, torch.Tensor]:
    """The residual of each of `world_size` new ranks, from those of all old ranks: their sum is kept, spread evenly.

    The mean gradient weighs a rank's residual by 1 / world size, so the *mean* has to be kept: each new rank gets the
    mean of the old ones.
    """
    if not states:
        raise InvalidArgument("no residuals to redistribute: pass the state of every old rank")
    if world_size < 1:
        raise InvalidArgument(f"world_size must be at least 1, got {world_size}")
    redistributed = {}
    for name in sorted({name for state in states for name in state}):
        residuals = [state[name] for state in states if name in state]  # a rank without one has left nothing out
        mean = torch.stack([residual.double() for residual in residuals]).sum(0).div(len(states))
        redistributed[name] = mean.to(residuals[0].dtype)
    return redistributed


def _split(flat: torch.Tensor, bucket: Bucket) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Each parameter of the bucket with its part of `flat`."""
    for parameter, offset in zip(bucket.parameters, bucket.offsets, strict=True):
        yield parameter, flat[offset : offset + parameter.numel()]


def _lies_in(part: torch.Tensor, flat: torch.Tensor) -> bool:
    return part.numel() > 0 and part.untyped_storage().data_ptr() == flat.untyped_storage().data_ptr()
