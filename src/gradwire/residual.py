"""Error feedback: what compression left out of a gradient, kept for the next step.

Keyed by parameter, never by bucket, because DDP rebuilds its buckets after the first step. New residuals are staged and
take effect only at `commit`, so that a step with a non-finite gradient changes nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch

from gradwire.bucket import Bucket
from gradwire.errors import InvalidArgument


class Residual:
    """One flat tensor for every parameter that has been compressed, in the gradient's dtype, free of the loss scale."""

    def __init__(self) -> None:
        # Two tensors a parameter, current and next, that change places at `commit`: no allocation once warm.
        self._current: dict[torch.Tensor, torch.Tensor] = {}
        self._next: dict[torch.Tensor, torch.Tensor] = {}
        self._staged: set[torch.Tensor] = set()

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
        self._current, self._next = loaded, {}
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
