"""What sharded training exchanges: weights that all ranks gather, and sums of gradients that stay with their owner.

In host memory, by the native core (native/exchange/shards.hpp) or, plainly, by the backend. A buffer has a part for every
rank, all equally long.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from gradwire import _native
from gradwire.codecs import Codec
from gradwire.codecs.embedded_float import EmbeddedFloat
from gradwire.codecs.gcomp import GCompCodec
from gradwire.codecs.tensors import bytes_of, dtype_code
from gradwire.core.bucket import Slot
from gradwire.core.feedback import Part
from gradwire.errors import Unsupported
from gradwire.exchange.parts import CHUNK_ELEMENTS, count_chunks
from gradwire.exchange.ring import engine_codec, options_for
from gradwire.telemetry.recorder import BucketRecord
from gradwire.wire.communicator import Communicator
from gradwire.wire.preamble import Facts
from gradwire.wire.wire import Wire


class Scatter:
    """The mean of this rank's part of a bucket, in the place of a scheme's own collective; the other parts stay as they are.

    Args:
        codec: what encodes a rank's values for the others; None: the backend sums, in the bucket's dtype.
        counts: bytes sent, and bytes that go in the buckets' own dtype; added to.
    """

    def __init__(self, codec: Codec | Bfloat16 | None, counts: list[int]) -> None:
        self.codec, self._counts = codec, counts

    @property
    def configuration(self) -> dict[str, Any]:
        """Options that ranks must share."""
        return {"inside": "shards"}

    def bind(self, wire: Wire) -> None:
        """Take the wire. Raises: Unsupported (a device)."""
        if wire.on_device:
            raise Unsupported("shards are exchanged in host memory: leave placement out")

    def mean(
        self, part: Part, wire: Wire, importance: Any = None, counts: Tensor | None = None, mean_room: int = 0
    ) -> None:
        """Replace this rank's part of `part.values` by its mean over the ranks, summed in float32 in rank order; on the lane.

        The arguments are a ring's, of which only `counts` concern what shards can have.
        Raises: PeerLost, RankMismatch, CorruptMessage, IncompatibleVersion, and whatever the codec raises.
        """
        bucket, world = part.bucket, wire.world_size
        is_sum = isinstance(bucket.slots[0], Summed)
        n_own = bucket.n_elements // world
        before = wire.record.bytes_sent
        self._exchange(part, wire, importance, counts, is_sum, n_own)
        self._counts[0] += wire.record.bytes_sent - before
        self._counts[1] += (world - 1) * n_own * bucket.buffer.element_size()

    def _exchange(
        self, part: Part, wire: Wire, importance: Any, counts: Tensor | None, is_sum: bool, n_own: int
    ) -> None:
        bucket, communicator, world = part.bucket, wire.communicator, wire.world_size
        if self.codec is None:
            own = bucket.buffer[wire.rank * n_own : (wire.rank + 1) * n_own]
            with wire.timing("communicate"):
                share = torch.empty_like(own)
                communicator.reduce_scatter_into(
                    share, bucket.buffer, dist.ReduceOp.SUM if is_sum else dist.ReduceOp.AVG
                )
                own.copy_(share)
            wire.record.count_exchanged((world - 1) * own.numel() * own.element_size())
            return
        dtype = bucket.buffer.dtype
        if isinstance(self.codec, Bfloat16):
            native = _native.bfloat16_exchange_codec()
        else:
            native = engine_codec(self.codec, dtype, importance, **options_for(self.codec, wire, bucket, counts))
            if isinstance(self.codec, GCompCodec) and self.codec.importance == "none":
                native = _native.exact_exchange_codec(native, dtype_code(dtype))
        account = _native.scatter_sums(
            *communicator.open_exchange(), wire.facts, native, bytes_of(bucket.buffer), dtype_code(dtype),
            1 if is_sum else world, count_chunks(n_own),
        )  # fmt: skip
        wire.record.add_account(*account)


class Summed(Slot):
    """Of which the sum is wanted, not the mean."""

    __slots__ = ()


class Bfloat16:
    """Values rounded to bfloat16, for `Scatter`."""


def gather(
    communicator: Communicator, codec: Codec | None, values: Tensor, facts: Facts, record: BucketRecord,
    counts: Tensor | None = None,
) -> None:  # fmt: skip
    """Fill `values` (world n,), in which every rank has its own part; on the lane.

    Args:
        codec: GComp's, whose messages are completed to the last bit; a lossy one, whose values each rank takes for its own
            part too; None: the backend sends them as they are, of any dtype.
        counts: (256,) int64: gets the exponents of all that GComp's codec encodes.
    Raises: PeerLost, RankMismatch, CorruptMessage, IncompatibleVersion.
    """
    world, rank, n_own = communicator.world_size, communicator.rank, values.numel() // communicator.world_size
    if codec is None:
        raw = bytes_of(values)
        n_bytes = raw.numel() // world
        with record.timing("communicate"):
            communicator.all_gather_into(raw, raw[rank * n_bytes : (rank + 1) * n_bytes])
        record.count_exchanged((world - 1) * n_bytes)
        return
    code = dtype_code(values.dtype)
    native = engine_codec(codec, values.dtype, None, **({"counts": counts} if isinstance(codec, GCompCodec) else {}))
    is_exact = not isinstance(codec, EmbeddedFloat)
    if is_exact:
        native = _native.exact_exchange_codec(native, code)
    account = _native.gather_parts(
        *communicator.open_exchange(), facts, native, bytes_of(values), code, not is_exact,
        count_chunks(n_own, CHUNK_ELEMENTS),
    )  # fmt: skip
    record.add_account(*account)
