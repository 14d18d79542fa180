"""The step at the owner: each rank steps the values whose mean it has taken, and all pull parameters instead of means.

A parameter server's "update on the server" (SlimGC, section 3.2, steps 6 to 8), with a server beside every worker. The
backward pass pushes gradients; the user's call of `step` has every owner step its values and then pulls them.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from gradwire.core.bucket import Bucket
from gradwire.core.checkpoint import not_the_state
from gradwire.core.session import Session
from gradwire.errors import Unsupported
from gradwire.stepping.blocks import Block
from gradwire.stepping.demands import inner_of, model_and_optimizer, refuse_join, stepped_parameters
from gradwire.stepping.frozen_step import FrozenStep
from gradwire.stepping.interception import Interceptor
from gradwire.stepping.sharded_state import Edges, ShardedState
from gradwire.telemetry.stopwatch import Stopwatch
from gradwire.wire.communicator import ring_bytes

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Owned:
    """What came of one bucket's push.

    Attributes:
        whole: parameters whose mean every rank has, in `.grad`.
        cut: (parameter, where its values begin in the fused buffer): those of which each rank has a part of the mean.
        part_edges: where the ranks' parts of the fused buffer end, 0 first.
        mean: (n_own,) float32: the mean of this rank's part.
    """

    whole: tuple[torch.Tensor, ...]
    cut: tuple[tuple[torch.Tensor, int], ...]
    part_edges: tuple[int, ...]
    mean: torch.Tensor

    def edges_of(self, parameter: torch.Tensor, fused: int) -> Edges:
        """Where the ranks' values of one parameter end."""
        return tuple(min(max(edge - fused, 0), parameter.numel()) for edge in self.part_edges)


class OwnerStep:
    """Stands between the user and the optimizer, on the training thread; `keep` and pulling run on the lane.

    Args:
        session: with model and optimizer.
        start_mean: starts the push of a bucket; done when `keep` was called for it and `.grad` may be filled.
        max_grad_value: clip the mean to +- this, as clip_grad_value_ does.
    Raises: InvalidArgument, Unsupported.
    """

    def __init__(
        self, session: Session, start_mean: Callable[[Bucket], torch.futures.Future], max_grad_value: float | None
    ) -> None:
        self._wrapper, optimizer = model_and_optimizer(session, 'update="owner"')
        if session.has_scaler:
            raise Unsupported('update="owner" does not serve a GradScaler: train in bfloat16, or use update="worker"')
        self._session, self._start_mean, self._max_grad_value = session, start_mean, max_grad_value
        inner = inner_of(self._wrapper)
        parameters = stepped_parameters(session, 'update="owner"')
        communicator = session.communicator
        self.state = ShardedState(optimizer, parameters, session.names, communicator.rank, communicator.world_size)
        self._parameters = parameters
        self._owned: dict[int, Owned] = {}  # by bucket, of the last backward pass
        self._step = 0
        self._waited = Stopwatch()
        self._has_told = False
        block = Block(0, type(inner).__name__, tuple(parameters), ())
        self._interceptor = Interceptor(self._wrapper, inner, optimizer, [block], self, dict(session.names), False)
        self._interceptor.guard.remedy = (
            'pass max_grad_value=... to the scheme instead of clipping, or use update="worker"'
        )
        self._handles = [
            optimizer.register_state_dict_post_hook(self._tell_where_the_state_is),
            optimizer.register_load_state_dict_post_hook(lambda _: self.state.forget_loaded()),
        ]

    # ---- the backward pass

    def begin_step(self, step: int) -> None:
        """A backward pass has its first gradients."""
        refuse_join(self._wrapper, 'update="owner"', 'update="worker"')
        self._interceptor.begin_reduction()
        self._owned.clear()
        self._step = step

    def reduce(self, bucket: Bucket) -> torch.futures.Future:
        """Push the bucket. DDP goes on with means of the tensors that travel raw, and this rank's own of the others."""
        return self._start_mean(bucket)

    def keep(self, index: int, owned: Owned) -> None:
        """The push of bucket number `index` is done; on the lane."""
        self._owned[index] = owned

    def end_backward(self) -> int:
        """DDP has ended its part; returns how long the step before waited for parameters, in ns."""
        self._interceptor.end_backward()
        return self._waited.take_ns()

    # ---- what the interceptor asks (StepOwner)

    def begin_forward(self) -> None:
        """Parameters are up to date after every step."""

    def before_forward(self, block: Block) -> None:
        """Parameters are up to date after every step."""

    def drop_step(self) -> None:
        """Only a GradScaler drops steps, and it is refused."""

    def flush(self) -> None:
        """Nothing is put off."""

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
        left = dict.fromkeys(p for p in self._parameters if p not in ownership)  # with one rank: all of them
        self.state.step(frozen, self._gradients(left))
        pulls = []
        for bucket in owned:
            self.state.step(frozen, self._gradients(dict.fromkeys(bucket.whole)) | self._own_gradients(bucket))
            if bucket.cut:
                pulls.append(communicator.submit(self._pull, bucket, record))
        try:
            with self._waited:
                for pull in pulls:
                    pull.wait()
        finally:
            self._session.recorder.close_bucket(record)

    def _gradients(self, parameters: dict[torch.Tensor, None]) -> dict[torch.Tensor, torch.Tensor]:
        found = {parameter: parameter.grad for parameter in parameters if parameter.grad is not None}
        if self._max_grad_value is None:
            return found
        return {p: g.clamp(-self._max_grad_value, self._max_grad_value) for p, g in found.items()}

    def _own_gradients(self, bucket: Owned) -> dict[torch.Tensor, torch.Tensor]:
        if self._max_grad_value is not None:
            bucket.mean.clamp_(-self._max_grad_value, self._max_grad_value)
        return {p: bucket.mean[mine] for p, mine, _ in self._slices(bucket, self._session.communicator.rank)}

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

    def _pull(self, bucket: Owned, record: Any) -> None:
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

    def state_dict(self) -> dict[str, Any]:
        """This rank's shards."""
        return {"shards": self.state.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Raises: InvalidArgument."""
        shards = state.get("shards")
        if not isinstance(shards, dict):
            raise not_the_state('update="owner"', "it lacks the optimizer's shards")
        self.state.load_state_dict(shards)

    def stats(self) -> dict[str, Any]:
        """What of the optimizer's state lies on this rank as its shard."""
        return {"sharded_state_bytes": self.state.n_bytes}

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
