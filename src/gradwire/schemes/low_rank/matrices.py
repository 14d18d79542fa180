"""Parameters as matrices, and what outlasts a step for each beside its residual: the factor that comes in next."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from gradwire.core.bucket import Bucket
from gradwire.core.feedback import Feedback, Kept, holds_nonzero
from gradwire.core.slot import Slot
from gradwire.schemes.low_rank.factors import draw_factor, multiply, orthogonalise


class MatrixShape(NamedTuple):
    """A parameter as a matrix, first dimension by the rest, and the rank it is approximated with."""

    n_rows: int
    n_columns: int
    rank: int

    @property
    def n_elements(self) -> int:
        return self.n_rows * self.n_columns


def matrix_shape(parameter: Slot | torch.Tensor, rank: int, min_compression_rate: float) -> MatrixShape | None:
    """The matrix that `parameter` is compressed as, or None if it travels as it is.

    The rate is n m / ((n + m) r): what both factors together save, as in PyTorch's powerSGD_hook.
    """
    if parameter.dim() < 2 or parameter.numel() == 0:
        return None
    n_rows = parameter.shape[0]
    n_columns = parameter.numel() // n_rows
    rank = min(rank, n_rows, n_columns)
    if n_rows * n_columns < min_compression_rate * (n_rows + n_columns) * rank:
        return None
    return MatrixShape(n_rows, n_columns, rank)


@dataclass
class MatrixState:
    """What one matrix keeps between steps.

    Attributes:
        factor: (rank, n_rows or n_columns) float32, the incoming factor transposed; None: not drawn yet.
    """

    factor: torch.Tensor | None = None


class MatrixGroup:
    """The matrices of one shape in one bucket, stacked, so that one batched product compresses them all.

    Attributes:
        p: (k, rank, n_rows), q: (k, rank, n_columns): the factors, transposed. Row after row they are contiguous.
        new_q: as q, for a Q that is made while the last one still counts.
        corrected: (k, n_rows, n_columns): gradient + residual, in a room of the feedback that `correct` takes anew; after
            `subtract_...` the new residual.
    """

    def __init__(
        self, shape: MatrixShape, members: Sequence[tuple[Slot, int, str, MatrixState]], device: torch.device
    ) -> None:
        """`members`: slot, offset in the bucket, key and state of each matrix."""
        self.shape, self._device = shape, device
        self.slots, self.offsets, self.keys, self.states = (list(column) for column in zip(*members, strict=True))
        n = len(members)
        self.p = torch.empty(n, shape.rank, shape.n_rows, device=device)
        self.q = torch.empty(n, shape.rank, shape.n_columns, device=device)
        self.corrected: torch.Tensor
        self._withheld: list[tuple[int, Kept]] = []
        self._loss_scale = 1.0

    def begin_with(self, incoming: torch.Tensor, seed: int, is_orthogonal: bool) -> None:
        """Fill `incoming`, p or q, with the factors of the states, or with drawn ones, and let the states have them."""
        for state, key, factor in zip(self.states, self.keys, incoming, strict=True):
            if state.factor is not None:
                factor.copy_(state.factor)
            else:
                factor.copy_(draw_factor(seed, key, 0, *factor.shape))
                if is_orthogonal:
                    orthogonalise(factor[None])
            state.factor = factor

    def correct(self, bucket: Bucket, feedback: Feedback, loss_scale: float) -> None:
        """corrected = gradient + residual, both multiplied by `loss_scale`; `bucket` stays as it is.

        A matrix whose gradient is all zero on this rank (an unused parameter) sends nothing and keeps its residual: if
        it is unused everywhere, DDP throws the result away, and the residual would go with it. On a device, which would have
        to be asked, it sends its residual.
        """
        self._withheld.clear()
        self._loss_scale = loss_scale
        n_rows, n_columns, device = self.shape.n_rows, self.shape.n_columns, self._device
        room = feedback.room(("matrices", *self.slots), len(self.slots) * self.shape.n_elements, device=device)
        self.corrected = room.view(-1, n_rows, n_columns)
        for i, slot in enumerate(self.slots):
            gradient, corrected, kept = self.view_in(bucket.buffer, i), self.corrected[i], feedback.of(slot)
            if kept is None:
                corrected.copy_(gradient)
                continue
            residual = kept.values.view(n_rows, n_columns).to(device)
            if device.type == "cpu" and not holds_nonzero(gradient):
                self._withheld.append((i, kept))
                corrected.zero_()
            elif gradient.dtype == torch.float32:
                torch.add(gradient, residual, alpha=loss_scale / kept.scale, out=corrected)
            else:
                corrected.copy_(gradient).add_(residual, alpha=loss_scale / kept.scale)

    @functools.cached_property
    def new_q(self) -> torch.Tensor:
        return torch.empty_like(self.q)

    def project_to_p(self) -> torch.Tensor:
        """P <- (M + E) Q; P."""
        return torch.bmm(self.q, self.corrected.mT, out=self.p)

    def project_to_q(self, out: torch.Tensor) -> torch.Tensor:
        """Q <- (M + E)^T P into `out`, q or new_q."""
        return torch.bmm(self.p, self.corrected, out=out)

    def view_in(self, flat: torch.Tensor, i: int) -> torch.Tensor:
        """(n_rows, n_columns): matrix i in a tensor that is laid out as the bucket."""
        return flat[self.offsets[i] : self.offsets[i] + self.shape.n_elements].view(
            self.shape.n_rows, self.shape.n_columns
        )

    def write_product(self, flat: torch.Tensor, q: torch.Tensor | None = None) -> None:
        """P Q^T of every matrix to where it lies in the bucket; `q` stands in for the group's own."""
        q = self.q if q is None else q
        for i in range(len(self.slots)):
            multiply(self.p[i], q[i], self.view_in(flat, i))

    def subtract_product(self, feedback: Feedback) -> None:
        """corrected -= P Q^T, which makes it the new residual against the factors as they stand; staged."""
        for i in range(len(self.slots)):
            multiply(self.p[i], self.q[i], self.corrected[i], subtract=True)
        self._stage(feedback)

    def subtract_result(self, flat: torch.Tensor, feedback: Feedback) -> None:
        """corrected -= what lies in the bucket, which makes it the new residual against the aggregate; staged."""
        for i in range(len(self.slots)):
            self.corrected[i].sub_(self.view_in(flat, i))
        self._stage(feedback)

    def _stage(self, feedback: Feedback) -> None:
        for i, kept in self._withheld:
            residual = kept.values.view(self.shape.n_rows, self.shape.n_columns)
            self.corrected[i].add_(residual, alpha=self._loss_scale / kept.scale)
        for slot, unsent in zip(self.slots, self.corrected, strict=True):
            feedback.stage(slot, unsent, self._loss_scale)

    def commit_factors(self, factors: torch.Tensor) -> None:
        """Make `factors` (k, rank, n) what comes in next."""
        for state, factor in zip(self.states, factors, strict=True):
            state.factor = factor
