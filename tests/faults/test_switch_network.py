"""A network that loses, doubles, reorders and damages packets costs time, never a bit of a result."""

import contextlib
import os
import socket
import threading
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import pytest

from gradwire import _native
from gradwire.errors import PeerLost, RankMismatch, Unsupported
from gradwire_lab.ranks.rack_switch import RackSwitch
from ranks import patience
from switch_cases import ADD, MAXIMUM, OR, Relay, Serving, Trouble, assert_reduced, at_once, clients, sums, try_at_once

LENGTHS = (0, 1, 255, 256, 257, 5_000)
TROUBLES = {
    "lost": Trouble(lost=0.1),
    "doubled": Trouble(doubled=0.3, hold=300),
    "reordered": Trouble(held=0.3, hold=100),
    "everything": Trouble(lost=0.05, doubled=0.1, held=0.2, damaged=0.05),
}


@pytest.mark.parametrize("n_workers", [1, 2, 3, 5, 8])
@pytest.mark.parametrize("slots", [1, 4, 256])
def test_sums_ors_and_maxima_are_exact_for_every_world_length_and_window(n_workers: int, slots: int) -> None:
    with Serving(n_slots=256) as serving, clients(serving.port, n_workers, slots=slots) as workers:
        for n in LENGTHS:
            for operation in (ADD, OR, MAXIMUM):
                assert_reduced(workers, n, operation, seed=n)
        assert all(worker.n_slots == slots for worker in workers)


@pytest.mark.parametrize("n_workers", [1, 2, 4, 8])
@pytest.mark.parametrize("trouble", TROUBLES.values(), ids=TROUBLES)
def test_results_are_exact_over_a_network_that_misbehaves(n_workers: int, trouble: Trouble) -> None:
    # 8 slots: stragglers of a round come when their slot is in the next one, or the one after that.
    with Serving() as serving, Relay(serving.port, trouble, seed=n_workers) as relay:
        with clients(relay.port, n_workers, slots=8) as workers:
            for call, n in enumerate((3_000, 100, 8_000)):
                assert_reduced(workers, n, (ADD, OR, MAXIMUM)[call], seed=call)
            resent = sum(worker.counters()["packets_resent"] for worker in workers)
        counters = serving.counters()
        if trouble.lost:
            assert resent > 0
        if trouble.doubled:
            assert counters["duplicates"] + counters["stale"] > 0
        if trouble.damaged:
            assert counters["foreign"] > 0


@contextlib.contextmanager
def two_levels(racks: Sequence[Sequence[int]], trouble: Trouble | None = None) -> Iterator[list[int]]:
    """A switch above one for each rack: the port of every worker's own. With `trouble`, above and below each rack's."""
    with contextlib.ExitStack() as stack:
        above = stack.enter_context(Serving(n_slots=64))
        ports = {}
        for number, ranks in enumerate(racks):
            port = above.port if trouble is None else stack.enter_context(Relay(above.port, trouble, number)).port
            rack = RackSwitch("127.0.0.1", 0, 64, ("127.0.0.1", port), number, len(racks), ranks)
            stack.callback(rack.close)
            stack.enter_context(Serving(server=rack))
            port = rack.port if trouble is None else stack.enter_context(Relay(rack.port, trouble, 9 + number)).port
            ports.update(dict.fromkeys(ranks, port))
        yield [ports[rank] for rank in sorted(ports)]


@pytest.mark.parametrize("racks", [[[0, 1], [2, 3]], [[0], [1, 2, 4], [3]]], ids=str)
@pytest.mark.parametrize(
    "trouble", [None, Trouble(lost=0.03, doubled=0.1, held=0.2, damaged=0.03)], ids=["", "trouble"]
)
def test_two_levels_of_switches_give_the_bits_of_one(racks: list[list[int]], trouble: Trouble | None) -> None:
    with two_levels(racks, trouble) as ports, clients(ports, len(ports), slots=16) as workers:
        for call, n in enumerate((9_000, 1, 3_000, 0, 5_000)):
            assert_reduced(workers, n, (ADD, OR, MAXIMUM)[call % 3], seed=call)


