"""Tensor fusion: what is to be summed is collected into buffers and summed by one all-reduce each, while work goes on."""

from __future__ import annotations

import contextlib
import functools
from collections import deque
from collections.abc import Callable

import torch

from gradwire.core.bucket import Bucket
from gradwire.core.site import DeviceSite
from gradwire.errors import InvalidArgument
from gradwire.schemes.low_rank.plan import LowRankPlan
from gradwire.telemetry.stopwatch import Stopwatch
from gradwire.wire.communicator import Communicator, ring_bytes

_FINGERPRINT_BITS = 32


class Work:
    """One bucket on its way through compression, sums and decompression.

    Attributes:
        done: what DDP waits for.
        dense: (n,) float32, the means of what is not compressed, until it is known that all of the bucket is finite.
        n_awaited: parcels that have not been summed yet.
        is_finite: no sum so far held Inf or NaN.
    """

    def __init__(self, bucket: Bucket, done: torch.futures.Future) -> None:
        self.bucket = bucket
        self.done = done
        self.plan: LowRankPlan
        self.dense = torch.empty(0)
        self.n_awaited = 0
        self.is_finite = True
        self.is_sent = False
        self.fingerprint = torch.empty(0)


class Parcel:
    """Values of one tensor on their way; their mean is written to `target`."""

    __slots__ = ("joins_next", "target", "values", "work")

    def __init__(self, work: Work, values: torch.Tensor, target: torch.Tensor, joins_next: bool = False) -> None:
        self.work, self.values, self.target, self.joins_next = work, values, target, joins_next


class _FusedBuffer:
    """Parcels that share one all-reduce."""

    def __init__(self, parcels: list[Parcel], dtype: torch.dtype) -> None:
        self.parcels = parcels
        n_elements = sum(parcel.values.numel() for parcel in parcels)
        self.data = torch.empty(n_elements, dtype=dtype, device=parcels[0].values.device)
        for parcel, part in self.parts(self.data):
            part.copy_(parcel.values)
        self.wait: Callable[[], object]  # until it is summed; on a device: has the stream wait
        self.is_summed: Callable[[], bool]
        self.watch = Stopwatch()
        self.is_taken = False

    def parts(self, flat: torch.Tensor) -> list[tuple[Parcel, torch.Tensor]]:
        pieces = flat.split([parcel.values.numel() for parcel in self.parcels])
        return list(zip(self.parcels, pieces, strict=True))


class Fusion:
    """Fused buffers of one scheme, in the order in which all ranks start them. Used on the lane.

    Args:
        dtype: of the sums: float32 or bfloat16.
        on_arrival: called with a work whose last awaited parcel has been summed.
        site: where parcels are on a device, its stream being current: sums are enqueued, and what is not finite is noted
            in its flags instead of the works.
    """

    def __init__(
        self,
        communicator: Communicator,
        dtype: torch.dtype,
        on_arrival: Callable[[Work], None],
        site: DeviceSite | None = None,
    ) -> None:
        self._communicator, self._dtype, self._on_arrival, self._site = communicator, dtype, on_arrival, site
        self._pending: list[Parcel] = []
        self._pending_bytes = 0
        self._started: deque[_FusedBuffer] = deque()
        self.n_buffers = 0

    def add(self, parcel: Parcel, cap_bytes: float) -> None:
        """Take a parcel; a buffer that has `cap_bytes` is summed."""
        parcel.work.n_awaited += 1
        self._pending.append(parcel)
        self._pending_bytes += parcel.values.numel() * self._dtype.itemsize
        if self._pending_bytes >= cap_bytes and not parcel.joins_next:
            self.flush()

    def flush(self) -> None:
        """Start to sum what is left."""
        if not self._pending:
            return
        buffer = _FusedBuffer(self._pending, self._dtype)
        self._pending, self._pending_bytes = [], 0
        self._started.append(buffer)
        self.n_buffers += 1
        if self._site is not None:
            buffer.wait, buffer.is_summed = self._site.group.start_sum(buffer.data), lambda: True
            return
        buffer.watch.begin()
        summed = self._communicator.start_all_reduce(buffer.data)
        buffer.wait, buffer.is_summed = functools.partial(self._communicator.finish, summed), summed.done

        def note_end(_: torch.futures.Future) -> None:
            buffer.watch.end()
            if not buffer.is_taken:  # the lane may have waited for it, and even be closed since
                with contextlib.suppress(InvalidArgument):
                    self._communicator.submit(self.finish_summed)

        summed.add_done_callback(note_end)

    def finish_summed(self) -> None:
        """Hand out the buffers, from the first on, that are summed already."""
        while self._started and self._started[0].is_summed():
            self._finish_first()

    def finish_for(self, work: Work) -> None:
        """Hand out buffers, from the first on, until nothing of `work` is awaited."""
        while work.n_awaited:
            self._finish_first()

    def finish_all(self) -> None:
        """Hand out all started buffers."""
        while self._started:
            self._finish_first()

    def drop(self) -> None:
        """Forget everything, after a failure."""
        self._pending, self._pending_bytes = [], 0
        self._started.clear()

    def _finish_first(self) -> None:
        buffer = self._started.popleft()
        buffer.is_taken = True
        buffer.wait()
        self._count(buffer)
        mean = buffer.data.to(torch.float32).div_(self._communicator.world_size)
        # The same bits on all ranks, so all ranks come to the same verdict.
        all_finite = self._site.note_finite(mean) if self._site is not None else bool(mean.isfinite().all())
        for parcel, part in buffer.parts(mean):
            parcel.target.copy_(part)
            work = parcel.work
            work.is_finite = work.is_finite and (all_finite or bool(part.isfinite().all()))
            work.n_awaited -= 1
            if work.n_awaited == 0 and work.is_sent:
                self._on_arrival(work)

    def _count(self, buffer: _FusedBuffer) -> None:
        record = buffer.parcels[-1].work.bucket.record
        if self._site is None:
            record.add("communicate", buffer.watch.start_ns, max(buffer.watch.end_ns, buffer.watch.start_ns))
        sizes: dict[Work, int] = {}
        for parcel in buffer.parcels:
            sizes[parcel.work] = sizes.get(parcel.work, 0) + parcel.values.numel() * self._dtype.itemsize
        for work, n_bytes in sizes.items():
            n_ring_bytes = ring_bytes(n_bytes, self._communicator.world_size)
            work.bucket.record.count_exchanged(n_ring_bytes)


def fingerprint_of(facts: int) -> torch.Tensor:
    """(32,) float32: the bits of `facts`, which ranks sum along with their gradients.

    A mean of 0 or 1 says that all ranks have the same bit; anything else, on all ranks, that they have not. Counts up
    to 256 are exact even in bfloat16.
    """
    return torch.tensor([float(facts >> bit & 1) for bit in range(_FINGERPRINT_BITS)])


def ranks_agree(mean_fingerprint: torch.Tensor) -> bool:
    """Whether the mean of the ranks' fingerprints is that of equal ones."""
    return bool(((mean_fingerprint == 0) | (mean_fingerprint == 1)).all())
