"""Codecs: floats to bytes and back, pure. They know nothing of ranks, parameters or training."""

from __future__ import annotations

import importlib
from typing import Any, Protocol, runtime_checkable

import torch

from gradwire.errors import InvalidArgument
from gradwire.registry import describe_choices, describe_wrong_option

__all__ = ["Codec", "OnePassCodec", "by_name", "names"]

# name: "module:class". A new codec is one file and one line here.
_REGISTRY: dict[str, str] = {
    "embedded-float": "gradwire.codecs.embedded_float:EmbeddedFloat",
    "gcomp": "gradwire.codecs.gcomp:GComp",
    "one-bit": "gradwire.codecs.one_bit:OneBit",
    "qsgd": "gradwire.codecs.qsgd:Qsgd",
    "ternary": "gradwire.codecs.ternary:Ternary",
    "thc": "gradwire.codecs.hadamard:Thc",
    "truncate": "gradwire.codecs.gcomp:Truncate",
    "two-bit": "gradwire.codecs.two_bit:TwoBit",
    "truncated-float": "gradwire.codecs.truncated_float:TruncatedFloat",
    "raw": "gradwire.codecs.general:RawCodec",
    "zlib": "gradwire.codecs.general:ZlibCodec",
    "zstd": "gradwire.codecs.general:ZstdCodec",
}


class Codec(Protocol):
    """Floats to one self-contained message and back; thread-safe; the same bytes for every thread count and SIMD."""

    name: str

    def max_encoded_bytes(self, n_elements: int, dtype: torch.dtype) -> int:
        """Bytes that no message of `n_elements` values of `dtype` exceeds."""
        ...

    def encode(self, gradient: torch.Tensor, out: torch.Tensor, importance: torch.Tensor | None = None) -> int:
        """Write `gradient` (n,) into `out` (>= max_encoded_bytes,) uint8; returns the bytes written."""
        ...

    def decode(self, message: torch.Tensor, out: torch.Tensor) -> None:
        """Read `message` (exactly one message, uint8) into `out` (n,), whose size and dtype the caller knows."""
        ...


@runtime_checkable
class OnePassCodec(Protocol):
    """A codec whose decoder may need the sender's importance bytes, and adds or divides while it decodes."""

    one_pass: bool

    def decode(
        self,
        message: torch.Tensor,
        out: torch.Tensor,
        importance: torch.Tensor | None = None,
        *,
        addend: torch.Tensor | None = None,
        divisor: int = 1,
    ) -> None:
        """`out` = addend + decoded message, or decoded message / divisor."""
        ...


def names() -> list[str]:
    """The registered codecs, sorted."""
    return sorted(_REGISTRY)


def by_name(name: str, **options: Any) -> Codec:
    """A new codec by its registry name.

    Raises: InvalidArgument (unknown name, or an option that the codec does not take).
    """
    if name not in _REGISTRY:
        raise InvalidArgument(f"no codec is called {name!r}; {describe_choices(name, names())}")
    module_path, class_name = _REGISTRY[name].split(":")
    cls = getattr(importlib.import_module(module_path), class_name)
    try:
        return cls(**options)
    except TypeError as error:
        wrong = describe_wrong_option(cls, options)
        raise InvalidArgument(f"codec {name!r} {wrong}" if wrong else f"codec {name!r}: {error}") from error
