"""A switch in a thread, its clients in others, and a relay between them that loses, doubles, holds and damages packets."""

import contextlib
import random
import select
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

import meshes
from gradwire import _native
from gradwire_lab.cli.switch import open_switch

ADD, OR, MAXIMUM = 1, 2, 3
IntArray = npt.NDArray[np.int32]


class Serving:
    """A switch that serves until it is told to stop; a context manager."""

    def __init__(self, n_slots: int = 1024, port: int = 0, lease_s: float = 60.0, server: Any = None) -> None:
        self.server: Any = server or open_switch("127.0.0.1", port, n_slots, lease_s)
        self.port = self.server.port
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        while not self._is_over.is_set():
            self.server.run(0.02)

    def counters(self) -> dict[str, int]:
        counters: dict[str, int] = self.server.counters()
        return counters

    def end(self) -> None:
        """Stop serving and close the socket."""
        self._is_over.set()
        self._thread.join()
        self.server = None

    def __enter__(self) -> "Serving":
        return self

    def __exit__(self, *_: object) -> None:
        if self.server is not None:
            self.end()


@dataclass(frozen=True)
class Trouble:
    """Shares of the packets, in each direction."""

    lost: float = 0.0
    doubled: float = 0.0  # the copy comes up to `hold` packets later
    held: float = 0.0  # overtaken by up to `hold` packets
    damaged: float = 0.0
    hold: int = 40


class Relay:
    """Forwards between clients and a switch, with trouble from a seeded generator; a context manager."""

    def __init__(self, switch_port: int, trouble: Trouble, seed: int) -> None:
        self._switch = ("127.0.0.1", switch_port)
        self._trouble, self._random = trouble, random.Random(seed)
        self._front = self._socket()
        self._front.bind(("127.0.0.1", 0))
        self.port: int = self._front.getsockname()[1]
        self._back: dict[Any, socket.socket] = {}  # a client's address: its socket towards the switch
        self._held: list[tuple[int, float, Callable[[], object]]] = []
        self.n_packets = 0
        self._is_over = False
        self._thread = threading.Thread(target=self._run)

    @staticmethod
    def _socket() -> socket.socket:
        made = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        made.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4 << 20)
        return made

    def _run(self) -> None:
        while not self._is_over:
            owners = {back: client for client, back in self._back.items()}
            for ready in select.select([self._front, *owners], [], [], 0.005)[0]:
                with contextlib.suppress(OSError):  # the switch has gone: its host says so
                    data, sender = ready.recvfrom(65536)
                    if ready is self._front:
                        if sender not in self._back:
                            self._back[sender] = self._socket()
                            self._back[sender].connect(self._switch)
                        self._pass(data, self._back[sender].send)
                    else:
                        client = owners[ready]
                        self._pass(data, lambda data, client=client: self._front.sendto(data, client))
            self._release(time.monotonic())

    def _pass(self, data: bytes, send: Callable[[bytes], object]) -> None:
        self.n_packets += 1
        trouble, draw = self._trouble, self._random.random
        if draw() < trouble.lost:
            return
        if draw() < trouble.damaged:
            place = self._random.randrange(len(data))
            data = data[:place] + bytes([data[place] ^ (1 << self._random.randrange(8))]) + data[place + 1 :]
        if draw() < trouble.doubled:
            self._hold(data, send)
        if draw() < trouble.held:
            self._hold(data, send)
        else:
            send(data)

    def _hold(self, data: bytes, send: Callable[[bytes], object]) -> None:
        due = self.n_packets + self._random.randint(1, self._trouble.hold)
        self._held.append((due, time.monotonic() + 0.05, lambda: send(data)))

    def _release(self, now: float) -> None:
        due = [one for one in self._held if one[0] <= self.n_packets or one[1] <= now]
        self._held = [one for one in self._held if one not in due]
        for _, _, send in due:
            with contextlib.suppress(OSError):
                send()

    def __enter__(self) -> "Relay":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over = True
        self._thread.join()
        for one in (self._front, *self._back.values()):
            one.close()


@contextlib.contextmanager
def clients(port: int | Sequence[int], n: int, job: int = 7, slots: int = 64) -> Iterator[list[Any]]:
    """`n` workers of one job, joined; they leave at the end. `port`: of the switch, or of each worker's own."""
    ports = [port] * n if isinstance(port, int) else port
    made = [_native.SwitchClient("127.0.0.1", ports[worker], job, worker, n, slots) for worker in range(n)]
    at_once([partial(client.join, 100.0) for client in made])
    try:
        yield made
    finally:
        at_once([client.leave for client in made])


def at_once(calls: Sequence[Callable[[], Any]]) -> list[Any]:
    """Every call in a thread of its own; raises the first error, by position."""
    outcomes = try_at_once(calls)
    for outcome in outcomes:
        if isinstance(outcome, BaseException):
            raise outcome
    return outcomes


def try_at_once(calls: Sequence[Callable[[], Any]]) -> list[Any]:
    """Like at_once; an error stands in its call's place."""
    return meshes.at_once(*calls)


def draw(n_workers: int, n: int, seed: int) -> list[IntArray]:
    """Arrays over the whole range of int32, so that sums wrap."""
    numbers = np.random.default_rng(seed)
    return [numbers.integers(-(2**31), 2**31, n, dtype=np.int64).astype(np.int32) for _ in range(n_workers)]


def expected(arrays: Sequence[IntArray], operation: int) -> IntArray:
    """What a switch must give: sums modulo 2**32."""
    if operation == OR:
        return np.bitwise_or.reduce(np.stack(arrays))
    if operation == MAXIMUM:
        return np.max(np.stack(arrays), axis=0)
    return np.sum(np.stack(arrays), axis=0, dtype=np.int64).astype(np.int32)


def sums(workers: Sequence[Any], timeout_s: float, n: int = 1000, operation: int = ADD) -> list[Callable[[], Any]]:
    """A call for each worker, whose result nobody looks at."""
    arrays = draw(len(workers), n, seed=1)
    return [partial(one.reduce, array, operation, timeout_s) for one, array in zip(workers, arrays, strict=True)]


def assert_reduced(
    workers: Sequence[Any], n: int, operation: int, seed: int, run: Callable[[Any], object] = at_once
) -> None:
    """One reduction of `n` values, exact on every worker. `run` makes the workers' calls."""
    arrays = draw(len(workers), n, seed)
    wanted = expected(arrays, operation)
    run([partial(worker.reduce, array, operation, 100.0) for worker, array in zip(workers, arrays, strict=True)])
    for worker, result in enumerate(arrays):
        assert np.array_equal(result, wanted), f"worker {worker} of {len(workers)}, {n} values, operation {operation}"
