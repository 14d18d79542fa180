"""Tensor fusion and overlap: tensors of several buckets in one all-reduce, and several of these under way.

A bucket's algorithm (`LowRank.steps`) is run up to where it waits for its sums, and goes on when they are there.
"""

from __future__ import annotations

import contextlib
import functools
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor

from gradwire.core.bucket import Bucket
from gradwire.core.session import Session
from gradwire.errors import InvalidArgument
from gradwire.schemes.low_rank.matrices import BucketPlan, Plans
from gradwire.wire.communicator import ring_bytes
from gradwire.wire.device_wire import DeviceWire
from gradwire.wire.wire import Wire


@dataclass(eq=False)
class Work:
    """One bucket on its way through the algorithm.

    Attributes:
        wire: the bucket's end of it.
        n_waits: how often the algorithm will still wait for sums.
        steps: the algorithm, which stops where it waits.
        dense: the tensors that travel as they are.
        fingerprint: of these, what ranks must share; None on a device, where no host would read its mean.
        n_awaited: tensors that are still to be summed.
        done: that the mean is there.
    """

    bucket: Bucket
    wire: Wire
    plan: BucketPlan
    loss_scale: float
    n_waits: int
    steps: Iterator[None] = field(init=False)
    dense: list[Tensor] = field(init=False)
    fingerprint: Tensor | None = None
    n_awaited: int = 0
    done: torch.futures.Future = field(default_factory=torch.futures.Future)

    def send(self) -> None:
        """Go on until sums are to be waited for."""
        with self.wire.timing("encode"):
            next(self.steps)
        self.n_waits -= 1
        self.finish_if_summed()

    def finish_if_summed(self) -> None:
        """Write the mean once nothing more is sent or awaited."""
        if self.n_waits or self.n_awaited:
            return
        mean = self.bucket.buffer
        with self.wire.timing("decode"):
            next(self.steps)
        self.wire.conclude(mean)
        if mean.dtype == torch.float16:
            self.wire.note(self.wire.all_finite(mean))  # it may leave float16's range although no sum did
        self.done.set_result(mean)


@dataclass
class _FusedBuffer:
    """Tensors that share one all-reduce, and `values`, all of them.

    Attributes:
        wait: until it is summed; on a device: has the stream wait.
    """

    tensors: list[tuple[Work, Tensor]]
    values: Tensor
    wait: Callable[[], None]
    is_summed: Callable[[], bool] = lambda: True
    is_taken: bool = False


class Fusion:
    """Fused buffers of one scheme, in the order in which all ranks start them. Used on the lane.

    Args:
        dtype: of the sums: float32 or bfloat16.
        buffer_bytes: of a fused buffer, if nothing were compressed.
        overlaps: buckets are compressed inside the backward pass; otherwise at its end, so that nothing competes with it.
    """

    def __init__(self, session: Session, plans: Plans, dtype: torch.dtype, buffer_bytes: float, overlaps: bool) -> None:
        self._communicator, self._wire, self._plans = session.communicator, session.wire, plans
        self._dtype, self._buffer_bytes, self._overlaps = dtype, buffer_bytes, overlaps
        self.drop()
        self.n_buffers = 0

    def drop(self) -> None:
        """Forget everything, after a failure."""
        self._held: list[Work] = []  # for the end of the backward pass
        self._half_sent: list[Work] = []  # they have sums to wait for before they send the rest
        self._filling: list[tuple[Work, Tensor]] = []
        self._filling_bytes = 0
        self._started: deque[_FusedBuffer] = deque()
        self._is_end = False  # the last bucket has come: the lane waits for all sums that are started

    def take(self, work: Work) -> None:
        """Have a bucket send what it has, now or at the end of the backward pass; with the last one all of the step ends.

        What waits for a first sum goes on when the next bucket has come, so that all ranks keep one order of sums.
        """
        self._is_end = is_last = work.bucket.is_last
        self._held.append(work)
        if not (self._overlaps or is_last):
            return
        before, self._half_sent = self._half_sent, []
        for held in self._held:
            held.send()
            if held.n_waits:
                self._half_sent.append(held)
        self._held = []
        if self._half_sent:
            self.flush()
        for works in [before, self._half_sent] if is_last else [before]:
            for half_sent in works:
                while half_sent.n_awaited:
                    self._finish_first()
                half_sent.send()
            if works:
                self.flush()
        if is_last:
            self.flush()
            while self._started:
                self._finish_first()
        elif self._wire.on_device:
            self._finish_summed()

    def send(self, work: Work, tensors: Iterable[Tensor], side: str) -> None:
        """Have tensors replaced by their means over the ranks, in buffers of the size for `side`, "p" or "q"."""
        cap_bytes = self._buffer_bytes * self._plans.rate_of(side)
        for tensor in tensors:
            work.n_awaited += 1
            self._filling.append((work, tensor.view(-1)))
            self._filling_bytes += tensor.numel() * self._dtype.itemsize
            if self._filling_bytes >= cap_bytes and tensor is not work.fingerprint:
                self.flush()

    def flush(self) -> None:
        """Start to sum what is left."""
        if not self._filling:
            return
        n = self._filling_bytes // self._dtype.itemsize
        values = torch.empty(n, dtype=self._dtype, device=self._wire.device)
        torch.cat([tensor for _, tensor in self._filling], out=values)
        tensors = self._filling
        self._filling, self._filling_bytes = [], 0
        self.n_buffers += 1
        if isinstance(self._wire, DeviceWire):
            self._started.append(_FusedBuffer(tensors, values, self._wire.group.start_reduce(values)))
            return
        timing = tensors[-1][0].bucket.record.timing("communicate")
        summed = self._communicator.start_all_reduce(values)
        buffer = _FusedBuffer(tensors, values, functools.partial(self._communicator.finish, summed), summed.done)
        self._started.append(buffer)

        def note_end(_: torch.futures.Future) -> None:
            timing.end()
            if not (buffer.is_taken or self._is_end):
                with contextlib.suppress(InvalidArgument):  # closed since
                    self._communicator.submit(self._finish_summed)

        summed.add_done_callback(note_end)

    def _finish_summed(self) -> None:
        """Hand out the buffers, from the first on, that are summed already."""
        while self._started and self._started[0].is_summed():
            self._finish_first()

    def _finish_first(self) -> None:
        buffer = self._started.popleft()
        buffer.is_taken = True
        buffer.wait()
        mean = self._wire.divide(buffer.values.to(torch.float32), self._wire.world_size)
        sizes: dict[Work, int] = {}  # of what each has in it, one after the other
        parts = mean.split([tensor.numel() for _, tensor in buffer.tensors])
        for (work, tensor), part in zip(buffer.tensors, parts, strict=True):
            tensor.copy_(part)
            work.n_awaited -= 1
            sizes[work] = sizes.get(work, 0) + part.numel()
        for work, part in zip(sizes, mean.split(list(sizes.values())), strict=True):
            n_bytes = part.numel() * self._dtype.itemsize
            work.bucket.record.count_exchanged(ring_bytes(n_bytes, self._wire.world_size))
            work.wire.note_message(self._wire.all_finite(part))  # the same bits, and so the same verdict, on all ranks
            work.finish_if_summed()
