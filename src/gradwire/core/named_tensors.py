"""Tensors by name, as flat buckets and back: what `Reducer.all_reduce` is given, and the work that it returns."""

from collections.abc import Callable, Mapping, Sequence

import torch

from gradwire.core.bucket import SUPPORTED_DTYPES, Slot, cut_into_buckets, local_of, offsets_of, shape_like
from gradwire.errors import InvalidArgument
from gradwire.telemetry.stopwatch import Stopwatch


class FlatBucket:
    """Room for neighbouring tensors of one dtype: `values` (n,), zeros at first, in which those of each of the `slots` begin at
    its offset; `places` are by its name its part of them, in its shape."""

    def __init__(self, slots: Sequence[Slot], dtype: torch.dtype, device: torch.device | str = "cpu") -> None:
        self.slots = slots
        *self.offsets, n = offsets_of(slots)
        self.values = torch.zeros(n, dtype=dtype, device=device)
        self.places = {
            slot.name: _place(slot, self.values[start : start + slot.numel()])
            for slot, start in zip(slots, self.offsets, strict=True)
        }


class Flattener:
    """Makes flat buckets of named tensors, of up to `bucket_bytes` unless one tensor has more, and keeps their memory for the
    next step. `slots` by name: those of new names are added."""

    def __init__(self, slots: dict[str, Slot], bucket_bytes: float) -> None:
        self.slots, self._bucket_bytes = slots, bucket_bytes
        self._spare: dict[tuple[str, ...], FlatBucket] = {}

    def _slot(self, name: str, tensor: torch.Tensor) -> Slot:
        """The slot called `name`, made at first sight."""
        if tensor.dtype not in SUPPORTED_DTYPES:
            raise InvalidArgument(f"{name!r} is {tensor.dtype}, not one of float32, bfloat16, float16; convert it")
        shape = local_of(tensor).shape
        slot = self.slots.setdefault(name, Slot(name, shape))
        if slot.shape != shape:
            raise InvalidArgument(f"{name!r} was {tuple(slot.shape)} and is {tuple(shape)}; give it another name")
        return slot

    def fill(self, tensors: Mapping[str, torch.Tensor]) -> list[FlatBucket]:
        """Copies of the tensors, cut into buckets."""
        if not tensors:
            raise InvalidArgument("all_reduce() got no tensors; give the same names on every rank")
        slotted = [(self._slot(name, tensor), tensor) for name, tensor in tensors.items()]
        return [self._fill(group) for group in cut_into_buckets(slotted, self._bucket_bytes)]

    @torch.no_grad()
    def empty(self, buckets: list[FlatBucket], tensors: Mapping[str, torch.Tensor]) -> None:
        """Put what the buckets hold into the tensors; the next step may write over it."""
        for bucket in buckets:
            for name, mean in bucket.places.items():
                local_of(tensors[name]).copy_(mean)
            self._spare[tuple(bucket.places)] = bucket

    def _fill(self, group: list[tuple[Slot, torch.Tensor]]) -> FlatBucket:
        slots, dtype = [slot for slot, _ in group], group[0][1].dtype
        # Taken out while it travels, until it is given back: a second call meanwhile makes another.
        bucket = self._spare.pop(tuple(slot.name for slot in slots), None)
        if bucket is None or bucket.values.dtype != dtype:
            bucket = FlatBucket(slots, dtype)
        for slot, tensor in group:
            bucket.places[slot.name].copy_(local_of(tensor.detach()))
        return bucket


class AllReduceWork:
    """An `all_reduce` under way. `finish` puts the means in place, called with how long `wait` waited, in ns."""

    def __init__(self, futures: list[torch.futures.Future], finish: Callable[[int], None]) -> None:
        self._futures, self._finish = futures, finish

    def is_completed(self) -> bool:
        """True if `wait` would return at once."""
        return all(future.done() for future in self._futures)

    def wait(self) -> None:
        """Put the means in place; calls after the first do nothing. Raises: what a rank failed of."""
        if self._futures:
            waited = Stopwatch()
            for future in self._futures:
                future.wait()
            self._finish(waited.elapsed_ns)
            self._futures, self._finish = [], lambda _: None  # which held the tensors


def _place(slot: Slot, part: torch.Tensor) -> torch.Tensor:
    """In the slot's shape, and in the memory order in which schemes read its parameter and the optimizer's state."""
    own = None if slot.parameter is None else local_of(slot.parameter)
    return part.view(slot.shape) if own is None or own.shape != slot.shape else shape_like(part, own)
