"""The schemes `plain` and `bf16`: DDP's own all-reduce, with gradwire's telemetry and checks. The baseline of everything."""

from typing import Any, ClassVar

import torch

from gradwire.core.bucket import Bucket
from gradwire.core.session import Session
from gradwire.schemes.base import Scheme
from gradwire.wire.communicator import Communicator, ring_bytes, then
from gradwire.wire.preamble import StepCheck


class Plain(Scheme):
    """Mean by the backend's all-reduce, in the gradient's own dtype; bit-identical to DDP without a hook.

    When not to use this: when nothing of gradwire is wanted; DDP without a hook does the same.
    """

    name = "plain"
    wire_dtype: ClassVar[torch.dtype | None] = None  # that wider gradients are rounded to for the sum
    works_on_device = True
    takes_any_gradient = True

    @property
    def configuration(self) -> dict[str, Any]:
        return {}

    def bind(self, session: Session) -> None:
        super().bind(session)
        self._check = StepCheck(session.communicator)
        self._rounded: dict[int, torch.futures.Future] = {}  # the last sum of rounded values, by bucket

    def reduce(self, bucket: Bucket) -> torch.futures.Future:
        """Start the all-reduce on the lane and leave it to the backend, so that buckets overlap as they do in DDP."""
        return then(self.session.communicator.submit(self._start, bucket), lambda _: bucket.buffer)

    def _start(self, bucket: Bucket) -> torch.futures.Future | None:
        communicator = self.session.communicator
        if communicator.world_size == 1:
            return None
        if bucket.resident is None:
            mean = start_plain_mean(communicator, bucket, self.wire_dtype, self._rounded)
            if bucket.is_last:  # behind the sums: its hops would keep one of the backend's few threads from them
                self._check.start(self.preamble(bucket), bucket.record)
            return mean
        if bucket.is_last:
            self._check.start(self.preamble(bucket), bucket.record)
            self._check.fail_early()
        with bucket.at_work():
            self.wire(bucket).mean(bucket.buffer, self.wire_dtype)
        return None


class Bf16(Plain):
    """Mean of values rounded to bfloat16, and put back: PyTorch's bf16_compress_hook. Half precisions keep theirs.

    A bfloat16 keeps 8 bits of a value and float32's whole range, so no scale is needed and nothing overflows; Inf and NaN
    travel as they are. The backend rounds every partial sum, so errors grow slowly with the ranks.

    When not to use this: where the mean must be DDP's; with more ranks than about 64, whose sums lose the smaller half of
    their bits.
    """

    name = "bf16"
    wire_dtype = torch.bfloat16
    takes_any_gradient = False


def start_plain_mean(
    communicator: Communicator,
    bucket: Bucket,
    wire_dtype: torch.dtype | None = None,
    rounded: dict[int, torch.futures.Future] | None = None,
) -> torch.futures.Future:
    """Start the mean as `plain` takes it, on the lane, which need not wait; or rounded to `wire_dtype`, where `rounded` says
    which such sums, by bucket, are under way: a bucket's next one takes their memory."""
    done: torch.futures.Future = torch.futures.Future()
    # DDP multiplies by 1/N before it sums, which keeps float16 sums in range; the same product gives its bits.
    bucket.buffer.mul_(1.0 / communicator.world_size)
    travelling = bucket.buffer
    if wire_dtype is not None and wire_dtype.itemsize < bucket.buffer.element_size():
        rounded = {} if rounded is None else rounded
        if bucket.index in rounded:
            rounded[bucket.index].wait()
        rounded[bucket.index] = done
        n_bytes = wire_dtype.itemsize * bucket.n_elements
        travelling = communicator.scratch(f"rounded {bucket.index}", n_bytes).view(wire_dtype).copy_(bucket.buffer)
    timing = bucket.record.timing("communicate")
    summed = communicator.start_all_reduce(travelling)

    def finish(_: torch.futures.Future) -> None:
        try:
            communicator.finish(summed)
        except Exception as error:
            done.set_exception(communicator.fail(error))
            return
        timing.end()
        if travelling is not bucket.buffer:
            bucket.buffer.copy_(travelling)
        bucket.record.count_exchanged(
            ring_bytes(travelling.numel() * travelling.element_size(), communicator.world_size)
        )
        done.set_result(bucket.buffer)

    summed.add_done_callback(finish)
    return done
