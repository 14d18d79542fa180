"""SlimGC's options: their defaults, what of them goes together, and the codec that they name."""

from __future__ import annotations

from typing import Any

from gradwire import codecs
from gradwire.checks import choice as check_choice
from gradwire.codecs import Codec
from gradwire.codecs.quantised import Quantised
from gradwire.errors import InvalidArgument, Unsupported
from gradwire.exchange.parts import CHUNK_ELEMENTS, QUANTISED_CHUNK_ELEMENTS
from gradwire.schemes.base import Scheme

# Of the scheme; all others belong to the codec that is named.
_DEFAULTS: dict[str, Any] = {
    "topology": "server",
    "pull": "compressed",
    "group_elements": None,
    "warmup_steps": 10,
    "method": "fit",
    "drift_every": 50,
    "drift_factor": 1.5,
    "backup": False,
    "local": "peek",
    "local_rate": None,
    "sync_steps": None,
    "max_grad_norm": None,
    "update": "worker",
    "max_grad_value": None,
}


def read_options(codec: Any, given: dict[str, Any]) -> tuple[Codec, dict[str, Any]]:
    """The codec, made by name with its options, given, or what a scheme given works with; and all of the scheme's options.

    Raises: InvalidArgument.
    """
    options = {name: given.pop(name, default) for name, default in _DEFAULTS.items()}
    is_server = check_choice("topology", options["topology"], ("server", "all-reduce")) == "server"
    is_raw = check_choice("pull", options["pull"], ("compressed", "raw")) == "raw"
    is_owners = check_choice("update", options["update"], ("worker", "owner")) == "owner"
    backup = options["backup"] = bool(options["backup"])
    most, group_elements = options["max_grad_value"], options["group_elements"]
    if is_raw and not is_server:
        raise InvalidArgument('pull="raw" needs topology="server": in a ring nobody owns the result')
    if group_elements is not None and group_elements < 1:
        raise InvalidArgument(f"group_elements must be at least 1, got {group_elements}")
    if is_owners and backup:
        raise InvalidArgument('backup=True moves local weights by the whole optimizer: it needs update="worker"')
    if most is not None and (not is_owners or not most > 0):
        raise InvalidArgument(
            f'max_grad_value is positive and belongs to update="owner", got {most!r}; otherwise clip .grad as ever'
        )
    if not backup and (options["max_grad_norm"] is not None or options["local_rate"] is not None):
        raise InvalidArgument("max_grad_norm and local_rate belong to backup=True; without it, clip .grad as ever")
    if is_owners and not is_raw:
        raise InvalidArgument(
            'update="owner" pulls parameters, raw, from the ranks that own them: it needs topology="server" and '
            'pull="raw"'
        )
    made = _codec_of(codec, given)
    if group_elements is None:
        options["group_elements"] = QUANTISED_CHUNK_ELEMENTS if isinstance(made, Quantised) else CHUNK_ELEMENTS
    return made, options


def _codec_of(codec: Any, options: dict[str, Any]) -> Codec:
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


def refuse_on_device(codec: Codec, options: dict[str, Any]) -> None:
    """Raises: Unsupported (what needs the host)."""
    for name, wanted in (("backup", False), ("update", "worker"), ("topology", "server"), ("pull", "compressed")):
        if options[name] != wanted:
            value = f'"{options[name]}"' if isinstance(options[name], str) else options[name]
            raise Unsupported(f"slimgc with {name}={value} works on host memory: leave that or placement out")
    if not isinstance(codec, Quantised):
        raise Unsupported(
            f"slimgc works on devices with one-bit, two-bit and qsgd, not with {codec.name}: take one of these, or leave "
            "placement out"
        )
