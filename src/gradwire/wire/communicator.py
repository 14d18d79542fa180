"""A Gloo group of gradwire's own, and one ordered background lane on which it is used.

The group is separate from DDP's, so that messages never interleave with DDP's own broadcasts. All communication of a rank
runs on one lane thread in the order of submission, the same on all ranks, while the training thread goes on.

The group is made without `dist.new_group`, which either takes every rank of the world to call it, or names the group by
how many groups each rank is in, so that ranks in unequally many subgroups wait for each other under different names.

Failures: a rank that fails notes why in the store that all ranks share, then breaks its connections; every peer that
waits for it, directly or round the ring, wakes at once, reads the note and raises the same error. A rank that dies
leaves no note: its peers raise PeerLost.
"""

import atexit
import contextlib
import functools
import os
import queue
import re
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from gradwire import _native
from gradwire.errors import GradwireError, InvalidArgument, PeerLost, RankMismatch, Unsupported
from gradwire.wire.notes import Notes, try_for
from gradwire.wire.rendezvous import Meeting, meet, name_group, ranks_of, restart_advice, timeout_of

# Of a receive that nothing answers (see `_break_connections`).
_SILENT_TAG = 1 << 20
# A lane with nothing to wait for ends in microseconds; one that waits for a peer is torn loose after this long. What it
# computes ends by itself.
_EXIT_WAIT_S = 0.5
_EXIT_LIMIT_S = 120
_LONGEST_S = 10**9  # more than any clock here has to count


# Of ranks that come and go: one that dies on its way to the others holds them up for so long.
MEETING_TIMEOUT_S = 60.0


@dataclass
class _Task:
    future: torch.futures.Future
    run: Callable[[], Any]
    may_overtake: bool


