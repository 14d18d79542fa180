"""Count sketches that sum without being decompressed, and are peeled (Li et al., ICML 2024).

Not a `Codec`: a sketch needs the index of the non-zeros of *all* ranks, which is itself summed (ORed). On every rank alike:

    facts = write_index(gradient, own_index)               one pass; own_index goes through an OR over the ranks
    sketch.prepare(index, n_elements)                      sizes and places, from the OR-ed index alone
    sketch.add(gradient, own_index, cells)                 cells go through a sum over the ranks
    sketch.peel(index)                                     which value stands alone where: no values needed
    sketch.recover(cells, scale, gradient)                 the sum of all ranks' gradients, times scale

Integer cells give back every sum exactly. Float32 cells are not lossless element by element: a value that shared its cells
with larger ones comes back without the digits that they rounded away, which may be all of them. By norms the error is 3e-7
to 7e-7.
"""

import enum
import math
import struct
from collections.abc import Sequence
from typing import NamedTuple

import torch

from gradwire import _native
from gradwire.codecs.tensors import check_64_bits
from gradwire.errors import InvalidArgument

MIN_GAMMA = 1.3
MAX_CORE = 8  # a core of up to this many values is sent beside the sketch; a larger one is given another salt
MAX_ATTEMPTS = 64  # after so many tables (gamma has grown by 40 % then) all is sent as core
_SALTS_PER_GAMMA, _GAMMA_STEP = 8, 0.05  # so many salts are tried with each gamma, and then 5 % more cells
_SALTS_PER_STEP = 1 << 16  # more than all attempts, and the Bloom filter's
_MEDIAN_VARIANCE = 0.449  # of the median of three normal draws, as a share of one draw's

_DTYPES = {torch.float32: 0, torch.bfloat16: 1}
_CELLS = {torch.float32: 0, torch.int32: 1, torch.int64: 2}
# Bits beside the sign; of int64 as many as let a float64 hold every limit exactly.
_FIXED_BITS = {torch.int8: 7, torch.int16: 15, torch.int32: 31, torch.int64: 62}


class Outcome(enum.IntEnum):
    """What came of a recovery."""

    COMPLETE = 0
    NONFINITE = 1  # sums of finite values have left the range of float32
    FOREIGN = 2  # the sketch does not belong to the index, or was altered


class IndexFacts(NamedTuple):
    """The findings of one pass over a gradient."""

    n_nonzeros: int  # values that are neither 0.0 nor -0.0
    max_magnitude: float  # of the values; inf if one of them is Inf or NaN


