"""The number of threads that codecs use: by default this rank's fair share of the machine's cores."""

import os

import torch.distributed as dist

from gradwire import _native
from gradwire.errors import InvalidArgument

_chosen_by_user = False


def set_thread_count(n_threads: int) -> None:
    """Let codecs of this process use `n_threads` threads, the lane included. Raises: InvalidArgument (below 1)."""
    global _chosen_by_user
    if n_threads < 1:
        raise InvalidArgument(f"n_threads must be at least 1, got {n_threads}")
    _chosen_by_user = True
    _native.set_thread_count(n_threads)


def thread_count() -> int:
    """Threads that codecs of this process may use."""
    return _native.thread_count()


def use_fair_share_of_cores() -> None:
    """Unless the user chose, give codecs this rank's share: usable cores / ranks on this machine (torchrun says how many; else
    all), at least one."""
    if _chosen_by_user:
        return
    n_cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    n_local_ranks = int(os.environ.get("LOCAL_WORLD_SIZE", 0))
    if not n_local_ranks:
        n_local_ranks = dist.get_world_size() if dist.is_initialized() else 1
    _native.set_thread_count(max(1, n_cores // n_local_ranks))
