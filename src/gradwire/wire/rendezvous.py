"""How the ranks of a group find each other: addresses and a secret through the store that they share already."""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
from collections.abc import Callable
from typing import Any

import torch

from gradwire import _native
from gradwire.errors import InvalidArgument

# The first that is set names the interface that this rank listens on. The second is Gloo's own.
INTERFACE_VARIABLES = ("GRADWIRE_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME")


class Rendezvous:
    """The making of one rank's mesh.

    Args:
        store: a c10d store of this group alone.
        timeout_s: how long the mesh waits for a peer.
    """

    def __init__(self, store: Any, rank: int, world_size: int, timeout_s: float) -> None:
        self._store, self._rank, self._world_size, self._timeout_s = store, rank, world_size, timeout_s

    def meet(self, all_gather: Callable[[torch.Tensor], torch.Tensor]) -> _native.Mesh:
        """Collective. `all_gather`: what says that every rank has written to the store; it fails where one does not.

        Raises: InvalidArgument, and whatever `all_gather` raises.
        """
        mesh = _native.Mesh(self._rank, self._world_size, own_address(self._store), self._timeout_s)
        with contextlib.ExitStack() as undo:
            undo.callback(mesh.shut)
            if self._rank == 0:
                self._store.set("secret", secrets.token_hex(_native.MESH_SECRET_BYTES))
            host, port = mesh.endpoint
            self._store.set(str(self._rank), f"{port} {host}")
            all_gather(torch.zeros(1, dtype=torch.uint8, device="cpu"))
            places = [self._store.get(str(rank)).decode().split(" ", 1) for rank in range(self._world_size)]
            mesh.join([(host, int(port)) for port, host in places], bytes.fromhex(self._store.get("secret").decode()))
            undo.pop_all()
        return mesh


def own_address(store: Any) -> str:
    """The numeric address that peers reach this rank at. Raises: InvalidArgument (no such interface)."""
    for variable in INTERFACE_VARIABLES:
        if name := os.environ.get(variable, "").split(",")[0].strip():
            return _native.interface_address(name)
    while hasattr(store, "underlying_store"):  # a PrefixStore around it
        store = store.underlying_store
    host, port = getattr(store, "host", None) or os.environ.get("MASTER_ADDR") or socket.gethostname(), 1
    try:
        family, kind, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(address)  # sends nothing: asks the system which way it would go
            return socket.getnameinfo(probe.getsockname(), socket.NI_NUMERICHOST | socket.NI_NUMERICSERV)[0]
    except OSError as error:
        raise InvalidArgument(
            f"no network interface reaches {host!r} ({error}): set {INTERFACE_VARIABLES[0]} to the one that peers reach"
        ) from error
