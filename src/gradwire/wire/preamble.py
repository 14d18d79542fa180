"""The preamble: before ranks send gradients of a new layout, they compare one small record each.

A mismatch names the field and the ranks, on every rank, before a byte of gradient has travelled. Between full exchanges the
same facts ride in every message's header, or, where the backend sums and messages have none, in a `StepCheck`.
"""

import hashlib
import json
import struct
from collections import Counter
from collections.abc import Iterable
from typing import Any, NamedTuple, NoReturn

import torch
import torch.distributed as dist

from gradwire.errors import PeerLost, RankMismatch
from gradwire.telemetry.recorder import BucketRecord
from gradwire.wire.communicator import Communicator, ring_bytes

FORMAT_VERSION = 1

# docs/format.md#preamble: little-endian, 40 bytes.
_LAYOUT = struct.Struct("<HH16sIIIQ")


class Facts(NamedTuple):
    """Both ends of a stream must agree on these; carried by every message header, compared on receipt."""

    configuration: int
    layout: int
    step: int
    bucket: int


class Preamble(NamedTuple):
    """All ranks must agree on this before a layout's first payload."""

    format_version: int
    bucket: int
    scheme: str
    configuration: int
    layout: int
    step: int
    n_elements: int

    @property
    def facts(self) -> Facts:
        """What of it every message carries."""
        return Facts(self.configuration, self.layout, self.step & 0xFFFFFFFF, self.bucket)

    def pack(self) -> bytes:
        return _LAYOUT.pack(*self[:2], self.scheme.encode()[:16], *self.facts[:3], self.n_elements)

    @classmethod
    def unpack(cls, raw: bytes) -> "Preamble":
        version, bucket, scheme, *others = _LAYOUT.unpack(raw)
        return cls(version, bucket, scheme.rstrip(b"\0").decode(errors="replace"), *others)


_ADVICE = {
    "format_version": "install the same gradwire on every host",
    "bucket": "every rank must run the same backward pass",
    "scheme": "pass the same scheme to attach() on every rank, and call switch() and state_dict(all_ranks=True) on all of them",
    "configuration": "pass the same options to the scheme, and optimizers of the same classes, on every rank",
    "layout": "every rank must hold the same model, with parameters of the same shapes in the same order",
    "step": "resume every rank from the same checkpoint, and call backward equally often on all of them",
    "n_elements": "every rank must hold the same model",
}


def hash_configuration(name: str, configuration: dict[str, Any]) -> int:
    """32 bits over a scheme's name and options (plain values)."""
    text = json.dumps([name, configuration], sort_keys=True, default=str)
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=4).digest(), "little")


def compare_preambles(communicator: Communicator, mine: Preamble, record: BucketRecord, given: object = "") -> None:
    """Exchange preambles with all ranks, on the lane; a RankMismatch names the field and the ranks. `given`: this
    rank's optimizers, which are a part of the configuration, and said where it differs: it travels as a hash."""
    record.count_exchanged(_LAYOUT.size * (communicator.world_size - 1))
    _exchange(communicator, mine, Preamble._fields, given)


def call_together(communicator: Communicator, what: str, number: int) -> list[int]:
    """Every rank's number, where all call `what`; on the lane. A rank that trains meanwhile sends no more bytes than awaited,
    which would end a process of the backend's. Raises: RankMismatch, PeerLost (after `timeout_s`)."""
    mine = Preamble(FORMAT_VERSION, 0, what, 0, 0, 0, number)
    return [one.n_elements for one in _exchange(communicator, mine, ("scheme",))]


def _exchange(communicator: Communicator, mine: Preamble, fields: Iterable[str], given: object = "") -> list[Preamble]:
    packed = torch.frombuffer(bytearray(mine.pack()), dtype=torch.uint8)
    theirs = [Preamble.unpack(bytes(row.tolist())) for row in communicator.all_gather(packed)]
    for field in fields:
        values = [getattr(preamble, field) for preamble in theirs]
        usual = Counter(values).most_common(1)[0][0]
        odd = [rank for rank, value in enumerate(values) if value != usual]
        if odd:
            listing = ", ".join(f"rank {rank}: {values[rank]}" for rank in odd)
            mine_is = f" (this rank was given {given})" if given and field == "configuration" else ""
            raise RankMismatch(
                f"ranks disagree on {field} before bucket {mine.bucket} of step {mine.step}: {listing}; "
                f"the others: {usual}. What to do: {_ADVICE[field]}{mine_is}."
            )
    return theirs


class StepCheck:
    """Compares step, layout and configuration of all ranks by a small all-reduce that is read a step later; on the lane.

    It can only say that ranks differ, not which: then all ranks, which read the same numbers, run the full exchange.
    """

    def __init__(self, communicator: Communicator) -> None:
        self._communicator = communicator
        # The largest of x and of -x over the ranks: ranks agree where the two are each other's negative.
        self._extremes = torch.zeros((2, 3), dtype=torch.int64, device="cpu")
        self._pending: tuple[torch.futures.Future, Preamble, int] | None = None

    def start(self, mine: Preamble, record: BucketRecord, factors: int = 0) -> None:
        """Read the last step's check, then start this step's. `factors`: 32 bits of the factors that ranks hold alike."""
        if self._communicator.world_size == 1:
            return
        self._read(record)
        for index, fact in enumerate((mine.step, mine.layout ^ factors, mine.configuration)):
            self._extremes[0, index], self._extremes[1, index] = fact, -fact
        self._pending = self._communicator.start_all_reduce(self._extremes, dist.ReduceOp.MAX), mine, factors
        record.count_exchanged(ring_bytes(self._extremes.nbytes, self._communicator.world_size))

    def fail_early(self) -> None:
        """Have the group fail as soon as a peer is lost to the check under way: for steps in which no host waits for it."""

        def look(pending: torch.futures.Future) -> None:
            try:
                self._communicator.finish(pending)
            except PeerLost as error:
                self._communicator.fail(error)

        if self._pending is not None:
            self._pending[0].add_done_callback(look)

    def _read(self, record: BucketRecord) -> None:
        if self._pending is None:
            return
        (started, mine, factors), self._pending = self._pending, None
        self._communicator.finish(started)
        largest, negated = self._extremes.tolist()
        if largest != [-fact for fact in negated]:
            compare_preambles(self._communicator, mine, record)
            name_other_factors(self._communicator, mine, factors)


def name_other_factors(communicator: Communicator, mine: Preamble, factors: int) -> NoReturn:
    """Once all else was found to be equal; every rank calls it. `factors`: 32 bits of them."""
    held = communicator.all_gather(torch.tensor([factors], dtype=torch.int64, device="cpu")).view(-1).tolist()
    listing = ", ".join(f"rank {rank}: {bits:08x}" for rank, bits in enumerate(held))
    raise RankMismatch(
        f"ranks hold different factors before bucket {mine.bucket} of step {mine.step} ({listing}). What to do: "
        "resume every rank from the same checkpoint; if this is no resumed run, report it with the machines' types."
    )
