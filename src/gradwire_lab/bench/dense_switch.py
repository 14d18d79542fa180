"""The method `dense-switch`: in-network aggregation without compression, every value as fixed point through the switch.

What SwitchML and ATP do: agree on the largest exponent, scale to int32 with room for the sum, add in the switch, scale back.
"""

from __future__ import annotations

import math

import torch

from gradwire.errors import Unsupported
from gradwire.telemetry.recorder import Recorder
from gradwire.wire.communicator import Communicator
from gradwire.wire.wire import HostWire
from gradwire_lab.bench.reducers import TimedReducer
from gradwire_lab.switch import Switch

# Values in a sum: while one is on its way the next is scaled. 16 MB are 0.6 s at 200 Mb/s, a round trip a thousandth.
_BLOCK_ELEMENTS = 1 << 22
_NOT_FINITE = 1 << 20  # above every exponent of float32


class DenseSwitchReducer(TimedReducer):
    """Mean of float32 gradients by sums of int32 in the switch, one exponent for all.

    When not to use this: in training. It keeps as many bits as the largest value of all leaves, and has no fallback.
    """

    def __init__(self, communicator: Communicator) -> None:
        super().__init__("dense-switch")
        self._communicator, self._wire = communicator, HostWire(communicator)
        self._recorder = Recorder(communicator.rank, communicator.world_size)
        self._aggregator = Switch()
        self._aggregator.bind(communicator, self._recorder)
        self._step = 0

    def reduce(self, buffer: torch.Tensor) -> None:
        self._wire.record = self._recorder.open_bucket(self._step, 0, buffer.numel() * buffer.element_size())
        self._communicator.submit(self._reduce_on_lane, buffer).wait()
        self._recorder.close_bucket(self._wire.record)

    def _reduce_on_lane(self, buffer: torch.Tensor) -> None:
        if buffer.numel() == 0:
            return
        largest = max(-float(buffer.min()), float(buffer.max()))
        # A value below 2^e; a sum of N below 2^(e + ceil(log2 N)), which must stay below 2^31.
        exponent = math.frexp(largest)[1] if math.isfinite(largest) else _NOT_FINITE
        agreed = torch.tensor([exponent], dtype=torch.int32)
        self._aggregator.max_int32(agreed, self._wire)
        if int(agreed) >= _NOT_FINITE:
            raise Unsupported("dense-switch sums finite gradients only: fixed point has no Inf or NaN")
        headroom_bits = (self._communicator.world_size - 1).bit_length()
        self.quantum = math.ldexp(1.0, int(agreed) + headroom_bits - 30)
        integers = self._communicator.scratch("dense switch", 4 * buffer.numel()).view(torch.int32)
        sums = []
        for start in range(0, buffer.numel(), _BLOCK_ELEMENTS):
            block = slice(start, min(start + _BLOCK_ELEMENTS, buffer.numel()))
            integers[block].copy_(buffer[block].mul_(1.0 / self.quantum).round_())
            sums.append((block, self._aggregator.start_sum(integers[block], self._wire)))
        for block, one in sums:
            one()
            buffer[block].copy_(integers[block]).mul_(self.quantum / self._communicator.world_size)

    def finish_step(self) -> None:
        self.sent_bytes += self._recorder.close_step(self._step, 0).bytes_sent
        self._step += 1

    def close(self) -> None:
        self._aggregator.close()
