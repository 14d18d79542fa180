"""Connections: who is let in, what a peer may not say, and what is left when it is gone. Ranks are threads here."""

import contextlib
import functools
import hashlib
import hmac
import itertools
import multiprocessing
import os
import random
import resource
import signal
import socket
import struct
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

import gradwire
from gradwire import _native, errors
from gradwire.core.bucket import Bucket
from meshes import FACTS, SECRET, at_once, meshes
from ranks import assert_alike, on_ranks, patience, try_ranks

STREAM, MAX_BYTES = 6, 1_000
CHALLENGE = struct.Struct("<4sI16s")
PROOF = struct.Struct("<4sIII16s32s")
HEADER = struct.Struct("<HBBIQIIIIII")


def open_all(made: list[_native.Mesh], stream: int = STREAM) -> None:
    opens = [functools.partial(mesh.open, stream, FACTS, MAX_BYTES, [1 - rank]) for rank, mesh in enumerate(made)]
    assert at_once(*opens) == [None] * 2


def carries(made: list[_native.Mesh]) -> bool:
    made[0].send([1], STREAM, [torch.tensor([1, 2], dtype=torch.uint8), torch.tensor([3], dtype=torch.uint8)])
    source, message, _ = made[1].receive_any(STREAM, [0])
    return (source, message.tolist()) == (0, [1, 2, 3])


def assert_lost(outcome: Any, words: str) -> None:
    assert isinstance(outcome, errors.PeerLost), outcome
    assert words in str(outcome)


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_messages_arrive_over_both_versions_of_ip(host: str) -> None:
    with meshes(host=host) as made:
        open_all(made)
        assert carries(made)


def introduce(endpoint: tuple[str, int], secret: bytes, rank: int = 1, peer: int = 0) -> socket.socket:
    """A connection as a rank makes it, written from docs/format.md with Python's own HMAC."""
    return prove_on(socket.create_connection(endpoint, timeout=5 * patience()), secret, rank, peer)[0]


def prove_on(connection: socket.socket, secret: bytes, rank: int = 1, peer: int = 0) -> tuple[socket.socket, bytes]:
    """The connection, and the answer to the proof; empty where there is none."""
    magic, version, theirs = CHALLENGE.unpack(connection.recv(CHALLENGE.size, socket.MSG_WAITALL))
    assert (magic, version) == (b"GWH1", _native.MESSAGE_VERSION)
    mine = os.urandom(16)
    text = struct.pack("<II", rank, peer) + theirs + mine
    proof = hmac.digest(secret, b"c" + text, hashlib.sha256)
    connection.sendall(PROOF.pack(magic, version, rank, peer, mine, proof))
    answer = connection.recv(32, socket.MSG_WAITALL)
    if answer:
        assert answer == hmac.digest(secret, b"a" + text, hashlib.sha256)
    return connection, answer


def closes_within_a_second(connection: socket.socket) -> bool:
    started = time.monotonic()
    with contextlib.suppress(ConnectionError):
        while connection.recv(100):
            pass
    return time.monotonic() - started < 1.2 * patience()


def test_strangers_are_closed_within_a_second_and_do_no_harm() -> None:
    with meshes() as made:
        open_all(made)

        def say(words: bytes) -> bool:
            connection = socket.create_connection(made[0].endpoints[0], timeout=5 * patience())
            with contextlib.suppress(ConnectionError):
                connection.sendall(words)
            return closes_within_a_second(connection)

        rubbish = [b"", b"GET / HTTP/1.1\r\n\r\n", os.urandom(64), b"GWH1" + os.urandom(60), os.urandom(1_000_000)]
        assert at_once(*[lambda w=w: say(w) for w in rubbish * 4]) == [True] * 20
        assert closes_within_a_second(introduce(made[0].endpoints[0], b"wrong" + SECRET[5:]))
        for rank, peer in ((2, 0), (0, 0), (1, 1)):  # who knows the secret but is nobody
            assert closes_within_a_second(introduce(made[0].endpoints[0], SECRET, rank, peer))
        # Who is there already has another connection.
        more = [introduce(made[0].endpoints[0], SECRET) for _ in range(63)]
        assert made[0].n_connections == 64
        assert closes_within_a_second(introduce(made[0].endpoints[0], SECRET))
        for connection in more:
            connection.close()
        assert carries(made)


