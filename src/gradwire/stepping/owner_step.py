"""The step at the owner: each rank steps the values whose mean it has taken, and all pull parameters instead of means.

A parameter server's "update on the server" (SlimGC, section 3.2, steps 6 to 8), with a server beside every worker. The
backward pass pushes gradients; the user's call of `step` has every owner step its values and then pulls them.

The optimizer's state is shared out with them. What a rank owns is said by edges: rank r has values edges[r] to edges[r + 1]
of the flattened parameter. They follow the buckets, so they change when DDP rebuilds those or a threshold moves; the state
then moves too, whole parameters at a time.
"""

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from gradwire.core.checkpoint import not_the_state
from gradwire.core.session import Session
from gradwire.errors import InvalidArgument, Unsupported
from gradwire.stepping.interception import (
    FrozenStep,
    Interceptor,
    StepOwner,
    refuse_join,
    stepped_parameters,
    takes_step_of,
)
from gradwire.telemetry.recorder import BucketRecord
from gradwire.telemetry.stopwatch import Stopwatch
from gradwire.wire.communicator import ring_bytes

_log = logging.getLogger(__name__)

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

    Raises: Unsupported (an optimizer that is not element-wise, fused, or a parameter that cannot be cut).
    """

    def __init__(self, session: Session, parameters: list[torch.Tensor]) -> None:
        (self._optimizer,), names = session.optimizers, session.names
        check_elementwise(self._optimizer)
        for parameter in parameters:
            if parameter.dtype != torch.float32 or parameter.device.type != "cpu" or not parameter.is_contiguous():
                raise Unsupported(
                    f'update="owner" steps slices of contiguous float32 parameters on the CPU; {names.get(parameter, "one")} '
                    f'is {parameter.dtype} on {parameter.device}, strides {parameter.stride()}: use update="worker"'
                )
        communicator = session.communicator
        self._names, self._rank, self._world_size = names, communicator.rank, communicator.world_size
        self._shards: dict[torch.Tensor, _Shard] = {}

    @property
    def n_bytes(self) -> int:
        """Bytes of the state that lies here and not in the optimizer."""
        values = [value for shard in self._shards.values() for value in shard.state.values()]
        return sum(value.numel() * value.element_size() for value in values if isinstance(value, torch.Tensor))

    @property
    def is_sharded(self) -> bool:
        """True if any parameter's state lies here."""
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
                bits = torch.zeros(parameter.numel(), dtype=torch.int32, device="cpu")
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
        """{"shards": {parameter name: {"edges": of all ranks, "state": this rank's part}}}, as copies."""
        return {
            "shards": {
                self._names[parameter]: {"edges": list(shard.edges), "state": _copied(shard.state)}
                for parameter, shard in self._shards.items()
            }
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take shards back; nothing is changed if it raises. Raises: InvalidArgument."""
        shards = state.get("shards")
        if not isinstance(shards, dict):
            raise not_the_state('update="owner"', "it lacks the optimizer's shards")
        parameters = {name: parameter for parameter, name in self._names.items()}
        loaded: dict[torch.Tensor, _Shard] = {}
        for name, entry in shards.items():
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
            loaded[parameter] = _Shard(edges, _copied(own))
        self._shards = loaded
        for parameter in loaded:
            self._optimizer.state.pop(parameter, None)

    def describe(self) -> list[tuple[str, Edges, list[str]]]:
        """List what must be the same on all ranks."""
        return sorted((self._names[p], shard.edges, sorted(shard.state)) for p, shard in self._shards.items())


def check_elementwise(optimizer: torch.optim.Optimizer) -> None:
    """Raises: Unsupported for an optimizer whose step on a slice is not that slice of its step, bit for bit."""
    if not takes_step_of(optimizer, _ELEMENTWISE):
        raise Unsupported(
            f'{type(optimizer).__name__} cannot be stepped at the owner: update="owner" cuts parameters, which it knows to '
            f'be right for torch.optim\'s {", ".join(_ELEMENTWISE)}; use update="worker"'
        )
    for group in optimizer.param_groups:
        for option in ("capturable", "differentiable", "fused"):
            if group.get(option):
                # Fused steps round a value by whether it lies in a full vector: measured, torch 2.13.
                raise Unsupported(f'update="owner" does not serve {option}=True: leave it out, or use update="worker"')


def _copied(state: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value.clone() if isinstance(value, torch.Tensor) else value for key, value in state.items()}


def _is_cut(key: str, value: Any) -> bool:
    """Return whether it has a value for each of the parameter's; the others count steps."""
    return isinstance(value, torch.Tensor) and key != "step"


@dataclass(frozen=True)
class Owned:
    """The result of one bucket's push."""

    whole: tuple[torch.Tensor, ...]  # parameters whose mean every rank has, in `.grad`
    # (parameter, where its values begin in the fused buffer): those of which each rank has a part of the mean
    cut: tuple[tuple[torch.Tensor, int], ...]
    part_edges: tuple[int, ...]  # where the ranks' parts of the fused buffer end, 0 first
    mean: torch.Tensor  # (n_own,) float32: the mean of this rank's part

    def edges_of(self, parameter: torch.Tensor, fused: int) -> Edges:
        """Find where the ranks' values of one parameter end."""
        return tuple(min(max(edge - fused, 0), parameter.numel()) for edge in self.part_edges)


class OwnerStep(StepOwner):
    """Stands between the user and the optimizer, on the training thread; `keep` and pulling run on the lane.

    Args:
        session: with model and optimizer.
        max_grad_value: clip the mean to +- this, as clip_grad_value_ does.
    Raises: InvalidArgument, Unsupported.
    """

    def __init__(self, session: Session, max_grad_value: float | None) -> None:
        self._parameters = stepped_parameters(session, 'update="owner"', of_one=True)
        if session.has_scaler:
            raise Unsupported('update="owner" does not serve a GradScaler: train in bfloat16, or use update="worker"')
        self._session, self._max_grad_value = session, max_grad_value
        self.state = ShardedState(session, self._parameters)
        self._owned: dict[int, Owned] = {}  # by bucket, of the last backward pass
        self._step = 0
        self._waited = Stopwatch()
        self._has_told = False
        remedy = 'pass max_grad_value=... to the scheme instead of clipping, or use update="worker"'
        self._interceptor = Interceptor(session, self._parameters, self, remedy=remedy)
        (optimizer,) = session.optimizers
        self._handles = [
            optimizer.register_state_dict_post_hook(self._tell_where_the_state_is),
            optimizer.register_load_state_dict_post_hook(lambda _: self.state.forget_loaded()),
        ]

    # ---- the backward pass

    def begin_step(self, step: int) -> None:
        """A backward pass has its first gradients."""
        refuse_join(self._session.module, 'update="owner"', 'use update="worker"')
        self._interceptor.begin_reduction()
        self._owned.clear()
        self._step = step

    def keep(self, index: int, owned: Owned) -> None:
        """Bucket number `index` is pushed: `.grad` gets means of what travels raw, this rank's own of the rest; on the lane."""
        self._owned[index] = owned

    def end_backward(self) -> int:
        """DDP has ended its part; returns how long the step before waited for parameters, in ns."""
        self._interceptor.end_backward()
        return self._waited.take_ns()

    # ---- what the interceptor asks (StepOwner): parameters are up to date after every step

    @torch.no_grad()
    def take_step(self, frozen: FrozenStep) -> None:
        """Step what this rank owns, and pull the rest. Raises: what the group failed of."""
        communicator, owned = self._session.communicator, [self._owned[index] for index in sorted(self._owned)]
        ownership: dict[torch.Tensor, Edges | None] = {}
        for bucket in owned:
            ownership |= {parameter: bucket.edges_of(parameter, fused) for parameter, fused in bucket.cut}
            ownership |= dict.fromkeys(bucket.whole)
        record = self._session.recorder.open_bucket(self._step, -1, 0)

        def add_up(bits: torch.Tensor) -> None:
            communicator.submit(communicator.all_reduce, bits).wait()
            record.count_exchanged(ring_bytes(4 * bits.numel(), communicator.world_size))

        self.state.move(ownership, add_up)
        left = [p for p in self._parameters if p not in ownership]  # with one rank: all of them
        self.state.step(frozen, self._clipped({p: p.grad for p in left}))
        pulls = []
        for bucket in owned:
            own = {p: bucket.mean[mine] for p, mine, _ in self._slices(bucket, communicator.rank)}
            self.state.step(frozen, self._clipped({p: p.grad for p in bucket.whole} | own))
            if bucket.cut:
                pulls.append(communicator.submit(self._pull, bucket, record))
        try:
            with self._waited:
                for pull in pulls:
                    pull.wait()
        finally:
            self._session.recorder.close_bucket(record)

    def _clipped(self, gradients: Mapping[torch.Tensor, torch.Tensor | None]) -> dict[torch.Tensor, torch.Tensor]:
        """Those that there are, within +- max_grad_value."""
        found, most = {p: gradient for p, gradient in gradients.items() if gradient is not None}, self._max_grad_value
        return found if most is None else {p: gradient.clamp(-most, most) for p, gradient in found.items()}

    @staticmethod
    def _slices(bucket: Owned, rank: int) -> list[tuple[torch.Tensor, slice, slice]]:
        """(parameter, which of the rank's part, which of the flattened parameter) of each parameter that is cut."""
        slices = []
        for parameter, fused in bucket.cut:
            edges = bucket.edges_of(parameter, fused)
            start, end = edges[rank], edges[rank + 1]
            at = max(0, fused + start - bucket.part_edges[rank]) if end > start else 0
            slices.append((parameter, slice(at, at + end - start), slice(start, end)))
        return slices

    def _pull(self, bucket: Owned, record: BucketRecord) -> None:
        """Everyone's values of every parameter of the bucket that is cut; on the lane."""
        communicator, world_size = self._session.communicator, self._session.communicator.world_size
        largest = max(b - a for a, b in zip(bucket.part_edges, bucket.part_edges[1:], strict=False))
        mine = communicator.scratch("owner's values", 4 * largest).view(torch.float32)
        theirs = communicator.scratch("owners' values", 4 * largest * world_size).view(torch.float32)
        with torch.no_grad():
            for parameter, own, values in self._slices(bucket, communicator.rank):
                mine[own] = parameter.detach().view(-1)[values]
            with record.timing("communicate"):
                communicator.all_gather_into(theirs, mine)
            record.count_exchanged(4 * largest * (world_size - 1))
            for rank in range(world_size):
                if rank == communicator.rank:
                    continue
                part = theirs[rank * largest : (rank + 1) * largest]
                for parameter, own, values in self._slices(bucket, rank):
                    parameter.detach().view(-1)[values] = part[own]

    # ---- beginning and end

    @torch.no_grad()
    def give_state_back(self) -> None:
        """Have the optimizer's whole state on every rank again. Collective, between two steps."""
        communicator = self._session.communicator
        self.state.move(
            dict.fromkeys(self._parameters), lambda bits: communicator.submit(communicator.all_reduce, bits).wait()
        )

    def _tell_where_the_state_is(self, optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
        if self.state.is_sharded and not self._has_told:
            self._has_told = True
            _log.warning(
                'gradwire slimgc, update="owner": optimizer.state_dict() lacks the state that lies with its owners; '
                "save attachment.state_dict() of every rank beside it"
            )

    def close(self) -> None:
        """Let the model and the optimizer go."""
        if self.state.is_sharded:
            _log.warning(
                'gradwire slimgc, update="owner": the optimizer\'s state that lay with its owners is let go; '
                "attachment.switch(another scheme) gives it back before that"
            )
        for handle in self._handles:
            handle.remove()
        self._interceptor.remove()
