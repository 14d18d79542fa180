"""The mean through a codec: round a ring, or directly through the owners of all parts.

In host memory one call of the native core (native/exchange/means.hpp), without the GIL from its start to its end;
a codec that is written in Python is called back. Between devices `DeviceMeans`, with the same bits. Every rank gets the same
bits: the decoding of the bytes that each part's owner sent, divided by N. Float16 values, whose sum may overflow, are divided
before they are encoded. What is not finite travels as the codec has it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from gradwire import _native
from gradwire.checks import choice as check_choice
from gradwire.codecs import Codec, DeviceCodec
from gradwire.codecs.gcomp import GCompCodec
from gradwire.codecs.tensors import bytes_of, dtype_code
from gradwire.codecs.truncated_float import TruncatedFloat
from gradwire.core.feedback import Part
from gradwire.errors import InvalidArgument
from gradwire.exchange.device_engine import DeviceMeans
from gradwire.exchange.parts import CHUNK_ELEMENTS, MESSAGES_AHEAD, count_chunks
from gradwire.telemetry.recorder import BucketRecord
from gradwire.wire.communicator import Communicator
from gradwire.wire.device_wire import DeviceWire
from gradwire.wire.facts import Facts
from gradwire.wire.wire import Wire

# Of the values of a bucket, how large each may be before its low bits matter: `write(first, out)` puts the importance
# bytes of elements [first, first + n) into `out` (n,) uint8.
Importance = _native.BucketImportance

# "ring": N-1 hops of partial sums, each encoded anew, then N-1 hops that forward bytes verbatim. "direct": every part to its
# owner, which adds them in rank order, itself unencoded, and answers: a lossy codec rounds a value twice instead of N times,
# and every rank talks to every other. Both send 2 (N-1)/N of the encoded buffer; every element is encoded once.
_RUN: dict[str, Callable[..., Any]] = {
    "ring": functools.partial(_native.ring_mean, n_ahead=MESSAGES_AHEAD),
    "direct": _native.direct_mean,
}


class Ring:
    """Means in which every message goes through one codec, in host memory or between devices.

    Args:
        codec: what encodes the messages.
        topology: "ring" (each value passes N-1 times through the codec before it is final) or "direct" (twice).
        chunk_elements: values encoded, sent and decoded at a time.
    Raises: InvalidArgument.
    """

    def __init__(self, codec: Codec, topology: str = "ring", chunk_elements: int = CHUNK_ELEMENTS) -> None:
        self.codec, self.topology = codec, check_choice("topology", topology, tuple(_RUN))
        if chunk_elements < 1:
            raise InvalidArgument(f"chunk_elements must be at least 1, got {chunk_elements}")
        self.chunk_elements = chunk_elements
        self._on_device: DeviceMeans | None = None

    @property
    def configuration(self) -> dict[str, Any]:
        """What ranks must share."""
        return {"topology": self.topology, "chunk_elements": self.chunk_elements}

    def bind(self, wire: Wire) -> None:
        """Take the wire. Raises: Unsupported (no kernels for the codec's options, or none on its device)."""
        self._on_device = None
        if isinstance(wire, DeviceWire):
            assert isinstance(self.codec, DeviceCodec)
            self._on_device = DeviceMeans(wire, self.codec, wire.communicator, self.topology, self.chunk_elements)

    def mean(self, part: Part, wire: Wire, importance: Any = None, counts: torch.Tensor | None = None) -> None:
        """Replace `part.values` by their mean, on the lane; without error feedback.

        Args:
            importance: of the bucket's values, for codecs that weigh them: an `Importance`, or on a device (n,) uint8.
            counts: int64: gets the exponents of all that GComp's codec encodes; None: they are not counted.
        Raises: PeerLost, RankMismatch, CorruptMessage, IncompatibleVersion, and whatever the codec raises.
        """
        bucket = part.bucket
        if self._on_device is not None:
            self._on_device.mean(bucket, importance, counts)
            return
        codec = self.codec
        if isinstance(codec, TruncatedFloat):
            codec = codec.streams(wire.rank, bucket.step, bucket.index)
        elif isinstance(codec, GCompCodec) and counts is not None:
            codec = codec.counting(counts)
        mean_through_codec(
            wire.communicator, codec, bucket.buffer, wire.facts, wire.record, importance,
            topology=self.topology, chunk_elements=self.chunk_elements,
        )  # fmt: skip


def mean_through_codec(
    communicator: Communicator,
    codec: Codec,
    buffer: torch.Tensor,
    facts: Facts,
    record: BucketRecord,
    importance: Importance | None = None,
    *,
    topology: str = "ring",
    chunk_elements: int = CHUNK_ELEMENTS,
    left_out: torch.Tensor | None = None,
) -> None:
    """Replace `buffer` (n,), in host memory, by the mean over the ranks; on the lane.

    Args:
        importance: of the bucket's values, for codecs that weigh them.
        left_out: (n,) for error feedback: what this rank's encodings lost. N x result + the sum of all ranks'
            left_out = the sum of their gradients.
    Raises: PeerLost, RankMismatch, CorruptMessage, IncompatibleVersion, and whatever the codec raises.
    """
    if communicator.world_size == 1 or buffer.numel() == 0:
        return
    account = _RUN[topology](
        communicator.mesh,
        communicator.next_stream(),
        facts,
        engine_codec(codec, buffer.dtype, importance),
        bytes_of(buffer),
        dtype_code(buffer.dtype),
        None if left_out is None else bytes_of(left_out),
        count_chunks(-(-buffer.numel() // communicator.world_size), chunk_elements),
    )
    record.add_account(*account)


def engine_codec(codec: Codec, dtype: torch.dtype, importance: Importance | None) -> _native.ExchangeCodec:
    """The codec as the engine calls it, for one bucket: native where it can say how, else called back."""
    native: Callable[..., _native.ExchangeCodec] | None = getattr(codec, "exchange_codec", None)
    if native is None:
        return _native.python_exchange_codec(codec, dtype, importance)
    return native(dtype, importance)
