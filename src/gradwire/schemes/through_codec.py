"""A codec in a ring (or between all pairs): the shape of GComp, and of the lossless and truncating methods beside it."""

from __future__ import annotations

from typing import Any, ClassVar

import torch

from gradwire import codecs
from gradwire.codecs import Codec, DeviceCodec
from gradwire.codecs.truncated_float import TruncatedFloat
from gradwire.control.checks import choice as check_choice
from gradwire.core.bucket import Bucket
from gradwire.core.session import Session
from gradwire.core.site import DeviceSite
from gradwire.errors import InvalidArgument
from gradwire.exchange.device_messages import DeviceMessages
from gradwire.exchange.engine import Importance, direct_mean, ring_mean
from gradwire.exchange.parts import CHUNK_ELEMENTS
from gradwire.schemes.base import Scheme
from gradwire.schemes.on_device import CodecOnDevice, Placing, StepsOnDevice

_TOPOLOGIES = {"ring": ring_mean, "direct": direct_mean}


class ThroughCodec(Scheme):
    """Mean over the ranks in which every message goes through one codec.

    Args:
        codec: what encodes the messages.
        topology: "ring" (each value passes N-1 times through the codec before it is final) or "direct" (twice).
        chunk_elements: values encoded, sent and decoded at a time.
        **codec_options: recorded in the configuration that all ranks compare.
    """

    def __init__(
        self, codec: Codec, topology: str = "ring", chunk_elements: int = CHUNK_ELEMENTS, **codec_options: Any
    ) -> None:
        check_choice("topology", topology, _TOPOLOGIES)
        if chunk_elements < 1:
            raise InvalidArgument(f"chunk_elements must be at least 1, got {chunk_elements}")
        self.codec = codec
        self.topology = topology
        self.chunk_elements = chunk_elements
        self._codec_options = codec_options

    @property
    def configuration(self) -> dict[str, Any]:
        return {"topology": self.topology, "chunk_elements": self.chunk_elements, **self._codec_options}

    def reduce(self, bucket: Bucket) -> torch.futures.Future:
        return self.session.communicator.submit(self._reduce_on_lane, bucket)

    def _reduce_on_lane(self, bucket: Bucket) -> None:
        if self.session.communicator.world_size > 1:
            self._reduce_with(self.codec, bucket, importance=None)

    def _reduce_with(self, codec: Codec, bucket: Bucket, importance: Importance | None) -> None:
        _TOPOLOGIES[self.topology](
            self.session.communicator,
            codec,
            bucket.buffer,
            self.facts(bucket),
            bucket.record,
            importance,
            self.chunk_elements,
        )


class _Named(ThroughCodec):
    """A scheme that is its codec, and has its name."""

    def __init__(self, topology: str = "ring", chunk_elements: int = CHUNK_ELEMENTS, **codec_options: Any) -> None:
        super().__init__(codecs.by_name(self.name, **codec_options), topology, chunk_elements, **codec_options)


class _NamedOnDevices(Placing, _Named):
    """One whose codec has kernels."""

    def _go_to(self, site: DeviceSite, session: Session) -> StepsOnDevice:
        """Raises: Unsupported (no kernels here, or none for its options)."""
        assert isinstance(self.codec, DeviceCodec)
        return CodecOnDevice(session, site, DeviceMessages(site, self.codec), self.topology, self.chunk_elements)

    def stats(self) -> dict[str, Any]:
        return {}


class TruncateScheme(_NamedOnDevices):
    """The `bits` lowest mantissa bits always cut off (18 by default): the quantisation of GComp's Fig. 18.

    When not to use this: for training; it is the comparator that GComp's levels are measured against.
    """

    name: ClassVar[str] = "truncate"


class EmbeddedFloatScheme(_NamedOnDevices):
    """`bits` bits (8 by default) of every value, with an exponent shared by a `partition` (256 values).

    When not to use this: beside AQGB, which sends the same bits and more where there is time; below 5 bits, where small
    values of a partition vanish and no error feedback brings them back.
    """

    name: ClassVar[str] = "embedded-float"


class TruncatedFloatScheme(_NamedOnDevices):
    """The first `bits` bits (8 by default) of every value, of `format` "auto", "native", "fp16", "fp8-e4m3", "fp8-e5m2",
    "fp6-e3m2" or "fp4-e2m1", with `rounding` "nearest", "truncate" (as published) or "stochastic" (`seed`): AQGB's TFP in an
    ordered all-reduce.

    Every hop rounds its partial sum anew; the sums' order is fixed by part and world size. Stochastic rounding draws
    from a stream of its own for every message of every rank, bucket and step.

    When not to use this: with "truncate" at few bits and many ranks, where N roundings towards zero add up: "stochastic",
    or topology "direct", which rounds twice.
    """

    name: ClassVar[str] = "truncated-float"

    def _reduce_on_lane(self, bucket: Bucket) -> None:
        communicator = self.session.communicator
        if communicator.world_size > 1:
            assert isinstance(self.codec, TruncatedFloat)
            codec = self.codec.streams(communicator.rank, bucket.step, bucket.index)
            self._reduce_with(codec, bucket, importance=None)


class ZstdScheme(_Named):
    """Lossless: zstd on the bytes (`level`, 1 by default).

    When not to use this: on any network faster than about 0.3 Gb/s a core; it gains 7 % and takes longer than it saves.
    """

    name: ClassVar[str] = "zstd"


class ZlibScheme(_Named):
    """Lossless: zlib on the bytes (`level`, 1 by default).

    When not to use this: wherever zstd is to be had.
    """

    name: ClassVar[str] = "zlib"