class Communicator:
    """One rank's end of a group of ranks.

    Args:
        group: the ranks to talk to, as a process group or a list of global ranks (default: all). gradwire makes a Gloo
            group of its own over the same ranks, so the constructor is collective: every rank of `group` calls it.
        timeout_s: how long to wait for a peer before PeerLost (default: as long as `group` does).
    """

    def __init__(
        self, group: dist.ProcessGroup | Sequence[int] | Meeting | None = None, timeout_s: float | None = None
    ) -> None:
        if isinstance(group, Meeting):
            timeout_s = MEETING_TIMEOUT_S if timeout_s is None else timeout_s
        elif not dist.is_available() or not dist.is_initialized():
            raise InvalidArgument(
                "torch.distributed is not initialised: start the script with torchrun, and call "
                "torch.distributed.init_process_group('gloo') before attach()"
            )
        if timeout_s is None:
            timeout_s = min(timeout_of(group), _LONGEST_S)
        if isinstance(timeout_s, bool) or not isinstance(timeout_s, int | float) or not 0 < timeout_s <= _LONGEST_S:
            raise InvalidArgument(
                f"timeout_s is a number of seconds above 0, at most {_LONGEST_S}, not {timeout_s!r:.40}"
            )
        self.timeout_s = timeout_s
        self._process = os.getpid()
        self._meeting = group if isinstance(group, Meeting) else None
        if isinstance(group, Meeting):
            self._store, self.rank, members = group.store, group.rank, list(range(group.world_size))
        else:
            self._store, members = dist.distributed_c10d._get_default_store(), ranks_of(group)
            self.rank = members.index(dist.get_rank())
        self.members, self.world_size = members, len(members)
        self._name = name_group(self._store, members, members[self.rank])
        self._failure: GradwireError | None = None
        self._failure_lock = threading.Lock()
        self.notes = Notes(self._store, self._name, self.rank, members)
        self._subgroups: weakref.WeakSet[Communicator] = weakref.WeakSet()  # closed ones go
        self._break_too: list[Callable[[], None]] = []
        self._mesh: _native.Mesh | None = None
        self._group: Any = None  # as long as it is being made, there are no connections to break
        try:
            with self._naming_peers():
                self._group = dist.ProcessGroupGloo(  # torch's annotations lack its collectives
                    dist.distributed_c10d.PrefixStore(self._name, self._store),
                    self.rank,
                    self.world_size,
                    timedelta(seconds=timeout_s),
                )
                self._group.barrier().wait()  # a rank that closed at once would break off who still connects
        except PeerLost as error:
            lost = PeerLost(
                f"{error} Every rank of the model calls attach(): did this one come alone?{restart_advice()}"
            )
            lost.names_global_ranks = True
            raise self.fail(lost) from error  # a peer that was quicker may have failed already, and left a note
        self._started: weakref.WeakKeyDictionary[torch.futures.Future, float] = weakref.WeakKeyDictionary()
        self._n_streams = 0
        self._scratch: dict[str, torch.Tensor] = {}
        self._closed = False
        self._tasks: queue.SimpleQueue[_Task | None] = queue.SimpleQueue()
        self._deferred: list[Callable[[], None]] = []
        self._lane = threading.Thread(target=self._run_tasks, name="gradwire-lane", daemon=True)
        self._lane.start()
        _open_communicators.add(self)

    def subgroup(self, members: Sequence[int] | None = None) -> "Communicator":
        """Another one over the same ranks or some of them, with its own lane and connections, which break with this
        one's. Collective."""
        if self._meeting is None:
            made = Communicator(self.members if members is None else members, self.timeout_s)
        elif members is None:
            made = Communicator(self._meeting, self.timeout_s)
        else:
            raise Unsupported("ranks that come and go form one group, no parts of it: take another scheme")
        self._subgroups.add(made)
        return made

    def store_for(self, purpose: str) -> Any:
        """A place in the store that all ranks share, of this group alone."""
        return dist.distributed_c10d.PrefixStore(f"{self._name}/{purpose}", self._store)

    def break_together(self, break_off: Callable[[], None]) -> None:
        """Call `break_off`, which ends other connections, when this group fails: peers that wait there wake too."""
        self._break_too.append(break_off)

    # ---- the lane

    def submit(self, task: Callable[..., Any], *args: Any, may_overtake: bool = False) -> torch.futures.Future:
        """Run task(*args) on the lane after everything submitted before; the future holds its result or its error.
        `may_overtake`: it may go before what the task before it has deferred, if it is there in time."""
        if self._closed:
            raise InvalidArgument("this attachment is closed: attach a scheme again first")
        self.check_process()
        future: torch.futures.Future = torch.futures.Future()
        self._tasks.put(_Task(future, functools.partial(task, *args), may_overtake))
        return future

    def check_process(self) -> None:
        """Refuse to work in a process that was forked from the one with the lane and the connections."""
        if os.getpid() != self._process:
            raise InvalidArgument(
                "this process was forked from the one that attached, which keeps the connections: attach in this one, "
                "after its own init_process_group, to train here"
            )

    def defer(self, work: Callable[[], None]) -> None:
        """Have `work` run on the lane when this task is over, before its future is done; in the order of calls.

        The next task goes before it if it `may_overtake` and is there in time: a message can be made while others travel. On
        another rank it may be late: what ranks do together in an order (collectives, new streams) must not be deferred.
        """
        self._deferred.append(work)

    def run_deferred(self) -> None:
        """Do now what this task has deferred."""
        deferred, self._deferred = self._deferred, []
        for work in deferred:
            work()

    def _run_tasks(self) -> None:
        # A new thread takes torch's thread count over when it first asks for it. Before that torch.bmm wakes as many
        # threads as there are cores, and 2 us become 1,400 (3 x 24 x 24, two busy cores).
        torch.get_num_threads()
        begun: _Task | None = None  # has run, but for what it has deferred
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
        """The task again, if it has deferred something."""
        try:
            if self._failure is not None:
                raise self._failure
            result = task.run()
        except Exception as error:
            self._deferred.clear()
            task.future.set_exception(self.fail(error))
            return None
        if self._deferred:
            deferred, self._deferred = self._deferred, []

            def finish() -> Any:
                for work in deferred:
                    work()
                return result

            task.run = finish
            return task
        task.future.set_result(result)
        return None

    def _end_lane(self, limit_s: float | None = None) -> bool:
        """Finish what was submitted, unless a task itself asks; whether that is done within the limit."""
        self._tasks.put(None)
        if threading.current_thread() is not self._lane:
            self._lane.join(limit_s)
        return not self._lane.is_alive()

    # ---- operations, all called on the lane; a peer that does not answer is a PeerLost

    def all_reduce(self, tensor: torch.Tensor, op: Any = dist.ReduceOp.SUM) -> None:
        """Reduce `tensor` in place over all ranks."""
        with self._naming_peers():
            self._group.allreduce([tensor], op).wait()

    def start_all_reduce(self, tensor: torch.Tensor, op: Any = dist.ReduceOp.SUM) -> torch.futures.Future:
        """Start reducing `tensor` in place over all ranks; `finish` the future before touching the tensor."""
        with self._naming_peers():
            future: torch.futures.Future = self._group.allreduce([tensor], op).get_future()
        self._started[future] = time.monotonic()
        return future

    def finish(self, started: torch.futures.Future) -> None:
        """Wait for a started collective."""
        with self._naming_peers(self._started.pop(started, None)):
            started.wait()

    def all_gather(self, tensor: torch.Tensor) -> torch.Tensor:
        """(world, n): every rank's `tensor` (n,), by rank."""
        gathered = torch.empty((self.world_size, tensor.numel()), dtype=tensor.dtype, device="cpu")
        self.all_gather_into(gathered.view(-1), tensor)
        return gathered

    def gather(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        """Every rank's `tensor` (n,), by rank, on rank 0; nothing elsewhere."""
        options = dist.GatherOptions()
        options.rootRank = 0
        gathered = [] if self.rank else [torch.empty_like(tensor) for _ in range(self.world_size)]
        with self._naming_peers():
            self._group.gather([gathered] if gathered else [], [tensor], options).wait()
        return gathered

    def all_gather_into(self, gathered: torch.Tensor, tensor: torch.Tensor) -> None:
        """Every rank's `tensor` (n,), by rank, into `gathered` (world n,)."""
        with self._naming_peers():
            self._group._allgather_base(gathered, tensor).wait()

    def reduce_scatter_into(self, share: torch.Tensor, values: torch.Tensor, op: Any = dist.ReduceOp.SUM) -> None:
        """The sum over all ranks of part number `rank` of `values` (world n,) into `share` (n,)."""
        options = dist.ReduceScatterOptions()
        options.reduceOp = op
        with self._naming_peers():
            self._group._reduce_scatter_base(share, values, options).wait()

    def all_to_all(self, shards: torch.Tensor) -> torch.Tensor:
        """(world, n): row i of every rank's `shards` (world, n) goes to rank i, here by sender."""
        received = torch.empty_like(shards)
        with self._naming_peers():
            self._group.alltoall_base(received, shards.contiguous(), [], []).wait()
        return received

    def swap(self, tensor: torch.Tensor, peer: int) -> torch.Tensor:
        """Send `tensor` (n,) to one rank, which swaps too, and give what it sent."""
        received = torch.empty_like(tensor)
        with self._naming_peers():
            sent = self._group.send([tensor], peer, 0)
            self._group.recv([received], peer, 0).wait()
            sent.wait()
        return received

    @property
    def mesh(self) -> _native.Mesh:
        """Connections of our own, for exchanges of messages. Ranks ask first at the same place in their order of tasks."""
        if self._mesh is None:
            mesh = meet(self.store_for("mesh"), self.rank, self.world_size, self.timeout_s, self.all_gather)
            with self._failure_lock:
                self._mesh = mesh
            if self._failure is not None:  # it has come too late to be broken off with the others
                mesh.break_off()
        return self._mesh

    def open_exchange(self) -> tuple[_native.Mesh, int]:
        """The mesh, and the first of two numbers for one exchange's messages: the same on all ranks, by the order of calls."""
        self._n_streams = (self._n_streams + 2) % (1 << 32)
        return self.mesh, self._n_streams

    def scratch(self, name: str, n_bytes: int) -> torch.Tensor:
        """(n_bytes,) uint8 that lives until the next call with this name: work space allocated once, not every step."""
        buffer = self._scratch.get(name)
        if buffer is None or buffer.numel() < n_bytes:
            self._scratch.pop(name, None)  # the old one goes before the new one comes
            buffer = self._scratch[name] = torch.empty(n_bytes, dtype=torch.uint8, device="cpu")
        return buffer[:n_bytes]

    @property
    def n_streams(self) -> int:
        """TCP connections to the peer that has most; 0 before the first exchange and once closed."""
        return 0 if self._mesh is None else self._mesh.n_connections

    # ---- failure

    def raise_if_failed(self) -> None:
        """Raise what this group failed of, if it has."""
        if self._failure is not None:
            raise self._failure

    def raise_if_peer_failed(self) -> None:
        """Raise what a peer has noted that it failed of: for waits outside the group, which its breaking does not end."""
        self.raise_if_failed()
        if self.notes.is_failure_left():
            raise self.fail(PeerLost("a peer has failed"))

    def fail(self, error: BaseException) -> GradwireError:
        """Mark the group as failed, tell every peer why, and return the error to raise here. The first failure of the
        whole group wins: a rank that fails because another did gets the other's error."""
        with self._failure_lock:
            if self._failure is not None:
                return self._failure
            if isinstance(error, GradwireError):
                failure = self._in_global_ranks(error)
            else:
                failure = RankMismatch(f"rank {self.members[self.rank]} failed: {type(error).__name__}: {error}")
                failure.__cause__ = error
            if isinstance(failure, PeerLost):  # it may be that peers have closed their ends while this rank goes on
                failure = try_for(functools.partial(self.notes.blame_closed, failure), failure)
            note = self.notes.leave_failure(failure)
            if note.rank != self.rank:
                is_lost = note.cls is PeerLost
                told = note.cls(note.message if is_lost else f"rank {self.members[note.rank]} raised: {note.message}")
                told.__cause__ = error
                failure = told
            failure.names_global_ranks = True
            self._failure = failure
        self._break_connections()
        if self.members[self.rank] == 0:  # it usually hosts the store
            self.notes.let_peers_read()
        return failure

    def _in_global_ranks(self, error: GradwireError) -> GradwireError:
        """What is below knows ranks by their place in the group; people know them by their number among all."""
        if error.names_global_ranks or self.members == list(range(self.world_size)):
            return error
        numbers = {str(place): str(member) for place, member in enumerate(self.members)}

        def name(found: re.Match[str]) -> str:
            return re.sub(r"\d+", lambda place: numbers.get(place[0], place[0]), found[0])

        text = re.sub(r"\branks? \[?\d+(?:(?:, | and )\d+)*\b", name, str(error))
        translated = type(error)(text)
        translated.__cause__ = error
        return translated

    def _break_connections(self) -> None:
        """Close every connection of this group, which wakes all peers that wait on them. The backend, which still sums,
        has no call for it (in torch 2.13 Gloo's `abort` closes nothing), but a receive that times out closes the
        connections of its whole group, and nobody ever sends to this one."""
        if self.world_size == 1 or self._group is None:
            return
        if self._mesh is not None:
            self._mesh.break_off()
        for subgroup in list(self._subgroups):
            subgroup._break_connections()
        for break_off in self._break_too:
            break_off()
        for peer in {*range(self.world_size)} - {self.rank}:
            with contextlib.suppress(Exception):  # of a dead one it fails at once, and closes nothing
                work = self._group.recv([torch.empty(1, dtype=torch.uint8, device="cpu")], peer, _SILENT_TAG)
                work.wait(timedelta(milliseconds=1))

    @contextlib.contextmanager
    def _naming_peers(self, started: float | None = None) -> Any:
        """Turn the backend's RuntimeError, which does not say who of several peers was waited for, into PeerLost.
        `started`: when what is waited for began, if that is not now."""
        started = time.monotonic() if started is None else started
        try:
            yield
        except GradwireError:
            raise
        except (RuntimeError, ValueError) as error:
            waited_s = time.monotonic() - started
            was_slow = "imed out" in str(error) or "timeout" in str(error)
            what = "did not answer" if was_slow else "closed the connection"
            lost, their = "its peers, one of which", "their"
            if self.world_size == 2:
                lost, their = f"rank {self.members[1 - self.rank]}, which", "its"
            cure = " If it was only slow, pass attach(..., timeout_s=) more." if was_slow else ""
            named = PeerLost(
                f"rank {self.members[self.rank]} lost {lost} {what} (waited {waited_s:.1f} s, "
                f"timeout_s={self.timeout_s:g}). Look at {their} output for the cause, and restart from the last "
                f"checkpoint.{cure} Backend: {error}"
            )
            named.names_global_ranks = True
            raise named from error

    def close(self, step: int | None = None) -> None:
        """Finish the lane. Every rank calls it; safe to call twice. `step`: told to peers that go on without this one."""
        if step is not None:
            try_for(lambda: self.notes.tell_closing(step), None)
        self._closed = True
        _open_communicators.discard(self)
        if not self._lane.is_alive():
            return
        self._end_lane()
        self._scratch.clear()
        if self._mesh is not None:
            self._mesh.shut()
        # By this thread and now: the group's own threads run callbacks that hold this object, and a group that is let go
        # on one of its threads waits for itself.
        self._group = None

    def _abandon(self) -> None:
        """End the lane and the group's threads without waiting for peers: the interpreter goes down, and would end the
        process by a signal if one of them came back to it."""
        if os.getpid() != self._process:
            return
        ends = time.monotonic() + _EXIT_WAIT_S
        is_over = self._end_lane(_EXIT_WAIT_S)
        while is_over and not all(started.done() for started in list(self._started)):
            is_over = time.monotonic() < ends
            time.sleep(0.001)
        if not is_over:
            who = f"rank {self.members[self.rank]}"
            self.fail(PeerLost(f"{who} left in the middle of a step; look at its output for the cause"))
            is_over = self._end_lane(_EXIT_LIMIT_S)
        if is_over:
            self._group = None


# Lanes that would still run when the interpreter goes down, and could crash it there: a script that ends without
# `close`, an exception, Ctrl-C.
_open_communicators: set[Communicator] = set()


@atexit.register
def _abandon_lanes() -> None:
    for communicator in list(_open_communicators):
        communicator._abandon()


def ring_bytes(n_bytes: int, world_size: int) -> int:
    """Bytes that each rank sends, and receives, in the backend's ring all-reduce of `n_bytes`."""
    return 2 * (world_size - 1) * n_bytes // world_size


def completed(value: Any) -> torch.futures.Future:
    """A future that is done."""
    done: torch.futures.Future = torch.futures.Future()
    done.set_result(value)
    return done


def then(first: torch.futures.Future, use: Callable[[Any], Any]) -> torch.futures.Future:
    """A future of `use(result)`, which runs where `first` is completed; an error of either keeps its type. Where the
    result is a future itself (a task of the lane that the lane need not wait for), it is that one's result."""
    done: torch.futures.Future = torch.futures.Future()

    def go_on(finished: torch.futures.Future) -> None:
        try:
            result = finished.wait()
            if isinstance(result, torch.futures.Future):
                result.add_done_callback(go_on)
                return
            used = use(result)
        except Exception as error:
            done.set_exception(error)
        else:
            done.set_result(used)

    first.add_done_callback(go_on)
    return done