class FixedPoint(NamedTuple):
    """Values as integers: rint(value x 2^shift), at most `limit` in magnitude; their sums over the ranks are exact.

    The rounding error of a value is at most 2^(-shift - 1), or 2^-shift for one that is rounded to 2^exponent itself.
    """

    dtype: torch.dtype
    shift: int
    limit: int

    @classmethod
    def fit(cls, exponent: int, world_size: int, dtype: torch.dtype) -> "FixedPoint":
        """The finest fixed point, int8 to int64, whose sums over `world_size` ranks cannot overflow. Every value of
        every rank is below 2^exponent in magnitude: agree on it anew at every step."""
        bits = _FIXED_BITS[dtype] - (world_size - 1).bit_length()
        return cls(dtype, bits - exponent, (1 << bits) - 1)

    @property
    def scale(self) -> float:
        """The factor of an integer that gives its value."""
        return math.ldexp(1.0, -self.shift)

    def quantise(self, values: torch.Tensor) -> torch.Tensor:
        """(n,) integers of `dtype`; ties to even."""
        scaled = values.double().mul_(math.ldexp(1.0, self.shift)).round_().clamp_(-self.limit, self.limit)
        return scaled.to(self.dtype)

    def to_words(self, integers: torch.Tensor) -> torch.Tensor:
        """What two ranks or more sum: int8 and int16 several to an int32, `limit` above zero, so that no sum carries over."""
        if integers.element_size() >= 4:
            return integers
        n = integers.numel()
        padded = integers.new_zeros(n + -n % (4 // integers.element_size()))
        padded[:n] = integers + self.limit
        return padded.view(torch.int32)

    def read_words(self, words: torch.Tensor, n: int, world_size: int) -> torch.Tensor:
        """(n,) sums of `world_size` ranks' integers."""
        if words.dtype == self.dtype:
            return words
        sums = words.view(self.dtype)[:n].int()
        return sums.bitwise_and_((1 << 8 * self.dtype.itemsize) - 1).sub_(world_size * self.limit)


class NarrowCells(NamedTuple):
    """Integer cells of 8 or 16 bits: a sketch of int32 modulo 2^`modulus_bits`, two or four cells to an int32 that is summed.

    A cell of a sketch wraps around. So that no sum of the ranks' cells carries into the next one, each is sent modulo a power
    of two that many times smaller; what comes out of the sketch is right if the sum of a value fits that.
    """

    dtype: torch.dtype
    world_bits: int

    @property
    def modulus_bits(self) -> int:
        return 8 * self.dtype.itemsize - self.world_bits

    @property
    def value_bits(self) -> int:
        """Of one rank's value, beside its sign."""
        return self.modulus_bits - 1 - self.world_bits

    def fixed_point(self, exponent: int) -> FixedPoint:
        """Of values that are below 2^exponent in magnitude, on every rank."""
        return FixedPoint(torch.int32, self.value_bits - exponent, (1 << self.value_bits) - 1)

    def narrow(self, cells: torch.Tensor) -> torch.Tensor:
        """The words to sum of (n,) int32 cells."""
        narrowed = cells.new_zeros(cells.numel() + -cells.numel() % (4 // self.dtype.itemsize), dtype=self.dtype)
        narrowed[: cells.numel()] = cells & ((1 << self.modulus_bits) - 1)
        return narrowed.view(torch.int32)

    def widen(self, words: torch.Tensor, cells: torch.Tensor) -> float:
        """Write the sums as int32 cells that wrap around as theirs do. Returns: the factor of a value that comes out."""
        shift = 32 - self.modulus_bits
        cells.copy_(words.view(self.dtype)[: cells.numel()]).bitwise_left_shift_(shift)
        return math.ldexp(1.0, -shift)


def index_words(n_elements: int) -> int:
    """Words of 32 bits in the index of `n_elements` values."""
    return (n_elements + 31) // 32


def write_index(gradient: torch.Tensor, words: torch.Tensor) -> IndexFacts:
    """Set bit i % 32 of word i / 32 of `words` (index_words(n),) int32 where value i of `gradient` (n,) is not zero."""
    is_half = gradient.dtype == torch.float16  # sorted and zero where the same bits as bfloat16 are
    code = _DTYPES[torch.bfloat16] if is_half else _dtype_code(gradient)
    n_nonzeros, bits = _native.sketch_write_index(gradient.view(torch.uint8), code, words.view(torch.uint32))
    packed = ("<e", struct.pack("<H", bits >> 16)) if is_half else ("<f", struct.pack("<I", bits))
    (largest,) = struct.unpack(*packed)
    return IndexFacts(n_nonzeros, largest if math.isfinite(largest) else math.inf)


class CountSketch:
    """One count sketch at a time; keeps its work space for the next (docs/format.md#count-sketch; sections 3.1 to 3.4).

    Args:
        batch_values: c: values that share rows, signs and rotations; a power of two from 16 to 1,024. Gradients with few
            non-zeros use smaller batches, so that a table has at least 32 rows.
        gamma: cells for each non-zero of the union. Peeling needs 1.23 asymptotically, and 1.3 at finite size.
        seed: of all hashes; ranks share it.
    """

    def __init__(self, batch_values: int = 1024, gamma: float = MIN_GAMMA, seed: int = 0) -> None:
        if batch_values not in (16, 32, 64, 128, 256, 512, 1024):
            raise InvalidArgument(f"batch_values is a power of two from 16 to 1,024, not {batch_values}")
        if not MIN_GAMMA <= gamma <= 10:
            raise InvalidArgument(
                f"gamma must be {MIN_GAMMA} to 10, got {gamma}; below {MIN_GAMMA} sketches of finite size do not peel. "
                'For a smaller sketch at the price of exactness take mode="lossy"'
            )
        self.batch_values, self.gamma, self.seed = batch_values, float(gamma), check_64_bits("seed", seed)
        self._plan = _native.SketchPlan()
        self._n_core = 0

    def prepare(self, index: torch.Tensor, n_elements: int, attempt: int = 0, max_cells: int = 0, step: int = 0) -> int:
        """Fit size, rows and rotations to the OR-ed index, (index_words(n_elements),) int32; returns the number of cells.

        Each `attempt` has another salt, and every eighth one 5 % more cells; with MAX_ATTEMPTS there are none, and all is core.
        `max_cells`: about so many (whole rows of each block), which lose values; 0: enough for all. Each `step`, below 2^32,
        has hashes of its own, so that what estimates miss differs. Raises: CorruptMessage (bits past the end).
        """
        if attempt >= MAX_ATTEMPTS:
            max_cells = 1
        gamma = self.gamma * (1 + _GAMMA_STEP * (attempt // _SALTS_PER_GAMMA))
        salt = attempt + _SALTS_PER_STEP * step
        self._plan.prepare(index.view(torch.uint32), n_elements, self.batch_values, gamma, self.seed, salt, max_cells)
        return self.n_cells

    def assume(self, n_elements: int, batch_values: int, rows: Sequence[int], attempt: int = 0) -> int:
        """Fit the sketch before the index is known, to be summed along with it; returns the number of cells. `rows`: of
        each of the table's blocks, three or more, or none. `attempt`: the salt alone. `adopt` comes before `peel`."""
        rows_of_blocks = torch.tensor(rows, dtype=torch.int32, device="cpu").view(torch.uint32)
        self._plan.assume(n_elements, batch_values, rows_of_blocks, self.seed, attempt)
        return self.n_cells

    def adopt(self, index: torch.Tensor) -> None:
        """Take the OR-ed index for which a table was assumed."""
        self._plan.adopt(index.view(torch.uint32))

    def block_nonzeros(self) -> list[int]:
        """Bits of the index in each block."""
        return list(self._plan.block_nonzeros())

    @property
    def table_batch_values(self) -> int:
        """Values that share rows in this table: `batch_values` or less."""
        return self._plan.batch_values

    @property
    def estimate_shrinkage(self) -> float:
        """The factor of estimates with which error feedback converges: 1 / (1 + relative variance). A core value's cell
        holds about L = 3 n_core / n_cells of them, so a row's estimate has the variance L of one value's square, and
        the median of three such rows 0.45 of that."""
        return 1 / (1 + _MEDIAN_VARIANCE * 3 * self._n_core / max(1, self.n_cells))

    @property
    def n_nonzeros(self) -> int:
        """Bits in the index."""
        return self._plan.n_nonzeros

    @property
    def n_cells(self) -> int:
        return self._plan.n_cells

    @property
    def n_rounds(self) -> int:
        """Rounds of peeling, of the block that took most."""
        return self._plan.n_rounds

    def add(
        self, gradient: torch.Tensor, own_index: torch.Tensor, cells: torch.Tensor, fixed: FixedPoint | None = None
    ) -> None:
        """Write the sketch of this rank's `gradient` (n_elements,) float32 or bfloat16 over `cells` (n_cells,) float32,
        or `fixed.dtype`. `own_index` is what `write_index` made of it, before the OR: only cache lines with non-zeros
        are read. Raises: InvalidArgument (cells of another dtype; a value that does not fit `fixed`)."""
        expected = torch.float32 if fixed is None else fixed.dtype
        if cells.dtype != expected:
            raise InvalidArgument(f"cells must be {expected}, got {cells.dtype}")
        _, shift, limit = fixed or (None, 0, 0)
        values, index, kind = gradient.view(torch.uint8), own_index.view(torch.uint32), _CELLS[cells.dtype]
        self._plan.add(values, _dtype_code(gradient), index, kind, shift, limit, cells.view(torch.uint8))

    def peel(self, index: torch.Tensor) -> int:
        """Find the order in which values come out of the sketch; returns how many do not: the core. Needs no values, so
        it runs while the sketch travels; `index` is as `prepare` was given it."""
        self._n_core = self._plan.peel(index.view(torch.uint32))
        return self._n_core

    def core(self) -> torch.Tensor:
        """(n_core,) int64: positions of the values that do not come out, in the same order on all ranks."""
        positions = torch.empty(self._n_core, dtype=torch.int64, device="cpu")
        self._plan.write_core(positions)
        return positions

    def recover(
        self, cells: torch.Tensor, scale: float, out: torch.Tensor, estimate: bool = False, bound: float | None = None
    ) -> Outcome:
        """Write into `out` (n_elements,) float32 or bfloat16 sum x `scale` of every value; 0 where the index has no bit. In the
        order of `peel`, so all ranks get the same bits from the same `cells`, their sum, which is used up.

        Args:
            scale: 1 / world size gives the mean; for integers times FixedPoint.scale.
            estimate: write the median of a core value's three cells in its place (the paper's lossy mode); otherwise 0.
            bound: the ranks' largest magnitudes add up to no more; in float32 cells, rounding leaves less than 2^-16 of
                it. Default: the largest cell, which is too little where ranks cancel.
        Returns: FOREIGN if what has come out does not leave the cells empty (never with a core).
        Raises: CorruptMessage (another number of cells).
        """
        kind, code = _CELLS[cells.dtype], _dtype_code(out)
        if bound is None:
            bound = float(cells.abs().max()) if kind == 0 and cells.numel() else 0.0
        raw, values = cells.view(torch.uint8), out.view(torch.uint8)
        return Outcome(self._plan.recover(raw, kind, scale, estimate, bound, values, code))


def _dtype_code(tensor: torch.Tensor) -> int:
    if tensor.dtype not in _DTYPES:
        raise InvalidArgument(f"a count sketch takes float32 and bfloat16, not {tensor.dtype}; convert it first")
    return _DTYPES[tensor.dtype]
