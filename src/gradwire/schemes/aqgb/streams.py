"""Heads and bodies between ranks: sending to all peers, receiving from each on a thread of its own."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from typing import Protocol

import torch
import torch.distributed as dist

from gradwire.communicator import Communicator
from gradwire.errors import CorruptMessage
from gradwire.schemes.aqgb.heads import NO_BLOCK, Head, HeadFormat

TOPOLOGIES = ("fan-out", "ring")


class Listener(Protocol):
    """What takes in what peers send; called on the receivers' threads."""

    def body_buffer(self, head: Head) -> torch.Tensor | None:
        """Where the body of `head` is to be received, (body_bytes,) uint8; None: anywhere. Raises: CorruptMessage."""

    def take(self, head: Head, body: torch.Tensor | None, duration_ns: int) -> None:
        """A head, and its body with how long its transfer took."""

    def has_ended(self, origin: int, step: int) -> bool:
        """Whether `origin` has sent its last in `step`."""

    def fail(self, error: Exception) -> None:
        """A receiver gave up."""

    def forwarded(self, block: int, n_bytes: int) -> None:
        """A head and body of another rank was passed on."""


class Streams:
    """This rank's end of the streams of one attachment.

    Args:
        topology: "fan-out": every rank sends to every other; "ring": to its right neighbour, which passes on.
        tag: of all messages, the same on all ranks.
    """

    def __init__(
        self, communicator: Communicator, topology: str, heads: HeadFormat, tag: int, listener: Listener,
        clock_ns: Callable[[], int],
    ) -> None:  # fmt: skip
        rank, world_size = communicator.rank, communicator.world_size
        self._communicator, self._heads, self._tag, self._listener = communicator, heads, tag, listener
        self._clock_ns = clock_ns
        self._right = (rank + 1) % world_size
        self._is_ring = topology == "ring"
        # Fan-out begins with the right neighbour, so that not all ranks send to the same one at once.
        others = [(rank + distance) % world_size for distance in range(1, world_size)]
        self._receivers_of_mine = [self._right] if self._is_ring else others
        sources = {(rank - 1) % world_size: others} if self._is_ring else {peer: [peer] for peer in others}
        self._in_flight: list[tuple[dist.Work, int, tuple[torch.Tensor, ...]]] = []
        self._sending = threading.Lock()
        self._queues: list[queue.SimpleQueue[int | None]] = []
        self._threads: list[threading.Thread] = []
        for source, origins in sources.items():
            rounds: queue.SimpleQueue[int | None] = queue.SimpleQueue()
            thread = threading.Thread(
                target=self._receive_rounds, args=(source, origins, rounds), name=f"gradwire-from-{source}", daemon=True
            )
            self._queues.append(rounds)
            self._threads.append(thread)
            thread.start()

    @property
    def n_copies(self) -> int:
        """How many copies of each of its messages this rank itself sends."""
        return len(self._receivers_of_mine)

    def begin_round(self, step: int) -> None:
        """Receive what peers send in `step`, until all have ended."""
        for rounds in self._queues:
            rounds.put(step)

    def send(self, head: Head, step: int, body: torch.Tensor | None) -> int:
        """Start sending to every receiver; returns the bytes of one copy. `body` stays unchanged until `finish`."""
        packed = torch.empty(self._heads.n_bytes, dtype=torch.uint8)
        self._heads.pack(head, step, packed)
        for peer in self._receivers_of_mine:
            self._start(peer, packed, body)
        return packed.numel() + (0 if body is None else body.numel())

    def _start(self, peer: int, packed: torch.Tensor, body: torch.Tensor | None) -> None:
        messages = (packed,) if body is None else (packed, body)
        with self._sending:  # a head and its body must not be parted by a message that is passed on
            for message in messages:
                self._in_flight.append((self._communicator.isend(message, peer, self._tag), peer, messages))

    def finish(self) -> None:
        """Wait until everything has been taken. Raises: PeerLost."""
        while True:
            with self._sending:
                if not self._in_flight:
                    return
                in_flight, self._in_flight = self._in_flight, []
            for work, peer, _ in in_flight:
                self._communicator.wait(work, peer)

    # ---- receiving

    def _receive_rounds(self, source: int, origins: list[int], rounds: queue.SimpleQueue[int | None]) -> None:
        torch.get_num_threads()  # a new thread takes the process's count over when it first asks (communicator.py)
        packed = torch.empty(self._heads.n_bytes, dtype=torch.uint8)
        memory = torch.empty(0, dtype=torch.uint8)
        while (step := rounds.get()) is not None:
            try:
                expected = dict.fromkeys(origins, 0)
                while not all(self._listener.has_ended(origin, step) for origin in origins):
                    memory = self._receive_one(source, step, expected, packed, memory)
            except Exception as error:
                self._listener.fail(error)
                return

    def _receive_one(
        self, source: int, step: int, expected: dict[int, int], packed: torch.Tensor, memory: torch.Tensor
    ) -> torch.Tensor:
        """One head and its body; returns the memory for the next body."""
        communicator = self._communicator
        communicator.wait(communicator.irecv(packed, source, self._tag), source)
        head = self._heads.unpack(packed, step, source)
        if head.origin not in expected or head.sequence != expected[head.origin]:
            raise CorruptMessage(
                f"rank {source} sent head {head.sequence} of rank {head.origin} in step {step}, out of turn; check that all "
                "ranks run the same gradwire with the same topology"
            )
        expected[head.origin] += 1
        body, duration_ns = None, 0
        if head.block != NO_BLOCK:
            body = self._listener.body_buffer(head)
            if body is None:
                if self._is_ring or memory.numel() < head.body_bytes:  # what is passed on must stay until it is gone
                    memory = torch.empty(head.body_bytes, dtype=torch.uint8)
                body = memory[: head.body_bytes]
            started_ns = self._clock_ns()
            communicator.wait(communicator.irecv(body, source, self._tag), source)
            duration_ns = self._clock_ns() - started_ns
        if self._is_ring and head.origin != self._right:
            self._start(self._right, packed.clone(), body)
            self._listener.forwarded(head.block, packed.numel() + (0 if body is None else body.numel()))
        self._listener.take(head, body, duration_ns)
        return memory

    def close(self) -> None:
        """End the receivers; between rounds, or after a failure."""
        for rounds in self._queues:
            rounds.put(None)
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join()
