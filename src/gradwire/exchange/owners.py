"""The mean through owners: each rank's messages go to every part's owner, which adds them, and its sum goes to all.

In host memory one call of the native core (native/exchange/means.hpp); between devices `DeviceOwners`, with the same
messages and bits.
"""

from __future__ import annotations

from typing import Any

from gradwire import _native
from gradwire.checks import choice as check_choice
from gradwire.codecs.quantised import Quantised
from gradwire.codecs.tensors import bytes_of, dtype_code
from gradwire.core.feedback import Part
from gradwire.errors import InvalidArgument
from gradwire.exchange.on_device import DeviceOwners
from gradwire.exchange.parts import QUANTISED_CHUNK_ELEMENTS, QUANTISED_MIN_CHUNKS, count_chunks
from gradwire.wire.device_wire import DeviceWire
from gradwire.wire.wire import Wire

_PULLS = ("compressed", "raw")


class Owners:
    """Each rank owns a part of the bucket, and adds what the others pushed of it to its own, unquantised share.

    Args:
        codec: the quantiser; another may take its place before `bind`.
        pull: how sums travel back: "compressed", quantised again, where what the message leaves out goes into the owner's
            residual; or "raw", in the bucket's dtype.
        chunk_elements: values to a message; each message has its own scales.
    Raises: InvalidArgument.
    """

    def __init__(
        self, codec: Quantised, pull: str = "compressed", chunk_elements: int = QUANTISED_CHUNK_ELEMENTS
    ) -> None:
        self.codec, self.pull = codec, check_choice("pull", pull, _PULLS)
        if chunk_elements < 1:
            raise InvalidArgument(f"chunk_elements must be at least 1, got {chunk_elements}")
        self.chunk_elements = chunk_elements
        self._on_device: DeviceOwners | None = None

    @property
    def configuration(self) -> dict[str, Any]:
        """What ranks must share."""
        return {"pull": self.pull, "chunk_elements": self.chunk_elements}

    def bind(self, wire: Wire) -> None:
        """Take the wire. Raises: Unsupported (a codec without kernels, or no kernels on its device)."""
        self._on_device = None
        if isinstance(wire, DeviceWire):
            self._on_device = DeviceOwners(wire, self.codec, wire.communicator, self.chunk_elements, self.pull == "raw")

    def mean(self, part: Part, wire: Wire) -> None:
        """Replace `part.values` by their mean, on the lane.

        Cost: sends 2 (N-1)/N of the encoded bucket, to N-1 peers; every element is encoded once.
        """
        if self._on_device is not None:
            n_bytes = self._on_device.mean(part.bucket, part.residual, part.unsent, part.loss_scale)
            wire.record.count_exchanged(n_bytes)
            return
        bucket, n, rank, world = part.bucket, part.bucket.n_elements, wire.rank, wire.world_size
        n_chunks = count_chunks(-(-n // world), self.chunk_elements, QUANTISED_MIN_CHUNKS)
        part.used_by_any, is_finite, account = _native.quantised_mean(
            wire.communicator.mesh,
            wire.communicator.next_stream(),
            wire.facts,
            self.codec.native_options,
            bytes_of(part.values),
            dtype_code(part.values.dtype),
            part.residual,
            part.unsent,
            part.loss_scale,
            bucket.spans,
            part.is_used,
            n_chunks,
            [bucket.draw(rank, owner, chunk, owner == rank) for owner in range(world) for chunk in range(n_chunks)],
            self.pull == "raw",
        )
        part.counted = n * rank // world, n * (rank + 1) // world
        wire.record.add_account(*account)
        wire.note(is_finite)
