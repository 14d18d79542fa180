"""Heads and bodies between ranks: sending to all peers, receiving from each on a thread of its own.

The backend sends a message once its receiver has said that it waits for it, and says so on the connection on which it
sends itself: behind everything that is queued there. So receives are posted before their messages come, and each
connection carries bodies one way only.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from typing import Protocol

import torch
import torch.distributed as dist

from gradwire.errors import CorruptMessage
from gradwire.schemes.aqgb.heads import NO_BLOCK, Head, HeadFormat
from gradwire.wire.communicator import Communicator

TOPOLOGIES = ("fan-out", "ring")
# A wait that takes no longer found its message there.
_AT_ONCE_NS = 100_000


class Listener(Protocol):
    """What takes in what peers send; called on the receivers' threads."""

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
    """This rank's end of the streams of one attachment.

    Args:
        topology: "fan-out": every rank sends to every other; "ring": to its right neighbour, which passes on.
        tags: of heads and of bodies, the same on all ranks.
    """

    def __init__(
        self, communicator: Communicator, topology: str, heads: HeadFormat, tags: tuple[int, int],
        listener: Listener, clock_ns: Callable[[], int],
    ) -> None:  # fmt: skip
        rank, world_size = communicator.rank, communicator.world_size
        self._rank = rank
        self._back = communicator.twin()  # from higher ranks to lower ones
        self._communicator, self._heads, self._tags, self._listener = communicator, heads, tags, listener
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

    def _way(self, sender: int, receiver: int) -> Communicator:
        return self._communicator if sender < receiver else self._back

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
            for message, tag in zip(messages, self._tags, strict=False):
                self._in_flight.append((self._way(self._rank, peer).isend(message, peer, tag), peer, messages))

    def finish(self) -> None:
        """Wait until everything has been taken. Raises: PeerLost."""
        while True:
            with self._sending:
                if not self._in_flight:
                    return
                in_flight, self._in_flight = self._in_flight, []
            for work, peer, _ in in_flight:
                self._way(self._rank, peer).wait(work, peer)

    # ---- receiving

    def _receive_rounds(self, source: int, origins: list[int], rounds: queue.SimpleQueue[int | None]) -> None:
        torch.get_num_threads()  # a new thread takes the process's count over when it first asks (communicator.py)
        try:
            inbox = _Inbox(
                self._way(source, self._rank), source, self._tags, self._heads.n_bytes, self._listener.max_body_bytes,
                self._clock_ns,
            )  # fmt: skip
        except Exception as error:
            self._listener.fail(error)
            return
        while (step := rounds.get()) is not None:
            try:
                expected = dict.fromkeys(origins, 0)
                while not all(self._listener.has_ended(origin, step) for origin in origins):
                    self._receive_one(inbox, source, step, expected)
            except Exception as error:
                self._listener.fail(error)
                return

    def _receive_one(self, inbox: _Inbox, source: int, step: int, expected: dict[int, int]) -> None:
        """One head and its body."""
        packed = inbox.next_head()
        head = self._heads.unpack(packed, step, source)
        if head.origin not in expected or head.sequence != expected[head.origin]:
            raise CorruptMessage(
                f"rank {source} sent head {head.sequence} of rank {head.origin} in step {step}, out of turn; check that all "
                "ranks run the same gradwire with the same topology"
            )
        expected[head.origin] += 1
        body, duration_ns = None, 0
        if head.block != NO_BLOCK:
            self._listener.check(head)
            body, duration_ns = inbox.next_body(head.body_bytes)
        if self._is_ring and head.origin != self._right:
            # Copies: the inbox receives into its memory again before these are gone.
            self._start(self._right, packed.clone(), None if body is None else body.clone())
            self._listener.forwarded(head.block, packed.numel() + (0 if body is None else body.numel()))
        self._listener.take(head, body, duration_ns)

    def close(self) -> None:
        """End the receivers; between rounds, or after a failure."""
        for rounds in self._queues:
            rounds.put(None)
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join()
        self._back.close()


class _Inbox:
    """What one peer sends: a head and a body are always waited for, into memory that takes turns.

    A message may be shorter than the receive that was posted for it, so bodies need not be announced first.
    """

    def __init__(
        self, communicator: Communicator, source: int, tags: tuple[int, int], head_bytes: int, max_body_bytes: int,
        clock_ns: Callable[[], int],
    ) -> None:  # fmt: skip
        self._communicator, self._source, self._clock_ns = communicator, source, clock_ns
        self._head_tag, self._body_tag = tags
        self._heads = [torch.empty(head_bytes, dtype=torch.uint8) for _ in range(2)]
        # Of a body's memory only what messages have filled is ever touched, and so taken from the system.
        self._bodies = [torch.empty(max_body_bytes, dtype=torch.uint8) for _ in range(2)]
        self._head_work = self._post(self._heads[0], self._head_tag)
        self._body_work = self._post(self._bodies[0], self._body_tag)
        self._free_since_ns = 0  # when the last message was there: the next one has been on its way since, or later

    def _post(self, memory: torch.Tensor, tag: int) -> dist.Work:
        return self._communicator.irecv(memory, self._source, tag)

    def next_head(self) -> torch.Tensor:
        """The next head; valid until the one after it. Raises: PeerLost."""
        started_ns = self._clock_ns()
        self._communicator.wait(self._head_work, self._source)
        self._heads.reverse()
        self._head_work = self._post(self._heads[0], self._head_tag)
        ended_ns = self._clock_ns()
        if ended_ns - started_ns > _AT_ONCE_NS:  # it was not there yet, so its body comes from now on
            self._free_since_ns = ended_ns
        return self._heads[1]

    def next_body(self, n_bytes: int) -> tuple[torch.Tensor, int]:
        """The body of the last head, (n_bytes,) uint8, valid until the one after it; and how long its transfer took.

        Where head and body came while this rank was busy, that is the time since the message before: no less than the
        truth. Raises: PeerLost.
        """
        self._communicator.wait(self._body_work, self._source)
        self._bodies.reverse()
        self._body_work = self._post(self._bodies[0], self._body_tag)
        ended_ns = self._clock_ns()
        duration_ns, self._free_since_ns = ended_ns - self._free_since_ns, ended_ns
        return self._bodies[1][:n_bytes], duration_ns
