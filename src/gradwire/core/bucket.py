"""The Bucket: one flat gradient as DDP hands it over, with the parameters it belongs to."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Sequence

import torch
from torch._C._distributed_c10d import GradBucket

from gradwire.core.staging import HostStaging, StagedBucket
from gradwire.errors import InvalidArgument, Unsupported
from gradwire.telemetry.recorder import BucketRecord

SUPPORTED_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


class Bucket:
    """A flat gradient, its parameters, and where it stands in training.

    Attributes:
        buffer: (n,) float32, bfloat16 or float16, contiguous, CPU: this rank's gradient; schemes write the mean here.
        parameters: the parameters whose gradients lie in `buffer`, in order.
        offsets: element offset of each parameter in `buffer`.
        index: position in this backward pass, 0 first.
        step: number of this reduction since attaching (or since the resumed checkpoint's start), 0 first.
        is_last: no bucket of this backward pass follows.
        layout_hash: 32 bits over dtype, shapes and offsets; equal on all ranks if their models are.
        record: where times and bytes of this bucket are noted.
        staged: if the gradient comes from a device, its copy under way to `buffer`; see `wait_for`.
    """

    __slots__ = ("buffer", "index", "is_last", "layout_hash", "offsets", "parameters", "record", "staged", "step")

    def __init__(
        self,
        buffer: torch.Tensor,
        parameters: Sequence[torch.Tensor] = (),
        offsets: Sequence[int] = (),
        *,
        index: int = 0,
        step: int = 0,
        is_last: bool = True,
        record: BucketRecord | None = None,
        staged: StagedBucket | None = None,
    ) -> None:
        check_gradient(buffer)
        self.buffer = buffer
        self.parameters = tuple(parameters)
        self.offsets = tuple(offsets)
        self.index = index
        self.step = step
        self.is_last = is_last
        self.record = record or BucketRecord(
            step, index, buffer.numel() * buffer.element_size(), trace=False, lock=threading.Lock()
        )
        self.staged = staged
        self.layout_hash = hash_layout(buffer, self.parameters, self.offsets)

    @classmethod
    def from_ddp(
        cls,
        bucket: GradBucket,
        step: int,
        record: BucketRecord | None = None,
        staging: HostStaging | None = None,
    ) -> Bucket:
        """The bucket of a DDP communication hook. Raises: Unsupported (device, sparse), InvalidArgument (dtype).

        `staging`: for a bucket on a device; `buffer` is then its copy on the host, and on its way.
        """
        buffer = bucket.buffer()
        start = buffer.storage_offset()
        offsets = [int(gradient.storage_offset() - start) for gradient in bucket.gradients()]
        staged = None
        if staging is not None:
            sizes = [gradient.numel() for gradient in bucket.gradients()]
            bounds = [(offset, offset + size) for offset, size in zip(offsets, sizes, strict=True)]
            staged = staging.stage(bucket.index(), buffer, bounds)
            buffer = staged.on_host
        return cls(
            buffer,
            bucket.parameters(),
            offsets,
            index=bucket.index(),
            step=step,
            is_last=bucket.is_last(),
            record=record,
            staged=staged,
        )

    @classmethod
    def from_tensor(cls, tensor: torch.Tensor, step: int = 0) -> Bucket:
        """A bucket without parameters, for benchmarks and for reducing a plain tensor."""
        return cls(tensor, step=step)

    def wait_for(self, position: int) -> None:
        """Return when the gradient of parameter number `position` may be read; at once, but for device gradients."""
        if self.staged is not None:
            self.staged.wait_for(position)

    def wait_for_all(self) -> None:
        """Return when all of `buffer` may be read."""
        if self.staged is not None:
            self.staged.wait_for_all()

    @property
    def n_elements(self) -> int:
        return self.buffer.numel()

    @property
    def original_bytes(self) -> int:
        return self.buffer.numel() * self.buffer.element_size()


def check_gradient(gradient: torch.Tensor) -> None:
    """Raise unless `gradient` is what codecs and collectives take: (n,) dense float, contiguous, on the CPU."""
    if gradient.layout is not torch.strided:
        raise Unsupported(
            "a sparse gradient reached gradwire; make the layer's gradient dense (for instance Embedding(sparse=False))"
        )
    if gradient.device.type != "cpu":
        raise Unsupported(
            f"a bucket on {gradient.device} reached gradwire, which with this scheme reduces CPU buckets "
            "only; take slimgc, which stages them through the host, train on the CPU with the gloo backend, or keep DDP's own "
            "all-reduce on this device"
        )
    if gradient.dtype not in SUPPORTED_DTYPES:
        raise InvalidArgument(
            f"gradient dtype {gradient.dtype} is not one of float32, bfloat16, float16; convert the model, "
            "or leave its parameters of other dtypes out of DDP with requires_grad_(False)"
        )
    if gradient.dim() != 1 or not gradient.is_contiguous():
        raise InvalidArgument(
            f"a gradient must be one-dimensional and contiguous, got shape {tuple(gradient.shape)} with strides "
            f"{gradient.stride()}; pass gradient.contiguous().view(-1)"
        )


def hash_layout(buffer: torch.Tensor, parameters: Sequence[torch.Tensor], offsets: Sequence[int]) -> int:
    """32 bits that differ, but for chance, when dtype, length, shapes or offsets do."""
    text = repr((str(buffer.dtype), buffer.numel(), [tuple(p.shape) for p in parameters], list(offsets)))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=4).digest(), "little")
