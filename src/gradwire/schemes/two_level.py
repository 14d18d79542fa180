"""Two levels around any scheme: sums inside a node, the scheme between nodes on a share of every tensor, and back.

For each bucket: (1) inside the node, where the network is fast, every rank gets the node's mean of the rows that it owns;
(2) the ranks of all nodes that own the same rows reduce them by the inner scheme; (3) inside the node every rank gets all
rows. Tensors are cut by rows, as FSDP2 cuts them: who owns what does not depend on buckets, and matrices stay matrices.

When not to use this: with one rank a node; where the network inside a node is no faster than between nodes; or where little
is sent anyway, as two more copies through the node's memory then cost more than the wire saves.
"""

import os
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch

from gradwire.core.bucket import Bucket, Layout, Slot
from gradwire.core.session import Session
from gradwire.errors import InvalidArgument, Unsupported
from gradwire.schemes.base import Scheme
from gradwire.schemes.selection import tensors_of
from gradwire.wire.wire import Wire


class _Cut:
    """One bucket layout, cut over the ranks of a node: each owner's pieces, and this rank's inner slots."""

    def __init__(self, bucket: Bucket, size: int, own: int, known: dict[str, Slot]) -> None:
        # (owner, start, end, place): elements `start` to `end` of the bucket lie from `place` on in their owner's share.
        self._pieces: list[tuple[int, int, int, int]] = []
        self.slots: list[Slot] = []
        self.offsets: list[int] = []
        lengths = [0] * size
        for slot, offset, n in tensors_of(bucket):
            for owner, (start, end) in enumerate(cut_rows(slot, n, size)):
                if owner == own and slot is not None and start < end:
                    made = _slice(slot, start, end)
                    self.slots.append(known.setdefault(slot.name, made) if slot.name else made)
                    self.offsets.append(lengths[owner])
                self._pieces.append((owner, offset + start, offset + end, lengths[owner]))
                lengths[owner] += end - start
        self.n_own = lengths[own]
        self.n_share = max(lengths) + 1  # and last a flag: not finite somewhere in the node

    def views(self, buffer: torch.Tensor, shares: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Each piece's part of the bucket, and its place in the shares (size, n_share) of all owners."""
        for owner, start, end, place in self._pieces:
            yield buffer[start:end], shares[owner, place : place + end - start]


class TwoLevel(Scheme):
    """`inner` between nodes, plain sums inside: `attach(ddp, optimizer, TwoLevel("one-bit"))`.

    Counted as sent is what leaves the node.

    Args:
        inner: a scheme that only reduces, or its registry name.
        nodes: ranks a node, which follow each other (default: LOCAL_WORLD_SIZE), or the ranks of each node, by their place
            in the group. All nodes have equally many.
        options: the inner scheme's, where `inner` is a name.
    """

    name = "two-level"
    state_is_per_world = True
    per_rank_state = None  # a rank's rows are others on nodes of another size

    def __init__(
        self, inner: Scheme | str = "plain", nodes: int | Sequence[Sequence[int]] | None = None, **options: Any
    ) -> None:
        from gradwire.schemes import by_name

        inner = self.inner = by_name(inner, **options) if isinstance(inner, str) else inner
        if inner.owns_step or inner.replicas_may_differ or inner.is_transparent or inner.needs_momenta:
            cure = "choose another, or attach it without two levels"
            raise Unsupported(f"two-level takes a scheme that only reduces, and {inner.name!r} does more; {cure}")
        self.nodes = nodes if nodes is not None else int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        self._turns = threading.Lock()

    @property
    def configuration(self) -> dict[str, Any]:
        nodes = self.nodes if isinstance(self.nodes, int) else [list(node) for node in self.nodes]
        return {"inner": self.inner.name, "nodes": nodes, "options": self.inner.configuration}

    @property
    def settling_steps(self) -> int:
        return self.inner.settling_steps

    @property
    def is_settled(self) -> bool:
        return self.inner.is_settled

    def bind(self, session: Session) -> None:
        """Raises: InvalidArgument (ranks do not make equal nodes), and what the inner scheme does."""
        communicator = session.communicator
        nodes = _nodes_of(self.nodes, communicator.world_size)
        own = next(node for node in nodes if communicator.rank in node)
        self._size, self._own = len(own), own.index(communicator.rank)
        super().bind(session)
        in_node = [communicator.members[rank] for rank in own]
        # Twice: sums of a bucket and rows of an earlier one may cross on the way, in another order on other ranks.
        self._sums, self._gathers = communicator.subgroup(in_node), communicator.subgroup(in_node)
        self._between = communicator.subgroup([communicator.members[node[self._own]] for node in nodes])
        self._inner_slots: dict[str, Slot] = dict(session.slots)  # whole, for the names that the inner scheme checks
        self._cuts: dict[Layout, _Cut] = {}
        self._ready: dict[int, Callable[[], None]] = {}  # gathers whose turn has not come, by number
        self._pending: dict[int, torch.futures.Future] = {}
        self._n_begun = self._n_gathered = 0
        between = replace(session, communicator=self._between, wire=Wire(self._between), slots=self._inner_slots)
        try:
            self.inner.bind(between)
        except BaseException:
            self._close_groups()
            raise
        self._inner_slots.clear()  # from now on this rank's slices
        for name, slot in session.slots.items():
            start, end = cut_rows(slot, slot.numel(), self._size)[self._own]
            if start != end:
                self._inner_slots[name] = _slice(slot, start, end)

    def reduce(self, bucket: Bucket) -> torch.futures.Future:
        """Sums on one lane, the inner scheme on its own, gathers on a third: buckets overlap."""
        done: torch.futures.Future = torch.futures.Future()
        number = self._n_begun
        self._n_begun += 1
        self._pending[number] = done
        if bucket.layout not in self._cuts:
            self._cuts[bucket.layout] = _Cut(bucket, self._size, self._own, self._inner_slots)
        cut = self._cuts[bucket.layout]
        # The last one of the step before may still be gathered from: buckets keep their buffers apart by number.
        flat = torch.zeros(self._size, cut.n_share, dtype=bucket.buffer.dtype, device="cpu")
        share = torch.empty(cut.n_share, dtype=bucket.buffer.dtype, device="cpu")
        place: Any = {"index": bucket.index, "step": bucket.step, "is_last": bucket.is_last}
        own = Bucket(share[: cut.n_own], cut.slots, cut.offsets, record=bucket.record, **place)
        if select := getattr(self.inner, "select", None):  # here, where all ranks know as many tensors
            select.look_for_small(own)

        def sum_in_node() -> None:
            bucket.wait_for_all()
            timing = bucket.record.timing("communicate")
            for piece, shared in cut.views(bucket.buffer, flat):
                torch.mul(piece, 1.0 / self._size, out=shared)
            flat[:, -1] = bucket.buffer.sum(dtype=torch.float32) * 0  # 0, or NaN if any value is not finite
            self._sums.reduce_scatter_into(share, flat.view(-1))
            if cut.n_own and not bool(share[-1].isfinite()):
                share[0] = float("nan")  # so that no share of a step that is not finite is kept
            timing.end()

        def reduce_between() -> None:
            if bucket.index == 0:
                self.inner.begin_step(bucket.step)
            reduced = self.inner.reduce(own)
            if bucket.is_last:
                # Here and not in `end_step`, which runs on another lane and would overtake it.
                self._then(self._between.submit(self.inner.end_step, bucket.step), lambda: None)
            self._then(reduced, gather_in_turn)

        def gather_in_turn() -> None:
            """In the order of the buckets: the inner scheme may end in another order on another rank of the node."""
            with self._turns:
                self._ready[number] = lambda: self._then(self._gathers.submit(gather), finish)
                while self._n_gathered in self._ready:
                    self._ready.pop(self._n_gathered)()
                    self._n_gathered += 1

        def gather() -> None:
            timing = bucket.record.timing("communicate")
            self._gathers.all_gather_into(flat.view(-1), share)
            for piece, shared in cut.views(bucket.buffer, flat):
                piece.copy_(shared)
            timing.end()

        def finish() -> None:
            if self._pending.pop(number, None) is not None:  # else it was told of a failure
                done.set_result(bucket.buffer)

        self._then(self._sums.submit(sum_in_node), reduce_between)
        return done

    def _then(self, begun: torch.futures.Future, work: Callable[[], None]) -> None:
        """Do `work` when what has begun has ended; where either fails, all buckets do, which would wait for their turn."""

        def go_on(ended: torch.futures.Future) -> None:
            try:
                ended.wait()
                work()
            except Exception as error:
                failure = self.session.communicator.fail(error)
                for number in list(self._pending):
                    done = self._pending.pop(number, None)
                    if done is not None and not done.done():
                        done.set_exception(failure)

        begun.add_done_callback(go_on)

    def _settle(self) -> None:
        """Return when the inner scheme has ended its step."""
        for communicator in (self._sums, self._between, self._gathers):
            communicator.submit(lambda: None).wait()

    def end_backward(self, step: int) -> int:
        return self.inner.end_backward(step)

    def divide_kept(self, by: float) -> None:
        self._between.submit(self.inner.divide_kept, by).wait()

    def stats(self) -> dict[str, Any]:
        return {"inner": self.inner.name, **self.inner.stats()}

    def state_dict(self) -> dict[str, Any]:
        self._settle()
        return self.inner.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Raises: InvalidArgument."""
        self._settle()
        self.inner.load_state_dict(state)

    def close(self) -> None:
        """Finish the lanes, which are the ranks' of a node and of a place; every rank calls it."""
        self._close_groups()
        self.inner.close()
        self.inner.unbind()

    def _close_groups(self) -> None:
        for communicator in (self._sums, self._between, self._gathers):
            communicator.close()


def cut_rows(slot: Slot | None, n_elements: int, size: int) -> list[tuple[int, int]]:
    """(start, end) of each owner's elements: rows, as FSDP2 cuts them, or elements where there are fewer rows than owners."""
    n_rows = slot.shape[0] if slot is not None and slot.dim() and slot.shape[0] >= size else n_elements
    per_row = n_elements // n_rows if n_rows else 0
    step = -(-n_rows // size) * per_row
    return [(min(owner * step, n_elements), min((owner + 1) * step, n_elements)) for owner in range(size)]


def _slice(slot: Slot, start: int, end: int) -> Slot:
    """The slot of elements `start` to `end`."""
    per_row = slot.numel() // slot.shape[0] if slot.dim() else 1
    is_rows = slot.dim() > 0 and start % per_row == 0 and end % per_row == 0
    shape = ((end - start) // per_row, *slot.shape[1:]) if is_rows else (end - start,)
    return Slot(slot.name, shape, slot.parameter, slot.start + start)


def _nodes_of(nodes: int | Sequence[Sequence[int]], world_size: int) -> list[list[int]]:
    """The ranks of each node. Raises: InvalidArgument."""
    if isinstance(nodes, int):
        if nodes < 1 or world_size % nodes:
            raise InvalidArgument(f"{world_size} ranks do not make whole nodes of {nodes}; say nodes=..., ranks a node")
        return [list(range(first, first + nodes)) for first in range(0, world_size, nodes)]
    groups = [list(node) for node in nodes]
    if sorted(rank for node in groups for rank in node) != list(range(world_size)):
        raise InvalidArgument(f"nodes {groups} must hold each rank from 0 to {world_size - 1} once")
    if len({len(node) for node in groups}) > 1:
        raise InvalidArgument(f"nodes {groups} have unequally many ranks; two levels need equally many")
    return groups
