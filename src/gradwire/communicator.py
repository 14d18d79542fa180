"""The Communicator: a process group of gradwire's own, and one ordered background lane on which it is used.

The group is separate from the one DDP uses, so that gradwire's messages never interleave with DDP's own broadcasts. All
communication of a rank runs on one lane thread in the order of submission, which is the same on all ranks; the training
thread goes on with the backward pass meanwhile.

Failures: a rank that fails notes why in the store that all ranks share, then breaks its connections; every peer that
waits for it, directly or round the ring, wakes at once, reads the note and raises the same error. A rank that dies
leaves no note: its peers raise PeerLost.
"""

from __future__ import annotations

import contextlib
import json
import queue
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from gradwire import errors
from gradwire.errors import GradwireError, InvalidArgument, PeerLost, RankMismatch

DEFAULT_TIMEOUT_S = 120.0
# Tags below 2**20 number the streams of point-to-point messages; this one is never sent on (see `_break_connections`).
_SILENT_TAG = 1 << 20
# A failing rank writes its note before it breaks its connections, so the note is there when the break is felt; the wait
# only covers the store's own latency.
_NOTE_WAIT_S = 2.0


class Communicator:
    """One rank's end of a group of ranks.

    Args:
        group: the ranks to talk to (default: all). gradwire makes a Gloo group of its own over the same ranks, so the
            constructor is collective: every rank of `group` calls it.
        timeout_s: how long to wait for a peer before PeerLost.
    Raises: InvalidArgument (torch.distributed not initialised, timeout not positive).
    """

    def __init__(self, group: dist.ProcessGroup | None = None, timeout_s: float = DEFAULT_TIMEOUT_S) -> None:
        if not dist.is_available() or not dist.is_initialized():
            raise InvalidArgument(
                "torch.distributed is not initialised: call torch.distributed.init_process_group('gloo') first"
            )
        if not timeout_s > 0:
            raise InvalidArgument(f"timeout_s must be positive, got {timeout_s}")
        self.timeout_s = timeout_s
        members = dist.get_process_group_ranks(group if group is not None else dist.group.WORLD)
        self.group = _take_group(members, timeout_s)
        self.rank = dist.get_rank(self.group)
        self.world_size = dist.get_world_size(self.group)
        self._global_rank = members
        self._note_key = f"gradwire/failure/{self.group.group_name}"
        self._store = dist.distributed_c10d._get_default_store()
        self._failure: GradwireError | None = None
        self._failure_lock = threading.Lock()
        self._n_streams = 0
        self._scratch: dict[str, torch.Tensor] = {}
        self._tasks: queue.SimpleQueue[tuple[torch.futures.Future, Callable[..., Any], tuple] | None]
        self._tasks = queue.SimpleQueue()
        self._lane = threading.Thread(target=self._run_lane, name="gradwire-lane", daemon=True)
        self._lane.start()

    # ---- the lane

    def submit(self, task: Callable[..., Any], *args: Any) -> torch.futures.Future:
        """Run task(*args) on the lane after everything submitted before; the future holds its result or its error."""
        future: torch.futures.Future = torch.futures.Future()
        self._tasks.put((future, task, args))
        return future

    def _run_lane(self) -> None:
        # A new thread takes torch's thread count over when it first asks for it. Before that torch.bmm wakes as many
        # threads as there are cores, and 2 us become 1,400 (3 x 24 x 24, two busy cores).
        torch.get_num_threads()
        while (item := self._tasks.get()) is not None:
            future, task, args = item
            try:
                self.raise_if_failed()
                result = task(*args)
            except Exception as error:
                future.set_exception(self.fail(error))
            else:
                future.set_result(result)
            del item, future, task, args  # nothing of a finished task may live until the next one comes

    # ---- operations, all called on the lane

    def isend(self, tensor: torch.Tensor, peer: int, tag: int) -> dist.Work:
        """Start sending a contiguous CPU tensor to group rank `peer`."""
        with self._naming_peer(peer):
            work = dist.isend(tensor, self._global_rank[peer], group=self.group, tag=tag)
        assert work is not None
        return work

    def irecv(self, tensor: torch.Tensor, peer: int, tag: int) -> dist.Work:
        """Start receiving exactly `tensor`'s bytes from group rank `peer`."""
        with self._naming_peer(peer):
            work = dist.irecv(tensor, self._global_rank[peer], group=self.group, tag=tag)
        assert work is not None
        return work

    def wait(self, work: dist.Work, peer: int) -> None:
        """Wait for one send or receive. Raises: PeerLost."""
        with self._naming_peer(peer):
            work.wait()

    def all_reduce(self, tensor: torch.Tensor, op: Any = dist.ReduceOp.SUM) -> None:
        """Reduce `tensor` in place over all ranks. Raises: PeerLost."""
        with self._naming_peer(None):
            dist.all_reduce(tensor, op=op, group=self.group)

    def start_all_reduce(self, tensor: torch.Tensor, op: Any = dist.ReduceOp.SUM) -> torch.futures.Future:
        """Start reducing `tensor` in place over all ranks; `finish` the future before touching the tensor."""
        with self._naming_peer(None):
            work = dist.all_reduce(tensor, op=op, group=self.group, async_op=True)
        assert work is not None
        return work.get_future()

    def finish(self, started: torch.futures.Future) -> None:
        """Wait for a started collective. Raises: PeerLost."""
        with self._naming_peer(None):
            started.wait()

    def all_gather(self, tensor: torch.Tensor) -> torch.Tensor:
        """(world, n): every rank's `tensor` (n,), by rank. Raises: PeerLost."""
        gathered = torch.empty((self.world_size, tensor.numel()), dtype=tensor.dtype)
        with self._naming_peer(None):
            dist.all_gather(list(gathered.unbind(0)), tensor, group=self.group)
        return gathered

    def next_stream(self) -> int:
        """A tag for one collective's messages; ranks call this in the same order, so they get the same numbers."""
        self._n_streams = (self._n_streams + 1) % _SILENT_TAG
        return self._n_streams

    def scratch(self, name: str, n_bytes: int) -> torch.Tensor:
        """(n_bytes,) uint8 that lives until the next call with this name: work space allocated once, not every step."""
        buffer = self._scratch.get(name)
        if buffer is None or buffer.numel() < n_bytes:
            self._scratch.pop(name, None)  # the old one goes before the new one comes
            buffer = self._scratch[name] = torch.empty(n_bytes, dtype=torch.uint8)
        return buffer[:n_bytes]

    @property
    def scratch_bytes(self) -> int:
        """Bytes of work space held now."""
        return sum(buffer.numel() for buffer in self._scratch.values())

    # ---- failure

    def raise_if_failed(self) -> None:
        """Raise what this group failed of, if it has."""
        if self._failure is not None:
            raise self._failure

    def fail(self, error: Exception) -> GradwireError:
        """Mark the group as failed, tell every peer why, and return the error to raise here.

        The first failure of the whole group wins: a rank that fails because another did gets the other's error.
        """
        with self._failure_lock:
            if self._failure is not None:
                return self._failure
            failure = error if isinstance(error, GradwireError) else None
            if failure is None:
                failure = RankMismatch(f"rank {self.rank} failed: {type(error).__name__}: {error}")
                failure.__cause__ = error
            origin, note = self._exchange_notes(failure)
            if origin != self.rank:
                cls = getattr(errors, note["type"], PeerLost)
                told = cls(note["message"] if cls is PeerLost else f"rank {origin} raised: {note['message']}")
                told.__cause__ = error
                failure = told
            self._failure = failure
        self._break_connections()
        self._let_peers_read()
        return failure

    def _exchange_notes(self, failure: GradwireError) -> tuple[int, dict[str, str]]:
        """Leave a note unless a peer has left one before; returns the note that stands and the rank that wrote it."""
        mine = {"rank": self.rank, "type": type(failure).__name__, "message": str(failure)}
        standing: list[dict[str, Any]] = [mine]

        def exchange() -> None:
            standing[0] = json.loads(self._store.compare_set(self._note_key, "", json.dumps(mine)))
            self._store.add(self._note_key + "/readers", 1)

        _try_for(_NOTE_WAIT_S, exchange)
        note = standing[0]
        return int(note["rank"]), {"type": str(note["type"]), "message": str(note["message"])}

    def _let_peers_read(self) -> None:
        """Rank 0, which usually hosts the store, stays until the others have read the note; not for one that died."""
        if dist.get_rank() != 0:
            return

        def wait_for_readers() -> None:
            while self._store.add(self._note_key + "/readers", 0) < self.world_size:
                time.sleep(0.01)

        _try_for(_NOTE_WAIT_S, wait_for_readers)

    def _break_connections(self) -> None:
        """Close every connection of this group, which wakes all peers that wait on them.

        Gloo has no call for it, but a receive that times out closes the connections of its whole group; nothing is ever
        sent on the silent tag, so this one always does.
        """
        if self.world_size == 1:
            return
        peer = (self.rank + 1) % self.world_size
        with contextlib.suppress(Exception):
            work = dist.irecv(
                torch.empty(1, dtype=torch.uint8), self._global_rank[peer], group=self.group, tag=_SILENT_TAG
            )
            assert work is not None
            work.wait(timedelta(milliseconds=1))

    @contextlib.contextmanager
    def _naming_peer(self, peer: int | None) -> Any:
        """Turn the backend's RuntimeError into PeerLost, which says who was waited for."""
        started = time.monotonic()
        try:
            yield
        except GradwireError:
            raise
        except (RuntimeError, ValueError) as error:
            whom = "its peers" if peer is None else f"rank {peer}"
            waited_s = time.monotonic() - started
            what = "did not answer" if "imed out" in str(error) else "closed the connection"
            raise PeerLost(
                f"rank {self.rank} lost {whom}, which {what} (waited {waited_s:.1f} s, timeout_s={self.timeout_s:g}). "
                f"Look at the output of {whom} for the cause, and restart from the last checkpoint. Backend: {error}"
            ) from error

    def close(self) -> None:
        """Finish the lane and give the group back. Every rank calls it; safe to call twice."""
        if not self._lane.is_alive():
            return
        self._tasks.put(None)
        if threading.current_thread() is not self._lane:
            self._lane.join()
        self._scratch.clear()
        if self._failure is None:
            _idle_groups.append(_IdleGroup(dist.group.WORLD, self._global_rank, self.timeout_s, self.group))


