"""Codecs: floats to bytes and back, pure. They know nothing of ranks, parameters or training."""

from __future__ import annotations

from typing import Any, Protocol, runtime_checkable

import torch

from gradwire.registry import Registry

__all__ = ["Codec", "WeighingCodec", "by_name", "names"]


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
class WeighingCodec(Protocol):
    """A codec whose decoder may need the importance bytes that the sender encoded by."""

    decodes_by_importance: bool

    def decode(self, message: torch.Tensor, out: torch.Tensor, importance: torch.Tensor | None = None) -> None:
        """As `Codec.decode`; `importance`: as in `encode`."""
        ...


# name: "module:class". A new codec is one file and one line here.
_REGISTRY: Registry[Codec] = Registry(
    "codec",
    {
        "embedded-float": "gradwire.codecs.embedded_float:EmbeddedFloat",
        "gcomp": "gradwire.codecs.gcomp:GCompCodec",
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
    },
)


def names() -> list[str]:
    """The registered codecs, sorted."""
    return _REGISTRY.names()


def by_name(name: str, **options: Any) -> Codec:
    """A new codec by its registry name.

    Raises: InvalidArgument (unknown name, or an option that the codec does not take).
    """
    return _REGISTRY.make(name, options)
