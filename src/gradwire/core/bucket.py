"""The Bucket: one flat gradient as a door hands it over, and the slots that it belongs to.

A slot is what error feedback, factors and importance are kept for: a parameter, a shard or slice of one, or a named tensor.
"""

import contextlib
import hashlib
import itertools
import math
import operator
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager

import torch
from torch import nn

from gradwire.core.staging import StagedBucket
from gradwire.errors import InvalidArgument, Unsupported
from gradwire.telemetry.recorder import BucketRecord
from gradwire.wire.device_wire import ResidentBucket

SUPPORTED_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_WRONG_DTYPE = (
    "gradient dtype {} is not one of float32, bfloat16, float16; convert the model, leave its parameters of other dtypes out "
    'of DDP with requires_grad_(False), or take the scheme "plain"'
)
_SPARSE = (
    "a sparse gradient reached gradwire; make the layer's gradient dense (for instance Embedding(sparse=False)), or take the "
    'scheme "plain"'
)


class Slot:
    """One tensor that is reduced again and again. Equal to every slot of the same elements of the same parameter.

    Attributes:
        name: unique in its Reducer; "" where nobody gave one.
        shape: of what this rank has of it: a DTensor's local shard, or the rows of a slice.
        parameter: the optimizer's key for it, or None for a tensor that no optimizer steps.
        start: the first element of (the local shard of) `parameter` that it stands for.
    """

    __slots__ = ("_numel", "name", "parameter", "shape", "start")

    def __init__(self, name: str, shape: Iterable[int], parameter: torch.Tensor | None = None, start: int = 0) -> None:
        self.name, self.shape, self.parameter, self.start = name, torch.Size(shape), parameter, start
        self._numel = math.prod(self.shape)

    def numel(self) -> int:
        return self._numel

    def dim(self) -> int:
        return len(self.shape)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Slot):
            return NotImplemented
        if self.parameter is None or other.parameter is None:
            return self is other
        return self.parameter is other.parameter and self.start == other.start and self.shape == other.shape

    def __hash__(self) -> int:
        return id(self) if self.parameter is None else hash((id(self.parameter), self.start))

    def __repr__(self) -> str:
        return f"Slot({self.name!r}, {tuple(self.shape)})"


def slot_of(key: Slot | torch.Tensor, name: str = "") -> Slot:
    """A slot as it is; a parameter's own one, for what this rank has of it."""
    return key if isinstance(key, Slot) else Slot(name, local_of(key).shape, key)


def slots_by_name(named: Mapping[str, torch.Tensor]) -> dict[str, Slot]:
    """The slot of every parameter, by its name."""
    return {name: slot_of(parameter, name) for name, parameter in named.items()}


def inner_of(module: nn.Module) -> nn.Module:
    """The model inside DDP, or the model itself."""
    return module.module if isinstance(module, nn.parallel.DistributedDataParallel) else module


def named_parameters(module: nn.Module) -> dict[str, torch.Tensor]:
    """Each parameter as the model inside DDP names it; a tied one by the first of its names."""
    return dict(inner_of(module).named_parameters())


