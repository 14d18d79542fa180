"""The aggregator `process-group`: the backend's own all-reduce. A fabric with reduction offload serves it unchanged."""

from typing import Any

from torch import Tensor
from torch.distributed import ReduceOp

from gradwire.checks import choice as check_choice
from gradwire.exchange.aggregators import Sum
from gradwire.telemetry.recorder import Recorder
from gradwire.wire.communicator import Communicator
from gradwire.wire.wire import Wire


class ProcessGroup:
    """Sums by all-reduce; ORs by all-reduce (Gloo's BOR) or by shards.

    `or_by`: "all-reduce", or "all-to-all" for backends that know no OR, and on devices: each rank gets one shard of every
    rank's words, ORs them, and all ranks gather the shards. Both send 2 (N-1)/N of the words.
    """

    name = "process-group"
    sums_floats = True

    def __init__(self, or_by: str = "all-reduce") -> None:
        self.or_by = check_choice("or_by", or_by, ("all-reduce", "all-to-all"))

    def bind(self, communicator: Communicator, recorder: Recorder) -> None:
        """Each call brings a wire, which knows the ranks."""

    def or_words(self, words: Tensor, wire: Wire) -> None:
        if self.or_by == "all-reduce" and not wire.on_device:
            wire.sum(words, ReduceOp.BOR)
        else:
            wire.or_words(words)

    def start_sum(self, values: Tensor, wire: Wire) -> Sum:
        return wire.start_sum(values)

    def start_or_and_sum(self, words: Tensor, values: Tensor, wire: Wire) -> tuple[Sum, Sum]:
        """See `Aggregator`: both are on their way at once."""
        if self.or_by == "all-reduce":
            return wire.start_sum(words, ReduceOp.BOR), wire.start_sum(values)
        summed = wire.start_sum(values)
        return lambda: wire.or_words(words), summed

    def stats(self) -> dict[str, Any]:
        """Nothing of its own: the recorder has the bytes."""
        return {}

    def close(self) -> None:
        """Nothing is held."""
