"""Threads change how long a step takes, never its bits; and a codec at work leaves Python to others."""

import hashlib
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

import gradwire
from float_messages import Tapped
from gradwire import _native, codecs, schemes
from gradwire.core import threads
from gradwire.core.bucket import Bucket
from ranks import assert_alike, on_ranks, run_ranks


@pytest.fixture
def unchosen(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """As in a new process: nobody has set a thread count; whatever it was comes back."""
    before = gradwire.thread_count()
    monkeypatch.setattr(threads, "_chosen_by_user", False)
    yield
    threads._native.set_thread_count(before)


@pytest.mark.usefixtures("unchosen")
@pytest.mark.parametrize(("n_local_ranks", "share"), [("1", 6), ("2", 3), ("4", 1), ("100", 1)])
def test_default_is_a_fair_share_of_the_cores(n_local_ranks: str, share: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(6)))
    monkeypatch.setenv("LOCAL_WORLD_SIZE", n_local_ranks)
    threads.use_fair_share_of_cores()
    assert gradwire.thread_count() == share


@pytest.mark.usefixtures("unchosen")
def test_count_that_the_user_chose_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    gradwire.set_thread_count(3)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "100")
    threads.use_fair_share_of_cores()
    assert gradwire.thread_count() == 3
    for wrong in (0, -1):
        with pytest.raises(gradwire.InvalidArgument, match="n_threads must be at least 1"):
            gradwire.set_thread_count(wrong)


def listening_to(codec: codecs.Codec) -> tuple[Tapped, Any]:
    """The codec, and the hash of every message that it writes."""
    digest = hashlib.blake2b(digest_size=16)
    return Tapped(codec, lambda out, n_bytes: digest.update(out[:n_bytes].numpy().tobytes()) or n_bytes), digest


@on_ranks(2, timeout_s=60)
def test_messages_in_the_ring_are_the_same_for_every_thread_count(rank: int, world_size: int) -> torch.Tensor:
    torch.manual_seed(rank)
    n = 600_001
    parameter = nn.Parameter(torch.randn(n))
    gradient = torch.randn(n) * 1e-3
    results = []
    for n_threads in (1, 2, 5, 1):
        gradwire.set_thread_count(n_threads)
        scheme, optimizer = schemes.by_name("gcomp", refresh_every=0, format=1), torch.optim.SGD([parameter], lr=0.1)
        state = gradwire.HookState(scheme, optimizer=optimizer, timeout_s=100)
        scheme.collective.codec, digest = listening_to(scheme.collective.codec)
        bucket = Bucket(gradient.clone(), [parameter], [0])
        scheme.reduce(bucket).wait()
        results.append((digest.hexdigest(), bucket.buffer))
        state.close()
    assert_alike(results)
    return results[0][1]


N = 1 << 20
VALUES = torch.randn(N)
GRADIENT, OUT = VALUES.view(torch.uint8), torch.empty(2 * 4 * N, dtype=torch.uint8)
# Cut beforehand: torch's own calls let go of the lock too.
DECODED, BYTES = OUT[: 4 * N], OUT[:N]
TABLE = _native.HuffmanTable.prior(8)
MESSAGE = OUT[: _native.gcomp_encode(GRADIENT, None, 0, 0, 23, False, 2, TABLE, OUT, 0)].clone()
NATIVE_CALLS: dict[str, Callable[[], object]] = {
    "encode": lambda: _native.gcomp_encode(GRADIENT, None, 0, 0, 23, False, 2, TABLE, OUT, 0),
    "decode": lambda: _native.gcomp_decode(MESSAGE, 0, [TABLE], None, False, 1.0, DECODED),
    "importance": lambda: _native.importance(VALUES, None, None, 0.0, 1.0, 0.0, BYTES),
    "checksum": lambda: _native.crc32c(OUT),
}


@pytest.mark.parametrize("name", NATIVE_CALLS)
def test_python_goes_on_while_the_native_core_works(name: str) -> None:
    """A thread that counts advances during a call only if the call has let go of the interpreter's lock.

    Python is told not to switch threads by itself, so that nothing else lets the counter run in between.
    """
    call, n_counted, stop = NATIVE_CALLS[name], 0, False

    def count() -> None:
        nonlocal n_counted
        while not stop:
            n_counted += 1
            time.sleep(0)  # hands the lock back

    counter = threading.Thread(target=count, daemon=True)
    interval_s = sys.getswitchinterval()
    sys.setswitchinterval(1_000)
    try:
        counter.start()
        advanced = 0
        for _ in range(1_000):  # on a busy machine the counter may not get a core at once
            before = n_counted
            call()
            advanced += n_counted - before
            if advanced:
                break
        assert advanced
    finally:
        stop = True
        sys.setswitchinterval(interval_s)
        counter.join()


def fork_beside_a_codec(rank: int, world_size: int) -> list[int]:
    """How children end that are forked while another thread encodes and changes the number of threads."""
    values = torch.randn(100_000)
    codec = codecs.by_name("gcomp", importance="none")
    message = torch.zeros(codec.max_encoded_bytes(values.numel(), values.dtype), dtype=torch.uint8)
    stop = threading.Event()

    def keep_at_work() -> None:
        own, into = codecs.by_name("gcomp", importance="none"), torch.zeros_like(message)
        while not stop.is_set():
            for n_threads in (2, 3):
                gradwire.set_thread_count(n_threads)
                own.encode(values, into)

    beside = threading.Thread(target=keep_at_work)
    beside.start()
    codes = []
    for _ in range(6):
        child = os.fork()
        if child == 0:
            signal.alarm(60)
            decoded = torch.empty_like(values)
            codec.decode(message[: codec.encode(values, message)], decoded)
            os._exit(0 if torch.equal(decoded, values) else 1)
        codes.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
    stop.set()
    beside.join()
    return codes


def test_children_forked_beside_a_codec_can_use_one() -> None:
    assert run_ranks(fork_beside_a_codec, 1) == [[0] * 6]
