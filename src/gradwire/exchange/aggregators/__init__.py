"""Aggregators: what adds up the ranks' sketches and ORs their indices. A scheme that sums needs nothing else of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

from gradwire.errors import InvalidArgument
from gradwire.registry import Registry

if TYPE_CHECKING:  # whoever registers an aggregator does not wait for torch
    from torch import Tensor

    from gradwire.telemetry.recorder import Recorder
    from gradwire.wire.communicator import Communicator
    from gradwire.wire.wire import Wire

__all__ = ["Aggregator", "Sum", "by_name", "names"]


# A sum on its way: called once, it returns when the sum lies in the tensor that was given. Raises: PeerLost.
Sum: TypeAlias = Callable[[], None]


class Aggregator(Protocol):
    """Element by element, over all ranks, in place. Every rank calls the same methods in the same order, on the lane.

    Results are bit-identical on all ranks. Each call notes in `wire.record` what it sends and receives, and how long it
    takes. Raises: PeerLost, and Unsupported for a dtype that it cannot sum.
    """

    name: str  # as in the registry
    sums_floats: bool  # whether `start_sum` takes floats. A programmable switch only adds integers.

    def bind(self, communicator: Communicator, recorder: Recorder) -> None: ...  # take the ranks

    # Replace `words` (n,) int32 by their bitwise OR over the ranks.
    def or_words(self, words: Tensor, wire: Wire) -> None: ...

    # Start replacing `values` (n,) by their sum over the ranks: float32, bfloat16, float16, int32 (which wraps around) or
    # int64. They must be left alone until it has been waited for.
    def start_sum(self, values: Tensor, wire: Wire) -> Sum: ...

    # Both as one aggregation; the OR is waited for first.
    def start_or_and_sum(self, words: Tensor, values: Tensor, wire: Wire) -> tuple[Sum, Sum]: ...

    def stats(self) -> dict[str, Any]: ...  # figures of this aggregator's own, as plain values

    def close(self) -> None: ...  # let go of what it holds; it may be bound again


_REGISTRY: Registry[Aggregator] = Registry(
    "aggregator", {"process-group": "gradwire.exchange.aggregators.process_group:ProcessGroup"}
)


def names() -> list[str]:
    """The registered aggregators, sorted."""
    return _REGISTRY.names()


def by_name(name: str, **options: Any) -> Aggregator:
    """A new aggregator by its registry name. Raises: InvalidArgument (unknown name, or an option that the aggregator
    does not take)."""
    if name == "switch" and name not in names():
        raise InvalidArgument("the aggregator 'switch' is an emulation: `import gradwire_lab` registers it")
    return _REGISTRY.make(name, options)
