"""Which ranks a group has, and what it is called in the store."""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from gradwire.errors import InvalidArgument


def name_group(store: Any, members: list[int]) -> str:
    """The prefix of the next group over `members` in the store: the same on all of them, and never used before.

    All ranks of a group make groups in the same order, and each counts its own in the store: who takes a lost rank's place
    finds its count there, or a new store with all counts at none. A launcher that restarts its ranks may keep the store of
    their life before.
    """
    digest = hashlib.blake2b(repr(members).encode(), digest_size=8).hexdigest()
    name = f"gradwire/{digest}/{_life()}"
    return f"{name}/{store.add(f'{name}/made by {dist.get_rank()}', 1)}"


def ranks_of(group: dist.ProcessGroup | Sequence[int] | None) -> list[int]:
    """The global ranks of a group. Raises: InvalidArgument (not ranks of this run, or not with this one)."""
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
    """How long `group` waits by itself, in seconds; a list of ranks and None stand for the group of all ranks."""
    backends: Any = dist.group.WORLD if group is None or isinstance(group, Sequence) else group
    for device in ("cpu", "cuda"):
        with contextlib.suppress(RuntimeError, AttributeError):  # a group may serve only one of them
            return float(backends._get_backend(torch.device(device)).options._timeout.total_seconds())
    return float(dist.default_pg_timeout.total_seconds())


def restart_advice() -> str:
    """What to try where a group cannot be built in a restarted life; nothing in the first."""
    if _life() == "0":
        return ""
    return (
        " In a restarted life torch's groups need TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1, else ranks find addresses of the life "
        "before in the agent's store."
    )


def _life() -> str:
    """How often torchrun has restarted this rank."""
    return os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
