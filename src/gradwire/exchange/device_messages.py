"""What an exchange on devices asks of a codec, and the codecs that can answer."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar

import torch
from torch import Tensor

from gradwire.codecs.embedded_float import EmbeddedFloat
from gradwire.codecs.gcomp import GCompCodec
from gradwire.codecs.truncated_float import TruncatedFloat, draw_after, first_draw
from gradwire.core.bucket import Bucket
from gradwire.gpu.floats import DeviceEmbeddedFloat, DeviceTruncatedFloat
from gradwire.gpu.gcomp import DeviceGComp
from gradwire.gpu.kernels import kernels_on
from gradwire.wire.device_wire import DeviceWire


class DeviceMessages(ABC):
    """One codec's messages on the device of a site; all is enqueued on the current stream, and nothing waits.

    Attributes:
        is_fixed: whether a message takes as many bytes as there are in its room, so that both ends know its length.
        cuts_parts: whether where messages begin and end matters to the values; otherwise a part is one message.
    """

    is_fixed: ClassVar[bool]
    cuts_parts: ClassVar[bool]

    def begin(self, bucket: Bucket, rank: int) -> None:
        """The messages of this rank that follow are about `bucket`."""

    @abstractmethod
    def room_bytes(self, n_elements: int, dtype: torch.dtype) -> int:
        """Bytes that no message of `n_elements` exceeds. Raises: InvalidArgument."""

    @abstractmethod
    def encode(self, values: Tensor, first: int, room: Tensor, n_bytes: Tensor, number: int) -> None:
        """Write a message.

        Args:
            values: (n,), which stand for those of the bucket from `first` on.
            room: (room_bytes(n, dtype),) uint8, at a multiple of 4 bytes.
            n_bytes: (1,) int64: gets the message's length.
            number: of the messages that this rank makes of the bucket; on a CPU, the how many-th it is.
        """

    @abstractmethod
    def decode(self, message: Tensor, first: int, out: Tensor, *, divisor: float = 1.0, adds: bool = False) -> None:
        """Read a message: out (n,) gets the values / divisor, or has them added; NaN where it is not whole."""

    @abstractmethod
    def raise_error(self, code: int) -> None:
        """Raise what an error word says, if anything."""


class FloatMessages(DeviceMessages):
    """Of truncated or embedded floats. Raises: Unsupported (no kernels here, or none for its options)."""

    is_fixed, cuts_parts = True, True

    def __init__(self, site: DeviceWire, codec: TruncatedFloat | EmbeddedFloat) -> None:
        kernels, self._site, self._first_draw = kernels_on(site.device), site, 0
        self._codec: DeviceTruncatedFloat | DeviceEmbeddedFloat = (
            DeviceTruncatedFloat(codec, kernels)
            if isinstance(codec, TruncatedFloat)
            else DeviceEmbeddedFloat(codec, kernels)
        )

    def begin(self, bucket: Bucket, rank: int) -> None:
        self._first_draw = first_draw(rank, bucket.step, bucket.index)

    def room_bytes(self, n_elements: int, dtype: torch.dtype) -> int:
        return self._codec.message_bytes(n_elements, dtype)

    def encode(self, values: Tensor, first: int, room: Tensor, n_bytes: Tensor, number: int) -> None:
        work = self._site.scratch("work", self._codec.work_bytes(values.numel(), values.dtype), torch.uint8)
        self._codec.encode(values, room, n_bytes, work, step=draw_after(self._first_draw, number))

    def decode(self, message: Tensor, first: int, out: Tensor, *, divisor: float = 1.0, adds: bool = False) -> None:
        self._codec.decode(message, out, self._site.flags[:1], divisor=divisor, adds=adds)

    def raise_error(self, code: int) -> None:
        self._codec.raise_error(code)


class GCompMessages(DeviceMessages):
    """Of GComp, whose lengths only the device knows. Raises: Unsupported (no kernels here, or format 1)."""

    is_fixed, cuts_parts = False, False

    def __init__(self, site: DeviceWire, codec: GCompCodec) -> None:
        self._codec, self._site = DeviceGComp(codec, kernels_on(site.device)), site
        self._importance: Tensor | None = None
        self._counts: Tensor | None = None

    def weigh(self, importance: Tensor | None, counts: Tensor | None) -> None:
        """Before each bucket's messages, where there is something to say.

        Args:
            importance: (n,) uint8 of the bucket's values, with importance="paper".
            counts: (256,) int64: gets the exponents of all that is encoded; None: they are not counted.
        """
        self._importance, self._counts = importance, counts

    def room_bytes(self, n_elements: int, dtype: torch.dtype) -> int:
        return self._codec.message_bytes(n_elements, dtype)

    def encode(self, values: Tensor, first: int, room: Tensor, n_bytes: Tensor, number: int) -> None:
        n = values.numel()
        if self._counts is not None:
            self._codec.histogram(values, self._counts)
        self._codec.encode(values, room, n_bytes, self._work(n), importance=self._importance_of(first, n))

    def decode(self, message: Tensor, first: int, out: Tensor, *, divisor: float = 1.0, adds: bool = False) -> None:
        n = out.numel()
        self._codec.decode(
            message, out, self._site.flags[:1], self._work(n),
            importance=self._importance_of(first, n), divisor=divisor, adds=adds,
        )  # fmt: skip

    def raise_error(self, code: int) -> None:
        self._codec.raise_error(code)

    def _importance_of(self, first: int, n: int) -> Tensor | None:
        return None if self._importance is None else self._importance[first : first + n]

    def _work(self, n_elements: int) -> Tensor:
        return self._site.scratch("work", self._codec.work_bytes(n_elements), torch.uint8)
