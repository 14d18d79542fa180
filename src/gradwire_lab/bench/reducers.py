"""What `bench allreduce` times: gradwire's schemes outside DDP, and the backend's own all-reduce, behind one face."""

from __future__ import annotations

import math
import time
from abc import abstractmethod
from typing import Any

import torch
import torch.distributed as dist

from gradwire import schemes
from gradwire.errors import Unsupported
from gradwire.reducer import Reducer
from gradwire.registry import parse_spec
from gradwire.telemetry.recorder import Recorder
from gradwire.wire.communicator import Communicator, ring_bytes
from gradwire.wire.wire import HostWire
from gradwire_lab.bench.driver import RankMethod
from gradwire_lab.bench.level_rule import make_optimizer
from gradwire_lab.switch import Switch
from gradwire_lab.workloads.gradients import OptimizerState

BASELINES = ("ddp", "ddp-bf16")
BY_NAME_ONLY = ("two-level", "dense-switch")  # `all` does not mean them: they need several ranks a node, or a switch

# Values in a sum of the dense switch: while one is on its way the next is scaled. 16 MB are 0.6 s at 200 Mb/s, a round trip a
# thousandth.
_BLOCK_ELEMENTS = 1 << 22
_NOT_FINITE = 1 << 20  # above every exponent of float32


class TimedReducer(RankMethod):
    """One way to replace a tensor by its mean over the ranks.

    Attributes:
        gradient, buffer: (n,) float32: what a step reduces, and where; given by whoever times it.
        period: steps after which everything repeats; a sample is made of whole periods.
    """

    gradient: torch.Tensor
    buffer: torch.Tensor
    period = 1

    def __init__(self, name: str, options: dict[str, Any] | None = None) -> None:
        self.name, self.options, self.times = name, options or {}, []
        self.sent_bytes = 0  # by this rank, so far
        self._filling_s = 0.0

    def step(self) -> None:
        """One reduction. Filling the buffer and finishing the step are off the clock."""
        filling_since_s = time.thread_time()
        self.buffer.copy_(self.gradient)
        self._filling_s += time.thread_time() - filling_since_s
        started = time.perf_counter()
        self.reduce(self.buffer)
        self.times.append(time.perf_counter() - started)
        self.finish_step()

    def stats(self) -> dict[str, float]:
        """`filling_s`: processor time that is none of the reduction's."""
        return {"sent_bytes": float(self.sent_bytes), "filling_s": self._filling_s}

    @abstractmethod
    def reduce(self, buffer: torch.Tensor) -> None:
        """Replace `buffer` (n,) float32 by the mean; returns when it is there."""

    def finish_step(self) -> None:
        """What follows a reduction off the clock."""


class BackendReducer(TimedReducer):
    """torch.distributed's own all-reduce, as DDP without a hook calls it: divide, then sum.

    The backend does not say what it sends; counted are the bytes of a ring, which Gloo's algorithm is.
    """

    def reduce(self, buffer: torch.Tensor) -> None:
        message = buffer.bfloat16() if self.name == "ddp-bf16" else buffer
        message.div_(dist.get_world_size())
        dist.all_reduce(message)
        self.sent_bytes += ring_bytes(message.nbytes, dist.get_world_size())
        if message is not buffer:
            buffer.copy_(message)


class SchemeReducer(TimedReducer):
    """A scheme of the registry in a Reducer of its own, which gets the whole gradient as one bucket."""

    def __init__(self, name: str, options: dict[str, Any], state: OptimizerState | None, n_elements: int) -> None:
        super().__init__(name, options)
        optimizer = make_optimizer(state, n_elements) if state is not None else None
        names = {"gradient": optimizer.param_groups[0]["params"][0]} if optimizer is not None else {}
        self._reducer = Reducer(make_scheme(name, options), names=names, optimizer=optimizer)
        self._slots = list(self._reducer.slots.values())
        # `periodic` communicates in one call of `every`.
        self.period = int(self._reducer.scheme.configuration["every"]) if name == "periodic" else 1

    def reduce(self, buffer: torch.Tensor) -> None:
        self._reducer.reduce(buffer, self._slots, [0] * len(self._slots), 0, True).wait()

    def finish_step(self) -> None:
        self._reducer.wait_until_idle()
        self._reducer.close_pass(self._reducer.step - 1, 0)
        self.sent_bytes += self._reducer.recorder.steps[-1].bytes_sent

    def close(self) -> None:
        self._reducer.close()


