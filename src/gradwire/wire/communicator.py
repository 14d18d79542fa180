"""The Communicator: a Gloo group of gradwire's own, and one ordered background lane on which it is used.

The group is separate from the one DDP uses, so that gradwire's messages never interleave with DDP's own broadcasts. All
communication of a rank runs on one lane thread in the order of submission, which is the same on all ranks; the training
thread goes on with the backward pass meanwhile.

The group is made without `dist.new_group`, which either takes every rank of the world to call it, or names the group by
how many groups each rank is in, so that ranks in unequally many subgroups wait for each other under different names.

Failures: a rank that fails notes why in the store that all ranks share, then breaks its connections; every peer that
waits for it, directly or round the ring, wakes at once, reads the note and raises the same error. A rank that dies
leaves no note: its peers raise PeerLost.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import hashlib
import json
import queue
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
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
# A lane with nothing to wait for ends in microseconds; one that waits for a peer is torn loose after this long.
_EXIT_WAIT_S = 0.5


class Rest(NamedTuple):
    """What a task on the lane gives back if it has more to do, once peers have answered: the next task may go first."""

    finish: Callable[[], Any]


@dataclass
class _Task:
    future: torch.futures.Future
    run: Callable[[], Any]
    may_overtake: bool


class Communicator:
    """One rank's end of a group of ranks.

    Args:
        group: the ranks to talk to (default: all). gradwire makes a Gloo group of its own over the same ranks, so the
            constructor is collective: every rank of `group` calls it.
        timeout_s: how long to wait for a peer before PeerLost.
    Raises: InvalidArgument (torch.distributed not initialised, timeout not positive), PeerLost (a rank did not come).
    """

    def __init__(self, group: dist.ProcessGroup | None = None, timeout_s: float = DEFAULT_TIMEOUT_S) -> None:
        if not dist.is_available() or not dist.is_initialized():
            raise InvalidArgument(
                "torch.distributed is not initialised: call torch.distributed.init_process_group('gloo') first"
            )
        if not timeout_s > 0:
            raise InvalidArgument(f"timeout_s must be positive, got {timeout_s}")
        self.timeout_s = timeout_s
        self._parent = group
        members = dist.get_process_group_ranks(group if group is not None else dist.group.WORLD)
        self.rank = members.index(dist.get_rank())
        self.world_size = len(members)
        self._store = dist.distributed_c10d._get_default_store()
        self._name = _name_group(members)
        self._failure: GradwireError | None = None
        self._failure_lock = threading.Lock()
        try:
            with self._naming_peer(None):
                self._group: Any = dist.ProcessGroupGloo(  # torch's annotations lack its collectives
                    dist.distributed_c10d.PrefixStore(self._name, self._store),
                    self.rank,
                    self.world_size,
                    timedelta(seconds=timeout_s),
                )
        except PeerLost as error:
            raise self.fail(error) from error  # a peer that was quicker may have failed already, and left a note
        self._n_streams = 0
        self._twins: weakref.WeakSet[Communicator] = weakref.WeakSet()  # closed ones go
        self._scratch: dict[str, torch.Tensor] = {}
        self._tasks: queue.SimpleQueue[_Task | None] = queue.SimpleQueue()
        self._closed = False
        self._lane = threading.Thread(target=self._run_lane, name="gradwire-lane", daemon=True)
        self._lane.start()
        _open_communicators.add(self)

    def twin(self) -> Communicator:
        """Another communicator over the same ranks, with a lane and connections of its own. Collective.

        When this one fails, the twin's connections break too: whoever waits on them wakes.
        """
        twin = Communicator(self._parent, self.timeout_s)
        self._twins.add(twin)
        return twin

    # ---- the lane

    def submit(self, task: Callable[..., Any], *args: Any, may_overtake: bool = False) -> torch.futures.Future:
        """Run task(*args) on the lane after everything submitted before; the future holds its result or its error.

        A task may give back a `Rest`, which then still is to run before the future is there. If the next task
        `may_overtake`, it goes before that rest where it is there in time: a message can be made while others travel.
        What ranks do together in an order (collectives, new streams) belongs into the task and not into its rest, since
        one rank's task may be in time and another's not.

        Raises: InvalidArgument (closed).
        """
        if self._closed:
            raise InvalidArgument("this attachment is closed: attach a scheme again first")
        future: torch.futures.Future = torch.futures.Future()
        self._tasks.put(_Task(future, functools.partial(task, *args), may_overtake))
        return future

    def _run_lane(self) -> None:
        # A new thread takes torch's thread count over when it first asks for it. Before that torch.bmm wakes as many
        # threads as there are cores, and 2 us become 1,400 (3 x 24 x 24, two busy cores).
        torch.get_num_threads()
        begun: _Task | None = None  # has run, but for its rest
        is_open = True
        while is_open:
            task = None
            with contextlib.suppress(queue.Empty):
                task = self._tasks.get(block=begun is None)
                is_open = task is not None
            if begun is not None and (task is None or not task.may_overtake):
                begun = self._run_task(begun)
            following = None if task is None else self._run_task(task)
            if begun is not None:
                self._run_task(begun)
            begun = following
            del task, following  # nothing of a finished task may live until the next one comes

    def _run_task(self, task: _Task) -> _Task | None:
        """The task again, if a rest of it is left."""
        try:
            self.raise_if_failed()
            result = task.run()
        except Exception as error:
            task.future.set_exception(self.fail(error))
            return None
        if isinstance(result, Rest):
            task.run = result.finish
            return task
        task.future.set_result(result)
        return None

    # ---- operations, all called on the lane

    def isend(self, tensor: torch.Tensor, peer: int, tag: int) -> dist.Work:
        """Start sending a contiguous CPU tensor to group rank `peer`."""
        with self._naming_peer(peer):
            work: dist.Work = self._group.send([tensor], peer, tag)
        return work

    def irecv(self, tensor: torch.Tensor, peer: int, tag: int) -> dist.Work:
        """Start receiving exactly `tensor`'s bytes from group rank `peer`."""
        with self._naming_peer(peer):
            work: dist.Work = self._group.recv([tensor], peer, tag)
        return work

    def wait(self, work: dist.Work, peer: int) -> None:
        """Wait for one send or receive. Raises: PeerLost."""
        with self._naming_peer(peer):
            work.wait()

    def all_reduce(self, tensor: torch.Tensor, op: Any = dist.ReduceOp.SUM) -> None:
        """Reduce `tensor` in place over all ranks. Raises: PeerLost."""
        with self._naming_peer(None):
            self._group.allreduce([tensor], op).wait()

    def start_all_reduce(self, tensor: torch.Tensor, op: Any = dist.ReduceOp.SUM) -> torch.futures.Future:
        """Start reducing `tensor` in place over all ranks; `finish` the future before touching the tensor."""
        with self._naming_peer(None):
            future: torch.futures.Future = self._group.allreduce([tensor], op).get_future()
        return future

    def finish(self, started: torch.futures.Future) -> None:
        """Wait for a started collective. Raises: PeerLost."""
        with self._naming_peer(None):
            started.wait()

    def all_gather(self, tensor: torch.Tensor) -> torch.Tensor:
        """(world, n): every rank's `tensor` (n,), by rank. Raises: PeerLost."""
        gathered = torch.empty((self.world_size, tensor.numel()), dtype=tensor.dtype)
        with self._naming_peer(None):
            self._group.allgather([list(gathered.unbind(0))], [tensor]).wait()
        return gathered

    def all_gather_into(self, gathered: torch.Tensor, tensor: torch.Tensor) -> None:
        """Every rank's `tensor` (n,), by rank, into `gathered` (world n,); in place. Raises: PeerLost."""
        with self._naming_peer(None):
            self._group._allgather_base(gathered, tensor).wait()

    def all_to_all(self, shards: torch.Tensor) -> torch.Tensor:
        """(world, n): row i of every rank's `shards` (world, n) goes to rank i, here by sender. Raises: PeerLost."""
        received = torch.empty_like(shards)
        with self._naming_peer(None):
            self._group.alltoall_base(received, shards.contiguous(), [], []).wait()
        return received

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

    def raise_if_peer_failed(self) -> None:
        """Raise what a peer has noted that it failed of: for waits outside the group, which its breaking does not end."""
        self.raise_if_failed()
        noted: list[bool] = []
        _try_for(_NOTE_WAIT_S, lambda: noted.append(self._store.check([self._name + "/failure"])))
        if any(noted):
            raise self.fail(PeerLost("a peer has failed"))

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
            standing[0] = json.loads(self._store.compare_set(self._name + "/failure", "", json.dumps(mine)))
            self._store.add(self._name + "/readers", 1)

        _try_for(_NOTE_WAIT_S, exchange)
        note = standing[0]
        return int(note["rank"]), {"type": str(note["type"]), "message": str(note["message"])}

    def _let_peers_read(self) -> None:
        """Rank 0, which usually hosts the store, stays until the others have read the note; not for one that died."""
        if dist.get_rank() != 0:
            return

        # It ends by itself: a thread that were left behind to poll would crash the interpreter on its way down.
        deadline = time.monotonic() + 0.9 * _NOTE_WAIT_S

        def wait_for_readers() -> None:
            while self._store.add(self._name + "/readers", 0) < self.world_size and time.monotonic() < deadline:
                time.sleep(0.01)

        _try_for(_NOTE_WAIT_S, wait_for_readers)

    def _break_connections(self) -> None:
        """Close every connection of this group, which wakes all peers that wait on them.

        Gloo has no call for it, but a receive that times out closes the connections of its whole group; nothing is ever
        sent on the silent tag, so this one always does.
        """
        if self.world_size == 1:
            return
        for twin in list(self._twins):
            twin._break_connections()
        peer = (self.rank + 1) % self.world_size
        with contextlib.suppress(Exception):
            work = self._group.recv([torch.empty(1, dtype=torch.uint8)], peer, _SILENT_TAG)
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
        """Finish the lane. Every rank calls it; safe to call twice."""
        self._closed = True
        _open_communicators.discard(self)
        if not self._lane.is_alive():
            return
        self._tasks.put(None)
        if threading.current_thread() is not self._lane:
            self._lane.join()
        self._scratch.clear()
        # By this thread and now: the group's own threads run callbacks that hold this object, and a group that is let go
        # on one of its threads waits for itself.
        del self._group

    def _abandon(self) -> None:
        """End the lane without waiting for peers: the interpreter goes down."""
        self._tasks.put(None)
        self._lane.join(_EXIT_WAIT_S)
        if self._lane.is_alive():
            self.fail(PeerLost(f"rank {self.rank} left in the middle of a step; look at its output for the cause"))
            self._lane.join(_EXIT_WAIT_S)


# Lanes that would still run when the interpreter goes down, and could crash it there: a script that ends without
# `close`, an exception, Ctrl-C.
_open_communicators: set[Communicator] = set()


@atexit.register
def _abandon_lanes() -> None:
    for communicator in list(_open_communicators):
        communicator._abandon()


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


# How many groups this process has made over the same ranks. All ranks of a group make them in the same order.
_n_groups: Counter[tuple[int, ...]] = Counter()


def _name_group(members: list[int]) -> str:
    """The prefix of the next group over `members` in the store: the same on all of them, and never used before."""
    _n_groups[tuple(members)] += 1
    digest = hashlib.blake2b(repr(members).encode(), digest_size=8).hexdigest()
    return f"gradwire/{digest}/{_n_groups[tuple(members)]}"


def ring_bytes(n_bytes: int, world_size: int) -> int:
    """What the backend's ring all-reduce of `n_bytes` sends, and receives, per rank."""
    return 2 * (world_size - 1) * n_bytes // world_size
