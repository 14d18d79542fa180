"""Saved state: one rank's, in an envelope that says who wrote it for which configuration, or that of all ranks in one file."""

import io
from collections.abc import Iterable
from typing import Any, Protocol

import torch

from gradwire.core.feedback import redistribute
from gradwire.errors import CorruptMessage, GradwireError, IncompatibleVersion, InvalidArgument
from gradwire.wire.communicator import Communicator
from gradwire.wire.preamble import call_together

STATE_VERSION = 1
ALONE = {"alone": True}  # the state of one rank by itself: there is nothing in it to go on with
_CURE = "pass what attachment.state_dict() returned"
_FIELDS = {"version": int, "scheme": str, "configuration": dict, "world_size": int, "rank": int, "step": int}


class Saved(Protocol):
    """A scheme as a checkpoint sees it."""

    name: str
    state_is_per_world: bool

    @property
    def configuration(self) -> dict[str, Any]: ...
    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, state: dict[str, Any]) -> None: ...


def state_of(scheme: Saved, communicator: Communicator, step: int) -> dict[str, Any]:
    """Tensors and plain values only, so that torch.load(weights_only=True) reads it."""
    return {
        "version": STATE_VERSION,
        "scheme": scheme.name,
        "configuration": scheme.configuration,
        "world_size": communicator.world_size,
        "rank": communicator.rank,
        "step": step,
        "state": scheme.state_dict(),
    }


def not_the_state(of: str, why: str) -> InvalidArgument:
    """The error of a part that cannot go on from what it was given as its saved state."""
    return InvalidArgument(f"this is not the state of {of}: {why}; {_CURE}")


def load(scheme: Saved, communicator: Communicator, saved: dict[str, Any], strict: bool) -> int:
    """Check what the envelope says, then give the scheme its state. Returns: the step to go on with."""
    if saved["scheme"] != scheme.name:
        raise InvalidArgument(
            f"the checkpoint was written by scheme {saved['scheme']!r}, but {scheme.name!r} is attached; "
            f"attach {saved['scheme']!r}, load, then switch()"
        )
    before, now = saved["configuration"], scheme.configuration
    if before != now:
        keys = sorted(key for key in before.keys() | now.keys() if before.get(key) != now.get(key))
        listing = ", ".join(f"{key}: {before.get(key)} saved, {now.get(key)} now" for key in keys)
        raise InvalidArgument(
            f"the checkpoint of scheme {scheme.name!r} was written with other options ({listing}); "
            "attach the scheme with the saved options"
        )
    if saved["world_size"] != communicator.world_size and (strict or scheme.state_is_per_world):
        cure = (
            "save state_dict(all_ranks=True), which any number of ranks can load"
            if scheme.state_is_per_world
            else "this scheme's state is the same on all ranks: load_state_dict(..., strict=False) takes it"
        )
        raise InvalidArgument(
            f"the checkpoint was written by {saved['world_size']} ranks, this run has {communicator.world_size}; {cure}"
        )
    if saved["rank"] != communicator.rank and scheme.state_is_per_world:
        raise InvalidArgument(
            f"this is the state of rank {saved['rank']}, loaded by rank {communicator.rank}; load each rank's own file"
        )
    take(scheme, saved["state"])
    return int(saved["step"])


def take(scheme: Saved, state: dict[str, Any]) -> None:
    """Give a scheme its saved state; one that it cannot read changes nothing."""
    before = scheme.state_dict()
    try:
        scheme.load_state_dict(state)
    except Exception as error:
        scheme.load_state_dict(before)
        if isinstance(error, GradwireError):
            raise
        raise not_the_state(f"scheme {scheme.name!r}", f"it does not read ({type(error).__name__}: {error})") from error


def check(saved: Any) -> None:
    """Raises: CorruptMessage (not such a state at all), IncompatibleVersion."""
    if not isinstance(saved, dict) or not isinstance(saved.get("state"), dict):
        raise CorruptMessage(f"this is not a gradwire state_dict: {_CURE}")
    for field, kind in _FIELDS.items():
        if not isinstance(saved.get(field), kind):
            raise CorruptMessage(f"the gradwire state_dict lacks {field!r} ({kind.__name__}): {_CURE}")
    if not 0 <= saved["step"] < 1 << 62:
        raise CorruptMessage(f"the gradwire state_dict is of step {saved['step']}: {_CURE}")
    if saved["version"] != STATE_VERSION:
        raise IncompatibleVersion(
            f"the gradwire state_dict has version {saved['version']}, this build reads {STATE_VERSION}; "
            "load it with the gradwire that wrote it"
        )


def gather(state: dict[str, Any], communicator: Communicator) -> dict[str, Any]:
    """{"version", "ranks": the states of all ranks} on rank 0, and no ranks elsewhere. Collective; not on the lane."""
    buffer = io.BytesIO()
    torch.save(state, buffer)
    own = torch.frombuffer(bytearray(buffer.getvalue()), dtype=torch.uint8)

    def exchange() -> list[torch.Tensor]:
        sizes = call_together(communicator, "state_dict", own.numel())
        padded = torch.zeros(max(sizes), dtype=torch.uint8, device="cpu")
        padded[: own.numel()] = own
        return [theirs[:size] for theirs, size in zip(communicator.gather(padded), sizes, strict=False)]

    received = communicator.submit(exchange).wait()
    ranks = [torch.load(io.BytesIO(bytes(one.numpy())), weights_only=True) for one in received]
    return {"version": STATE_VERSION, "ranks": [] if communicator.rank else ranks}


def state_for(gathered: dict[str, Any], per_rank: Iterable[str] | None, world_size: int, rank: int) -> dict[str, Any]:
    """One new rank's state: its own; or with another number of ranks the mean of what differs, which is what counts.
    `per_rank`: the fields of a scheme's state that differ between ranks, each tensors by name."""
    states = gathered["ranks"]
    if not states:
        raise InvalidArgument(
            "state_dict(all_ranks=True) gives the states to rank 0 alone: save and load rank 0's answer"
        )
    for state in states:
        check(state)
    if [state["rank"] for state in states] != list(range(len(states))):
        raise CorruptMessage(
            "this state for all ranks lacks some of them, or has them in another order: pass what state_dict(all_ranks=True) "
            "returned on rank 0, unchanged"
        )
    if len(states) == world_size:
        return dict(states[rank])
    if per_rank is None:
        raise InvalidArgument(
            f"this state of scheme {states[0]['scheme']!r} was written by {len(states)} ranks and serves no other number; this "
            f"run has {world_size}"
        )
    kept = dict(states[0]["state"])
    for field in per_rank:
        if field in kept:
            kept[field] = redistribute([state["state"][field] for state in states])
    return {**states[0], "world_size": world_size, "rank": rank, "state": kept}