class DenseSwitchReducer(TimedReducer):
    """In-network aggregation without compression: sums of int32 in the switch, one exponent for all values.

    What SwitchML and ATP do: agree on the largest exponent, scale to int32 with room for the sum, add, scale back.

    When not to use this: in training. It keeps as many bits as the largest value of all leaves, and has no fallback.
    """

    def __init__(self) -> None:
        super().__init__("dense-switch")
        self._communicator = Communicator()
        self._wire = HostWire(self._communicator)
        self._recorder = Recorder(self._communicator.rank, self._communicator.world_size)
        self._aggregator = Switch()
        self._aggregator.bind(self._communicator, self._recorder)

    def reduce(self, buffer: torch.Tensor) -> None:
        self._wire.record = self._recorder.open_bucket(len(self.times), 0, buffer.nbytes)
        self._communicator.submit(self._reduce_on_lane, buffer).wait()
        self._recorder.close_bucket(self._wire.record)

    def _reduce_on_lane(self, buffer: torch.Tensor) -> None:
        largest = max(-float(buffer.min()), float(buffer.max()))
        # A value below 2^e; a sum of N below 2^(e + ceil(log2 N)), which must stay below 2^31.
        exponent = math.frexp(largest)[1] if math.isfinite(largest) else _NOT_FINITE
        agreed = torch.tensor([exponent], dtype=torch.int32)
        self._aggregator.max_int32(agreed, self._wire)
        if int(agreed) >= _NOT_FINITE:
            raise Unsupported("dense-switch sums finite gradients only: fixed point has no Inf or NaN")
        headroom_bits = (self._communicator.world_size - 1).bit_length()
        quantum = math.ldexp(1.0, int(agreed) + headroom_bits - 30)
        integers = self._communicator.scratch("dense switch", 4 * buffer.numel()).view(torch.int32)
        sums = []
        for start in range(0, buffer.numel(), _BLOCK_ELEMENTS):
            block = slice(start, min(start + _BLOCK_ELEMENTS, buffer.numel()))
            integers[block].copy_(buffer[block].mul_(1.0 / quantum).round_())
            sums.append((block, self._aggregator.start_sum(integers[block], self._wire)))
        for block, one in sums:
            one()
            buffer[block].copy_(integers[block]).mul_(quantum / self._communicator.world_size)

    def finish_step(self) -> None:
        self.sent_bytes += self._recorder.close_step(len(self.times) - 1, 0).bytes_sent

    def close(self) -> None:
        self._aggregator.close()
        self._communicator.close()


def make_reducer(spec: str, state: OptimizerState | None, n_elements: int) -> TimedReducer:
    """A baseline or a scheme from its spec. Raises: InvalidArgument."""
    name, options = parse_spec(spec)
    if name in BASELINES:
        return BackendReducer(name)
    if name == "dense-switch":
        return DenseSwitchReducer()
    if name == "gcomp" and state is None:
        # Its default reads an optimizer; a gradient without one can still be sent without loss.
        options = {"importance": "none", **options}
    return SchemeReducer(name, options, state, n_elements)


def make_scheme(name: str, options: dict[str, Any]) -> schemes.Scheme:
    """A scheme of the registry, or "two-level" around the one that its option `scheme` names. Raises: InvalidArgument."""
    if name != "two-level":
        return schemes.by_name(name, **schemes.as_published(name, options))
    inner = str(options.get("scheme", "plain"))
    rest = {key: value for key, value in options.items() if key != "scheme"}
    return schemes.TwoLevel(inner, **schemes.as_published(inner, rest))


def names() -> list[str]:
    """The baselines, then every scheme of the registry that reduces without a model around it."""
    alone = [name for name in schemes.names() if not (schemes.owns_step(name) or schemes.needs_momenta(name))]
    return [*BASELINES, *alone]