@pytest.mark.parametrize("has_fewer_descriptors", [False, True])
def test_flood_of_strangers_does_not_keep_a_rank_out(has_fewer_descriptors: bool) -> None:
    """Nor if fewer descriptors are allowed meanwhile: the system then refuses to watch all who stand at the door."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    with meshes() as made:
        crowd = [socket.create_connection(made[0].endpoints[0], timeout=5 * patience()) for _ in range(400)]
        if has_fewer_descriptors:
            try:
                resource.setrlimit(resource.RLIMIT_NOFILE, (100, limits[1]))
                crowd[0].sendall(b"GET")  # the door looks, and then waits again
                time.sleep(0.3)
            finally:
                resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        open_all(made)
        assert carries(made)
        for stranger in crowd:
            stranger.close()


def test_rank_without_the_secret_is_refused() -> None:
    with meshes(secrets=(SECRET, bytes(16)), timeout_s=2) as made:
        zero, one = at_once(*[lambda r=r: made[r].open(STREAM, FACTS, MAX_BYTES, [1 - r]) for r in range(2)])
        assert_lost(one, "rank 0")
        assert_lost(zero, "did not answer")


def test_rank_of_another_version_is_named() -> None:
    listener = socket.create_server(("127.0.0.1", 0))
    one = _native.Mesh(1, 2, ["127.0.0.1"], 5, 0, "")
    one.join([[listener.getsockname()[:2]], one.endpoints], SECRET)

    def answer() -> None:
        connection, _ = listener.accept()
        connection.sendall(CHALLENGE.pack(b"GWH1", 99, bytes(16)))
        connection.recv(1)

    _, error = at_once(answer, lambda: one.open(STREAM, FACTS, MAX_BYTES, [0]))
    assert isinstance(error, errors.IncompatibleVersion)
    assert "rank 0 speaks version 99" in str(error)
    one.shut()
    listener.close()


def keep_a_door(pipe: Any) -> None:
    zero = _native.Mesh(0, 2, ["127.0.0.1"], 60, 0, "")
    zero.join([zero.endpoints] * 2, SECRET)
    pipe.send(zero.endpoints[0])
    pipe.recv()
    zero.shut()


def test_a_rank_that_came_in_time_is_let_in_by_a_process_that_was_held_up() -> None:
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=keep_a_door, args=(theirs,), daemon=True)
    process.start()
    connection = socket.create_connection(ours.recv(), timeout=60 * patience())
    assert connection.recv(CHALLENGE.size, socket.MSG_PEEK) != b"", "the door knows of it"
    assert process.pid is not None
    os.kill(process.pid, signal.SIGSTOP)
    timer = threading.Timer(1.5, os.kill, (process.pid, signal.SIGCONT))
    timer.start()
    assert len(prove_on(connection, SECRET)[1]) == 32
    timer.join()
    connection.close()
    ours.send("end")
    process.join()


@pytest.mark.parametrize("held_up_s", [0.9, 0])
def test_a_rank_held_up_and_taken_for_a_stranger_comes_again_and_one_that_is_refused_does_not(held_up_s: float) -> None:
    listener = socket.create_server(("127.0.0.1", 0))
    listener.settimeout(10 * patience())
    one = _native.Mesh(1, 2, ["127.0.0.1"], 60, 0, "")
    one.join([[listener.getsockname()[:2]], one.endpoints], SECRET)

    def answer() -> socket.socket:
        connection, _ = listener.accept()
        time.sleep(held_up_s)
        connection.close()
        if held_up_s:
            connection, _ = listener.accept()
            theirs = bytes(16)
            connection.sendall(CHALLENGE.pack(b"GWH1", _native.MESSAGE_VERSION, theirs))
            *_, rank, peer, nonce, _ = PROOF.unpack(connection.recv(PROOF.size, socket.MSG_WAITALL))
            text = b"a" + struct.pack("<II", rank, peer) + theirs + nonce
            connection.sendall(hmac.digest(SECRET, text, hashlib.sha256))
        listener.close()
        return connection

    connection, ended = at_once(answer, lambda: one.open(STREAM, FACTS, MAX_BYTES, [0]))
    one.shut()
    connection.close()
    assert ended is None if held_up_s else isinstance(ended, errors.PeerLost)


def header(**changes: int) -> bytes:
    fields = {"magic": 0x4757, "version": _native.MESSAGE_VERSION, "flags": 0, "stream": STREAM, "n_bytes": 5}
    fields |= dict(zip(("number", "configuration", "layout", "step", "bucket"), (0, *FACTS), strict=True))
    fields |= {"checksum": _native.crc32c(b"hello")} | changes
    raw = HEADER.pack(*fields.values())
    return raw + struct.pack("<I", _native.crc32c(raw))


@contextlib.contextmanager
def facing_a_fake() -> Iterator[tuple[_native.Mesh, socket.socket]]:
    """Rank 0, and a rank 1 that has introduced itself."""
    with meshes(timeout_s=2) as made:
        fake = introduce(made[0].endpoints[0], SECRET)
        made[0].open(STREAM, FACTS, MAX_BYTES, [1])
        yield made[0], fake


def hear(raw: bytes, ends: bool = False) -> Any:
    """What rank 0 makes of these bytes from rank 1."""
    with facing_a_fake() as (zero, fake):
        fake.sendall(raw)
        if ends:
            fake.close()
        (heard,) = at_once(lambda: zero.receive_any(STREAM, [1]))
        return heard


@pytest.mark.parametrize("changes", [{}, {"flags": 1, "checksum": 0}])
def test_message_of_a_peer_written_from_the_document_is_read(changes: dict[str, int]) -> None:
    """One that says that it has a checksum of its own is left to its decoder."""
    source, message, _ = hear(header(**changes) + b"hello")
    assert (source, bytes(message.tolist())) == (1, b"hello")


CORRUPT = (
    ("magic", 0x1234),
    ("flags", 2),
    ("checksum", 7),
    ("n_bytes", MAX_BYTES + 1),
    ("n_bytes", 2**64 - 1),
    ("number", 1),
)


@pytest.mark.parametrize(
    ("name", "value", "error"),
    [
        ("version", 99, errors.IncompatibleVersion),
        *((*wrong, errors.CorruptMessage) for wrong in CORRUPT),
        *((name, 9, errors.RankMismatch) for name in ("configuration", "layout", "step", "bucket")),
    ],
)
def test_wrong_header_field_raises_its_error(name: str, value: int, error: type[Exception]) -> None:
    heard = hear(header(**{name: value}) + b"hello")
    assert type(heard) is error, heard
    if error is errors.RankMismatch:
        assert f"ranks 0 and 1 disagree on {name}" in str(heard)
        assert f"{value} there" in str(heard)


@pytest.mark.parametrize("place", range(_native.MESSAGE_HEADER_BYTES + 5))
def test_flipped_bit_in_a_header_or_behind_it_is_found(place: int) -> None:
    raw = bytearray(header() + b"hello")
    raw[place] ^= 1 << place % 8
    assert isinstance(hear(bytes(raw)), errors.CorruptMessage | errors.IncompatibleVersion)


def test_message_that_is_longer_than_announced_ends_with_an_error() -> None:
    with facing_a_fake() as (zero, fake):
        fake.sendall(header() + b"hello" + bytes(_native.MESSAGE_HEADER_BYTES))
        heard = at_once(*[lambda: zero.receive_any(STREAM, [1])] * 2)
        assert any(isinstance(error, errors.CorruptMessage) for error in heard), heard


@pytest.mark.parametrize("n_bytes", [0, 7, _native.MESSAGE_HEADER_BYTES, _native.MESSAGE_HEADER_BYTES + 3])
def test_connection_that_ends_in_the_middle_loses_its_peer(n_bytes: int) -> None:
    heard = hear((header() + b"hello")[:n_bytes], ends=True)
    assert_lost(heard, "rank 0 lost rank 1, which closed the connection")


@pytest.mark.parametrize("says", [b"", b"x"])
def test_peer_that_says_nothing_more_or_a_byte_now_and_then_is_lost_after_the_timeout(says: bytes) -> None:
    started, stop = time.monotonic(), threading.Event()
    with facing_a_fake() as (zero, fake):
        fake.sendall(header(n_bytes=500) + b"hel")

        def trickle() -> None:
            with contextlib.suppress(OSError):
                while not stop.wait(0.3):
                    fake.sendall(says)

        ((heard,), _) = at_once(lambda: [at_once(lambda: zero.receive_any(STREAM, [1])), stop.set()][0], trickle)
    assert_lost(heard, "did not answer")
    assert "timeout_s=2" in str(heard)
    assert 1.9 < time.monotonic() - started < 10 * patience()


def test_message_of_a_stream_that_is_not_open_waits() -> None:
    with meshes() as made:
        open_all(made)
        made[0].open(STREAM + 2, FACTS, MAX_BYTES, [1])
        made[0].send([1], STREAM + 2, [torch.ones(1_000, dtype=torch.uint8)])
        made[0].send([1], STREAM + 2, [torch.ones(3, dtype=torch.uint8)])
        made[0].wait_until_all_sent()
        made[1].open(STREAM + 2, FACTS, MAX_BYTES, [0])
        assert [made[1].receive_any(STREAM + 2, [0])[1].numel() for _ in range(2)] == [1_000, 3]


def test_breaking_off_ends_the_waits_of_both_sides() -> None:
    with meshes(timeout_s=100) as made:
        open_all(made)
        timer = threading.Timer(0.3, made[0].break_off)
        timer.start()
        waits = at_once(*[lambda r=r: made[r].receive_any(STREAM, [1 - r]) for r in range(2)])
        assert all(isinstance(error, errors.PeerLost) for error in waits)
        timer.join()


def test_a_thousand_meshes_leave_nothing_behind() -> None:
    def held() -> tuple[int, int]:
        return len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda _: time.sleep(0.05), range(4)))  # both threads are there before anything is counted
        before = held()
        for _ in range(1_000):
            with meshes() as made:
                list(pool.map(lambda r, made=made: made[r].open(STREAM, FACTS, MAX_BYTES, [1 - r]), range(2)))
                assert carries(made)
        assert held() == before


# ---- several connections


def sockets_between(made: list[_native.Mesh]) -> list[int]:
    """Descriptors of rank 0's connections: those of this process from the port that it listens at."""
    found = []
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            if not os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
                continue
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(int(name))) as one:
            if one.getsockname()[:2] == made[0].endpoints[0] and one.getpeername():
                found.append(int(name))
    return found


