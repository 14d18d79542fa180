"""The schemes `aqgb` and `broadcast`.

Luo et al., "Approximate gradient synchronization with adaptive quantized gradient broadcast". The paper simulates; here
the control law of gradwire.control.quantisation runs live.
"""

from __future__ import annotations

from typing import Any, ClassVar

from gradwire.control.checks import share
from gradwire.control.contention import DEFAULT_MAX_CONTENTION
from gradwire.control.quantisation import DEFAULT_FLOOR, MIN_BITS, PROFILED_ROUNDS, WORD_BITS
from gradwire.errors import InvalidArgument
from gradwire.schemes.aqgb.broadcasting import BlockBroadcast
from gradwire.schemes.aqgb.core_times import CoreTimes, read_core_times
from gradwire.schemes.aqgb.pacing import DEFAULT_CONFIDENCE, Pacing, PacingLimits
from gradwire.stepping.blocks import Division


class Aqgb(BlockBroadcast):
    """Compress only as much as it takes for communication not to be waited for.

    First stage: each block leaves when its gradient appears, newest first, with as many bits as pass until the next one
    appears (the floor for the last). Second stage: what time is left before a block's next forward pass refines it. The
    optimizer steps a block just before that pass; read parameters in between only after `Attachment.flush()`.

    When not to use this: on more than about 8 ranks, since a broadcast sends every gradient to every rank (at 4 bits
    a value and 16 ranks as much as an uncompressed ring); where a forward pass is too short to hide anything; where two runs
    must give the same bits, as what is sent depends on the network's speed.

    Args:
        floor, ceiling: the least and the largest share of its 32 bits that a value is sent with.
        blocks: how many, or lists of module names; DDP's buckets (`bucket_cap_mb`) should be no larger than a block.
        confidence: the share of the estimated rate that is planned with.
        initial_bps: the rate to begin with; without it, the first steps are sent at the floor.
        max_contention: of the time in which threads could run, the share that they may wait for a core before fewer bits
            are sent; 1: bits are bounded by the network alone, as in the paper.
        core_times: how long threads ran and waited for a core.
        options: see BlockBroadcast.
    """

    name: ClassVar[str] = "aqgb"

    def __init__(
        self, floor: float = DEFAULT_FLOOR, ceiling: float = 1.0, blocks: Division = 4,
        confidence: float = DEFAULT_CONFIDENCE, initial_bps: float | None = None,
        max_contention: float = DEFAULT_MAX_CONTENTION, core_times: CoreTimes = read_core_times, **options: Any,
    ) -> None:  # fmt: skip
        super().__init__(blocks, **options)
        self.limits = PacingLimits(share("floor", floor), share("ceiling", ceiling), confidence, max_contention)
        self.initial_bps = initial_bps
        self._core_times = core_times if max_contention < 1 else None
        Pacing(0, 2, [1], self._clock, initial_bps=initial_bps)  # refuses a rate of zero here, where it was given

    @property
    def settling_steps(self) -> int:
        """DDP's first step, with one bucket, then as many rounds as its timetable is the median of, and one to use it."""
        return PROFILED_ROUNDS + 2

    @property
    def configuration(self) -> dict[str, Any]:
        return super().configuration | {"floor": self.limits.floor, "ceiling": self.limits.ceiling}

    def _make_pacing(self, rank: int, world_size: int, block_elements: list[int]) -> Pacing:
        return Pacing(rank, world_size, block_elements, self._clock, self.limits, self.initial_bps, self._core_times)

    def _first_bits(self, block: int, unsent_elements: int) -> int:
        return self.pacing.bits_now(unsent_elements)

    def _more_bits(self, block: int, sent_bits: int, extra_bytes: int) -> int:
        return self.pacing.more_bits(block, sent_bits, extra_bytes)

    def _more_bits_ever(self, sent_bits: int) -> int:
        return max(0, self.pacing.ceiling_bits - sent_bits)


class Broadcast(BlockBroadcast):
    """Every gradient to every rank with `bits` of each value, 2 to 32; 32: as it is. What AQGB is measured against.

    When not to use this: with more than 2 ranks uncompressed, since a ring sends 2/N as much; with few bits where `aqgb`
    would find the time for more.

    Options: see BlockBroadcast.
    """

    name: ClassVar[str] = "broadcast"

    def __init__(self, bits: int = 4, blocks: Division = 4, max_grad_norm: float | None = None, **options: Any) -> None:
        super().__init__(blocks, max_grad_norm, **options)
        if not MIN_BITS <= bits <= WORD_BITS:
            raise InvalidArgument(f"bits is from {MIN_BITS} to {WORD_BITS}, not {bits}")
        self.bits = bits

    @property
    def configuration(self) -> dict[str, Any]:
        return super().configuration | {"bits": self.bits}

    def _make_pacing(self, rank: int, world_size: int, block_elements: list[int]) -> Pacing:
        return Pacing(rank, world_size, block_elements, self._clock)

    def _first_bits(self, block: int, unsent_elements: int) -> int:
        return self.bits

    def _more_bits(self, block: int, sent_bits: int, extra_bytes: int) -> int:
        return 0
