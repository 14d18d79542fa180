"""The optimizer's state, shared out: of each parameter every rank keeps, and steps, the values that it owns.

What a rank owns is said by edges: rank r has values edges[r] to edges[r + 1] of the flattened parameter. They follow the
buckets, so they change when DDP rebuilds those or a threshold moves; the state then moves too, whole parameters at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from gradwire.errors import InvalidArgument, Unsupported
from gradwire.stepping.frozen_step import FrozenStep

# Optimizers that treat every value by itself, so that a slice of a parameter is stepped as it would be within the whole.
_ELEMENTWISE = ("Adam", "AdamW", "SGD")

Edges = tuple[int, ...]
# (n,) int32 in place: the sum over all ranks. Every rank calls it for the same tensors in the same order.
AddUp = Callable[[torch.Tensor], None]


@dataclass
class _Shard:
    edges: Edges
    state: dict[str, Any]


class ShardedState:
    """This rank's share of an optimizer's state. A parameter without a shard has its whole state in the optimizer.

    Args:
        names: for errors and `state_dict`.
    Raises: Unsupported (an optimizer that is not element-wise, fused, or a parameter that cannot be cut).
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        parameters: list[torch.Tensor],
        names: Mapping[torch.Tensor, str],
        rank: int,
        world_size: int,
    ) -> None:
        check_elementwise(optimizer)
        for parameter in parameters:
            if parameter.dtype != torch.float32 or parameter.device.type != "cpu" or not parameter.is_contiguous():
                raise Unsupported(
                    f'update="owner" steps slices of contiguous float32 parameters on the CPU; {names.get(parameter, "one")} '
                    f'is {parameter.dtype} on {parameter.device}, strides {parameter.stride()}: use update="worker"'
                )
        self._optimizer, self._names, self._rank, self._world_size = optimizer, names, rank, world_size
        self._shards: dict[torch.Tensor, _Shard] = {}

    @property
    def n_bytes(self) -> int:
        """Bytes of the state that lies here and not in the optimizer."""
        return sum(_bytes_of(shard.state) for shard in self._shards.values())

    @property
    def is_sharded(self) -> bool:
        """Whether any parameter's state lies here."""
        return bool(self._shards)

    # ---- ownership

    def move(self, owned: Mapping[torch.Tensor, Edges | None], add_up: AddUp) -> None:
        """Have each parameter's state where it is needed; None: whole, on every rank.

        Collective where edges change, which ranks decide alike: edges are the same on all of them.
        """
        for parameter, edges in owned.items():
            shard = self._shards.get(parameter)
            if (shard is None and edges is None) or (shard is not None and shard.edges == edges):
                continue
            if shard is None:
                whole = dict(self._optimizer.state.pop(parameter, {}))
            else:
                whole = self._gather(parameter, shard, add_up)
                del self._shards[parameter]
            if edges is None:
                if whole:
                    self._optimizer.state[parameter] = whole
            else:
                start, end = edges[self._rank], edges[self._rank + 1]
                cut = {
                    key: value.reshape(-1)[start:end].clone() if _is_cut(key, value) else value
                    for key, value in whole.items()
                }
                self._shards[parameter] = _Shard(edges, cut)

    def _gather(self, parameter: torch.Tensor, shard: _Shard, add_up: AddUp) -> dict[str, Any]:
        start, end = shard.edges[self._rank], shard.edges[self._rank + 1]
        whole = dict(shard.state)
        for key in sorted(whole):
            if _is_cut(key, whole[key]):
                # As integers: each value is one rank's bits and the others' zeros, whatever the bits mean as a float.
                bits = torch.zeros(parameter.numel(), dtype=torch.int32)
                bits[start:end] = whole[key].view(torch.int32)
                add_up(bits)
                whole[key] = bits.view(torch.float32).view(parameter.shape)
        return whole

    def forget_loaded(self) -> None:
        """The user loaded a state into the optimizer: what is whole there counts, and shards of it are void."""
        for parameter in list(self._shards):
            if self._optimizer.state.get(parameter):
                del self._shards[parameter]

    # ---- the step

    def step(self, frozen: FrozenStep, gradients: Mapping[torch.Tensor, torch.Tensor]) -> None:
        """Take the user's step, for a parameter with a shard on the values that this rank owns.

        `gradients`: in the parameter's shape, or with a shard (n_owned,) float32.
        """
        state = self._optimizer.state
        pieces: dict[torch.Tensor, torch.Tensor] = {}
        for parameter in gradients:
            shard = self._shards.get(parameter)
            if shard is not None and parameter in frozen.parameters:
                start, end = shard.edges[self._rank], shard.edges[self._rank + 1]
                # Memory of the parameter's own: the step writes into it. Empty ones are stepped too, for their counters.
                piece = pieces[parameter] = parameter.detach().view(-1)[start:end]
                state[piece] = shard.state
        try:
            frozen.apply(gradients, pieces)
        finally:
            for parameter, piece in pieces.items():
                self._shards[parameter].state = dict(state.pop(piece, {}))

    # ---- checkpoints

    def state_dict(self) -> dict[str, Any]:
        """By parameter name: the edges of all ranks, and this rank's part of the state."""
        return {
            self._names[parameter]: {
                "edges": list(shard.edges),
                "state": {k: v.clone() if isinstance(v, torch.Tensor) else v for k, v in shard.state.items()},
            }
            for parameter, shard in self._shards.items()
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take shards back; nothing is changed if it raises. Raises: InvalidArgument."""
        parameters = {name: parameter for parameter, name in self._names.items()}
        loaded: dict[torch.Tensor, _Shard] = {}
        for name, entry in state.items():
            parameter = parameters.get(name)
            try:
                edges, own = tuple(int(edge) for edge in entry["edges"]), dict(entry["state"])
            except (KeyError, TypeError, ValueError) as error:
                raise InvalidArgument(
                    f"the checkpoint's optimizer state of {name!r} does not read: {error!r}"
                ) from error
            fits = (
                parameter is not None
                and len(edges) == self._world_size + 1
                and list(edges) == sorted(edges)
                and (edges[0], edges[-1]) == (0, parameter.numel())
                and all(
                    value.dtype == torch.float32 and value.shape == (edges[self._rank + 1] - edges[self._rank],)
                    for key, value in own.items()
                    if _is_cut(key, value)
                )
            )
            if not fits or parameter is None:
                raise InvalidArgument(
                    f"the checkpoint's optimizer state of {name!r} does not fit this model and rank: load into the model "
                    "and with as many ranks as wrote it, each rank its own"
                )
            own = {k: v.clone() if isinstance(v, torch.Tensor) else v for k, v in own.items()}
            loaded[parameter] = _Shard(edges, own)
        self._shards = loaded
        for parameter in loaded:
            self._optimizer.state.pop(parameter, None)

    def describe(self) -> list[tuple[str, Edges, list[str]]]:
        """What must be the same on all ranks."""
        return sorted((self._names[p], shard.edges, sorted(shard.state)) for p, shard in self._shards.items())


def check_elementwise(optimizer: torch.optim.Optimizer) -> None:
    """Raises: Unsupported for an optimizer whose step on a slice is not that slice of its step, bit for bit."""
    kind = type(optimizer)
    known = [getattr(torch.optim, name) for name in _ELEMENTWISE]
    if not any(kind.step is cls.step or kind.step is getattr(cls.step, "__wrapped__", None) for cls in known):
        raise Unsupported(
            f'{kind.__name__} cannot be stepped at the owner: update="owner" cuts parameters, which it knows to be right for '
            f'torch.optim\'s {", ".join(_ELEMENTWISE)}; use update="worker"'
        )
    for group in optimizer.param_groups:
        for option in ("capturable", "differentiable", "fused"):
            if group.get(option):
                # Fused steps round a value by whether it lies in a full vector: measured, torch 2.13.
                raise Unsupported(f'update="owner" does not serve {option}=True: leave it out, or use update="worker"')


def _is_cut(key: str, value: Any) -> bool:
    """Whether it has a value for each of the parameter's; the others count steps."""
    return isinstance(value, torch.Tensor) and key != "step"


def _bytes_of(state: Mapping[str, Any]) -> int:
    return sum(v.numel() * v.element_size() for v in state.values() if isinstance(v, torch.Tensor))
