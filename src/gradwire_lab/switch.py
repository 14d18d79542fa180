"""The aggregator `switch`: sums in the network, through the packets and slots of a programmable switch.

What answers is gradwire's emulation (`gradwire switch`; docs/switch.md), a process that keeps to a switch's
restrictions. Each rank opens one UDP socket.
It is not fast: it proves on the wire that sketches and indices need nothing but integer sums and ORs.
"""

import atexit
import functools
import os
import queue
import secrets
import socket
import threading
from collections.abc import Callable
from concurrent import futures
from concurrent.futures import Future
from typing import Any

import torch

from gradwire import _native
from gradwire.errors import GradwireError, InvalidArgument, Unsupported
from gradwire.exchange.aggregators import Sum
from gradwire.telemetry.recorder import Recorder
from gradwire.telemetry.stopwatch import Stopwatch
from gradwire.wire.communicator import Communicator
from gradwire.wire.wire import Wire

ADDRESS_VARIABLE = "GRADWIRE_SWITCH"

_ADD, _OR, _MAXIMUM = 1, 2, 3
# int64 as three digits in base 2**22: 32 ranks' digits stay below 2**27, so nothing wraps in a 32-bit register.
_DIGIT_BITS = 22
_LOOK_S = 0.5  # how often a waiting rank looks whether a peer has noted a failure
_EXIT_WAIT_S = 0.5


class Switch:
    """Sums of int32 (int64 at 1.5 times its bytes), ORs and maxima in a switch's registers.

    Args:
        address: host:port of the switch (IPv4); by default what the environment variable GRADWIRE_SWITCH says. After a comma
            more of them, of servers that take a job's slots over where those before have none left, as ATP's do.
        slots: packets of 256 values that this job may have in flight, a power of two; the switch may grant fewer.
    Raises: InvalidArgument.
    """

    name = "switch"
    sums_floats = False

    def __init__(self, address: str | None = None, slots: int = 1024) -> None:
        if not 1 <= slots <= 1 << 20 or slots & (slots - 1):
            raise InvalidArgument(f"slots is a power of two from 1 to 1,048,576, not {slots}")
        self.slots = slots
        self._address = address
        self._communicator: Communicator | None = None
        self._stream: _Stream | None = None
        self._totals: dict[str, Any] = {}
        self._spare_digits: list[torch.Tensor] = []

    def bind(self, communicator: Communicator, recorder: Recorder) -> None:
        """Take the ranks. The switch is asked for slots at the first call, which is on the lane. Raises:
        InvalidArgument (no address), Unsupported (more ranks than a bitmap has bits)."""
        if communicator.world_size > _native.SWITCH_MAX_WORKERS:
            raise Unsupported(
                f"a switch serves up to {_native.SWITCH_MAX_WORKERS} ranks, one bit each of a register; "
                f"there are {communicator.world_size}: use the aggregator process-group"
            )
        parse_addresses(self._address)
        self._communicator = communicator

    def or_words(self, words: torch.Tensor, wire: Wire) -> None:
        """See `Aggregator`."""
        self._start(words, _OR, wire)()

    def max_int32(self, values: torch.Tensor, wire: Wire) -> None:
        """Replace `values` (n,) int32 by their largest over the ranks: one instruction of the switch's register units."""
        self._start(values, _MAXIMUM, wire)()

    def start_sum(self, values: torch.Tensor, wire: Wire) -> Sum:
        """See `Aggregator`. int64 travels as three int32 digits, and wraps at 64 bits as torch's does."""
        if values.dtype == torch.int64:
            return self._start_digits(values, wire)
        return self._start(values, _ADD, wire)

    def start_or_and_sum(self, words: torch.Tensor, values: torch.Tensor, wire: Wire) -> tuple[Sum, Sum]:
        """See `Aggregator`: one stream of packets after the other, without a wait between them."""
        return self._start(words, _OR, wire), self.start_sum(values, wire)

    def stats(self) -> dict[str, Any]:
        """Packets and bytes of this rank since the start; says that the switch is an emulation."""
        return {"switch": "emulation", **(self._stream.client.counters() if self._stream else self._totals)}

    def close(self) -> None:
        """Leave the switch, which frees this rank's part of the job."""
        stream, self._stream = self._stream, None
        if stream is not None:
            stream.end()
            self._totals = dict(stream.client.counters())
            self._spare_digits.clear()

    # ---- on the lane

    def _start(self, values: torch.Tensor, operation: int, wire: Wire) -> Sum:
        _check(values, torch.int32)
        communicator, record, watch = self._communicator, wire.record, Stopwatch()
        if communicator is None:
            raise InvalidArgument("bind the aggregator to a communicator first")
        if self._stream is None:
            self._stream = _Stream(self._open(communicator))
        client = self._stream.client

        def reduce() -> list[int]:
            """In the stream's thread; returns the bytes sent and received."""
            before = client.counters()
            with watch:
                client.reduce(values, operation, communicator.timeout_s)
            after = client.counters()
            return [after[key] - before[key] for key in ("bytes_sent", "bytes_received")]

        reduced = self._stream.submit(reduce)

        @functools.cache  # the second call does nothing
        def wait() -> None:
            while not futures.wait([reduced], _LOOK_S).done:
                try:
                    communicator.raise_if_peer_failed()
                except GradwireError:
                    client.stop()
                    raise
            sent, received = reduced.result()
            record.add("communicate", watch.start_ns, watch.end_ns)
            record.count_sent(sent)
            record.count_received(received)

        return wait

    def _start_digits(self, values: torch.Tensor, wire: Wire) -> Sum:
        """A sum of int64 as one of int32: digits in base 2**22, the highest of 20 bits and signed."""
        _check(values, torch.int64)
        n, spare = values.numel(), self._spare_digits
        fitting = next((i for i, one in enumerate(spare) if one.numel() >= 3 * n), None)
        buffer = spare.pop(fitting) if fitting is not None else torch.empty(3 * n, dtype=torch.int32)
        digits = buffer[: 3 * n].view(3, n)
        for place in range(3):
            digit = values >> (place * _DIGIT_BITS)
            digits[place].copy_(digit if place == 2 else digit.bitwise_and_((1 << _DIGIT_BITS) - 1))
        wait_for_digits = self._start(digits.view(-1), _ADD, wire)

        @functools.cache  # the second call does nothing
        def wait() -> None:
            wait_for_digits()
            values.copy_(digits[2])
            for place in (1, 0):
                values.bitwise_left_shift_(_DIGIT_BITS).add_(digits[place])
            spare.append(buffer)

        return wait

    def _open(self, communicator: Communicator) -> _native.SwitchClient:
        places = parse_addresses(self._address)
        for host, port in places[:-1]:
            try:
                client = self._join(communicator, host, port)
                refused = 0
            except Unsupported:
                client, refused = None, 1
            # Slots may have become free between one rank's request and another's: all are served there, or none.
            if not communicator.all_gather(torch.tensor([refused])).any() and client is not None:
                return client
            if client is not None:
                client.leave()
        return self._join(communicator, *places[-1])

    def _join(self, communicator: Communicator, host: str, port: int) -> _native.SwitchClient:
        # Rank 0 draws the job's number: who does not know it cannot join in. Two draws never meet by accident.
        drawn = communicator.all_gather(torch.tensor([secrets.randbits(62) + 1], dtype=torch.int64))
        job = int(drawn[0, 0])
        place = (communicator.rank, communicator.world_size)
        try:
            address = socket.gethostbyname(host)
        except OSError as error:
            raise InvalidArgument(f"the switch's host {host!r} has no IPv4 address ({error})") from error
        client = _native.SwitchClient(address, port, job, *place, self.slots)
        client.join(communicator.timeout_s)
        return client


