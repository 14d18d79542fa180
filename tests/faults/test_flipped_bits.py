"""One bit of one message is flipped on its way between two real ranks: it is never taken for what was sent."""

from __future__ import annotations

import contextlib
import socket
import threading
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import gradwire
from gradwire import _native
from gradwire.wire import rendezvous
from ranks import try_ranks

# What travels without a codec's checksum -> where the bit is flipped, in bytes from rank 1 to rank 0.
CASES: dict[str, tuple[str, dict[str, Any], list[int]]] = {
    "one-bit raw": ("one-bit", {"pull": "raw", "warmup_steps": 0}, [45, 3_000, 9_000]),
    "qsgd raw": ("qsgd", {"pull": "raw"}, [45, 9_000, 14_001]),
    "one-bit": ("one-bit", {"warmup_steps": 0}, [45, 700]),
    "broadcast": ("broadcast", {"bits": 32}, [3_000, 9_000, 20_002]),
}


def relay(listener: socket.socket, target: tuple[str, int], place: int) -> None:
    """Carries rank 1's connection to rank 0, with the lowest bit of byte `place` behind the handshake flipped."""
    come, _ = listener.accept()
    there = socket.create_connection(target)
    done = 0

    def carry(source: socket.socket, sink: socket.socket, flips: bool) -> None:
        nonlocal done
        with contextlib.suppress(OSError):
            while data := bytearray(source.recv(1 << 16)):
                at = place + 64 - done  # the proof is 64 bytes
                if flips and 0 <= at < len(data):
                    data[at] ^= 1
                done += len(data) if flips else 0
                sink.sendall(data)
        for end in (source, sink):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    threading.Thread(target=carry, args=(come, there, True), daemon=True).start()
    threading.Thread(target=carry, args=(there, come, False), daemon=True).start()


def train(rank: int, world_size: int, case: str, place: int) -> list[bytes]:
    name, options, _ = CASES[case]
    if rank == 0:
        make = _native.Mesh
        listener = socket.create_server(("127.0.0.1", 0))

        class Told:
            """The mesh, which tells the others of the relay in the place of its own door."""

            def __init__(self, *args: Any) -> None:
                self.mesh = make(*args)
                own = self.mesh.endpoint
                threading.Thread(target=relay, args=(listener, own, place), daemon=True).start()
                self.shut = self.mesh.shut

            endpoint = ("127.0.0.1", listener.getsockname()[1])

            def join(self, *args: Any) -> None:
                self.mesh.join(*args)

        rendezvous._native.Mesh = Told
        meet = rendezvous.meet
        from gradwire.wire import communicator

        communicator.meet = lambda *args: meet(*args).mesh
    torch.manual_seed(0)
    ddp = DistributedDataParallel(nn.Linear(60, 50))
    attachment = gradwire.attach(ddp, torch.optim.SGD(ddp.parameters(), 0.1), name, timeout_s=20, **options)
    (optimizer,) = attachment.session.optimizers
    for step in range(4):
        torch.manual_seed(10 * step + rank)
        ddp(torch.randn(8, 60)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return [parameter.detach().numpy().tobytes() for parameter in ddp.parameters()]


@pytest.mark.parametrize(("case", "place"), [(case, place) for case in CASES for place in CASES[case][2]])
def test_flipped_bit_ends_in_an_error_and_never_in_other_replicas(case: str, place: int) -> None:
    outcomes = try_ranks(train, 2, case, place)
    assert isinstance(outcomes[0].error, gradwire.CorruptMessage | gradwire.RankMismatch), outcomes
    assert isinstance(outcomes[1].error, gradwire.GradwireError), outcomes


@pytest.mark.parametrize("case", CASES)
def test_without_it_the_replicas_are_equal(case: str) -> None:
    first, second = try_ranks(train, 2, case, 1 << 40)
    assert first.error is None, first
    assert first.result == second.result