def reset(descriptor: int) -> None:
    """Both ends of a connection get a reset, as from a router on the way; without the right to it, one end closes."""
    with socket.socket(fileno=os.dup(descriptor)) as one:
        (host, port), (peer, peer_port) = one.getsockname(), one.getpeername()
        query = ["ss", "-K", "src", host, "sport", "=", f":{port}", "dst", peer, "dport", "=", f":{peer_port}"]
        with contextlib.suppress(OSError):
            subprocess.run(query, check=False, capture_output=True)
        with contextlib.suppress(OSError):
            one.send(b"")  # raises where it was reset
            one.shutdown(socket.SHUT_WR)


def exchange(made: list[_native.Mesh], n_messages: int, most_bytes: int, meanwhile: Callable[[int], None]) -> None:
    """Messages of any length both ways arrive whole and in order; `meanwhile` is called before each that rank 0 sends."""
    for mesh, other in zip(made, (1, 0), strict=True):
        mesh.close(STREAM)
        assert at_once(lambda mesh=mesh, other=other: mesh.open(STREAM + 2, FACTS, most_bytes, [other])) == [None]
    draw = torch.Generator().manual_seed(7)
    sizes = torch.randint(0, most_bytes + 1, (n_messages,), generator=draw).tolist()
    messages = [torch.randint(0, 256, (size,), generator=draw, dtype=torch.uint8) for size in sizes]

    def send(rank: int) -> None:
        for number, message in enumerate(messages):
            if rank == 0:
                meanwhile(number)
            made[rank].send([1 - rank], STREAM + 2, [message])
        made[rank].wait_until_all_sent()

    def receive(rank: int) -> None:
        for message in messages:
            source, found, _ = made[rank].receive_any(STREAM + 2, [1 - rank])
            assert source == 1 - rank
            assert torch.equal(found, message)

    calls = [(call, rank) for call in (send, receive) for rank in range(2)]
    assert at_once(*[lambda call=call, rank=rank: call(rank) for call, rank in calls]) == [None] * 4