class _Stream:
    """A client of the switch, and the thread that makes its calls in order: the lane computes while a sum is on its way."""

    def __init__(self, client: _native.SwitchClient) -> None:
        self.client = client
        self._tasks: queue.SimpleQueue[tuple[Future[list[int]], Callable[[], list[int]]] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="gradwire-switch", daemon=True)
        self._thread.start()
        _open_streams.add(self)

    def submit(self, call: Callable[[], list[int]]) -> Future[list[int]]:
        future: Future[list[int]] = Future()
        self._tasks.put((future, call))
        return future

    def _run(self) -> None:
        while (task := self._tasks.get()) is not None:
            future, call = task
            try:
                future.set_result(call())
            except Exception as error:
                future.set_exception(error)
            del task, future, call  # and with them the tensor

    def end(self, wait_s: float | None = None) -> None:
        """Finish what is queued, and leave the switch."""
        _open_streams.discard(self)
        self._tasks.put(None)
        self._thread.join(wait_s)
        if not self._thread.is_alive():
            self.client.leave()


# Whose threads would still wait for packets when the interpreter goes down, and could crash it there.
_open_streams: set[_Stream] = set()


@atexit.register
def _abandon_streams() -> None:
    for stream in list(_open_streams):
        stream.client.stop()
        stream.end(_EXIT_WAIT_S)


def parse_addresses(address: str | None) -> list[tuple[str, int]]:
    """Hosts and ports of `address`, or of GRADWIRE_SWITCH where that is None. Raises: InvalidArgument."""
    where = "address" if address is not None else ADDRESS_VARIABLE
    text = address if address is not None else os.environ.get(ADDRESS_VARIABLE)
    if text is None:
        raise InvalidArgument(
            f"the aggregator switch needs a switch: start one (gradwire switch), and set {ADDRESS_VARIABLE}=host:port on "
            "every rank or give address='host:port'"
        )
    places = []
    for place in text.split(","):
        host, colon, port = place.rpartition(":")
        if not colon or not host or not port.isdecimal() or not 1 <= int(port) <= 65535:
            raise InvalidArgument(f"{where} is {text!r}; write it as host:port, such as 10.77.0.5:4790")
        places.append((host, int(port)))
    return places


def _check(tensor: torch.Tensor, dtype: torch.dtype) -> None:
    if tensor.dtype != dtype:
        raise Unsupported(
            f"a switch adds integers only: int32, or int64 in sums, not {tensor.dtype}; convert to fixed point first "
            "(homomorphic: mode='packed' or 'exact'), or use the aggregator process-group"
        )
    if tensor.dim() != 1 or not tensor.is_contiguous() or tensor.device.type != "cpu":
        raise InvalidArgument(f"an aggregator takes (n,) contiguous CPU tensors, got shape {tuple(tensor.shape)}")
