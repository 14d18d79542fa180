"""Parameters as matrices: which are compressed, those of one shape together, and how a bucket is divided into them."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from gradwire.core.bucket import Bucket, Layout
from gradwire.core.feedback import Feedback
from gradwire.core.slot import Slot
from gradwire.schemes.low_rank.factors import checksum, draw_factor, multiply, orthogonalise
from gradwire.wire.wire import Wire

Member = tuple[
    Slot, str, tuple[int, int]
]  # a matrix, the key that its factors are drawn from, and its place in the bucket


class MatrixShape(NamedTuple):
    """A parameter as a matrix, first dimension by the rest, and the rank it is approximated with."""

    n_rows: int
    n_columns: int
    rank: int


def matrix_shape(parameter: Slot | Tensor, rank: int, min_compression_rate: float) -> MatrixShape | None:
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


class MatrixGroup:
    """The matrices of one shape in one bucket, stacked, so that one batched product compresses them all.

    Attributes:
        p: (k, rank, n_rows), q: (k, rank, n_columns): the factors, transposed. Row after row they are contiguous.
        new_q: as q, for a Q that is made while the last one still counts.
        corrected: (k, n_rows, n_columns): gradient + residual, in a room of the feedback that `correct` takes anew; after
            `subtract_...` the new residual.
    """

    corrected: Tensor

    def __init__(self, shape: MatrixShape, members: Sequence[Member], feedback: Feedback, device: torch.device) -> None:
        self.shape, self._feedback = shape, feedback
        self.slots, self.keys, self._spans = map(list, zip(*members, strict=True))
        # Zeros, so that ranks agree on the other factors even where their turn comes before they were ever summed.
        self.p = torch.zeros(len(members), shape.rank, shape.n_rows, device=device, dtype=torch.float32)
        self.q = torch.zeros(len(members), shape.rank, shape.n_columns, device=device, dtype=torch.float32)
        self._withheld: list[tuple[Tensor, Tensor, float]] = []
        self._loss_scale = 1.0

    @functools.cached_property
    def new_q(self) -> Tensor:
        return torch.empty_like(self.q)

    def incoming(self, turn: str) -> Tensor:
        """(k, rank, n): the factors that come in when `turn`, "p" or "q", is computed."""
        return self.q if turn == "p" else self.p

    def in_bucket(self, flat: Tensor) -> list[Tensor]:
        """k times (n_rows, n_columns): the matrices in a tensor that is laid out as the bucket."""
        return [flat[start:end].view(self.shape.n_rows, self.shape.n_columns) for start, end in self._spans]

    def correct(self, gradient: Tensor, wire: Wire, loss_scale: float) -> None:
        """corrected = gradient + residual, both multiplied by `loss_scale`; `gradient`, the bucket's, stays as it is.

        A matrix whose gradient is all zero on this rank (an unused parameter) sends nothing and keeps its residual: if
        it is unused everywhere, DDP throws the result away, and the residual would go with it. On a device, which would have
        to be asked, it sends its residual.
        """
        self._loss_scale = loss_scale
        self._withheld.clear()
        matrices, residuals = self.in_bucket(gradient), list(map(self._feedback.of, self.slots))
        room = self._feedback.room(self, sum(map(torch.numel, matrices)), device=wire.device)
        self.corrected = room.view(-1, self.shape.n_rows, self.shape.n_columns)
        is_used = wire.used(gradient, self._spans)
        for corrected, matrix, kept, used in zip(self.corrected, matrices, residuals, is_used, strict=True):
            if kept is None:
                corrected.copy_(matrix)
                continue
            residual, scale = kept.values.view(matrix.shape).to(wire.device), loss_scale / kept.scale
            if not used:
                self._withheld.append((corrected, residual, scale))
                corrected.zero_()
            elif matrix.dtype == torch.float32:
                torch.add(matrix, residual, alpha=scale, out=corrected)
            else:
                corrected.copy_(matrix).add_(residual, alpha=scale)

    def write_product(self, flat: Tensor, p: Tensor, q: Tensor) -> None:
        """P Q^T of every matrix to where it lies in the bucket."""
        for left, right, matrix in zip(p, q, self.in_bucket(flat), strict=True):
            multiply(left, right, matrix)

    def subtract_product(self) -> None:
        """corrected -= P Q^T, which makes it the new residual against the factors as they stand; staged."""
        for left, right, corrected in zip(self.p, self.q, self.corrected, strict=True):
            multiply(left, right, corrected, subtract=True)
        self._stage()

    def subtract_result(self, flat: Tensor) -> None:
        """corrected -= what lies in the bucket, which makes it the new residual against the aggregate; staged."""
        for corrected, matrix in zip(self.corrected, self.in_bucket(flat), strict=True):
            corrected.sub_(matrix)
        self._stage()

    def _stage(self) -> None:
        for corrected, residual, scale in self._withheld:
            corrected.add_(residual, alpha=scale)
        for slot, unsent in zip(self.slots, self.corrected, strict=True):
            self._feedback.stage(slot, unsent, self._loss_scale)


@dataclass
class BucketPlan:
    """How one bucket layout is compressed.

    Attributes:
        groups: its matrices by shape.
        dense: where the tensors lie that travel as they are.
        checksum: of the factors that come in next, for ranks to compare.
    """

    groups: list[MatrixGroup]
    dense: list[tuple[int, int]]
    checksum: int = 0


class Plans:
    """A plan for every bucket layout in use, and the factors that come in next: by slot, as buckets are rebuilt.

    Args:
        seed: of factors that are drawn.
        are_orthogonal: factors come in with orthonormal rows.
    """

    def __init__(
        self, shape_of: Callable[[Slot], MatrixShape | None], feedback: Feedback, seed: int, are_orthogonal: bool
    ) -> None:
        self._shape_of, self._feedback, self._seed, self._are_orthogonal = shape_of, feedback, seed, are_orthogonal
        self._plans: dict[Layout, BucketPlan] = {}
        self._keys: dict[Slot, str] = {}
        self._n_elements = {"p": 0, "q": 0, "": 0}  # sent of the model so far, dense tensors included, and in all
        self.factors: dict[Slot, Tensor] = {}

    def find(self, bucket: Bucket, turn: str) -> BucketPlan:
        """The plan of this bucket; if `turn` is "p", Q comes in. In a new plan it is that of earlier steps, or drawn."""
        plan = self._plans.get(bucket.layout)
        if plan is not None:
            return plan
        plan = self._make(bucket)
        for group in plan.groups:
            for slot, key, factor in zip(group.slots, group.keys, group.incoming(turn), strict=True):
                if slot in self.factors:
                    factor.copy_(self.factors[slot])
                    continue
                factor.copy_(draw_factor(self._seed, key, 0, *factor.shape))
                if self._are_orthogonal:
                    orthogonalise(factor[None])
        self.keep(plan, turn)
        return plan

    def keep(self, plan: BucketPlan, turn: str) -> None:
        """The factors that come in for `turn` are those of the next step."""
        plan.checksum = 0
        for group in plan.groups:
            factors = group.incoming(turn)
            self.factors.update(zip(group.slots, factors, strict=True))
            plan.checksum = checksum(factors, plan.checksum)

    def load(self, factors: dict[Slot, Tensor]) -> None:
        """Begin with these."""
        self.factors = factors
        self._plans.clear()

    def rate_of(self, side: str) -> float:
        """Elements sent / elements of the gradient, over the whole model as far as it has been seen."""
        return self._n_elements[side] / self._n_elements[""] if self._n_elements[""] else 1.0

    def _make(self, bucket: Bucket) -> BucketPlan:
        """A new plan; those that share a slot with it are of an old layout, and go."""
        dense = [] if bucket.slots else [(0, bucket.n_elements)]
        members: dict[MatrixShape, list[Member]] = {}
        for slot, (start, end) in zip(bucket.slots, bucket.spans, strict=True):
            key, shape = self._count(slot), self._shape_of(slot)
            if shape is not None:
                members.setdefault(shape, []).append((slot, key, (start, end)))
            elif start < end:
                dense.append((start, end))
        device, slots = bucket.buffer.device, set(bucket.slots)
        plan = BucketPlan([MatrixGroup(*group, self._feedback, device) for group in members.items()], dense)
        self._plans = {
            layout: old for layout, old in self._plans.items() if layout.slots and slots.isdisjoint(layout.slots)
        }
        self._plans[bucket.layout] = plan
        return plan

    def _count(self, slot: Slot) -> str:
        """Its key; at first sight its values are added to the model's."""
        if slot not in self._keys:
            # Without names: the order in which slots first appear, which is the same on all ranks.
            self._keys[slot] = slot.name or f"#{len(self._keys)}"
            n, shape = slot.numel(), self._shape_of(slot)
            n_p, n_q = (shape.rank * shape.n_rows, shape.rank * shape.n_columns) if shape else (n, n)
            for side, n_sent in (("", n), ("p", n_p), ("q", n_q)):
                self._n_elements[side] += n_sent
        return self._keys[slot]
