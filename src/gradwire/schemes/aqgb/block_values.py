"""What each rank knows of every rank's gradient of a block, and its sum in rank order."""

from __future__ import annotations

import threading

import torch

from gradwire.codecs.embedded_float import EmbeddedFloat, EmbeddedValues
from gradwire.errors import CorruptMessage
from gradwire.schemes.deferred import OpenBlock

WORD_BITS = 32


class BlockValues:
    """The copies of one block: of every peer as it has come so far, and this rank's own as the peers have it.

    With all 32 bits in one message the words travel as they are, without a codec.
    """

    def __init__(self, codec: EmbeddedFloat, slot: OpenBlock, rank: int, world_size: int) -> None:
        self._codec, self._slot, self._rank, self._world_size = codec, slot, rank, world_size
        self._refined: dict[int, EmbeddedValues] = {}
        self._plain: dict[int, torch.Tensor] = {}
        self._is_plain: dict[int, bool] = {}
        self._messages: dict[int, torch.Tensor] = {}  # by first bit: what was sent must stay until it is gone
        self._rounded: torch.Tensor | None = None
        self.sent_bits = 0

    def reset(self) -> None:
        """A new gradient begins."""
        for values in self._refined.values():
            values.reset()
        self._is_plain.clear()
        self.sent_bits = 0

    # ---- own

    def encode(self, n_bits: int) -> tuple[torch.Tensor, bool]:
        """The message with the next `n_bits` of every value of this rank's gradient, and whether it is plain words.

        It stays valid until the next round's.
        """
        gradient, first_bit = self._slot.gradient, self.sent_bits
        self.sent_bits += n_bits
        n_needed = self.max_message_bytes(first_bit, n_bits)
        stage = min(first_bit, 1)
        memory = self._messages.get(stage)
        if memory is None or memory.numel() < n_needed:
            memory = self._messages[stage] = torch.empty(n_needed, dtype=torch.uint8)
        if (first_bit, n_bits) == (0, WORD_BITS):
            # A copy: the gradient becomes the mean here while slower ranks are still receiving.
            return memory[:n_needed].copy_(gradient.view(torch.uint8)), True
        return memory[: self._codec.encode_planes(gradient, first_bit, n_bits, memory)], False

    def max_message_bytes(self, first_bit: int, n_bits: int) -> int:
        """Bytes that no message with these bits exceeds."""
        gradient = self._slot.gradient
        if (first_bit, n_bits) == (0, WORD_BITS):
            return gradient.numel() * gradient.element_size()
        return self._codec.max_plane_bytes(gradient.numel(), gradient.dtype, first_bit, n_bits)

    @property
    def largest_message_bytes(self) -> int:
        """Bytes that no first message exceeds, whatever its bits; later ones hold fewer."""
        return max(self.max_message_bytes(0, n_bits) for n_bits in range(1, WORD_BITS + 1))

    # ---- of a peer

    def check_announced(self, origin: int, first_bit: int, n_bits: int, is_plain: bool, n_bytes: int) -> None:
        """Raises: CorruptMessage if no message with these bits has `n_bytes`."""
        if n_bytes > self.max_message_bytes(first_bit, n_bits) or (
            is_plain and n_bytes != self.max_message_bytes(0, WORD_BITS)
        ):
            raise CorruptMessage(
                f"rank {origin} announced {n_bytes} bytes for {n_bits} bits of block {self._slot.block.name!r} in this step; "
                "check that all ranks run the same gradwire"
            )

    def add_plain(self, origin: int, message: torch.Tensor) -> None:
        """Take in all words of `origin`."""
        if origin not in self._plain:
            self._plain[origin] = torch.empty_like(self._slot.gradient)
        self._plain[origin].view(torch.uint8).copy_(message)
        self._is_plain[origin] = True

    def add_planes(self, origin: int, message: torch.Tensor, first_bit: int, n_bits: int) -> None:
        """Take in a message. Raises: CorruptMessage, IncompatibleVersion."""
        values = self._refined.get(origin)
        if values is None:
            gradient = self._slot.gradient
            values = self._refined[origin] = self._codec.receive(gradient.numel(), gradient.dtype)
        if values.n_bits != first_bit or values.add_planes(message) != first_bit + n_bits:
            raise CorruptMessage(
                f"rank {origin} announced bits {first_bit} to {first_bit + n_bits} of block {self._slot.block.name!r} and "
                f"sent others; check that all ranks run the same gradwire"
            )

    # ---- the sum

    def write_own(self, out: torch.Tensor) -> None:
        """This rank's gradient as the others have it, into `out` (n,) of its dtype."""
        if self.sent_bits == WORD_BITS:
            out.copy_(self._slot.gradient)
        else:
            self._codec.quantise(self._slot.gradient, self.sent_bits, out)

    def sum_in_rank_order(self, sums: torch.Tensor, own: torch.Tensor) -> None:
        """sums (n,) float32 = all ranks' copies, added in rank order, so that all ranks get the same bits.

        `own` (n,): as `write_own` gives it. Raises: CorruptMessage (a rank ended a block that it never sent).
        """
        sums.zero_()
        for rank in range(self._world_size):
            if rank == self._rank:
                sums.add_(own)
            elif self._is_plain.get(rank):
                sums.add_(self._plain[rank])
            elif rank in self._refined and self._refined[rank].n_bits:
                self._add_refined(self._refined[rank], sums)
            else:
                raise CorruptMessage(
                    f"rank {rank} said that block {self._slot.block.name!r} is complete before it sent any of it; check that "
                    "all ranks run the same gradwire"
                )

    def _add_refined(self, values: EmbeddedValues, sums: torch.Tensor) -> None:
        if values.dtype == torch.float32:
            values.add_to(sums)
            return
        # As its sender adds it: rounded to the gradient's dtype.
        if self._rounded is None:
            self._rounded = torch.empty_like(self._slot.gradient)
        values.write(self._rounded)
        sums.add_(self._rounded)


class Scratch:
    """Two work spaces for one sum at a time: allocated once, not every step."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self._sums = torch.empty(0)
        self._own = torch.empty(0)

    def for_block(self, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(n,) float32 and (n,) of the gradient's dtype; under `lock`."""
        n = gradient.numel()
        if self._sums.numel() < n:
            self._sums = torch.empty(n)
        if self._own.numel() < n or self._own.dtype != gradient.dtype:
            self._own = torch.empty(n, dtype=gradient.dtype)
        return self._sums[:n], self._own[:n]
