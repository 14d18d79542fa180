"""The preamble: before ranks send gradients of a new layout, they compare one small record each.

A mismatch found here names the field and the ranks, on every rank, before a byte of gradient has travelled. Between
full exchanges the same facts ride in the header of every frame (`exchange/frames.py`).
"""

from __future__ import annotations

import hashlib
import json
import struct
from collections import Counter
from typing import Any, NamedTuple

import torch

from gradwire.errors import RankMismatch
from gradwire.telemetry.recorder import BucketRecord
from gradwire.wire.communicator import Communicator

FORMAT_VERSION = 1

# docs/format.md#preamble: little-endian, 40 bytes.
_LAYOUT = struct.Struct("<HH16sIIIQ")


class Preamble(NamedTuple):
    """What all ranks must agree on before a layout's first payload."""

    format_version: int
    bucket: int
    scheme: str
    configuration: int
    layout: int
    step: int
    n_elements: int

    def pack(self) -> bytes:
        return _LAYOUT.pack(
            self.format_version,
            self.bucket,
            self.scheme.encode()[:16],
            self.configuration,
            self.layout,
            self.step & 0xFFFFFFFF,
            self.n_elements,
        )

    @classmethod
    def unpack(cls, raw: bytes) -> Preamble:
        version, bucket, scheme, configuration, layout, step, n_elements = _LAYOUT.unpack(raw)
        return cls(
            version, bucket, scheme.rstrip(b"\0").decode(errors="replace"), configuration, layout, step, n_elements
        )


_ADVICE = {
    "format_version": "install the same gradwire on every host",
    "bucket": "every rank must run the same backward pass",
    "scheme": "pass the same scheme to attach() on every rank",
    "configuration": "pass the same options to the scheme on every rank",
    "layout": "every rank must hold the same model, with parameters of the same shapes in the same order",
    "step": "resume every rank from the same checkpoint, and call backward equally often on all of them",
    "n_elements": "every rank must hold the same model",
}


def hash_configuration(name: str, configuration: dict[str, Any]) -> int:
    """32 bits over a scheme's name and options (plain values)."""
    text = json.dumps([name, configuration], sort_keys=True, default=str)
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=4).digest(), "little")


def compare_preambles(communicator: Communicator, mine: Preamble, record: BucketRecord) -> None:
    """Exchange preambles with all ranks (on the lane). Raises: RankMismatch, naming the field and the ranks."""
    packed = torch.frombuffer(bytearray(mine.pack()), dtype=torch.uint8)
    n_bytes = packed.numel() * (communicator.world_size - 1)
    record.count_exchanged(n_bytes)
    theirs = [Preamble.unpack(bytes(row.tolist())) for row in communicator.all_gather(packed)]
    for field in Preamble._fields:
        values = [getattr(preamble, field) for preamble in theirs]
        usual = Counter(values).most_common(1)[0][0]
        odd = [rank for rank, value in enumerate(values) if value != usual]
        if odd:
            listing = ", ".join(f"rank {rank}: {values[rank]}" for rank in odd)
            raise RankMismatch(
                f"ranks disagree on {field} before bucket {mine.bucket} of step {mine.step}: {listing}; "
                f"the others: {usual}. What to do: {_ADVICE[field]}."
            )
