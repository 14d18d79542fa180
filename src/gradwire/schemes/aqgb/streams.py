"""Heads and bodies between ranks: sent from the lane to all peers, received from all of them on one thread of its own.

A head and its body are one message of the engine's (docs/format.md#message-header).
"""

from __future__ import annotations

import queue
import threading
from typing import Protocol

import torch

from gradwire import _native
from gradwire.errors import CorruptMessage
from gradwire.schemes.aqgb.heads import NO_BLOCK, Head, HeadFormat
from gradwire.wire.communicator import Communicator
from gradwire.wire.facts import Facts

TOPOLOGIES = ("fan-out", "ring")
# A body begins at a multiple of this in its message, so that its words are aligned.
_ALIGNMENT = 64


class Listener(Protocol):
    """What takes in what peers send; called on the receiver's thread."""

    @property
    def max_body_bytes(self) -> int:
        """Bytes that no body exceeds."""

    def check(self, head: Head) -> None:
        """Raises: CorruptMessage if `head` announces a body that its bits do not make."""

    def take(self, head: Head, body: torch.Tensor | None, duration_ns: int) -> None:
        """A head, and its body with how long its transfer took."""

    def has_ended(self, origin: int, step: int) -> bool:
        """Whether `origin` has sent its last in `step`."""

    def fail(self, error: Exception) -> None:
        """A receiver gave up."""

    def forwarded(self, block: int, n_bytes: int) -> None:
        """A head and body of another rank was passed on."""


class Streams:
    """This rank's end of the stream of one attachment.

    Args:
        topology: "fan-out": every rank sends to every other; "ring": to its right neighbour, which passes on.
    """

    def __init__(self, communicator: Communicator, topology: str, heads: HeadFormat, listener: Listener) -> None:
        rank, world_size = communicator.rank, communicator.world_size
        self._heads, self._listener = heads, listener
        self._head_bytes = -(-heads.n_bytes // _ALIGNMENT) * _ALIGNMENT
        self._right = (rank + 1) % world_size
        self._is_ring = topology == "ring"
        # Fan-out begins with the right neighbour, so that not all ranks send to the same one at once.
        others = [(rank + distance) % world_size for distance in range(1, world_size)]
        self._receivers_of_mine = [self._right] if self._is_ring else others
        self._origins_by_source = (
            {(rank - 1) % world_size: others} if self._is_ring else {peer: [peer] for peer in others}
        )
        self._stream = communicator.next_stream()
        self._mesh = communicator.submit(self._open, communicator).wait()
        self._rounds: queue.SimpleQueue[int | None] = queue.SimpleQueue()
        self._receiver = threading.Thread(target=self._receive_rounds, name="gradwire-receiver", daemon=True)
        self._receiver.start()

    def _open(self, communicator: Communicator) -> _native.Mesh:
        mesh = communicator.mesh
        # Each head carries facts of its own; what they do not say is the same by construction.
        facts, largest = Facts(0, 0, 0, 0), self._head_bytes + self._listener.max_body_bytes
        mesh.open(self._stream, facts, largest, sorted({*self._receivers_of_mine, *self._origins_by_source}))
        return mesh

    @property
    def n_copies(self) -> int:
        """How many copies of each of its messages this rank itself sends."""
        return len(self._receivers_of_mine)

    def begin_round(self, step: int) -> None:
        """Receive what peers send in `step`, until all have ended."""
        self._rounds.put(step)

    def send(self, head: Head, step: int, body: torch.Tensor | None) -> int:
        """Start sending to every receiver; returns the bytes of one copy. Raises: PeerLost."""
        packed = torch.zeros(self._head_bytes, dtype=torch.uint8)
        self._heads.pack(head, step, packed[: self._heads.n_bytes])
        return self._start(self._receivers_of_mine, packed, body)

    def _start(self, peers: list[int], packed: torch.Tensor, body: torch.Tensor | None) -> int:
        parts = [packed] if body is None else [packed, body]
        self._mesh.send(peers, self._stream, parts)
        return _native.MESSAGE_HEADER_BYTES + sum(part.numel() for part in parts)

    def finish(self) -> None:
        """Wait until the kernel has taken everything. Raises: PeerLost."""
        self._mesh.wait_until_all_sent()

    # ---- receiving

    def _receive_rounds(self) -> None:
        torch.get_num_threads()  # a new thread takes the process's count over when it first asks (communicator.py)
        while (step := self._rounds.get()) is not None:
            try:
                expected = {origin: 0 for origins in self._origins_by_source.values() for origin in origins}
                while sources := self._sources_under_way(step):
                    self._receive_one(sources, step, expected)
            except Exception as error:
                self._listener.fail(error)
                return

    def _sources_under_way(self, step: int) -> list[int]:
        """Who still sends messages of this step: what others send belongs to the next one."""
        return [
            source
            for source, origins in self._origins_by_source.items()
            if not all(self._listener.has_ended(origin, step) for origin in origins)
        ]

    def _receive_one(self, sources: list[int], step: int, expected: dict[int, int]) -> None:
        """One head and its body."""
        source, message, duration_ns = self._mesh.receive_any(self._stream, sources)
        if message.numel() < self._head_bytes:
            raise CorruptMessage(f"rank {source} sent {message.numel()} bytes, fewer than a head has")
        packed, body = message[: self._heads.n_bytes], message[self._head_bytes :]
        head = self._heads.unpack(packed, step, source)
        if expected.get(head.origin) != head.sequence or head.origin not in self._origins_by_source[source]:
            raise CorruptMessage(
                f"rank {source} sent head {head.sequence} of rank {head.origin} in step {step}, out of turn; check that all "
                "ranks run the same gradwire with the same topology"
            )
        expected[head.origin] += 1
        if head.block != NO_BLOCK:
            self._listener.check(head)
        if body.numel() != head.body_bytes:
            raise CorruptMessage(f"rank {source} announced a body of {head.body_bytes} bytes and sent {body.numel()}")
        if self._is_ring and head.origin != self._right:
            self._listener.forwarded(head.block, self._start([self._right], message, None))
        self._listener.take(head, None if head.block == NO_BLOCK else body, duration_ns)

    def close(self) -> None:
        """End the receiver; between rounds, or after a failure."""
        self._rounds.put(None)
        if self._receiver is not threading.current_thread():
            self._receiver.join()
        self._mesh.close(self._stream)
