"""Where the gradients of `bench allreduce` come from; any process can make any rank's, so results can be verified."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from gradwire.errors import InvalidArgument
from gradwire_lab.workloads.gradients import FloatArray, GradientFile

# Positions of non-zeros come in runs of this many elements: single values, embedding rows, whole batches of a sketch.
PATTERNS = {"element": 1, "row": 32, "batch": 1024}
_SCALE = np.float32(1e-3)
# Purposes of the random streams; each has its own seed sequence (purpose, seed, rank).
_POSITIONS, _VALUES = 0, 1


@dataclass(frozen=True)
class GradientSource:
    """Gradients by rank and length: random ones, `density` of them not zero at the same positions on every rank, or a file's.

    The file's is repeated or cut to the length; rank r's is multiplied element by element by a random sign and a factor from
    0.75 to 1.25: ranks differ as they do over batches; zeros, exponents and every value's neighbourhood stay the file's.
    """

    file: GradientFile | None = None
    density: float = 1.0
    pattern: str = "element"
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.density <= 1:
            raise InvalidArgument(f"density must be from 0 to 1, got {self.density}")
        if self.pattern not in PATTERNS:
            raise InvalidArgument(f"pattern {self.pattern!r} is not one of {', '.join(PATTERNS)}")
        if self.file is not None and self.density != 1.0:
            raise InvalidArgument("--density makes a random gradient and --gradients takes one from a file: name one")

    @property
    def name(self) -> str:
        """What the records call it."""
        if self.file is not None:
            return self.file.name
        return "random" if self.density == 1 else f"random density={self.density:g} pattern={self.pattern}"

    def gradient(self, rank: int, n_elements: int) -> FloatArray:
        """Rank `rank`'s gradient, (n_elements,) float32, the same in every process."""
        numbers = np.random.default_rng((_VALUES, self.seed, rank))
        if self.file is not None:
            factor = numbers.random(n_elements, np.float32)
            factor -= np.float32(0.5)  # its sign is the sign, its size the factor
            factor = np.copysign(np.float32(0.75) + np.abs(factor), factor)
            factor *= np.resize(self.file.gradient, n_elements)
            return factor
        if self.density == 1:
            values = numbers.standard_normal(n_elements, np.float32)
            values *= _SCALE
            return values
        gradient = np.zeros(n_elements, np.float32)
        positions = self.positions(n_elements)
        values = numbers.standard_normal(positions.size, np.float32)
        values[values == 0] = 1  # a non-zero that came out as zero would make the union smaller than was asked for
        gradient[positions] = values * _SCALE
        return gradient

    def positions(self, n_elements: int) -> npt.NDArray[np.int64]:
        """Where the non-zeros of a random sparse gradient lie, on every rank."""
        run = PATTERNS[self.pattern]
        n_runs = -(-n_elements // run)
        n_chosen = min(n_runs, round(self.density * n_elements / run)) or int(self.density > 0 and n_elements > 0)
        chosen = np.random.default_rng((_POSITIONS, self.seed)).choice(n_runs, n_chosen, replace=False, shuffle=False)
        positions = (np.sort(chosen)[:, None] * run + np.arange(run)).ravel()
        return positions[positions < n_elements]
