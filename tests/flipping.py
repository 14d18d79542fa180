"""A relay between two real ranks that flips one bit on its way."""

import contextlib
import socket
import threading
from typing import Any

from gradwire import _native
from gradwire.wire import communicator, rendezvous


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


def flip_what_comes(place: int) -> None:
    """In rank 0 of two, before it attaches: flip a bit of byte `place` of all that rank 1 sends over the engine."""
    make, meet = _native.Mesh, rendezvous.meet
    listener = socket.create_server(("127.0.0.1", 0))

    class Told:
        """The mesh, which tells the others of the relay in the place of its own door."""

        def __init__(self, *args: Any) -> None:
            self.mesh = make(*args)
            (own,) = self.mesh.endpoints
            threading.Thread(target=relay, args=(listener, own, place), daemon=True).start()
            self.shut = self.mesh.shut

        endpoints = (("127.0.0.1", listener.getsockname()[1]),)

        def join(self, *args: Any) -> None:
            self.mesh.join(*args)

    rendezvous._native.Mesh = Told
    communicator.meet = lambda *args: meet(*args).mesh
