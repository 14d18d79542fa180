"""Aggregators: what adds up the ranks' sketches and ORs their indices. A scheme that sums needs nothing else of them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

from gradwire.errors import InvalidArgument
from gradwire.registry import Registry

if TYPE_CHECKING:  # whoever registers an aggregator does not wait for torch
    import torch

    from gradwire.telemetry.recorder import BucketRecord, Recorder
    from gradwire.wire.communicator import Communicator

__all__ = ["Aggregator", "Sum", "by_name", "names"]


class Sum(Protocol):
    """A sum on its way."""

    def wait(self) -> None:
        """Return when the sum lies in the tensor that was given. Raises: PeerLost."""
        ...


class Aggregator(Protocol):
    """Element by element, over all ranks, in place. Every rank calls the same methods in the same order, on the lane.

    Results are bit-identical on all ranks. Each call notes in `record` what it sends and receives, and how long it takes.

    Attributes:
        name: as in the registry.
        sums_floats: whether `start_sum` takes floats. A programmable switch only adds integers.
    """

    name: str
    sums_floats: bool

    def bind(self, communicator: Communicator, recorder: Recorder) -> None:
        """Take the ranks. Raises: Unsupported, InvalidArgument, PeerLost."""
        ...

    def or_words(self, words: torch.Tensor, record: BucketRecord) -> None:
        """Replace `words` (n,) int32 by their bitwise OR over the ranks. Raises: PeerLost."""
        ...

    def max_int32(self, values: torch.Tensor, record: BucketRecord) -> None:
        """Replace `values` (n,) int32, a few of them, by their largest over the ranks. Raises: PeerLost."""
        ...

    def start_sum(self, values: torch.Tensor, record: BucketRecord) -> Sum:
        """Start replacing `values` (n,) by their sum over the ranks: float32, bfloat16, float16, int32 (which wraps
        around) or int64.

        `values` must be left alone until the sum has been waited for.
        Raises: Unsupported (a dtype that this aggregator cannot sum), PeerLost.
        """
        ...

    def start_or_and_sum(self, words: torch.Tensor, values: torch.Tensor, record: BucketRecord) -> tuple[Sum, Sum]:
        """Start `or_words` of `words` and `start_sum` of `values` as one aggregation; the OR is waited for first.

        Raises: as those.
        """
        ...

    def stats(self) -> dict[str, Any]:
        """Figures of this aggregator's own, as plain values."""
        ...

    def close(self) -> None:
        """Let go of what it holds; it may be bound again."""
        ...


_REGISTRY: Registry[Aggregator] = Registry(
    "aggregator", {"process-group": "gradwire.exchange.aggregators.process_group:ProcessGroup"}
)


def names() -> list[str]:
    """The registered aggregators, sorted."""
    return _REGISTRY.names()


def by_name(name: str, **options: Any) -> Aggregator:
    """A new aggregator by its registry name.

    Raises: InvalidArgument (unknown name, or an option that the aggregator does not take).
    """
    if name == "switch" and name not in names():
        raise InvalidArgument("the aggregator 'switch' is an emulation: `import gradwire_lab` registers it")
    return _REGISTRY.make(name, options)
