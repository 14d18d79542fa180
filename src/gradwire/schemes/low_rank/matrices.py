"""Parameters as matrices, and what outlasts a step for each: its residual and the factor that comes in next."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

from gradwire import _native
from gradwire.core.bucket import Bucket

# A gradient with values nearly always shows one among its first few: only zero gradients are read to their end.
_GLANCE_ELEMENTS = 64


class MatrixShape(NamedTuple):
    """A parameter as a matrix, first dimension by the rest, and the rank it is approximated with."""

    n_rows: int
    n_columns: int
    rank: int

    @property
    def n_elements(self) -> int:
        return self.n_rows * self.n_columns


def matrix_shape(parameter: torch.Tensor, rank: int, min_compression_rate: float) -> MatrixShape | None:
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
        residual: (n_rows, n_columns) float32, what compression left out; None: nothing yet.
        residual_scale: the loss scale that `residual` still carries; the true one is residual / residual_scale.
    """

    factor: torch.Tensor | None = None
    residual: torch.Tensor | None = None
    residual_scale: float = 1.0


def draw_factor(seed: int, key: str, step: int, rank: int, length: int) -> torch.Tensor:
    """(rank, length) float32 from N(0, 1), the same on every rank: from what all ranks share alone."""
    digest = hashlib.blake2b(repr((seed, key, step, rank, length)).encode(), digest_size=16).digest()
    generator = np.random.Generator(np.random.Philox(key=int.from_bytes(digest, "little")))
    return torch.from_numpy(generator.standard_normal((rank, length), dtype=np.float32))


def redraw_zero_factors(factors: torch.Tensor, keys: Sequence[str], seed: int, step: int) -> None:
    """Draw anew the factors (k, rank, n) that are zero: they would stay zero for ever, whatever the gradients."""
    for factor, key in zip(factors, keys, strict=True):
        if not factor.any():
            factor.copy_(draw_factor(seed, key, step, factor.shape[0], factor.shape[1]))


def orthogonalise(factors: torch.Tensor) -> None:
    """Make the rows of each factor in (k, rank, n) orthonormal, in place, with the same bits on every machine."""
    _native.orthogonalise_factors(factors.view(-1), factors.shape[0], factors.shape[1])


class Group:
    """The matrices of one shape in one bucket, stacked, so that one batched product compresses them all.

    Attributes:
        p: (k, rank, n_rows), q: (k, rank, n_columns): the factors, transposed. Row after row they are contiguous.
        corrected: (k, n_rows, n_columns): gradient + residual; after `subtract_...` the new residual.
    """

    def __init__(self, shape: MatrixShape, members: Sequence[tuple[torch.Tensor, int, str, MatrixState]]) -> None:
        """`members`: parameter, offset in the bucket, key and state of each matrix."""
        self.shape = shape
        self.parameters, self.offsets, self.keys, self.states = (list(column) for column in zip(*members, strict=True))
        n = len(members)
        self.p = torch.empty(n, shape.rank, shape.n_rows)
        self.q = torch.empty(n, shape.rank, shape.n_columns)
        self.corrected = torch.empty(n, shape.n_rows, shape.n_columns)
        self._spare: torch.Tensor | None = None
        self._withheld: list[int] = []
        self._loss_scale = 1.0

    def correct(self, bucket: Bucket, loss_scale: float) -> None:
        """corrected = gradient + residual, both multiplied by `loss_scale`; `bucket` stays as it is.

        A matrix whose gradient is all zero on this rank (an unused parameter) sends nothing and keeps its residual: if
        it is unused everywhere, DDP throws the result away, and the residual would go with it.
        """
        self._withheld.clear()
        self._loss_scale = loss_scale
        for i, state in enumerate(self.states):
            gradient, corrected = self.view_in(bucket.buffer, i), self.corrected[i]
            if state.residual is None:
                corrected.copy_(gradient)
            elif not _has_values(gradient):
                self._withheld.append(i)
                corrected.zero_()
            elif gradient.dtype == torch.float32:
                torch.add(gradient, state.residual, alpha=loss_scale / state.residual_scale, out=corrected)
            else:
                corrected.copy_(gradient).add_(state.residual, alpha=loss_scale / state.residual_scale)

    def view_in(self, flat: torch.Tensor, i: int) -> torch.Tensor:
        """(n_rows, n_columns): matrix i in a tensor that is laid out as the bucket."""
        return flat[self.offsets[i] : self.offsets[i] + self.shape.n_elements].view(
            self.shape.n_rows, self.shape.n_columns
        )

    def write_product(self, flat: torch.Tensor, q: torch.Tensor | None = None) -> None:
        """P Q^T of every matrix to where it lies in the bucket; `q` stands in for the group's own."""
        q = self.q if q is None else q
        for i in range(len(self.parameters)):
            out = self.view_in(flat, i)
            product = out if out.dtype == torch.float32 else torch.empty(out.shape)
            _native.multiply_factors(self.p[i].view(-1), q[i].view(-1), self.shape.rank, False, product.view(-1))
            if product is not out:
                out.copy_(product)

    def subtract_product(self) -> None:
        """corrected -= P Q^T, which makes it the new residual against the factors as they stand."""
        for i in range(len(self.parameters)):
            _native.multiply_factors(
                self.p[i].view(-1), self.q[i].view(-1), self.shape.rank, True, self.corrected[i].view(-1)
            )
        self._keep_withheld()

    def subtract_result(self, flat: torch.Tensor) -> None:
        """corrected -= what lies in the bucket, which makes it the new residual against the aggregate."""
        for i in range(len(self.parameters)):
            self.corrected[i].sub_(self.view_in(flat, i))
        self._keep_withheld()

    def _keep_withheld(self) -> None:
        for i in self._withheld:
            state = self.states[i]
            assert state.residual is not None
            self.corrected[i].add_(state.residual, alpha=self._loss_scale / state.residual_scale)

    def commit_residuals(self) -> None:
        """Make what stands in `corrected` the residuals; the stack of the old ones serves the next step."""
        for state, residual in zip(self.states, self.corrected, strict=True):
            state.residual, state.residual_scale = residual, self._loss_scale
        self.corrected, self._spare = (
            torch.empty_like(self.corrected) if self._spare is None else self._spare,
            self.corrected,
        )

    def commit_factors(self, factors: torch.Tensor) -> None:
        """Make `factors` (k, rank, n) what comes in next."""
        for state, factor in zip(self.states, factors, strict=True):
            state.factor = factor


def _has_values(gradient: torch.Tensor) -> bool:
    flat = gradient.view(-1)
    return bool(flat[:_GLANCE_ELEMENTS].any()) or bool(flat.any())
