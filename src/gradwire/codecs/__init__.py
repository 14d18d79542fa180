"""Codecs: floats to bytes and back, pure. They know nothing of ranks, parameters or training."""

from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from gradwire.errors import InvalidArgument
from gradwire.gpu.kernels import Kernels
from gradwire.registry import Registry

__all__ = ["Codec", "DeviceCodec", "by_name", "choose_feedback", "names"]


class Codec(Protocol):
    """Floats to one self-contained message and back; thread-safe; the same bytes for every thread count and SIMD.

    Tensors are contiguous, of one dimension, on the CPU. A message says all that its reading needs, but for what two ranks
    know anyway: size and dtype of the values. Native calls release the GIL, and allocate nothing once warm.

    Attributes:
        feeds_back: whether what a message leaves out may be added to the next gradient (error feedback). Not of codecs that
            are right on average, but whose error may be larger than the values: what is left out would grow.
    """

    name: str
    feeds_back: bool

    def max_encoded_bytes(self, n_elements: int, dtype: torch.dtype) -> int:
        """Bytes that no message of `n_elements` values of `dtype` exceeds. Raises: InvalidArgument."""
        ...

    def encode(self, gradient: Tensor, out: Tensor, importance: Tensor | None = None) -> int | Tensor:
        """Write `gradient` as one message; returns the bytes written.

        Args:
            gradient: (n,) float32, bfloat16 or float16; any n from 0.
            out: (>= max_encoded_bytes(n, dtype),) uint8.
            importance: (n,) uint8, for a codec that weighs its values; ignored by others.
        Raises: InvalidArgument (shape, dtype, device, an option that does not fit the dtype), BufferTooSmall.
        """
        ...

    def decode(self, message: Tensor, out: Tensor) -> None:
        """Read `message`, whatever options of this codec it was written with.

        Args:
            message: uint8, exactly one message.
            out: (n,) of the sender's size and dtype; undefined after an error.
        Raises: InvalidArgument, CorruptMessage (failed checks, another dtype or size), IncompatibleVersion.
        """
        ...


@runtime_checkable
class DeviceCodec(Codec, Protocol):
    """A codec that also takes tensors on a device: the same bytes and values, made by kernels.

    Calls with such tensors enqueue kernels on the current stream, and wait for nothing. What they are given is trusted:
    tensors of one device, contiguous, as long as said, messages at a multiple of 4 bytes and written with this codec's
    options.
    """

    def check_device(self, device: torch.device) -> Kernels:
        """The kernels that run there. Raises: Unsupported (none for this device, this codec or these options)."""
        ...

    def encode(self, gradient: Tensor, out: Tensor, importance: Tensor | None = None, *, step: int = 0) -> int | Tensor:
        """As `Codec.encode`; on a device it returns (1,) int64 there.

        Args:
            step: what is drawn by beside the codec's seed, where anything is: 0 to 2^64 - 1. Messages whose errors have to
                be independent (of other steps, ranks, chunks) need steps of their own.
        """
        ...

    def decode(
        self,
        message: Tensor,
        out: Tensor,
        importance: Tensor | None = None,
        *,
        divisor: float = 1.0,
        adds: bool = False,
        error: Tensor | None = None,
    ) -> None:
        """As `Codec.decode`.

        Args:
            divisor: `out` gets the values / divisor.
            adds: `out` has the values added.
            error: (1,) int32 on the device: if the message is not whole, `out` becomes NaN, and this keeps the worst of what
                was wrong since it was 0 (`gpu.launching.raise_error` says it). No message counts as whole beside one that
                was not. None: NaN alone tells.
        """
        ...


# name: "module:class". A new codec is one file and one line here.
_REGISTRY: Registry[Codec] = Registry(
    "codec",
    {
        "embedded-float": "gradwire.codecs.embedded_float:EmbeddedFloat",
        "gcomp": "gradwire.codecs.gcomp:GCompCodec",
        "one-bit": "gradwire.codecs.quantised:OneBit",
        "qsgd": "gradwire.codecs.quantised:Qsgd",
        "ternary": "gradwire.codecs.ternary:Ternary",
        "thc": "gradwire.codecs.hadamard:Thc",
        "two-bit": "gradwire.codecs.quantised:TwoBit",
        "truncated-float": "gradwire.codecs.truncated_float:TruncatedFloat",
        "raw": "gradwire.codecs.general:RawCodec",
    },
)
# Baselines that the laboratory registers when it is imported.
_OF_THE_LABORATORY = ("truncate", "zlib", "zstd")


def names() -> list[str]:
    """The registered codecs, sorted."""
    return _REGISTRY.names()


def by_name(name: str, **options: Any) -> Codec:
    """A new codec by its registry name. Raises: InvalidArgument (unknown name, or an option that the codec does not take)."""
    if name in _OF_THE_LABORATORY and name not in names():
        raise InvalidArgument(f"the codec {name!r} is a baseline for experiments: `import gradwire_lab` registers it")
    return _REGISTRY.make(name, options)


def choose_feedback(codec: Codec, asked: bool | None) -> bool:
    """Return whether what `codec` leaves out is added to the next gradient: as asked, or, None, as the codec wants."""
    wants: bool | None = getattr(codec, "feeds_back", None)
    if wants is None:
        raise InvalidArgument(
            f"the codec {codec.name} does not say whether its error may be fed back: give it an attribute feeds_back"
        )
    if asked and not wants:
        raise InvalidArgument(
            f"error_feedback=True does not go with {codec.name}, which is right on average without: its error may be larger "
            "than the values, and fed back it would grow without bound; leave error_feedback out"
        )
    return wants if asked is None else bool(asked)
