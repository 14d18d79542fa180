"""SlimGC's options: what goes together, and the codec that they name."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any, TypeVar

from gradwire import codecs
from gradwire.codecs import Codec
from gradwire.codecs.quantised import Quantised
from gradwire.control.checks import choice as check_choice
from gradwire.errors import InvalidArgument
from gradwire.exchange.parts import CHUNK_ELEMENTS, QUANTISED_CHUNK_ELEMENTS
from gradwire.schemes.base import Scheme
from gradwire.stepping.look_ahead import LookAheadOptions

TOPOLOGIES = ("server", "all-reduce")
PULLS = ("compressed", "raw")
UPDATES = ("worker", "owner")


Options = TypeVar("Options", "Transport", "Measured", "Stepping")


@dataclass(frozen=True)
class Transport:
    """How compressed tensors travel: see `SlimGC`. Raises: InvalidArgument."""

    topology: str = "server"
    pull: str = "compressed"
    group_elements: int | None = None

    def __post_init__(self) -> None:
        check_choice("topology", self.topology, TOPOLOGIES)
        check_choice("pull", self.pull, PULLS)
        if self.pull == "raw" and self.topology != "server":
            raise InvalidArgument('pull="raw" needs topology="server": in a ring nobody owns the result')
        if self.group_elements is not None and self.group_elements < 1:
            raise InvalidArgument(f"group_elements must be at least 1, got {self.group_elements}")

    def elements_for(self, codec: Codec) -> int:
        """Values encoded and sent at a time."""
        fitting = QUANTISED_CHUNK_ELEMENTS if isinstance(codec, Quantised) else CHUNK_ELEMENTS
        return fitting if self.group_elements is None else self.group_elements


@dataclass(frozen=True)
class Measured:
    """How the threshold is found: see `Measuring`."""

    warmup_steps: int = 10
    method: str = "fit"
    drift_every: int = 50
    drift_factor: float = 1.5


@dataclass(frozen=True)
class Stepping:
    """Who takes the optimizer's step, and what it waits for: see `SlimGC`. Raises: InvalidArgument."""

    backup: bool = False
    local: str = "peek"
    local_rate: float | None = None
    sync_steps: int | None = None
    max_grad_norm: float | None = None
    update: str = "worker"
    max_grad_value: float | None = None

    def __post_init__(self) -> None:
        check_choice("update", self.update, UPDATES)
        if self.update == "owner" and self.backup:
            raise InvalidArgument('backup=True moves local weights by the whole optimizer: it needs update="worker"')
        if self.max_grad_value is not None and (self.update != "owner" or not self.max_grad_value > 0):
            raise InvalidArgument(
                'max_grad_value is positive and belongs to update="owner", '
                f"got {self.max_grad_value!r}; otherwise clip .grad as ever"
            )
        if not self.backup and (self.max_grad_norm is not None or self.local_rate is not None):
            raise InvalidArgument("max_grad_norm and local_rate belong to backup=True; without it, clip .grad as ever")

    def check(self, transport: Transport) -> None:
        """Raises: InvalidArgument (the owner's step without what makes owners)."""
        if self.update == "owner" and (transport.topology != "server" or transport.pull != "raw"):
            raise InvalidArgument(
                'update="owner" pulls parameters, raw, from the ranks that own them: it needs topology="server" and '
                'pull="raw"'
            )

    def look_ahead(self, settling_steps: int) -> LookAheadOptions:
        """`settling_steps`: steps that wait for their aggregate unless `sync_steps` says otherwise."""
        sync_steps = settling_steps if self.sync_steps is None else self.sync_steps
        return LookAheadOptions(self.local, self.local_rate, sync_steps, self.max_grad_norm)


def take(kind: type[Options], options: dict[str, Any]) -> Options:
    """The options that `kind` knows, taken out of `options`. Raises: InvalidArgument."""
    known = {field.name for field in fields(kind)} & options.keys()
    return kind(**{name: options.pop(name) for name in known})


def codec_of(codec: Any, options: dict[str, Any]) -> Codec:
    """The codec: made by name, given, or what a scheme given works with. Raises: InvalidArgument."""
    if isinstance(codec, str):
        return codecs.by_name(codec, **options)
    if options:
        raise InvalidArgument(f"{', '.join(options)}: options are for a codec given by name; make the codec with them")
    inner: Any = getattr(codec, "codec", None) if isinstance(codec, Scheme) else codec
    if not all(callable(getattr(inner, method, None)) for method in ("encode", "decode", "max_encoded_bytes")):
        raise InvalidArgument(
            f"codec is a name ({', '.join(codecs.names())}), a codec, or a scheme that is one, "
            f"not {type(codec).__name__}"
        )
    checked: Codec = inner
    return checked


def options_of(codec: Codec) -> dict[str, Any]:
    """A codec's options, as plain values: what ranks compare."""
    plain = (bool, int, float, str, type(None))
    return {k: v for k, v in sorted(vars(codec).items()) if not k.startswith("_") and isinstance(v, plain)}
