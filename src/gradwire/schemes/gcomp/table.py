"""Refresh of GComp's Huffman table: count what is sent, sum over the ranks, switch at a step that all ranks agree on.

In step t, a multiple of `refresh_every` (by need: of 4), the exponents of everything that a rank encodes are counted.
After its last bucket the counts are summed over the ranks in the background, while the next forward and backward pass go
on. The new table takes over with the first bucket of step t + 2: by then the sum has long arrived, and nobody needs to say
so. By need, it does so only where the table in use takes 3 % more bits than the entropy of the counts, which all ranks
find alike.
"""

import functools
import math
from collections.abc import Callable
from typing import Any

import torch

from gradwire.codecs.gcomp import GCompCodec
from gradwire.codecs.huffman import HuffmanTable
from gradwire.core.checkpoint import not_the_state
from gradwire.errors import InvalidArgument
from gradwire.telemetry.recorder import BucketRecord
from gradwire.wire.communicator import Communicator, ring_bytes
from gradwire.wire.device_wire import DeviceWire, Reading
from gradwire.wire.wire import Wire

# Steps from counting to switching: the sum overlaps with the whole step between them.
_SWITCH_AFTER = 2
# By need: steps from one look at the counts to the next, and bits above their entropy that are worth a new table.
_LOOK_EVERY = 4
_WORTH_A_TABLE = 1.03
# Counts for 8-bit exponents, then for 5-bit ones (float16 in format 1); the last of each is Inf and NaN.
_WIDE, _NARROW = slice(0, 256), slice(256, 288)
_WIDTHS = {"wide": (8, _WIDE), "narrow": (5, _NARROW)}


