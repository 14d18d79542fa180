"""The thread that takes in what peers broadcast, from a step's first head to its last."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from typing import NamedTuple

import torch

from gradwire import _native


class Heard(NamedTuple):
    """What a head of a peer said, and what became of the body behind it, if one was.

    Attributes:
        origin: the rank whose gradient the body held.
        block: its block; None: the head came alone.
        body_bytes, forwarded_bytes: of the body, and of what was passed on to the right neighbour.
        received_bytes, receiving_us: of bodies of this rank that the origin has received since it was attached, and how
            long those transfers took: acknowledgements, which carry both b and u of the control law.
        remaining_s: [block] from now until the origin's next forward pass needs it; None if it cannot tell yet.
        ceiling_bits: of a value, that the origin's processors have time for (control/contention.py).
        newly_ended: blocks of which the origin sends no more in this step.
        duration_ns, arrived_ns, decoded_ns: of the transfer; when the body was there, and when it was decoded.
    """

    origin: int
    block: int | None
    body_bytes: int
    forwarded_bytes: int
    received_bytes: int
    receiving_us: int
    remaining_s: list[float] | None
    ceiling_bits: int
    newly_ended: list[int]
    duration_ns: int
    arrived_ns: int
    decoded_ns: int


class Receiver:
    """
    Args:
        take: told of every head; on the receiver's thread, like `fail`.
        fail: told of the error that ended the thread.
    """

    def __init__(
        self, broadcast: _native.Broadcast, rank: int, take: Callable[[Heard], None], fail: Callable[[Exception], None]
    ) -> None:
        self._broadcast, self._rank, self._take, self._fail = broadcast, rank, take, fail
        self._steps: queue.SimpleQueue[int | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="gradwire-receiver", daemon=True)
        self._thread.start()

    def begin(self, step: int) -> None:
        """Receive what peers send in `step`, until all have ended."""
        self._steps.put(step)

    def _run(self) -> None:
        torch.get_num_threads()  # a new thread takes the process's count over when it first asks (communicator.py)
        while (step := self._steps.get()) is not None:
            try:
                while (heard := self._broadcast.receive(step & 0xFFFFFFFF, self._rank)) is not None:
                    self._take(Heard(*heard))
            except Exception as error:
                self._fail(error)
                return

    def close(self) -> None:
        """End the thread; between rounds, or after a failure."""
        self._steps.put(None)
        if self._thread is not threading.current_thread():
            self._thread.join()
