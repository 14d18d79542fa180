"""The lower of two levels of switches, emulated: it sums its own rack's packets, and sends their sums to the switch above.

For the workers it is a switch (docs/switch.md), for the switch above one worker among the racks, so neither knows of the
other. It keeps registers as a switch does, and no timers: a worker that asks again for a sum that is complete here makes it
send that sum up again.
It is not fast: it handles packet by packet in Python.
"""

import contextlib
import secrets
import select
import socket
import struct
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from gradwire import _native
from gradwire.errors import InvalidArgument

# native/switch/udp_socket.hpp has the names, docs/format.md#switch-packets the meaning.
_JOIN, _WELCOME, _REFUSAL, _VALUES, _RESULT, _PENDING, _LEAVE, _FAREWELL = range(1, 9)
_UNKNOWN_JOB, _NO_SLOTS, _BAD_JOIN, _MISMATCH, _PEER_LEFT = range(1, 6)
_FIRST_SEQUENCE = 1
_HEADER = struct.Struct("<IBBBBQIIHHII")  # and the checksum
_ACTIONS = {1: np.add, 2: np.bitwise_or, 3: np.maximum}

Address = tuple[str, int]


class Header(NamedTuple):
    """Of a packet, without its checksum."""

    magic: int
    version: int
    kind: int
    operation: int
    worker: int
    job: int
    epoch: int
    sequence: int
    handle: int
    collective: int
    word: int
    reserved: int

    def sealed(self, payload: bytes = b"") -> bytes:
        raw = _HEADER.pack(*self)
        return raw + struct.pack("<I", _native.crc32c(payload, _native.crc32c(raw))) + payload


@dataclass
class _Job:
    """One job's row and registers."""

    handle: int
    n_workers: int  # as they count themselves: of all racks
    log2_slots: int
    # epoch and handle of the job there; None until the switch above has let this rack in
    above: tuple[int, int] | None = None
    refused: int = 0  # why it has not
    workers: dict[int, Address] = field(default_factory=dict)
    left: int = 0

    def make_registers(self) -> None:
        n = 2 << self.log2_slots
        self.sequences, self.contents, self.seen = np.zeros((3, n), np.int64)  # sequences of packets begin with 1
        self.is_final = np.zeros(n, bool)
        self.values = np.zeros((n, _native.SWITCH_LANES), np.int32)

    def cell(self, sequence: int) -> int:
        slot = sequence & ((1 << self.log2_slots) - 1)
        return 2 * slot + (sequence >> self.log2_slots & 1)


