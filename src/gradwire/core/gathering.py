"""One state for all ranks: gathered on rank 0 for one file, and given to any number of ranks."""

from __future__ import annotations

import io
from collections.abc import Iterable
from typing import Any

import torch

from gradwire.core import checkpoint
from gradwire.core.feedback import redistribute
from gradwire.errors import CorruptMessage, InvalidArgument
from gradwire.wire.communicator import Communicator


def gather(state: dict[str, Any], communicator: Communicator) -> dict[str, Any]:
    """{"version", "ranks": the states of all ranks} on rank 0, and no ranks elsewhere. Collective; not on the lane."""
    buffer = io.BytesIO()
    torch.save(state, buffer)
    own = torch.frombuffer(bytearray(buffer.getvalue()), dtype=torch.uint8)
    received: list[torch.Tensor] = []

    def exchange() -> None:
        sizes = communicator.all_gather(torch.tensor([own.numel()], dtype=torch.int64, device="cpu")).view(-1).tolist()
        padded = torch.zeros(max(sizes), dtype=torch.uint8, device="cpu")
        padded[: own.numel()] = own
        received.extend(theirs[:size] for theirs, size in zip(communicator.gather(padded), sizes, strict=False))

    communicator.submit(exchange).wait()
    ranks = [torch.load(io.BytesIO(bytes(one.numpy())), weights_only=True) for one in received]
    return {"version": checkpoint.STATE_VERSION, "ranks": [] if communicator.rank else ranks}


def is_gathered(state: Any) -> bool:
    """Whether `state` is one for all ranks."""
    return isinstance(state, dict) and "ranks" in state


def state_for(gathered: dict[str, Any], per_rank: Iterable[str] | None, world_size: int, rank: int) -> dict[str, Any]:
    """One new rank's state: its own; or with another number of ranks the mean of what differs, which is what counts.

    `per_rank`: the fields of a scheme's state that differ between ranks, each tensors by name.
    Raises: CorruptMessage, InvalidArgument (no rank 0's answer).
    """
    states = gathered["ranks"]
    if not states:
        raise InvalidArgument(
            "state_dict(all_ranks=True) gives the states to rank 0 alone: save and load rank 0's answer"
        )
    for state in states:
        checkpoint.check(state)
    if [state["rank"] for state in states] != list(range(len(states))):
        raise CorruptMessage(
            "this state for all ranks lacks some of them, or has them in another order: pass what state_dict(all_ranks=True) "
            "returned on rank 0, unchanged"
        )
    if len(states) == world_size:
        own: dict[str, Any] = states[rank]
        return own
    if per_rank is None:
        raise InvalidArgument(
            f"this state of scheme {states[0]['scheme']!r} was written by {len(states)} ranks and serves no other number; this "
            f"run has {world_size}"
        )
    kept = dict(states[0]["state"])
    for field in per_rank:
        if field in kept:
            kept[field] = redistribute([state["state"][field] for state in states], world_size)
    return {**states[0], "world_size": world_size, "rank": rank, "state": kept}