@pytest.mark.parametrize("n_connections", [1, 2, 8])
def test_messages_are_in_order_whatever_connection_brings_them(n_connections: int) -> None:
    with meshes(n_connections=n_connections, timeout_s=30) as made:
        open_all(made)
        assert [mesh.n_connections for mesh in made] == [n_connections] * 2
        exchange(made, 300, 200_000, lambda number: None)


@pytest.mark.parametrize("seed", range(5))
def test_connections_that_break_lose_nothing_while_one_lives(seed: int) -> None:
    draw = random.Random(seed)
    with meshes(n_connections=8, timeout_s=30) as made:
        open_all(made)
        breaks = dict(zip(sorted(draw.sample(range(200), 7)), draw.sample(sockets_between(made), 7), strict=True))

        def break_one(number: int) -> None:
            if number in breaks and draw.random() < 0.3:
                with socket.socket(fileno=os.dup(breaks[number])) as one:
                    one.shutdown(socket.SHUT_WR)
            elif number in breaks:
                reset(breaks[number])

        exchange(made, 200, 300_000, break_one)
        assert all(1 <= mesh.n_connections < 8 for mesh in made)


def test_broken_connections_are_made_anew_and_a_peer_is_lost_with_its_last_one() -> None:
    with meshes(n_connections=4, timeout_s=30) as made:
        open_all(made)
        for descriptor in sockets_between(made)[:3]:
            reset(descriptor)
        alive = []
        exchange(made, 20, 100_000, lambda number: alive.append(made[0].n_connections))
        assert min(alive) < 4
        deadline = time.monotonic() + 20 * patience()
        streams = itertools.count(STREAM + 4, 2)
        while made[0].n_connections < 4 and time.monotonic() < deadline:
            time.sleep(0.1)
            open_all(made, next(streams))
        assert [mesh.n_connections for mesh in made] == [4, 4]
        made[1].shut()
        (heard,) = at_once(lambda: made[0].receive_any(STREAM + 2, [1]))
        assert_lost(heard, "closed the connection")