def local_of(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's shard of a DTensor, sharing its memory; any other tensor as it is."""
    local: torch.Tensor | None = getattr(tensor, "_local_tensor", None)  # to_local() waits for collectives: none here
    return tensor if local is None else local


class Layout:
    """The places of slots in a flat gradient: made once, for all steps whose buckets lie alike. Equal layouts are one key.

    `spans`: the first and the past-the-last element of each slot. `hash`: 32 bits over dtype, shapes and offsets; equal on all
    ranks if their models are.
    """

    __slots__ = ("_key", "_key_hash", "dtype", "hash", "n_elements", "offsets", "slots", "spans")

    def __init__(self, buffer: torch.Tensor, slots: Sequence[Slot], offsets: Sequence[int]) -> None:
        self.slots, self.offsets = tuple(slots), tuple(offsets)
        self.n_elements, self.dtype = buffer.numel(), buffer.dtype
        self.spans = [(start, start + slot.numel()) for slot, start in zip(slots, offsets, strict=True)]
        text = repr((str(self.dtype), self.n_elements, [tuple(slot.shape) for slot in slots], list(offsets)))
        self.hash = int.from_bytes(hashlib.blake2b(text.encode(), digest_size=4).digest(), "little")
        self._key = self.hash, self.slots
        self._key_hash = hash(self._key)

    def __eq__(self, other: object) -> bool:
        return self is other or (isinstance(other, Layout) and self._key == other._key)

    def __hash__(self) -> int:
        return self._key_hash

    def is_of(self, buffer: torch.Tensor, slots: Sequence[Slot], offsets: Sequence[int]) -> bool:
        """True if these slots lie so in a flat gradient like `buffer`, by the identity of the slots."""
        return (
            buffer.numel() == self.n_elements
            and buffer.dtype == self.dtype
            and len(slots) == len(self.slots)
            and tuple(offsets) == self.offsets
            and all(map(operator.is_, slots, self.slots))
        )


class Bucket:
    """A flat gradient, its slots, and where it stands in training.

    Attributes:
        buffer: (n,) float32, bfloat16 or float16, contiguous: this rank's gradient; schemes write the mean here. On the CPU,
            but for a bucket that is reduced where it is.
        layout: whose gradients lie where in `buffer`; `slots`, `offsets`, `spans` and `layout_hash` are its.
        index: position in this backward pass, 0 first.
        step: number of this reduction since attaching (or since the resumed checkpoint's start), 0 first.
        staged: if the gradient comes from a device, its copy under way to `buffer`; see `wait_for`.
        resident: if it is reduced on its device, how work gets behind it there.
        at_work: `with bucket.at_work():` enqueues what is inside behind the gradient, if the bucket stays on its device.
    """

    __slots__ = (
        "at_work", "buffer", "index", "is_last", "layout", "layout_hash", "n_elements", "offsets", "original_bytes", "record",
        "resident", "slots", "spans", "staged", "step",
    )  # fmt: skip

    def __init__(
        self,
        buffer: torch.Tensor,
        slots: Sequence[Slot | torch.Tensor] | Layout = (),
        offsets: Sequence[int] = (),
        *,
        index: int = 0,
        step: int = 0,
        is_last: bool = True,
        record: BucketRecord | None = None,
        staged: StagedBucket | None = None,
        resident: ResidentBucket | None = None,
    ) -> None:
        """`slots`: of a parameter that is given, its own; or the layout of a bucket that lies alike, which is not looked at."""
        if not isinstance(slots, Layout):
            check_gradient(buffer, on_any_device=resident is not None)
            slots = Layout(buffer, tuple(map(slot_of, slots)), offsets)
        self.layout = layout = slots
        self.buffer, self.n_elements = buffer, layout.n_elements
        self.original_bytes = buffer.numel() * buffer.element_size()  # sparse tensors have no nbytes
        self.slots, self.offsets, self.spans, self.layout_hash = layout.slots, layout.offsets, layout.spans, layout.hash
        self.index, self.step, self.is_last = index, step, is_last
        self.record = record or BucketRecord(step, index, self.original_bytes, threading.Lock())
        self.staged, self.resident = staged, resident
        self.at_work: Callable[[], AbstractContextManager[None]] = (
            contextlib.nullcontext if resident is None else resident.at_work
        )

    def wait_for(self, position: int) -> None:
        """Return when the gradient of slot number `position` may be read; for schemes with `waits_by_tensor`."""
        if self.staged is not None:
            self.staged.wait_for(position)

    def wait_for_all(self) -> None:
        """Return when all of `buffer` may be read."""
        if self.staged is not None:
            self.staged.wait_for_all()

    @property
    def parameters(self) -> tuple[torch.Tensor, ...]:
        """The parameters of the slots, for schemes that step them."""
        return tuple(slot.parameter for slot in self.slots if slot.parameter is not None)

    def draw(self, *place: object) -> int:
        """64 bits to draw by, different for every step, bucket and place in it (rank, part, ...)."""
        text = repr((self.step, self.index, *place))
        return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


def check_gradient(gradient: torch.Tensor, on_any_device: bool = False) -> None:
    """Raise unless `gradient` is what codecs and collectives take: (n,) dense float, contiguous, on the CPU."""
    if gradient.layout is not torch.strided:
        raise Unsupported(_SPARSE)
    if gradient.device.type != "cpu" and not on_any_device:
        raise Unsupported(
            f"a gradient on {gradient.device}: schemes work on host memory; let a Reducer stage it (gradwire.attach), or pass "
            "gradient.cpu()"
        )
    if gradient.dtype not in SUPPORTED_DTYPES:
        raise InvalidArgument(_WRONG_DTYPE.format(gradient.dtype))
    if gradient.dim() != 1 or not gradient.is_contiguous():
        raise InvalidArgument(
            f"a gradient must be one-dimensional and contiguous, got shape {tuple(gradient.shape)} with strides "
            f"{gradient.stride()}; pass gradient.contiguous().view(-1)"
        )


def check_trained(module: nn.Module) -> None:
    """Raise, and name the layer, if codecs and collectives do not take a gradient that `module` will have."""
    ignored: set[str] = getattr(module, "parameters_to_ignore", set())
    for name, parameter in named_parameters(module).items():
        if parameter.requires_grad and name not in ignored and parameter.dtype not in SUPPORTED_DTYPES:
            raise InvalidArgument(f"parameter {name}: {_WRONG_DTYPE.format(parameter.dtype)}")
    for name, layer in inner_of(module).named_modules():
        if isinstance(layer, (nn.Embedding, nn.EmbeddingBag)) and layer.sparse and layer.weight.requires_grad:
            raise Unsupported(f"layer {name}: {_SPARSE}")


def cut_into_buckets(
    slotted: Sequence[tuple[Slot, torch.Tensor]], bucket_bytes: float
) -> Iterator[list[tuple[Slot, torch.Tensor]]]:
    """Neighbours of one dtype, up to `bucket_bytes` together."""
    group: list[tuple[Slot, torch.Tensor]] = []
    n_bytes = 0
    for slot, tensor in slotted:
        size = slot.numel() * tensor.element_size()
        if group and (n_bytes + size > bucket_bytes or group[0][1].dtype != tensor.dtype):
            yield group
            group, n_bytes = [], 0
        group.append((slot, tensor))
        n_bytes += size
    if group:
        yield group


def offsets_of(slots: Sequence[Slot]) -> list[int]:
    """First element of each slot in a flat bucket, and last the end of it."""
    return list(itertools.accumulate((slot.numel() for slot in slots), initial=0))


def flatten_like(values: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    """`values` as (n,) in the order of `parameter`'s gradient in a DDP bucket; a view wherever strides allow. DDP's
    reducer keeps a parameter's memory order if it is dense (channels_last, transposed), else goes row by row."""
    if values.is_contiguous() and parameter.is_contiguous():
        return values.view(-1)
    if not torch.ops.aten.is_non_overlapping_and_dense(parameter):
        return values.reshape(-1)
    if values.stride() != parameter.stride():
        values = torch.empty_like(parameter, dtype=values.dtype, device=values.device).copy_(values)
    return values.as_strided((values.numel(),), (1,))


def shape_like(flat: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    """The inverse of `flatten_like`: a view of `flat` (n,), as a DDP bucket holds a gradient, in the shape of `parameter`."""
    if parameter.is_contiguous() or not torch.ops.aten.is_non_overlapping_and_dense(parameter):
        return flat.view(parameter.shape)
    return flat.as_strided(parameter.shape, parameter.stride())
