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
import re
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist

from gradwire import _native
from gradwire.errors import GradwireError, InvalidArgument, PeerLost, RankMismatch
from gradwire.wire.closing import Closing
from gradwire.wire.failure_note import FailureNote, try_for
from gradwire.wire.groups import name_group, ranks_of, restart_advice, timeout_of
from gradwire.wire.lane import Lane
from gradwire.wire.rendezvous import Rendezvous

# Of a receive that nothing answers (see `_break_connections`).
_SILENT_TAG = 1 << 20
# A lane with nothing to wait for ends in microseconds; one that waits for a peer is torn loose after this long.
_EXIT_WAIT_S = 0.5


class Breakable(Protocol):
    """Connections that end with the group."""

    def break_off(self) -> None: ...


class Communicator:
    """One rank's end of a group of ranks.

    Args:
        group: the ranks to talk to, as a process group or a list of global ranks (default: all). gradwire makes a Gloo
            group of its own over the same ranks, so the constructor is collective: every rank of `group` calls it.
        timeout_s: how long to wait for a peer before PeerLost (default: as long as `group` does).
    Raises: InvalidArgument (torch.distributed not initialised, timeout not positive, not a group of this rank), PeerLost
        (a rank did not come).
    """

    def __init__(self, group: dist.ProcessGroup | Sequence[int] | None = None, timeout_s: float | None = None) -> None:
        if not dist.is_available() or not dist.is_initialized():
            raise InvalidArgument(
                "torch.distributed is not initialised: start the script with torchrun, and call "
                "torch.distributed.init_process_group('gloo') before attach()"
            )
        if timeout_s is None:
            timeout_s = timeout_of(group)
        if not timeout_s > 0:
            raise InvalidArgument(f"timeout_s must be positive, got {timeout_s}")
        self.timeout_s = timeout_s
        self.members = members = ranks_of(group)
        self.rank = members.index(dist.get_rank())
        self.world_size = len(members)
        self._store = dist.distributed_c10d._get_default_store()
        self._name = name_group(self._store, members)
        self._failure: GradwireError | None = None
        self._failure_lock = threading.Lock()
        self.closing = Closing(self._store, self._name, self.rank, members)
        self._note = FailureNote(self._store, self._name, self.rank, self.world_size)
        self._subgroups: weakref.WeakSet[Communicator] = weakref.WeakSet()  # closed ones go
        self._parts: list[Breakable] = []
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
        self._lane = Lane(self.raise_if_failed, self.fail)
        _open_communicators.add(self)

    def subgroup(self, members: Sequence[int] | None = None) -> Communicator:
        """Another communicator over the same ranks, or over some of them, with a lane and connections of its own. Collective.

        When this one fails, the connections of its subgroups break too: whoever waits on them wakes.
        """
        made = Communicator(self.members if members is None else members, self.timeout_s)
        self._subgroups.add(made)
        return made

    def store_for(self, purpose: str) -> Any:
        """A place in the store that all ranks share, of this group alone."""
        return dist.distributed_c10d.PrefixStore(f"{self._name}/{purpose}", self._store)

    def break_together(self, part: Breakable) -> None:
        """Break `part` off when this group fails: peers that wait there wake too."""
        self._parts.append(part)

    # ---- the lane

    def submit(self, task: Callable[..., Any], *args: Any, may_overtake: bool = False) -> torch.futures.Future:
        """Run task(*args) on the lane after everything submitted before; the future holds its result or its error.

        A task may give back a `Continuation`, which then still is to run before the future is there. If the next task
        `may_overtake`, it goes before that rest where it is there in time: a message can be made while others travel.
        What ranks do together in an order (collectives, new streams) belongs into the task and not into its rest, since
        one rank's task may be in time and another's not.

        Raises: InvalidArgument (closed).
        """
        if self._closed:
            raise InvalidArgument("this attachment is closed: attach a scheme again first")
        return self._lane.submit(task, *args, may_overtake=may_overtake)

    # ---- operations, all called on the lane

    def all_reduce(self, tensor: torch.Tensor, op: Any = dist.ReduceOp.SUM) -> None:
        """Reduce `tensor` in place over all ranks. Raises: PeerLost."""
        with self._naming_peers():
            self._group.allreduce([tensor], op).wait()

    def start_all_reduce(self, tensor: torch.Tensor, op: Any = dist.ReduceOp.SUM) -> torch.futures.Future:
        """Start reducing `tensor` in place over all ranks; `finish` the future before touching the tensor."""
        with self._naming_peers():
            future: torch.futures.Future = self._group.allreduce([tensor], op).get_future()
        self._started[future] = time.monotonic()
        return future

    def finish(self, started: torch.futures.Future) -> None:
        """Wait for a started collective. Raises: PeerLost."""
        with self._naming_peers(self._started.pop(started, None)):
            started.wait()

    def all_gather(self, tensor: torch.Tensor) -> torch.Tensor:
        """(world, n): every rank's `tensor` (n,), by rank. Raises: PeerLost."""
        gathered = torch.empty((self.world_size, tensor.numel()), dtype=tensor.dtype, device="cpu")
        with self._naming_peers():
            self._group.allgather([list(gathered.unbind(0))], [tensor]).wait()
        return gathered

    def gather(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        """Every rank's `tensor` (n,), by rank, on rank 0; nothing elsewhere. Raises: PeerLost."""
        options = dist.GatherOptions()
        options.rootRank = 0
        gathered = [] if self.rank else [torch.empty_like(tensor) for _ in range(self.world_size)]
        with self._naming_peers():
            self._group.gather([gathered] if gathered else [], [tensor], options).wait()
        return gathered

    def all_gather_into(self, gathered: torch.Tensor, tensor: torch.Tensor) -> None:
        """Every rank's `tensor` (n,), by rank, into `gathered` (world n,); in place. Raises: PeerLost."""
        with self._naming_peers():
            self._group._allgather_base(gathered, tensor).wait()

    def reduce_scatter_into(self, share: torch.Tensor, values: torch.Tensor) -> None:
        """The sum over all ranks of part number `rank` of `values` (world n,) into `share` (n,). Raises: PeerLost."""
        with self._naming_peers():
            self._group._reduce_scatter_base(share, values).wait()

    def all_to_all(self, shards: torch.Tensor) -> torch.Tensor:
        """(world, n): row i of every rank's `shards` (world, n) goes to rank i, here by sender. Raises: PeerLost."""
        received = torch.empty_like(shards)
        with self._naming_peers():
            self._group.alltoall_base(received, shards.contiguous(), [], []).wait()
        return received

    def swap(self, tensor: torch.Tensor, peer: int) -> torch.Tensor:
        """Send `tensor` (n,) to one rank, which swaps too, and give what it sent. Raises: PeerLost."""
        received = torch.empty_like(tensor)
        with self._naming_peers():
            sent = self._group.send([tensor], peer, 0)
            self._group.recv([received], peer, 0).wait()
            sent.wait()
        return received

    @property
    def mesh(self) -> _native.Mesh:
        """Connections of our own, for exchanges of messages. Ranks ask first at the same place in their order of tasks.

        Raises: InvalidArgument (no such interface), PeerLost.
        """
        if self._mesh is None:
            mesh = Rendezvous(self.store_for("mesh"), self.rank, self.world_size, self.timeout_s).meet(self.all_gather)
            with self._failure_lock:
                self._mesh = mesh
            if self._failure is not None:  # it has come too late to be broken off with the others
                mesh.break_off()
        return self._mesh

    def next_stream(self) -> int:
        """The first of two numbers for one exchange's messages, the same on all ranks, which call this in the same order."""
        self._n_streams = (self._n_streams + 2) % (1 << 32)
        return self._n_streams

    def scratch(self, name: str, n_bytes: int) -> torch.Tensor:
        """(n_bytes,) uint8 that lives until the next call with this name: work space allocated once, not every step."""
        buffer = self._scratch.get(name)
        if buffer is None or buffer.numel() < n_bytes:
            self._scratch.pop(name, None)  # the old one goes before the new one comes
            buffer = self._scratch[name] = torch.empty(n_bytes, dtype=torch.uint8, device="cpu")
        return buffer[:n_bytes]

    @property
    def scratch_bytes(self) -> int:
        """Bytes of work space held now."""
        held = 0 if self._mesh is None else self._mesh.bytes_held
        return held + sum(buffer.numel() for buffer in self._scratch.values())

    # ---- failure

    def raise_if_failed(self) -> None:
        """Raise what this group failed of, if it has."""
        if self._failure is not None:
            raise self._failure

    def raise_if_peer_failed(self) -> None:
        """Raise what a peer has noted that it failed of: for waits outside the group, which its breaking does not end."""
        self.raise_if_failed()
        if self._note.is_left():
            raise self.fail(PeerLost("a peer has failed"))

    def fail(self, error: BaseException) -> GradwireError:
        """Mark the group as failed, tell every peer why, and return the error to raise here.

        The first failure of the whole group wins: a rank that fails because another did gets the other's error.
        """
        with self._failure_lock:
            if self._failure is not None:
                return self._failure
            if isinstance(error, GradwireError):
                failure = self._in_global_ranks(error)
            else:
                failure = RankMismatch(f"rank {self.members[self.rank]} failed: {type(error).__name__}: {error}")
                failure.__cause__ = error
            if isinstance(failure, PeerLost):
                failure = self._name_who_closed(failure)
            note = self._note.leave(failure)
            if note.rank != self.rank:
                is_lost = note.cls is PeerLost
                told = note.cls(note.message if is_lost else f"rank {self.members[note.rank]} raised: {note.message}")
                told.__cause__ = error
                failure = told
            failure.names_global_ranks = True
            self._failure = failure
        self._break_connections()
        if dist.get_rank() == 0:  # it usually hosts the store
            self._note.let_peers_read()
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

    def _name_who_closed(self, lost: PeerLost) -> PeerLost:
        """`lost`, or a better one if peers have closed their ends while this rank goes on."""
        better: list[PeerLost] = []
        try_for(lambda: better.extend(self.closing.blame(lost)))
        return better[0] if better else lost

    def _break_connections(self) -> None:
        """Close every connection of this group, which wakes all peers that wait on them.

        The backend, which still sums, has no call for it (in torch 2.13 Gloo's `abort` closes nothing), but a receive that
        times out closes the connections of its whole group, and nobody ever sends to this one.
        """
        if self.world_size == 1 or self._group is None:
            return
        if self._mesh is not None:
            self._mesh.break_off()
        for subgroup in list(self._subgroups):
            subgroup._break_connections()
        for part in self._parts:
            part.break_off()
        peer = (self.rank + 1) % self.world_size
        with contextlib.suppress(Exception):
            work = self._group.recv([torch.empty(1, dtype=torch.uint8, device="cpu")], peer, _SILENT_TAG)
            work.wait(timedelta(milliseconds=1))

    @contextlib.contextmanager
    def _naming_peers(self, started: float | None = None) -> Any:
        """Turn the backend's RuntimeError into PeerLost; it does not say who was waited for, of two peers and more.

        `started`: when what is waited for began, if that is not now.
        """
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
            try_for(lambda: self.closing.tell(step))
        self._closed = True
        _open_communicators.discard(self)
        if not self._lane.is_running():
            return
        self._lane.end()
        self._scratch.clear()
        if self._mesh is not None:
            self._mesh.shut()
        # By this thread and now: the group's own threads run callbacks that hold this object, and a group that is let go
        # on one of its threads waits for itself.
        self._group = None

    def _abandon(self) -> None:
        """End the lane without waiting for peers: the interpreter goes down."""
        if not self._lane.end(_EXIT_WAIT_S):
            self.fail(PeerLost(f"rank {self.rank} left in the middle of a step; look at its output for the cause"))
            self._lane.end(_EXIT_WAIT_S)


# Lanes that would still run when the interpreter goes down, and could crash it there: a script that ends without
# `close`, an exception, Ctrl-C.
_open_communicators: set[Communicator] = set()


@atexit.register
def _abandon_lanes() -> None:
    for communicator in list(_open_communicators):
        communicator._abandon()


def ring_bytes(n_bytes: int, world_size: int) -> int:
    """What the backend's ring all-reduce of `n_bytes` sends, and receives, per rank."""
    return 2 * (world_size - 1) * n_bytes // world_size
