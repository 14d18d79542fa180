"""Error feedback: what compression left out of a gradient, kept for the next step. The one mechanism of all schemes."""

import functools
import itertools
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gradwire.core.bucket import Bucket, Layout, Slot
from gradwire.errors import InvalidArgument
from gradwire.wire.wire import Wire

_CPU = torch.device("cpu")


class Feedback:
    """One residual for every slot that has been compressed: float32, free of the loss scale.

    Keyed by slot, never by bucket, because DDP rebuilds its buckets after the first step. New residuals are staged and take
    effect only at `commit`, so that a step with a non-finite gradient changes nothing.

    Residuals are views of rooms, flat tensors that codecs write in their own sweep. Two rooms change places from step to
    step: what is staged never overwrites what counts, and nothing is allocated once warm. A room in which the residuals of a
    whole bucket lie is kept by the bucket's layout, and its slots are not looked at as long as buckets stay as they are.

    Attributes:
        decay: what is left of a residual when it is kept; 1: all of it. Below, old residuals fade (SparseLoCo's beta).
    """

    def __init__(self, decay: float = 1.0) -> None:
        self.decay = decay
        self.clear()

    def clear(self) -> None:
        """Forget everything."""
        # Of slots that are in no whole room; flat, or a matrix in the slot's shape.
        self._current: dict[Slot, Tensor] = {}
        self._whole: dict[Layout, Tensor] = {}
        self._staged: dict[Slot, Tensor | None] = {}  # None: the residual went out, nothing is left
        self._staged_whole: dict[Layout, Tensor] = {}
        self._rooms: dict[Hashable, list[Tensor]] = {}

    def of(self, slot: Slot | None) -> Tensor | None:
        """The residual of `slot`, if it has one."""
        if slot is None:
            return None
        for layout in [layout for layout in self._whole if slot in layout.slots]:
            self._part(layout)
        return self._current.get(slot)

    def pair(self, bucket: Bucket) -> tuple[Tensor, Tensor]:
        """(residual, unsent), each (n,) float32 and aligned with the bucket, to read and to write in one sweep. What is
        written into `unsent` counts after `stage_bucket` and `commit`. Without slots nothing is kept."""
        layout, device = bucket.layout, bucket.buffer.device
        residual = self._whole.get(layout)
        if residual is None or residual.device != device:
            residual = self._join(layout, device)
        for room, free in itertools.permutations(self._rooms.get(layout, ()), 2):
            if residual is room:
                return residual, free
        return residual, self.room(layout, layout.n_elements, other_than=residual, device=device)

    def _join(self, layout: Layout, device: torch.device) -> Tensor:
        """The residuals of all slots of a layout, zeros where there are none, as one room; it counts from now on."""
        residual = self._room_of(layout)
        if residual is None or residual.device != device:
            residual = self.room(layout, layout.n_elements, device=device).zero_()
            for slot, (start, end) in zip(layout.slots, layout.spans, strict=True):
                old = self.of(slot)
                if old is not None:
                    residual[start:end].copy_(old.view(-1))
        for slot in layout.slots:
            self._current.pop(slot, None)
        if layout.slots:
            self._whole[layout] = residual
        return residual

    def _room_of(self, layout: Layout) -> Tensor | None:
        """(n,) the room in which the residuals of all slots lie just as in the layout, if they do."""
        residuals = [self.of(slot) for slot in layout.slots]
        room = residuals[0]._base if residuals and residuals[0] is not None else None
        if room is None or room.numel() != layout.n_elements:
            return None
        lie_so = (
            one is not None and one._base is room and one.storage_offset() == offset
            for one, offset in zip(residuals, layout.offsets, strict=True)
        )
        return room if all(lie_so) else None

    def _part(self, layout: Layout) -> None:
        """Keep the residuals of a whole room by their slots again."""
        residual = self._whole.pop(layout)
        for slot, (start, end) in zip(layout.slots, layout.spans, strict=True):
            self._current[slot] = residual[start:end]

    def _by_slot(self) -> dict[Slot, Tensor]:
        """All residuals that count, by slot."""
        for layout in list(self._whole):
            self._part(layout)
        return self._current

    def room(
        self,
        key: Hashable,
        n_elements: int,
        dtype: torch.dtype = torch.float32,
        other_than: Tensor | None = None,
        device: torch.device = _CPU,
    ) -> Tensor:
        """(n_elements,) to write into, in which no residual lies that counts; `key`: whose, to be found again."""
        rooms = [room for room in self._rooms.get(key, ()) if room.numel() == n_elements and room.device == device]
        counting = self._whole, self._current
        free = next((room for room in rooms if room is not other_than and not _is_used(room, counting)), None)
        if free is None:
            free = torch.zeros(n_elements, dtype=dtype, device=device)
            self._rooms = {  # those of earlier layouts go as soon as no slot lies in them
                key: kept
                for key, kept in self._rooms.items()
                if any(_is_used(room, (*counting, self._staged_whole, self._staged)) for room in kept)
            }
        self._rooms[key] = [free, *(room for room in rooms if room is not free)][:2]
        return free

    def stage(self, slot: Slot, unsent: Tensor | None) -> None:
        """Keep `unsent`, a view of a room, from the next `commit` on; None: nothing is left."""
        self._staged[slot] = unsent

    def stage_bucket(self, bucket: Bucket, unsent: Tensor) -> None:
        """Keep what `unsent` of `pair` holds, from the next `commit` on."""
        if bucket.slots:
            self._staged_whole[bucket.layout] = unsent

    def commit(self, slots: Iterable[Slot] | None = None) -> None:
        """Make what was staged (for `slots`, one by one, or for all) the residual."""
        if slots is None:
            whole, self._staged_whole = self._staged_whole, {}
            for layout, unsent in whole.items():
                if layout not in self._whole:
                    self._join(layout, unsent.device)
                self._whole[layout] = unsent if self.decay == 1 else unsent.mul_(self.decay)
        for slot in list(self._staged) if slots is None else slots:
            if slot in self._staged:
                staged = self._staged.pop(slot)
                self.of(slot)  # it is in no whole room from now on
                if staged is None:
                    self._current.pop(slot, None)
                else:
                    self._current[slot] = staged if self.decay == 1 else staged.mul_(self.decay)

    def discard(self, slots: Iterable[Slot] | None = None) -> None:
        """Forget what was staged in this step (for `slots`, one by one, or for all)."""
        if slots is None:
            self._staged_whole.clear()
        for slot in list(self._staged) if slots is None else slots:
            self._staged.pop(slot, None)

    def forget_nonfinite(self) -> None:
        """Forget residuals that have grown beyond float32: no gradient could be sent with them any more."""
        for slot, kept in list(self._by_slot().items()):
            if not kept.isfinite().all():
                del self._current[slot]

    def take(self) -> dict[Slot, Tensor]:
        """Give all residuals away, flat, as copies: this begins anew without."""
        taken = {slot: kept.reshape(-1).clone() for slot, kept in self._by_slot().items()}
        self.clear()
        return taken

    def give(self, taken: Mapping[Slot, Tensor]) -> None:
        """Begin with what `take` gave."""
        self.clear()
        self._current = dict(taken)

    def divide(self, by: float) -> None:
        """Divide all residuals: they were kept without a loss scale that there was."""
        for kept in self._by_slot().values():
            kept.div_(by)

    def state_by_name(self, slots: Mapping[str, Slot]) -> dict[str, Tensor]:
        """Copies of the residuals, by name, on the CPU."""
        names = {slot: name for name, slot in slots.items()}
        return {names[slot]: kept.to(_CPU, copy=True) for slot, kept in self._by_slot().items()}

    def load_by_name(self, state: Mapping[str, Tensor], slots: Mapping[str, Slot]) -> None:
        """Take residuals back. Raises: InvalidArgument (a name that the model lacks, another size)."""
        loaded: dict[Slot, Tensor] = {}
        for name, residual in state.items():
            slot = slots.get(name)
            if not isinstance(residual, Tensor) or not residual.is_floating_point():
                raise InvalidArgument(f"the checkpoint's residual for {name!r} is no tensor of floats")
            if slot is None or slot.numel() != residual.numel():
                has = "no such parameter" if slot is None else f"{slot.numel()} elements"
                raise InvalidArgument(
                    f"the checkpoint holds a residual of {residual.numel()} elements for {name!r}; it has {has}. "
                    "Load the checkpoint into the model that wrote it."
                )
            loaded[slot] = residual.detach().reshape(-1).clone()
        self.give(loaded)