def _try_for(limit_s: float, action: Callable[[], None]) -> None:
    """Run `action` on a thread of its own and leave it behind at the limit: a store whose host hangs holds up nothing.

    Where the host has died there is nobody to tell: the broken connections say enough.
    """

    def attempt() -> None:
        with contextlib.suppress(Exception):
            action()

    thread = threading.Thread(target=attempt, daemon=True)
    thread.start()
    thread.join(limit_s)


class _IdleGroup(NamedTuple):
    world: Any  # the default group at that time: a new init_process_group makes the old groups useless
    members: list[int]
    timeout_s: float
    group: dist.ProcessGroup


# Groups of closed communicators, to be used again. They are never destroyed: torch would give their name, and with it
# their old addresses in the store, to the next group over the same ranks, whose ranks would then wait for each other.
_idle_groups: list[_IdleGroup] = []


def _take_group(members: list[int], timeout_s: float) -> dist.ProcessGroup:
    """An idle Gloo group over `members`, or a new one; all ranks open and close communicators in the same order."""
    for idle in _idle_groups:
        if idle.world is dist.group.WORLD and (idle.members, idle.timeout_s) == (members, timeout_s):
            _idle_groups.remove(idle)
            return idle.group
    return dist.new_group(members, timeout=timedelta(seconds=timeout_s), backend="gloo", use_local_synchronization=True)


def ring_bytes(n_bytes: int, world_size: int) -> int:
    """What the backend's ring all-reduce of `n_bytes` sends, and receives, per rank."""
    return 2 * (world_size - 1) * n_bytes // world_size
