"""Mode "packed": the values at the union, summed one after the other as they are."""

from __future__ import annotations

from gradwire.codecs import packed_values
from gradwire.codecs.count_sketch import FixedPoint
from gradwire.exchange.aggregators import Aggregator
from gradwire.schemes.homomorphic.unsent import Summand, quantised


def sum_packed(aggregator: Aggregator, summand: Summand, n_values: int, fixed: FixedPoint | None) -> None:
    """Sum the `n_values` at the union, and put the mean into the bucket; with `fixed` as integers."""
    bucket, wire, _, values, unsent, union = summand
    packed = wire.scratch("packed", n_values, values.dtype)
    with wire.timing("encode"):
        packed_values.pack(values, union.words, packed)
        # Divided before it is summed, by DDP's own product: with two ranks DDP's bits, and float16 stays in range.
        cells = packed.mul_(1.0 / wire.world_size) if fixed is None else quantised(packed, fixed)
    if n_values:
        aggregator.start_sum(cells, wire.record).wait()
    is_direct = unsent is None and values.dtype == bucket.buffer.dtype
    with wire.timing("decode"):
        if fixed is not None:
            packed.copy_(cells.double().mul_(fixed.scale / wire.world_size).float())
        out = bucket.buffer if is_direct else wire.scratch("mean", bucket.n_elements)
        packed_values.unpack(packed, union.words, out)
        if unsent is not None:
            unsent.stage(values, out, None)
        if not is_direct:
            bucket.buffer.copy_(out)