class TableRefresh:
    """The life of one codec's tables. Used on the lane only, but for `stats`; exponents are counted where `wire` is."""

    def __init__(self, codec: GCompCodec, refresh_every: int | None, wire: Wire | None = None) -> None:
        self._by_need = refresh_every is None
        refresh_every = _LOOK_EVERY if refresh_every is None else refresh_every
        if refresh_every < 0 or 0 < refresh_every <= _SWITCH_AFTER:
            raise InvalidArgument(
                f"refresh_every is 0 (keep the built-in table), more than {_SWITCH_AFTER} steps or None (by need), "
                f"got {refresh_every}"
            )
        self._codec, self._every = codec, refresh_every
        self._counts = torch.zeros(_NARROW.stop, dtype=torch.int64, device="cpu")
        self._wire = wire if isinstance(wire, DeviceWire) else None
        if self._wire is not None:
            with self._wire.stream:
                self._on_device = torch.zeros(_WIDE.stop, dtype=torch.int64, device=self._wire.device)
            self._on_host = torch.empty(_WIDE.stop, dtype=torch.int64, pin_memory=True, device="cpu")
        self._wait_for_sum: Callable[[], object] | None = None
        self._switch_step: int | None = None
        self._n_refreshes = 0

    def begin_with(self, values: torch.Tensor, communicator: Communicator, record: BucketRecord) -> None:
        """Switch at once to the table that the `values` (n,) of all ranks need, unless one of them is Inf or NaN."""
        counts = torch.zeros(_WIDE.stop, dtype=torch.int64, device="cpu")
        with record.timing("table"):
            self._codec.histogram(values, counts)
            communicator.all_reduce(counts)
            if int(counts.sum()) and not int(counts[-1]):
                self._codec.use_table(HuffmanTable.from_histogram(counts))
        record.count_exchanged(ring_bytes(counts.numel() * counts.element_size(), communicator.world_size))

    def begin_bucket(self, step: int, communicator: Communicator, record: BucketRecord) -> None:
        """Switch to the next table when its step has come."""
        if self._switch_step is None or step < self._switch_step:
            return
        with record.timing("table"):
            self._finish_sum()
            for width, counts in _WIDTHS.values():
                histogram, table = self._counts[counts], self._codec.table_of_width(width)
                # All ranks hold the same sum, so all of them leave out a step that held an Inf or NaN anywhere.
                if not int(histogram.sum()) or int(histogram[-1]):
                    continue
                if not self._by_need or _excess_of(table, histogram) > _WORTH_A_TABLE:
                    self._codec.use_table(HuffmanTable.from_histogram(histogram.contiguous()))
                    self._n_refreshes += 1
            self._counts.zero_()
            self._switch_step = None
        summed = self._counts if self._wire is None else self._on_device
        record.count_exchanged(ring_bytes(summed.numel() * summed.element_size(), communicator.world_size))

    def end_step(self, step: int, communicator: Communicator) -> None:
        """After the last bucket of a step that was counted: start to sum the counts over the ranks."""
        if not self._counts_in(step) or communicator.world_size == 1:
            return
        self._switch_step = step + _SWITCH_AFTER
        if self._wire is None:
            self._wait_for_sum = functools.partial(communicator.finish, communicator.start_all_reduce(self._counts))
            return
        with self._wire.stream:
            self._wire.group.sum(self._on_device)
            reading = Reading(self._on_device, self._on_host)
            self._on_device.zero_()
        self._wait_for_sum = lambda: self._counts[_WIDE].copy_(reading.wait())

    def counts_for(self, step: int, dtype: torch.dtype) -> torch.Tensor | None:
        """(256,) or (32,) int64 for the exponents of what is sent of `dtype` in `step`; None: they are not counted."""
        if not self._counts_in(step):
            return None
        if self._wire is not None:
            return self._on_device
        return self._counts[_WIDE if self._codec.exponent_bits(dtype) == 8 else _NARROW]

    def _counts_in(self, step: int) -> bool:
        return self._every > 0 and step % self._every == 0

    def _finish_sum(self) -> None:
        if self._wait_for_sum is not None:
            self._wait_for_sum()
            self._wait_for_sum = None

    def stats(self) -> dict[str, Any]:
        """The number of refreshes, and the ids of the tables in use."""
        return {
            "table_refreshes": self._n_refreshes,
            **{f"table_id_{name}": self._codec.table_of_width(width).id for name, (width, _) in _WIDTHS.items()},
        }

    def state_dict(self, communicator: Communicator) -> dict[str, Any]:
        """The tables in use and a refresh that is under way."""
        communicator.submit(self._finish_sum).wait()
        tables = {
            name: torch.frombuffer(bytearray(self._codec.table_of_width(width).to_bytes()), dtype=torch.uint8)
            for name, (width, _) in _WIDTHS.items()
        }
        return {"tables": tables, "counts": self._counts.clone(), "switch_step": self._switch_step}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Raises: InvalidArgument, CorruptMessage, IncompatibleVersion (a table that is none)."""
        counts, switch_step = state["counts"], state["switch_step"]
        if counts.shape != self._counts.shape or not isinstance(switch_step, int | None):
            raise not_the_state("scheme 'gcomp'", "it lacks counts or switch_step")
        for name, (width, _) in _WIDTHS.items():
            table = HuffmanTable.from_bytes(bytes(state["tables"][name].tolist()))
            if table.exponent_bits != width:
                raise InvalidArgument(f"the state of scheme gcomp holds a table of the wrong width under {name!r}")
            self._codec.use_table(table)
        self._counts.copy_(counts)
        self._switch_step = switch_step


def _excess_of(table: HuffmanTable, histogram: torch.Tensor) -> float:
    """Bits that `table` takes for values counted in `histogram` (n,) int64, of their entropy; Inf where that is 0."""
    *lengths, escape = table.lengths
    bits = [length or escape + 8 for length in lengths]
    total = int(histogram.sum())
    counted = [(count, n_bits) for count, n_bits in zip(histogram.tolist(), bits, strict=True) if count]
    entropy = sum(count * math.log2(total / count) for count, _ in counted)
    return sum(count * n_bits for count, n_bits in counted) / entropy if entropy > 0 else math.inf
