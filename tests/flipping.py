"""A relay between two real ranks that flips one bit on its way."""

import contextlib
import socket
import threading
from typing import Any

from gradwire import _native
from gradwire.wire import communicator, rendezvous


def relay(listener: socket.socket, target: tuple[str, int], place: int, begun: threading.Event) -> None:
    """Carries rank 1's connection to rank 0, with the lowest bit of byte `place` of what comes once it has begun flipped."""
    come, _ = listener.accept()
    there = socket.create_connection(target)
    done = -64  # the proof

    def carry(source: socket.socket, sink: socket.socket, flips: bool) -> None:
        nonlocal done
        with contextlib.suppress(OSError):
            while data := bytearray(source.recv(1 << 16)):
                if flips and (done < 0 or begun.is_set()):
                    if 0 <= place - done < len(data):
                        data[place - done] ^= 1
                    done += len(data)
                sink.sendall(data)
        for end in (source, sink):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    threading.Thread(target=carry, args=(come, there, True), daemon=True).start()
    threading.Thread(target=carry, args=(there, come, False), daemon=True).start()


def flip_what_comes(place: int) -> threading.Event:
    """In rank 0 of two, before it attaches: flip a bit of byte `place` of all that rank 1 sends over the engine once the
    event that is returned is set."""
    begun = threading.Event()
    make, meet = _native.Mesh, rendezvous.meet
    listener = socket.create_server(("127.0.0.1", 0))

    class Told:
        """The mesh, which tells the others of the relay in the place of its own door."""

        def __init__(self, *args: Any) -> None:
            self.mesh = make(*args)
            (own,) = self.mesh.endpoints
            threading.Thread(target=relay, args=(listener, own, place, begun), daemon=True).start()
            self.shut = self.mesh.shut

        endpoints = (("127.0.0.1", listener.getsockname()[1]),)

        def join(self, *args: Any) -> None:
            self.mesh.join(*args)

    rendezvous._native.Mesh = Told
    communicator.meet = lambda *args: meet(*args).mesh
    return begun
