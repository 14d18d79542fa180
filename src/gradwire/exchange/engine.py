"""The exchanges of the native core (native/exchange), for tensors and codecs: ring and direct.

One call a bucket, without the GIL from its start to its end; a codec that is written in Python is called back. Both
replace `buffer` (n,) by the mean over the ranks, on the lane. Every rank gets the same bits: the decoding of the bytes
that each part's owner sent, divided by N. Float16 values, whose sum may overflow, are divided before they are encoded.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from gradwire import _native
from gradwire.codecs import Codec
from gradwire.codecs.tensors import bytes_of, dtype_code
from gradwire.exchange.parts import CHUNK_ELEMENTS, count_chunks
from gradwire.telemetry.recorder import BucketRecord
from gradwire.wire.communicator import Communicator
from gradwire.wire.facts import Facts

__all__ = ["Importance", "direct_mean", "engine_codec", "ring_mean"]

# What says how large each value of a bucket may be before its low bits matter: `write(first, out)` puts the importance
# bytes of elements [first, first + n) into `out` (n,) uint8.
Importance = _native.BucketImportance

# Messages that may be on their way while a rank works: chunk k+1 is encoded while k travels while k-1 is decoded.
MESSAGES_AHEAD = 2


def ring_mean(
    communicator: Communicator,
    codec: Codec,
    buffer: torch.Tensor,
    facts: Facts,
    record: BucketRecord,
    importance: Importance | None = None,
    chunk_elements: int = CHUNK_ELEMENTS,
    left_out: torch.Tensor | None = None,
) -> None:
    """N-1 hops of partial sums, each encoded anew, then N-1 hops that forward bytes verbatim (native/exchange/ring.hpp).

    Args:
        importance: of the bucket's values, for codecs that weigh them.
        left_out: (n,) for error feedback: what this rank's encodings lost. N x result + the sum of all ranks'
            left_out = the sum of their gradients.
    Raises: PeerLost, RankMismatch, CorruptMessage, IncompatibleVersion, and whatever the codec raises.
    Cost: sends 2 (N-1)/N of the encoded buffer; every element is encoded once.
    """

    run = functools.partial(_native.ring_mean, n_ahead=MESSAGES_AHEAD)
    _mean(run, communicator, codec, buffer, facts, record, importance, chunk_elements, left_out)


def direct_mean(
    communicator: Communicator,
    codec: Codec,
    buffer: torch.Tensor,
    facts: Facts,
    record: BucketRecord,
    importance: Importance | None = None,
    chunk_elements: int = CHUNK_ELEMENTS,
    left_out: torch.Tensor | None = None,
) -> None:
    """Every part to its owner, which adds them in rank order, itself unencoded, and answers (native/exchange/owners.hpp).

    Two hops whatever the world size, so a lossy codec rounds a value twice instead of N times. The price: every rank
    talks to every other. Arguments, errors and bytes are those of `ring_mean`.
    """
    _mean(_native.direct_mean, communicator, codec, buffer, facts, record, importance, chunk_elements, left_out)


def _mean(
    run: Callable[..., Any],
    communicator: Communicator,
    codec: Codec,
    buffer: torch.Tensor,
    facts: Facts,
    record: BucketRecord,
    importance: Importance | None,
    chunk_elements: int,
    left_out: torch.Tensor | None,
) -> None:
    if communicator.world_size == 1 or buffer.numel() == 0:
        return
    n_chunks = count_chunks(-(-buffer.numel() // communicator.world_size), chunk_elements)
    account = run(
        communicator.mesh,
        communicator.next_stream(),
        facts,
        engine_codec(codec, buffer.dtype, importance),
        bytes_of(buffer),
        dtype_code(buffer.dtype),
        None if left_out is None else bytes_of(left_out),
        n_chunks,
    )
    record.add_account(*account)


def engine_codec(codec: Codec, dtype: torch.dtype, importance: Importance | None) -> _native.ExchangeCodec:
    """The codec as the engine calls it, for one bucket: native where it can say how, else called back."""
    native: Callable[..., _native.ExchangeCodec] | None = getattr(codec, "exchange_codec", None)
    if native is None:
        return _native.python_exchange_codec(codec, dtype, importance)
    return native(dtype, importance)
