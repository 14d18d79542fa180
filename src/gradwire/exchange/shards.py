"""What sharded training exchanges in host memory: weights that all ranks gather, sums of gradients that stay with their owner.

By the native core (native/exchange/shards.hpp) or, plainly, by the backend. A buffer has an equally long part for every rank.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from gradwire import _native
from gradwire.codecs import Codec
from gradwire.codecs.gcomp import GCompCodec
from gradwire.codecs.tensors import bytes_of, dtype_code
from gradwire.core.bucket import Slot
from gradwire.core.feedback import Part
from gradwire.errors import Unsupported
from gradwire.exchange.parts import count_chunks
from gradwire.exchange.ring import engine_codec, options_for
from gradwire.wire.wire import Wire


class Scatter:
    """The mean of this rank's part of a bucket, in the place of a scheme's own collective; the other parts stay as they are.

    `codec`: None: the backend sums, in the bucket's dtype. `count`: called with the bytes sent, and those of a part.
    """

    def __init__(self, codec: "Codec | Bfloat16 | None", count: Callable[[int, int], None]) -> None:
        self.codec: Any = codec
        self._count = count

    @property
    def configuration(self) -> dict[str, Any]:
        """Options that ranks must share."""
        return {"inside": "shards"}

    def bind(self, wire: Wire) -> None:
        if wire.on_device:
            raise Unsupported("shards are exchanged in host memory: leave placement out")

    def mean(
        self, part: Part, wire: Wire, importance: Any = None, counts: Tensor | None = None, mean_room: int = 0
    ) -> None:
        """Replace this rank's part of `part.values` by its mean over the ranks, summed in float32 in rank order; on the
        lane. The arguments are a ring's, of which only `counts` concern what shards can have."""
        buffer, world = part.values, wire.world_size
        is_sum = isinstance(part.bucket.slots[0], Summed)
        n_own = buffer.numel() // world
        n_bytes = n_own * buffer.element_size()
        before = wire.record.bytes_sent
        if self.codec is None:
            own = buffer[wire.rank * n_own : (wire.rank + 1) * n_own]
            with wire.timing("communicate"):
                share = torch.empty_like(own)
                op = dist.ReduceOp.SUM if is_sum else dist.ReduceOp.AVG
                wire.communicator.reduce_scatter_into(share, buffer, op)
                own.copy_(share)
            wire.record.count_exchanged((world - 1) * n_bytes)
        else:
            code, options = dtype_code(buffer.dtype), options_for(self.codec, wire, part.bucket, counts)
            native = engine_codec(self.codec, buffer.dtype, importance, **options)
            if isinstance(self.codec, GCompCodec) and self.codec.importance == "none":
                native = _native.exact_exchange_codec(native, code)
            account = _native.scatter_sums(
                *wire.communicator.open_exchange(), wire.facts, native, bytes_of(buffer), code, 1 if is_sum else world,
                count_chunks(n_own),
            )  # fmt: skip
            wire.record.add_account(*account)
        self._count(wire.record.bytes_sent - before, n_bytes)


class Summed(Slot):
    """Of which the sum is wanted, not the mean."""

    __slots__ = ()


class Bfloat16:
    """Values rounded to bfloat16, for `Scatter`."""

    def exchange_codec(self, dtype: torch.dtype, importance: Any) -> _native.ExchangeCodec:
        """As the engine calls it."""
        return _native.bfloat16_exchange_codec()


def gather(wire: Wire, codec: Codec | None, values: Tensor, counts: Tensor | None = None) -> None:
    """Fill `values` (world n,), in which every rank has its own part; on the lane. `counts`: as of a ring. `codec`:
    GComp's, whose messages are completed to the last bit; a lossy one, whose values each rank takes for its own part
    too; None: the backend sends them as they are, of any dtype."""
    world, raw = wire.world_size, bytes_of(values)
    if codec is None:
        n_bytes = raw.numel() // world
        with wire.timing("communicate"):
            wire.communicator.all_gather_into(raw, raw[wire.rank * n_bytes : (wire.rank + 1) * n_bytes])
        wire.record.count_exchanged((world - 1) * n_bytes)
        return
    code, is_exact = dtype_code(values.dtype), isinstance(codec, GCompCodec)
    native = engine_codec(codec, values.dtype, None, **({"counts": counts} if is_exact else {}))
    if is_exact:
        native = _native.exact_exchange_codec(native, code)
    account = _native.gather_parts(
        *wire.communicator.open_exchange(), wire.facts, native, raw, code, not is_exact,
        count_chunks(values.numel() // world),
    )  # fmt: skip
    wire.record.add_account(*account)