def _is_used(room: Tensor, residuals: Iterable[Mapping[Any, Tensor | None]]) -> bool:
    """True if any of these is `room` or lies in it."""
    return any(
        room is kept or (kept is not None and room is kept._base) for some in residuals for kept in some.values()
    )


class Unused:
    """The residuals of parameters that this rank did not use in this step: they wait.

    If no rank used a parameter, DDP throws its result away, and a residual sent for it would be lost. So they are taken out
    of `residual` (n,) until `put_back`.
    """

    def __init__(self, spans: Sequence[tuple[int, int]], is_used: Sequence[bool], residual: Tensor) -> None:
        self._residual = residual
        self._kept: list[tuple[int, int, int, Tensor]] = []
        for place, ((start, end), used) in enumerate(zip(spans, is_used, strict=True)):
            if not used:
                self._kept.append((place, start, end, residual[start:end].clone()))
                residual[start:end] = 0

    def put_back(self) -> None:
        """Make `residual` what it was before."""
        for _, start, end, values in self._kept:
            self._residual[start:end] = values

    def keep(self, unsent: Tensor, used_by_any: Sequence[bool], counted: tuple[int, int] | None = None) -> None:
        """Let them stand in `unsent` (n,) as they were, and beside them what messages left out of nothing, where the result of
        a parameter is `used_by_any`. `counted`: the elements of which this rank's message counted; all, if not given."""
        for place, start, end, values in self._kept:
            first, last = (start, end) if counted is None else (max(start, counted[0]), min(end, counted[1]))
            if used_by_any[place] and first < last:
                values[first - start : last - start] += unsent[first:last]
            unsent[start:end] = values


