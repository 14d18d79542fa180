"""The head that goes before every body, and alone to say that blocks are complete: docs/format.md#broadcast."""

from __future__ import annotations

import struct
from dataclasses import dataclass

import torch

from gradwire import _native
from gradwire.errors import CorruptMessage, IncompatibleVersion, RankMismatch

HEAD_VERSION = 3
NO_BLOCK = 0xFFFF  # a head without a body
_MAGIC = 0x4257  # "WB"
_FIXED = struct.Struct("<HBBHHBBHIIIII")
_CHECKSUM = struct.Struct("<I")
_UNKNOWN_US = -(1 << 31)  # a remaining time that its sender cannot tell yet
_MAX_US = (1 << 31) - 1

_ADVICE = {
    "configuration": "pass the same scheme and options, blocks and their order among them, on every rank",
    "blocks": "every rank must hold the same model and cut it into the same blocks in the same order",
    "step": "resume every rank from the same checkpoint and call backward equally often on all of them",
}
_CORRUPTION_ADVICE = "check that all ranks run the same gradwire, and the host's memory and network"


@dataclass
class Head:
    """What a rank says with each body.

    Attributes:
        origin: the rank whose gradient the body holds.
        block: its block, or NO_BLOCK.
        first_bit, n_bits: which bits of each value the body holds; 0 and 32 also for a body of plain words.
        is_plain: the body holds the words themselves, not a codec's message.
        body_bytes: its length.
        sequence: heads of this origin and step before this one.
        ceiling_bits: of a value, that this origin's processors have time for (control/contention.py).
        ended: [block] whether this origin sends no more of it in this step: its marker of the end.
        remaining_s: [block] from the head's arrival until this origin's next forward pass needs it; None if it cannot tell yet.
        received_bytes, receiving_us: [rank] of bodies that this origin has received of each rank since it was attached,
            and how long those transfers took: acknowledgements, which carry both b and u of the control law.
    """

    origin: int
    block: int
    first_bit: int
    n_bits: int
    is_plain: bool
    body_bytes: int
    sequence: int
    ceiling_bits: int
    ended: list[bool]
    remaining_s: list[float] | None
    received_bytes: list[int]
    receiving_us: list[int]


class HeadFormat:
    """Heads of one run: their size follows from the numbers of blocks and ranks.

    Args: configuration, blocks: hashes that all ranks must share.
    """

    def __init__(self, n_blocks: int, world_size: int, configuration: int, blocks: int) -> None:
        self._n_blocks, self._world_size = n_blocks, world_size
        self._configuration, self._blocks = configuration, blocks
        self._ended_bytes = -(-n_blocks // 8)
        self._tail = struct.Struct(f"<{self._ended_bytes}s{n_blocks}i{world_size}Q{world_size}Q")
        self.n_bytes = _FIXED.size + self._tail.size + _CHECKSUM.size

    def pack(self, head: Head, step: int, out: torch.Tensor) -> None:
        """Write `head` into `out` (n_bytes,) uint8."""
        ended = sum(1 << block for block, is_ended in enumerate(head.ended) if is_ended)
        remaining_us = [_UNKNOWN_US] * self._n_blocks
        if head.remaining_s is not None:
            remaining_us = [max(_UNKNOWN_US + 1, min(_MAX_US, int(seconds * 1e6))) for seconds in head.remaining_s]
        raw = _FIXED.pack(
            _MAGIC, HEAD_VERSION, int(head.is_plain), head.origin, head.block, head.first_bit, head.n_bits, head.ceiling_bits,
            head.body_bytes, head.sequence, step & 0xFFFFFFFF, self._configuration, self._blocks,
        )  # fmt: skip
        raw += self._tail.pack(
            ended.to_bytes(self._ended_bytes, "little"), *remaining_us, *head.received_bytes, *head.receiving_us
        )
        raw += _CHECKSUM.pack(_native.crc32c(raw))
        out.copy_(torch.frombuffer(bytearray(raw), dtype=torch.uint8))

    def unpack(self, message: torch.Tensor, step: int, peer: int) -> Head:
        """Read and check a head that `peer` sent. Raises: CorruptMessage, IncompatibleVersion, RankMismatch."""
        raw = bytes(message.numpy())
        (magic, version, flags, origin, block, first_bit, n_bits, ceiling_bits, body_bytes, sequence, *shared) = (
            _FIXED.unpack_from(raw)
        )
        if magic == _MAGIC and version != HEAD_VERSION:
            raise IncompatibleVersion(
                f"rank {peer} sends broadcast heads of version {version}, this build reads {HEAD_VERSION}; install the "
                "same gradwire on every host"
            )
        (checksum,) = _CHECKSUM.unpack_from(raw, self.n_bytes - _CHECKSUM.size)
        if magic != _MAGIC or checksum != _native.crc32c(raw[: -_CHECKSUM.size]):
            raise CorruptMessage(
                f"rank {peer} sent a head that gradwire did not write (step {step}); {_CORRUPTION_ADVICE}"
            )
        mine = (self._configuration, self._blocks, step & 0xFFFFFFFF)
        theirs_by_name = dict(zip(("step", "configuration", "blocks"), shared, strict=True))
        for name, here in zip(("configuration", "blocks", "step"), mine, strict=True):
            if theirs_by_name[name] != here:
                raise RankMismatch(
                    f"ranks disagree on {name}: {here} here, {theirs_by_name[name]} on rank {origin} (step {step} here). "
                    f"What to do: {_ADVICE[name]}."
                )
        ended_raw, *numbers = self._tail.unpack_from(raw, _FIXED.size)
        ended = int.from_bytes(ended_raw, "little")
        remaining_us = numbers[: self._n_blocks]
        received = numbers[self._n_blocks : self._n_blocks + self._world_size]
        head = Head(
            origin, block, first_bit, n_bits, bool(flags), body_bytes, sequence, ceiling_bits,
            [bool(ended >> index & 1) for index in range(self._n_blocks)],
            None if _UNKNOWN_US in remaining_us else [us / 1e6 for us in remaining_us],
            received, numbers[self._n_blocks + self._world_size :],
        )  # fmt: skip
        has_bits = block < self._n_blocks and n_bits >= 1 and first_bit + n_bits <= 32
        is_alone = block == NO_BLOCK and not body_bytes
        is_sane = flags <= 1 and 1 <= ceiling_bits <= 32 and origin < self._world_size and not ended >> self._n_blocks
        if not is_sane or not (has_bits or is_alone):
            raise CorruptMessage(f"rank {peer} sent a head out of range (step {step}); {_CORRUPTION_ADVICE}")
        return head
