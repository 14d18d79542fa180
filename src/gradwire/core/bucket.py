"""The Bucket: one flat gradient as a door hands it over, with the slots it belongs to."""

from __future__ import annotations

import contextlib
import hashlib
import operator
import threading
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager

import torch
from torch import nn

from gradwire.core.slot import Slot, named_parameters, slot_of
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


class Layout:
    """Where slots lie in a flat gradient: made once, for all steps whose buckets lie alike. Equal layouts are one key.

    Attributes:
        slots: in their order.
        offsets: the first element of each.
        spans: the first and the past-the-last element of each.
        hash: 32 bits over dtype, shapes and offsets; equal on all ranks if their models are.
    """

    __slots__ = ("_key", "_key_hash", "dtype", "hash", "n_elements", "offsets", "slots", "spans")

    def __init__(self, buffer: torch.Tensor, slots: Sequence[Slot], offsets: Sequence[int]) -> None:
        self.slots, self.offsets = tuple(slots), tuple(offsets)
        self.n_elements, self.dtype = buffer.numel(), buffer.dtype
        self.spans = [(start, start + slot.numel()) for slot, start in zip(slots, offsets, strict=True)]
        self.hash = hash_layout(buffer, self.slots, self.offsets)
        self._key = self.hash, self.slots
        self._key_hash = hash(self._key)

    def __eq__(self, other: object) -> bool:
        return self is other or (isinstance(other, Layout) and self._key == other._key)

    def __hash__(self) -> int:
        return self._key_hash

    def is_of(self, buffer: torch.Tensor, slots: Sequence[Slot], offsets: Sequence[int]) -> bool:
        """Whether these slots lie so in a flat gradient like `buffer`, by the identity of the slots."""
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
        is_last: no bucket of this backward pass follows.
        record: where times and bytes of this bucket are noted.
        staged: if the gradient comes from a device, its copy under way to `buffer`; see `wait_for`.
        resident: if it is reduced on its device, how work gets behind it there.
    """

    __slots__ = (
        "buffer", "index", "is_last", "layout", "layout_hash", "n_elements", "offsets", "record", "resident", "slots", "spans",
        "staged", "step",
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
        if isinstance(slots, Layout):
            layout = slots
        else:
            check_gradient(buffer, on_any_device=resident is not None)
            layout = Layout(buffer, tuple(map(slot_of, slots)), offsets)
        self.buffer, self.layout, self.n_elements = buffer, layout, layout.n_elements
        self.slots, self.offsets, self.spans, self.layout_hash = layout.slots, layout.offsets, layout.spans, layout.hash
        self.index = index
        self.step = step
        self.is_last = is_last
        self.record = record or BucketRecord(
            step, index, buffer.numel() * buffer.element_size(), trace=False, lock=threading.Lock()
        )
        self.staged, self.resident = staged, resident

    @classmethod
    def from_tensor(cls, tensor: torch.Tensor, step: int = 0) -> Bucket:
        """A bucket without slots, for benchmarks and for reducing a plain tensor."""
        return cls(tensor, step=step)

    def at_work(self) -> AbstractContextManager[None]:
        """`with bucket.at_work():` enqueues what is inside behind the gradient, if the bucket stays on its device."""
        return contextlib.nullcontext() if self.resident is None else self.resident.at_work()

    def wait_for(self, position: int) -> None:
        """Return when the gradient of slot number `position` may be read; at once, but for device gradients.

        Only for schemes that wait by tensor (`Scheme.waits_by_tensor`).
        """
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

    @property
    def original_bytes(self) -> int:
        return self.buffer.numel() * self.buffer.element_size()


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
    """Raise, and name the layer, if codecs and collectives do not take a gradient that `module` will have.

    Raises: Unsupported (sparse), InvalidArgument (dtype).
    """
    ignored: set[str] = getattr(module, "parameters_to_ignore", set())
    for name, parameter in named_parameters(module).items():
        dtype = torch.float32 if parameter.dtype == torch.complex64 else parameter.dtype  # it travels as pairs of those
        if parameter.requires_grad and name not in ignored and dtype not in SUPPORTED_DTYPES:
            raise InvalidArgument(f"parameter {name}: {_WRONG_DTYPE.format(parameter.dtype)}")
    inner = module.module if isinstance(module, nn.parallel.DistributedDataParallel) else module
    for name, layer in inner.named_modules():
        if isinstance(layer, (nn.Embedding, nn.EmbeddingBag)) and layer.sparse and layer.weight.requires_grad:
            raise Unsupported(f"layer {name}: {_SPARSE}")


def hash_layout(buffer: torch.Tensor, slots: Sequence[Slot], offsets: Sequence[int]) -> int:
    """32 bits that differ, but for chance, when dtype, length, shapes or offsets do."""
    text = repr((str(buffer.dtype), buffer.numel(), [tuple(slot.shape) for slot in slots], list(offsets)))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=4).digest(), "little")


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
    """Where each slot begins in a flat bucket, and last where it ends."""
    offsets = [0]
    for slot in slots:
        offsets.append(offsets[-1] + slot.numel())
    return offsets
