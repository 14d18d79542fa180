"""The clocks of what SlimGC sends: a stopwatch and the buckets' records in host memory, events on a device's stream."""

from __future__ import annotations

from collections.abc import Callable

import torch

from gradwire.telemetry.recorder import BucketRecord
from gradwire.telemetry.stopwatch import Stopwatch
from gradwire.wire.device_wire import DeviceTimes, DeviceWire
from gradwire.wire.wire import Wire

# Reads what an exchange took, when it is over: (seconds, of them in the codec). On a device the host waits for it.
Later = Callable[[], tuple[float, float]]


class HostClock:
    """Times one attachment in host memory, where what was sent has arrived when the lane goes on."""

    def __init__(self) -> None:
        self._records: list[BucketRecord] = []

    def begin_bucket(self, record: BucketRecord) -> None:
        """A bucket is about to be reduced."""
        if self._records and self._records[0].step != record.step:
            self._records.clear()  # of a step that was given up half-way
        self._records.append(record)

    def take_communicate_s(self) -> float:
        """Seconds that the buckets of the last step communicated; forgets them."""
        records, self._records = self._records, []
        return sum(record.busy_ns["communicate"] for record in records) / 1e9

    def time(self, wire: Wire, send: Callable[[], None]) -> Later:
        """Have all ranks `send` by this end of the wire at the same time: waiting for a slow one is not communication."""
        wire.communicator.all_reduce(torch.zeros(1, dtype=torch.float32, device="cpu"))
        watch = Stopwatch()
        with watch:
            send()
        busy_ns = wire.record.busy_ns
        taken = watch.total_ns / 1e9, (busy_ns["encode"] + busy_ns["decode"]) / 1e9
        return lambda: taken


class DeviceClock:
    """Times one attachment on a device, all that its stream does from now on until `close`; see `HostClock`."""

    def __init__(self, wire: DeviceWire) -> None:
        self._wire, self._of_step = wire, DeviceTimes(wire.device)
        wire.note_times(self._of_step)

    def take_communicate_s(self) -> float:
        """As `HostClock`'s, of all that was enqueued."""
        return self._of_step.take().get("communicate", 0.0)

    def time(self, wire: Wire, send: Callable[[], None]) -> Later:
        """As `HostClock`'s; nobody waits before the times are read."""
        self._wire.group.sum(self._wire.scratch("start", 1).zero_())
        times = DeviceTimes(self._wire.device)
        self._wire.note_times(times)
        send()
        self._wire.note_times(self._of_step)

        def read() -> tuple[float, float]:
            taken = times.take()
            codec_s = taken.get("encode", 0.0) + taken.get("decode", 0.0)
            return codec_s + taken["communicate"], codec_s

        return read

    def close(self) -> None:
        """Times are noted no more."""
        self._wire.note_times(None)
