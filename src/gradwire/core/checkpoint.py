"""The envelope of a rank's saved state: who wrote it, for which configuration, and where training stood."""

from __future__ import annotations

from typing import Any, ClassVar, Protocol

from gradwire.errors import CorruptMessage, GradwireError, IncompatibleVersion, InvalidArgument
from gradwire.wire.communicator import Communicator

STATE_VERSION = 1
_FIELDS = {"version": int, "scheme": str, "configuration": dict, "world_size": int, "rank": int, "step": int}


class Saved(Protocol):
    """What a checkpoint knows of a scheme."""

    name: ClassVar[str]
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
    """What a part raises that cannot go on from what it was given as its saved state."""
    return InvalidArgument(f"this is not the state of {of}: {why}; pass what attachment.state_dict() returned")


def load(scheme: Saved, communicator: Communicator, saved: dict[str, Any], strict: bool) -> int:
    """Check what the envelope says, then give the scheme its state. Returns: the step to go on with.

    Nothing is changed if a check fails. Raises: InvalidArgument.
    """
    if saved["scheme"] != scheme.name:
        raise InvalidArgument(
            f"the checkpoint was written by scheme {saved['scheme']!r}, but {scheme.name!r} is attached; "
            f"attach {saved['scheme']!r}, load, then switch()"
        )
    if saved["configuration"] != scheme.configuration:
        keys = sorted(
            key
            for key in saved["configuration"].keys() | scheme.configuration.keys()
            if saved["configuration"].get(key) != scheme.configuration.get(key)
        )
        listing = ", ".join(
            f"{k}: {saved['configuration'].get(k)} saved, {scheme.configuration.get(k)} now" for k in keys
        )
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
    """Give a scheme its saved state; one that it cannot read changes nothing. Raises: what it raises, InvalidArgument."""
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
        raise CorruptMessage("this is not a gradwire state_dict: pass what attachment.state_dict() returned")
    for field, kind in _FIELDS.items():
        if not isinstance(saved.get(field), kind):
            raise CorruptMessage(
                f"the gradwire state_dict lacks {field!r} ({kind.__name__}): pass what attachment.state_dict() returned"
            )
    if not 0 <= saved["step"] < 1 << 62:
        raise CorruptMessage(
            f"the gradwire state_dict is of step {saved['step']}: pass what attachment.state_dict() returned"
        )
    if saved["version"] != STATE_VERSION:
        raise IncompatibleVersion(
            f"the gradwire state_dict has version {saved['version']}, this build reads {STATE_VERSION}; "
            "load it with the gradwire that wrote it"
        )