@on_ranks(2)
def test_streams_and_interfaces_are_what_the_environment_says(rank: int, world_size: int) -> None:
    means, counts = [], []
    for streams, interfaces in (("", "lo"), ("", "lo"), ("5", "lo"), ("1", "lo,lo,lo")):
        os.environ |= {"GRADWIRE_STREAMS": streams, "GRADWIRE_SOCKET_IFNAME": interfaces, "GRADWIRE_CONGESTION": "reno"}
        reducer = gradwire.Reducer("gcomp:importance=none", timeout_s=100)
        reducer.all_reduce(tensors := {"w": torch.randn(300_000, generator=torch.Generator().manual_seed(rank))}).wait()
        counts.append(reducer.stats()["n_streams"])
        reducer.close()
        means.append(tensors["w"])
    assert (min(counts[:2]), *counts[2:]) == (1, 5, 3), counts  # a round trip can look long once, on a busy machine
    assert_alike(means)


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("GRADWIRE_STREAMS", "-1", "number of connections to each peer up to 64, got '-1'"),
        ("GRADWIRE_STREAMS", "65", "up to 64"),
        ("GRADWIRE_STREAMS", "many", "got 'many'"),
        ("GRADWIRE_CONGESTION", "vega2", "congestion control 'vega2'.*tcp_allowed_congestion_control"),
    ],
)
@on_ranks(2)
def test_wrong_streams_are_refused(rank: int, world_size: int, name: str, value: str, words: str) -> None:
    os.environ[name] = value
    with pytest.raises(gradwire.InvalidArgument, match=words):
        gradwire.Reducer("gcomp:importance=none", timeout_s=100).all_reduce({"w": torch.ones(300_000)}).wait()


def test_interfaces_are_asked_for_by_name() -> None:
    assert _native.interface_address("lo") == "127.0.0.1"
    with pytest.raises(gradwire.InvalidArgument, match=r"no network interface 'nosuch'.*GRADWIRE_SOCKET_IFNAME"):
        _native.interface_address("nosuch")


def exchange_then(rank: int, world_size: int, ending: str) -> None:
    state = gradwire.HookState("truncate", timeout_s=100)
    state.scheme.reduce(Bucket(torch.ones(1_000))).wait()
    if rank == 1:
        if ending == "fork" and os.fork() == 0:
            time.sleep(30)  # a data loader's worker, say, which outlives its parent
        os._exit(9)
    state.scheme.reduce(Bucket(torch.ones(1_000), step=1)).wait()


@pytest.mark.parametrize("ending", ["exit", "fork"])
def test_death_of_a_rank_is_seen_at_once_though_a_child_of_it_lives_on(ending: str) -> None:
    started = time.monotonic()
    outcomes = try_ranks(exchange_then, 2, ending, timeout_s=60)
    assert type(outcomes[0].error) is gradwire.PeerLost, outcomes[0]
    assert time.monotonic() - started < 25 * patience()


@on_ranks(2, timeout_s=60, raises=gradwire.InvalidArgument, match="nosuch")
def test_interface_that_one_rank_does_not_have_is_told_on_all(rank: int, world_size: int) -> None:
    os.environ["GRADWIRE_SOCKET_IFNAME"] = "nosuch" if rank == 1 else "lo"
    state = gradwire.HookState("truncate", timeout_s=10)
    state.scheme.reduce(Bucket(torch.ones(10))).wait()
