"""Ranks of a group find each other: who they are, the group's name in their store, addresses and a secret."""

import contextlib
import hashlib
import json
import os
import secrets
import socket
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from gradwire import _native
from gradwire.errors import IncompatibleVersion, InvalidArgument

# The first that is set names the interfaces that this rank listens on. The second is Gloo's own.
INTERFACE_VARIABLES = ("GRADWIRE_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME")
# Connections to each peer, and their congestion control; where they are not set, both follow the round trip.
STREAMS, CONGESTION = "GRADWIRE_STREAMS", "GRADWIRE_CONGESTION"
MOST_STREAMS = 64


class Meeting(NamedTuple):
    """Ranks that meet in a c10d store of their own, without torch.distributed's default group."""

    store: Any
    rank: int
    world_size: int


def name_group(store: Any, members: list[int], rank: int) -> str:
    """The prefix of the next group over `members` in the store: the same on all of them, and never used before.

    All ranks make groups in the same order, and each counts its own in the store: who takes a lost rank's place finds its
    count there, or a new store without counts. A launcher that restarts its ranks may keep the store of their life before.
    """
    digest = hashlib.blake2b(repr(members).encode(), digest_size=8).hexdigest()
    name = f"gradwire/{digest}/{_life()}"
    return f"{name}/{store.add(f'{name}/made by {rank}', 1)}"


def ranks_of(group: dist.ProcessGroup | Sequence[int] | None) -> list[int]:
    """The global ranks of a group, which must have this one."""
    if isinstance(group, Sequence):
        members = [int(rank) for rank in group]
        if len(set(members)) != len(members) or not set(members) <= set(range(dist.get_world_size())):
            raise InvalidArgument(f"group {members} does not name ranks below {dist.get_world_size()}, each once")
    else:
        members = dist.get_process_group_ranks(group if group is not None else dist.group.WORLD)
    if dist.get_rank() not in members:
        raise InvalidArgument(f"rank {dist.get_rank()} is not in the group {members} that it was given")
    return members


def timeout_of(group: dist.ProcessGroup | Sequence[int] | None) -> float:
    """Seconds that `group` waits by itself; a list of ranks and None stand for the group of all ranks."""
    backends: Any = dist.group.WORLD if group is None or isinstance(group, Sequence) else group
    for device in ("cpu", "cuda"):
        with contextlib.suppress(RuntimeError, AttributeError):  # a group may serve only one of them
            return float(backends._get_backend(torch.device(device)).options._timeout.total_seconds())
    return float(dist.default_pg_timeout.total_seconds())


def restart_advice() -> str:
    """Advice where a group cannot be built in a restarted life; none in the first."""
    if _life() == "0":
        return ""
    return (
        " In a restarted life torch's groups need TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1, else ranks find addresses of the life "
        "before in the agent's store."
    )


def _life() -> str:
    """Count of restarts of this rank by torchrun."""
    return os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")


def meet(
    store: Any, rank: int, world_size: int, timeout_s: float, all_gather: Callable[[torch.Tensor], torch.Tensor]
) -> _native.Mesh:
    """Make one rank's mesh, in a c10d store of this group alone. Collective. `all_gather` says that every rank has
    written to the store; it fails where one does not."""
    mesh = _native.Mesh(
        rank, world_size, own_addresses(store), timeout_s, _n_connections(), os.environ.get(CONGESTION, "")
    )
    with contextlib.ExitStack() as undo:
        undo.callback(mesh.shut)
        if rank == 0:
            store.set("secret", secrets.token_hex(_native.MESH_SECRET_BYTES))
        store.set(str(rank), json.dumps(mesh.endpoints))
        all_gather(torch.zeros(1, dtype=torch.uint8, device="cpu"))
        endpoints = [_read_endpoints(store, peer) for peer in range(world_size)]
        mesh.join(endpoints, bytes.fromhex(store.get("secret").decode()))
        undo.pop_all()
    return mesh


def _read_endpoints(store: Any, peer: int) -> Any:
    try:
        return json.loads(store.get(str(peer)))
    except ValueError as error:
        raise IncompatibleVersion(
            f"rank {peer} says otherwise where it listens: install the same gradwire on every host"
        ) from error


def _n_connections() -> int:
    """Connections to each peer; 0: by its round trip."""
    given = os.environ.get(STREAMS) or "0"
    if not given.isdecimal() or not 0 <= int(given) <= MOST_STREAMS:
        raise InvalidArgument(f"{STREAMS} is a number of connections to each peer up to {MOST_STREAMS}, got {given!r}")
    return int(given)


def own_addresses(store: Any) -> list[str]:
    """The numeric addresses that peers reach this rank at."""
    for variable, most in zip(INTERFACE_VARIABLES, (None, 1), strict=True):  # Gloo takes the first of several
        if names := [name.strip() for name in os.environ.get(variable, "").split(",") if name.strip()]:
            return [_native.interface_address(name) for name in names[:most]]
    while hasattr(store, "underlying_store"):  # a PrefixStore around it
        store = store.underlying_store
    host, port = getattr(store, "host", None) or os.environ.get("MASTER_ADDR") or socket.gethostname(), 1
    try:
        family, kind, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(address)  # sends nothing: asks the system which way it would go
            return [socket.getnameinfo(probe.getsockname(), socket.NI_NUMERICHOST | socket.NI_NUMERICSERV)[0]]
    except OSError as error:
        raise InvalidArgument(
            f"no network interface reaches {host!r} ({error}): set {INTERFACE_VARIABLES[0]} to the one that peers reach"
        ) from error
