"""A scheme at work on buckets made by hand: no DDP, so that a test chooses every gradient."""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from gradwire import schemes
from gradwire.core.bucket import Bucket, slots_by_name
from gradwire.core.optimizers import Optimizers
from gradwire.schemes import Scheme, Session
from gradwire.telemetry.recorder import Recorder
from gradwire.wire.communicator import Communicator
from gradwire.wire.wire import Wire
from ranks import at_end


class Driver:
    """One rank's end of a scheme that reduces `parameters`, cut into buckets of `bucket_sizes` parameters each; closed
    when the rank's function has returned."""

    def __init__(
        self, scheme: Scheme, parameters: Sequence[torch.Tensor], bucket_sizes: Sequence[int] | None = None
    ) -> None:
        self.scheme = scheme
        self.communicator = Communicator(timeout_s=100)
        self.recorder = Recorder(self.communicator.rank, self.communicator.world_size)
        self.parameters = list(parameters)
        self.loss_scale = 1.0
        self.step = 0
        self.bucket_sizes = list(bucket_sizes or [len(self.parameters)])
        slots = slots_by_name({f"p{i}": parameter for i, parameter in enumerate(self.parameters)})
        self.slots = list(slots.values())
        shared = self.communicator, Wire(self.communicator), self.recorder, Optimizers(), slots
        scheme.bind(Session(*shared, lambda: self.loss_scale, has_scaler=True))
        at_end.callback(self._close)

    def reduce(self, gradients: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """One step: the means of `gradients`, one per parameter, in its shape."""
        buckets, first = [], 0
        for index, size in enumerate(self.bucket_sizes):
            mine = range(first, first + size)
            offsets = [sum(self.parameters[j].numel() for j in range(first, i)) for i in mine]
            flat = torch.cat([gradients[i].reshape(-1) for i in mine])
            slots, is_last = [self.slots[i] for i in mine], index == len(self.bucket_sizes) - 1
            buckets.append(Bucket(flat, slots, offsets, index=index, step=self.step, is_last=is_last))
            first += size
        self.scheme.begin_step(self.step)
        futures = [self.scheme.reduce(bucket) for bucket in buckets]
        for future in futures:
            future.wait()
        self.communicator.submit(self.scheme.end_step, self.step).wait()
        self.step += 1
        self.last_buckets = buckets
        return [
            bucket.buffer[offset : offset + parameter.numel()].view(parameter.shape).clone()
            for bucket in buckets
            for parameter, offset in zip(bucket.parameters, bucket.offsets, strict=True)
        ]

    def state(self, kind: str = "residuals") -> torch.Tensor:
        """(n,): what the scheme keeps of every parameter, one after the other; zeros of those it keeps nothing of."""
        kept = self.scheme.state_dict()[kind]
        return flat([kept.get(f"p{i}", torch.zeros(own.shape)) for i, own in enumerate(self.parameters)])

    def _close(self) -> None:
        self.scheme.close()
        self.communicator.close()


# Matrices, vectors, nothing and a scalar, in two buckets.
SHAPES = [(24, 18), (7,), (30, 11), (0, 5), (), (50,)]
LAYOUT = [2, 4]


def gradients_of(
    rank: int, step: int, dtype: torch.dtype = torch.float32, shapes: Sequence[tuple[int, ...]] = SHAPES
) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(100 * rank + step)
    return [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]


def flat(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    return torch.cat([tensor.reshape(-1) for tensor in tensors])


def mean_over_ranks(values: torch.Tensor) -> torch.Tensor:
    """In float64; every rank of the default group has to ask."""
    summed = values.to(torch.float64, copy=True)
    dist.all_reduce(summed)
    return summed / dist.get_world_size()


def by_bucket(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    return [flat(tensors[: LAYOUT[0]]), flat(tensors[LAYOUT[0] :])]


def drive(scheme: Scheme | str, options: dict[str, Any] | None = None, dtype: torch.dtype = torch.float32) -> Driver:
    """A scheme, or that of this name, at work on parameters of SHAPES."""
    made = schemes.by_name(scheme, **(options or {})) if isinstance(scheme, str) else scheme
    return Driver(made, [torch.zeros(shape, dtype=dtype) for shape in SHAPES], LAYOUT)