def test_two_levels_say_who_is_missing_or_elsewhere() -> None:
    with two_levels([[0, 1], [2]]) as ports, clients(ports, 3, slots=16) as workers:
        errors = try_at_once(sums(workers[:2], 1.0 * patience(), n=300))
        assert all(isinstance(error, PeerLost) and "rank 2 sent nothing" in str(error) for error in errors), errors
    with two_levels([[0, 1], [2]]) as ports, clients(ports, 3, slots=16) as workers:
        at_once(sums(workers[2:], 9.0, n=0))  # a call that the others do not make
        errors = try_at_once(sums(workers, 20.0, n=300))
        assert any(isinstance(error, RankMismatch) for error in errors), errors
    with two_levels([[0, 1], [2]]) as ports:
        stranger = _native.SwitchClient("127.0.0.1", ports[0], 7, 2, 3, 16)  # in the other rack
        with pytest.raises(Unsupported, match="another number of ranks"):
            stranger.join(20.0)


def test_two_jobs_at_once_do_not_touch_each_other() -> None:
    trouble = Trouble(lost=0.03, doubled=0.1, held=0.1)
    with Serving(n_slots=32) as serving, Relay(serving.port, trouble, seed=1) as relay:
        with clients(relay.port, 2, job=1, slots=16) as first, clients(relay.port, 3, job=2, slots=16) as second:
            assert serving.counters()["n_free_slots"] == 0
            at_once(
                [
                    lambda: [assert_reduced(first, 6_000, ADD, seed) for seed in range(3)],
                    lambda: [assert_reduced(second, 4_000, OR, seed) for seed in range(3, 6)],
                ]
            )
        assert serving.counters()["n_free_slots"] == 32


@contextlib.contextmanager
def stranger_at_work(send: Callable[[socket.socket], None]) -> Iterator[None]:
    """Meanwhile a thread calls `send`, time and again; the ranks want this core, too."""
    is_over = threading.Event()

    def flood() -> None:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as stranger:
            while not is_over.wait(0.001):
                send(stranger)

    thread = threading.Thread(target=flood)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()


def test_a_flood_of_foreign_packets_changes_no_result() -> None:
    numbers = np.random.default_rng(5)
    with Serving(n_slots=64) as serving, clients(serving.port, 3, job=99, slots=32) as workers:
        to = ("127.0.0.1", serving.port)
        spoofed = _native.SwitchClient(*to, 99, 0, 3, 32)  # another process as worker 0

        def send(stranger: socket.socket) -> None:
            """Noise, packets of ours with a wrong sender, and others' jobs that ask for slots and send values."""
            stranger.setblocking(False)
            for size in (0, 1, 39, 40, 41, 1063, 1064, 1065, 9000):
                stranger.sendto(numbers.bytes(size), to)
            stranger.sendto(b"GWSW\x01" + numbers.bytes(1059), to)
            with pytest.raises((Unsupported, PeerLost)):
                spoofed.join(0.001)

        with stranger_at_work(send):
            for seed in range(4):
                assert_reduced(workers, 30_000, ADD, seed)
        assert serving.counters()["foreign"] > 0
        assert serving.counters()["n_jobs"] == 1


def test_what_a_stranger_sends_to_a_rank_is_not_taken_for_a_result() -> None:
    with Serving() as serving, clients(serving.port, 2) as workers:

        def send(stranger: socket.socket) -> None:
            for port in range(32_768, 61_000, 97):  # the ranks' sockets are connected: the kernel turns it away
                stranger.sendto(os.urandom(64), ("127.0.0.1", port))

        with stranger_at_work(send):
            assert_reduced(workers, 50_000, ADD, seed=1)
