"""What `bench allreduce` times: gradwire's schemes outside DDP, and the backend's own all-reduce, behind one face."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import torch
import torch.distributed as dist

from gradwire import schemes
from gradwire.reducer import Reducer
from gradwire.wire.communicator import ring_bytes
from gradwire_lab.bench.live_optimizer import make_optimizer
from gradwire_lab.workloads.gradients import OptimizerState

BASELINES = ("ddp", "ddp-bf16")
# Measured when asked for by name: they need a switch beside the ranks.
IN_NETWORK = ("dense-switch",)
BY_NAME_ONLY = ("two-level", *IN_NETWORK)  # `all` does not mean them: they need a switch, or several ranks a node


class TimedReducer(ABC):
    """One way to replace a tensor by its mean over the ranks."""

    def __init__(self, name: str, options: dict[str, Any] | None = None) -> None:
        self.name = name
        self.options = options or {}
        self.sent_bytes = 0  # by this rank, in all calls since the last reset
        self.period = 1  # calls after which everything repeats; a sample is made of whole periods
        self.quantum: float | None = None  # of the last reduction, where it was one in fixed point

    @abstractmethod
    def reduce(self, buffer: torch.Tensor) -> None:
        """Replace `buffer` (n,) float32 by the mean; returns when it is there."""

    @abstractmethod
    def finish_step(self) -> None:
        """What follows a reduction off the clock."""

    @abstractmethod
    def close(self) -> None:
        """Let go of everything. Collective."""


class BackendReducer(TimedReducer):
    """torch.distributed's own all-reduce, as DDP without a hook calls it: divide, then sum.

    The backend does not say what it sends; counted are the bytes of a ring, which Gloo's algorithm is.
    """

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self._dtype = torch.bfloat16 if name == "ddp-bf16" else torch.float32

    def reduce(self, buffer: torch.Tensor) -> None:
        world_size = dist.get_world_size()
        message = buffer.to(self._dtype)  # no copy for float32
        message.div_(world_size)
        dist.all_reduce(message)
        self.sent_bytes += ring_bytes(message.numel() * message.element_size(), world_size)
        if message is not buffer:
            buffer.copy_(message)

    def finish_step(self) -> None:
        """Nothing follows."""

    def close(self) -> None:
        """Nothing is held."""


class SchemeReducer(TimedReducer):
    """A scheme of the registry in a Reducer of its own, which gets the whole gradient as one bucket."""

    def __init__(self, name: str, options: dict[str, Any], state: OptimizerState | None, n_elements: int) -> None:
        super().__init__(name, options)
        optimizer = make_optimizer(state, n_elements) if state is not None else None
        names = {"gradient": optimizer.param_groups[0]["params"][0]} if optimizer is not None else {}
        self._reducer = Reducer(make_scheme(name, options), names=names, optimizer=optimizer)
        self._slots = list(self._reducer.slots.values())
        if name == "periodic":  # it communicates in one call of `every`
            self.period = int(self.scheme.configuration["every"])

    @property
    def scheme(self) -> schemes.Scheme:
        """The one at work."""
        return self._reducer.scheme

    def reduce(self, buffer: torch.Tensor) -> None:
        self._reducer.reduce(buffer, self._slots, [0] * len(self._slots), 0, True).wait()

    def finish_step(self) -> None:
        self._reducer.wait_until_idle()
        self._reducer.close_pass(self._reducer.step - 1, 0)
        self.sent_bytes += self._reducer.recorder.steps[-1].bytes_sent

    def close(self) -> None:
        self._reducer.close()


def make_scheme(name: str, options: dict[str, Any]) -> schemes.Scheme:
    """A scheme of the registry, or "two-level" around the one that its option `scheme` names. Raises: InvalidArgument."""
    if name != "two-level":
        return schemes.by_name(name, **schemes.as_published(name, options))
    inner = str(options.get("scheme", "plain"))
    rest = {key: value for key, value in options.items() if key != "scheme"}
    return schemes.TwoLevel(inner, **schemes.as_published(inner, rest))


def names() -> list[str]:
    """The baselines, then every scheme of the registry that reduces without a model around it."""
    return [
        *BASELINES,
        *(name for name in schemes.names() if not (schemes.owns_step(name) or schemes.needs_adam(name))),
    ]