@dataclass
class Part:
    """One rank's values as a scheme's step sees them: gradient + residual x loss_scale is to be sent.

    Attributes:
        residual: (n,) float32, or None for no error feedback.
        unsent: (n,) float32 to be written: what is not sent, in units of the residual; made None, the residual stays.
        used_by_any: written by collectives: for each span, whether its result counts although this rank did not use it.
        counted: written by collectives: the elements of which this rank's message counted even so; None: all.
    """

    bucket: Bucket
    wire: Wire
    residual: Tensor | None
    unsent: Tensor | None
    loss_scale: float
    used_by_any: list[bool] | None = None
    counted: tuple[int, int] | None = None

    @property
    def values(self) -> Tensor:
        """(n,) the gradient, over which the mean is written, in the bucket's dtype."""
        return self.bucket.buffer

    @functools.cached_property
    def is_used(self) -> list[bool]:
        """For each span of the bucket, whether this rank has a gradient of it; asked first before the mean is there.
        The residuals of the others count as zero."""
        return self.wire.used(self.bucket.buffer, self.bucket.spans)

    def total(self) -> Tensor:
        """(n,) float32, to be changed: gradient + residual x loss_scale; what stays of it is kept, after `keep`."""
        out = self.wire.scratch("total", self.bucket.n_elements) if self.unsent is None else self.unsent
        out.copy_(self.values)
        return out if self.residual is None else out.add_(self.residual, alpha=self.loss_scale)

    def zero_unused(self) -> None:
        """Have the result of what no rank used be zero."""
        for (start, end), used in zip(self.bucket.spans, self.used_by_any or (), strict=bool(self.used_by_any)):
            if not used:
                self.values[start:end] = 0

    def keep(self) -> None:
        """Take the loss scale off what stays of `total`."""
        if self.unsent is not None:
            self.wire.divide(self.unsent, self.loss_scale)


def redistribute(states: list[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """The residual of each new rank, however many there are: the mean of those of all old ranks. The mean gradient
    weighs a rank's residual by 1 / world size, so the *mean* is what has to be kept."""
    redistributed = {}
    for name in sorted({name for state in states for name in state}):
        residuals = [state[name] for state in states if name in state]  # a rank without one has left nothing out
        mean = torch.stack([residual.double() for residual in residuals]).sum(0).div(len(states))
        redistributed[name] = mean.to(residuals[0].dtype)
    return redistributed