class RackSwitch:
    """A switch below another one, which sees it as worker `rack` of `n_racks`; serves while its `run(seconds)` is called.

    Its own workers, these ranks, find it at `address` and `port`, of which 0 takes a free one. Raises: InvalidArgument.
    """

    def __init__(
        self, address: str, port: int, n_slots: int, above: Address, rack: int, n_racks: int, workers: Sequence[int]
    ) -> None:
        if not 0 <= rack < n_racks <= _native.SWITCH_MAX_WORKERS:
            raise InvalidArgument(f"a rack is one of up to {_native.SWITCH_MAX_WORKERS}, not {rack} of {n_racks}")
        ranks, most = set(workers), _native.SWITCH_MAX_WORKERS
        if not ranks or len(ranks) != len(workers) or not ranks < set(range(most)):
            raise InvalidArgument(f"a rack has ranks below {most}, each once, not {list(workers)}")
        self._here = sum(1 << worker for worker in workers)
        self._rack, self._n_racks, self._n_slots = rack, n_racks, n_slots
        self._front, self._back = (socket.socket(socket.AF_INET, socket.SOCK_DGRAM) for _ in range(2))
        for one in (self._front, self._back):
            one.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4 << 20)
            one.setblocking(False)
        try:
            self._front.bind((address, port))
            self._back.connect(above)
        except OSError as error:
            raise InvalidArgument(f"{address}:{port} below {above[0]}:{above[1]}: {error}") from error
        self.port: int = self._front.getsockname()[1]
        self.epoch = secrets.randbits(32)
        self._jobs: dict[int, _Job] = {}
        self._handles = 0
        self._counts = dict.fromkeys(("values", "results", "duplicates", "stale", "foreign", "refusals", "sent_up"), 0)

    def counters(self) -> dict[str, int]:
        return {"n_slots": self._n_slots, "n_jobs": len(self._jobs), **self._counts}

    def close(self) -> None:
        self._front.close()
        self._back.close()

    def run(self, seconds: float) -> None:
        end = time.monotonic() + seconds
        while (left_s := end - time.monotonic()) > 0:
            for ready in select.select([self._front, self._back], [], [], left_s)[0]:
                self._take_all(ready)

    def _take_all(self, ready: socket.socket) -> None:
        while True:
            try:
                data, sender = ready.recvfrom(1 << 16)
            except OSError:  # no more; or nobody listens above, which who waits for it learns by its own timeout
                return
            if _native.switch_check_packet(data) != 0:
                self._counts["foreign"] += 1
                continue
            header, payload = Header(*_HEADER.unpack_from(data)), data[_native.SWITCH_HEADER_BYTES :]
            if ready is self._back:
                self._take_from_above(header, payload)
            elif header.kind == _JOIN:
                self._join(header, sender)
            elif header.kind in (_VALUES, _LEAVE):
                self._take_of_worker(header, payload, sender)

    # ---- from below

    def _take_of_worker(self, header: Header, payload: bytes, sender: Address) -> None:
        job = self._jobs.get(header.job)
        if job is None or job.above is None or (header.epoch, header.handle) != (self.epoch, job.handle):
            if header.kind == _LEAVE:
                self._answer(sender, header, _FAREWELL)
            else:
                self._refuse(sender, header, _UNKNOWN_JOB)
        elif job.workers.get(header.worker) != sender:
            self._counts["foreign"] += 1
        elif header.kind == _LEAVE:
            job.left |= 1 << header.worker
            self._answer(sender, header, _FAREWELL)
            if job.left == self._here:
                self._send_up(job, header)
                del self._jobs[header.job]
        else:
            self._aggregate(job, header, payload, sender)

    def _aggregate(self, job: _Job, header: Header, payload: bytes, sender: Address) -> None:
        """The stages of the switch above, and one more: whether a complete cell holds this rack's sum or that of all."""
        cell, bit = job.cell(header.sequence), 1 << header.worker
        age = (header.sequence - int(job.sequences[cell]) + (1 << 31) & 0xFFFFFFFF) - (1 << 31)  # numbers wrap around
        if age < 0:
            self._counts["stale"] += 1
            return
        is_first = age > 0
        content = header.operation << 16 | header.collective
        if is_first:
            job.sequences[cell], job.contents[cell] = header.sequence, content
            job.seen[cell], job.is_final[cell] = 0, False
        if job.contents[cell] != content:
            self._refuse(sender, header, _MISMATCH)
            return
        is_duplicate = bool(job.seen[cell] & bit)
        job.seen[cell] |= bit
        self._counts["duplicates" if is_duplicate else "values"] += 1
        if not is_duplicate:
            values, lanes = np.frombuffer(payload, np.int32), job.values[cell]
            if is_first:
                lanes[:] = values
            else:
                _ACTIONS[header.operation](lanes, values, out=lanes)
        if job.is_final[cell]:
            self._answer(sender, header, _RESULT, payload=job.values[cell].tobytes())
        elif job.seen[cell] == self._here:
            self._send_up(job, header, job.values[cell].tobytes())
        elif job.left & ~int(job.seen[cell]):
            self._refuse(sender, header, _PEER_LEFT, job.left & ~int(job.seen[cell]))
        elif is_duplicate:
            self._answer(sender, header, _PENDING, word=int(job.seen[cell]))

    def _join(self, header: Header, sender: Address) -> None:
        n_workers, log2_slots = header.word & 0xFF, header.word >> 8
        job = self._jobs.get(header.job)
        if not self._here >> header.worker & 1 or n_workers < self._here.bit_length() or log2_slots > 20:
            self._refuse(sender, header, _BAD_JOIN)
            return
        if job is None:
            n_free = self._n_slots - sum(1 << other.log2_slots for other in self._jobs.values())
            log2_slots = min(log2_slots, n_free.bit_length() - 1)
            if log2_slots < 0:
                self._refuse(sender, header, _NO_SLOTS)
                return
            self._handles = (self._handles + 1) & 0xFFFF
            job = self._jobs[header.job] = _Job(self._handles, n_workers, log2_slots)
        if job.n_workers != n_workers or job.workers.setdefault(header.worker, sender) != sender:
            self._refuse(sender, header, _BAD_JOIN)
        elif job.refused:
            self._refuse(sender, header, job.refused)
        elif job.above is None:  # no answer: by the time the worker asks again, the switch above may have given its own
            word = self._n_racks | job.log2_slots << 8
            self._back_send(header._replace(worker=self._rack, word=word).sealed())
        else:
            word = n_workers | job.log2_slots << 8
            self._answer(sender, header._replace(handle=job.handle, sequence=_FIRST_SEQUENCE), _WELCOME, word=word)

    # ---- from above

    def _take_from_above(self, header: Header, payload: bytes) -> None:
        job = self._jobs.get(header.job)
        if job is None or header.worker >= self._n_racks:
            return
        if header.kind == _WELCOME and job.above is None:
            job.above, job.log2_slots = (header.epoch, header.handle), min(job.log2_slots, header.word >> 8)
            job.make_registers()
        elif header.kind == _REFUSAL and job.above is None:
            job.refused = header.word
        elif header.kind == _REFUSAL:
            # It names racks: whoever is not of this one.
            who = (1 << job.n_workers) - 1 & ~self._here if header.word == _PEER_LEFT else 0
            for worker, address in job.workers.items():
                self._refuse(address, header._replace(worker=worker, handle=job.handle), header.word, who)
        elif header.kind in (_RESULT, _PENDING) and job.above is not None:
            cell = job.cell(header.sequence)
            if header.sequence != job.sequences[cell] or job.is_final[cell]:
                self._counts["stale"] += 1
                return
            if header.kind == _RESULT:
                job.values[cell] = np.frombuffer(payload, np.int32)
                job.is_final[cell] = True
                self._counts["results"] += 1
            for address in job.workers.values():
                word = int(job.seen[cell]) if header.kind == _PENDING else 0
                self._answer(address, header._replace(handle=job.handle), header.kind, word=word, payload=payload)

    # ---- sending

    def _send_up(self, job: _Job, header: Header, payload: bytes = b"") -> None:
        assert job.above is not None
        self._counts["sent_up"] += 1
        epoch, handle = job.above
        self._back_send(header._replace(worker=self._rack, epoch=epoch, handle=handle).sealed(payload))

    def _back_send(self, datagram: bytes) -> None:
        with contextlib.suppress(OSError):  # a full queue, or nobody there: the workers ask again
            self._back.send(datagram)

    def _answer(self, to: Address, header: Header, kind: int, word: int = 0, payload: bytes = b"") -> None:
        answer = header._replace(kind=kind, epoch=self.epoch, word=word)
        with contextlib.suppress(OSError):  # as at a full port
            self._front.sendto(answer.sealed(payload), to)

    def _refuse(self, to: Address, header: Header, reason: int, who: int = 0) -> None:
        self._counts["refusals"] += 1
        self._answer(to, header._replace(operation=0, sequence=who), _REFUSAL, word=reason)
