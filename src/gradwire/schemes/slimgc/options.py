"""SlimGC's options: what goes together, and the codec that they name."""

from __future__ import annotations

from typing import Any

from gradwire import codecs
from gradwire.codecs import Codec
from gradwire.errors import InvalidArgument
from gradwire.schemes.base import Scheme

TOPOLOGIES = ("server", "all-reduce")
PULLS = ("compressed", "raw")
UPDATES = ("worker", "owner")


def check_topology(topology: str, pull: str) -> None:
    """Raises: InvalidArgument."""
    if topology not in TOPOLOGIES:
        raise InvalidArgument(f"topology is one of {', '.join(TOPOLOGIES)}, not {topology!r}")
    if pull not in PULLS:
        raise InvalidArgument(f"pull is one of {', '.join(PULLS)}, not {pull!r}")
    if pull == "raw" and topology != "server":
        raise InvalidArgument('pull="raw" needs topology="server": in a ring nobody owns the result')


def check_update(update: str, max_grad_value: float | None, topology: str, pull: str, backup: bool) -> None:
    """Raises: InvalidArgument."""
    if update not in UPDATES:
        raise InvalidArgument(f"update is one of {', '.join(UPDATES)}, not {update!r}")
    if update == "owner" and (topology != "server" or pull != "raw"):
        raise InvalidArgument(
            'update="owner" pulls parameters, raw, from the ranks that own them: it needs topology="server" and pull="raw"'
        )
    if update == "owner" and backup:
        raise InvalidArgument('backup=True moves local weights by the whole optimizer: it needs update="worker"')
    if max_grad_value is not None and (update != "owner" or not max_grad_value > 0):
        raise InvalidArgument(
            f'max_grad_value is positive and belongs to update="owner", got {max_grad_value!r}; otherwise clip .grad as ever'
        )


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
