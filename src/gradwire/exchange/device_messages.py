"""One codec's messages about a bucket on a device, as an exchange between devices makes and reads them."""

from __future__ import annotations

import torch
from torch import Tensor

from gradwire.codecs import DeviceCodec
from gradwire.codecs.gcomp import GCompCodec
from gradwire.codecs.truncated_float import draw_after, first_draw
from gradwire.core.bucket import Bucket
from gradwire.gpu.launching import raise_error
from gradwire.wire.device_wire import DeviceWire


class DeviceMessages:
    """All is enqueued on the current stream, and nothing waits. Raises: Unsupported (no kernels of the codec here).

    Attributes:
        is_fixed: whether a message takes as many bytes as there are in its room, so that both ends know its length; then
            where messages begin and end matters to the values too, and otherwise a part is one message.
    """

    def __init__(self, site: DeviceWire, codec: DeviceCodec) -> None:
        codec.check_device(site.device)
        self.is_fixed = not isinstance(codec, GCompCodec)
        self._site, self._codec, self._first_draw = site, codec, 0
        self._importance: Tensor | None = None
        self._counts: Tensor | None = None

    def weigh(self, importance: Tensor | None, counts: Tensor | None) -> None:
        """Before each bucket's messages, where there is something to say.

        Args:
            importance: (n,) uint8 of the bucket's values, with importance="paper".
            counts: (256,) int64: gets the exponents of all that is encoded; None: they are not counted.
        """
        self._importance, self._counts = importance, counts

    def begin(self, bucket: Bucket, rank: int) -> None:
        """The messages of this rank that follow are about `bucket`."""
        self._first_draw = first_draw(rank, bucket.step, bucket.index)

    def room_bytes(self, n_elements: int, dtype: torch.dtype) -> int:
        """Bytes that no message of `n_elements` exceeds. Raises: InvalidArgument."""
        return self._codec.max_encoded_bytes(n_elements, dtype)

    def encode(self, values: Tensor, first: int, room: Tensor, number: int) -> Tensor:
        """Write a message; (1,) int64: its length.

        Args:
            values: (n,), which stand for those of the bucket from `first` on.
            room: (room_bytes(n, dtype),) uint8, at a multiple of 4 bytes.
            number: of the messages that this rank makes of the bucket; on a CPU, the how many-th it is.
        """
        if self._counts is not None and isinstance(self._codec, GCompCodec):
            self._codec.histogram(values, self._counts)
        step = draw_after(self._first_draw, number)
        return torch.as_tensor(self._codec.encode(values, room, self._importance_of(first, values), step=step))

    def decode(self, message: Tensor, first: int, out: Tensor, *, divisor: float = 1.0, adds: bool = False) -> None:
        """Read a message: out (n,) gets the values / divisor, or has them added; NaN where it is not whole."""
        importance, error = self._importance_of(first, out), self._site.flags[:1]
        self._codec.decode(message, out, importance, divisor=divisor, adds=adds, error=error)

    def raise_error(self, code: int) -> None:
        """Raise what an error word says, if anything."""
        raise_error(code, f"{self._codec.name} message", self._site.device)

    def _importance_of(self, first: int, values: Tensor) -> Tensor | None:
        return None if self._importance is None else self._importance[first : first + values.numel()]
