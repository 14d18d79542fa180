"""The communication threshold table where buckets stay on their device: the same table, by times that the device takes.

Probes are enqueued behind the last bucket of a step that measures, before its mean is handed out: the training's kernels
wait for them, and no thread does. What they took is read when the next step begins; ranks agree then.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from gradwire.core.device_times import DeviceTimes
from gradwire.core.site import DeviceSite
from gradwire.schemes.slimgc.measuring import COLD_STEPS, Measuring
from gradwire.wire.communicator import Communicator

# (values (n,), is_compressed, where "encode", "communicate" and "decode" are noted) -> None: one tensor's exchange, with
# the site's stream current; the values are overwritten.
DeviceProbe = Callable[[torch.Tensor, bool, DeviceTimes], None]


@dataclass(frozen=True)
class _Probed:
    """The probes of one size and mode that are under way."""

    n: int
    is_compressed: bool
    times: list[DeviceTimes]


class MeasuringOnDevice(Measuring):
    """See `Measuring`. Used on the lane only, but for `request` and `stats`."""

    def place(self, site: DeviceSite) -> DeviceTimes:
        """Say where times are taken, before all else; where a step's buckets note what they "communicate"."""
        self._site, self._of_step = site, DeviceTimes(site.device)
        self._under_way: list[_Probed] = []
        self._ended: int | None = None  # the step whose buckets were all enqueued last
        self._is_due = False  # all sizes are measured behind the next step
        return self._of_step

    def end_buckets(self, step: int, probe: DeviceProbe) -> None:
        """Enqueue the probes of this step, with the site's stream current, behind its last bucket."""
        self._ended = step
        modes: tuple[bool, ...] = (True, False) if self._is_due else ()
        if self.is_warming_up(step):
            assert self._first_step is not None
            is_typical = step - self._first_step >= COLD_STEPS
            modes = (self.is_compressed_warmup(step),) if is_typical else ()
        if modes:
            self._sample = self._sample.to(self._site.device)  # where it is, unless it was loaded
        for is_compressed in modes:
            for n, repeats in self._probes():
                times = [self._send(n, is_compressed, probe) for _ in range(repeats)]
                self._under_way.append(_Probed(n, is_compressed, times))

    def begin(self, communicator: Communicator) -> bool:
        """Before the next step's first bucket, when the step before is over: whether there is a new table."""
        step, self._ended = self._ended, None
        for probed in self._under_way:
            self._note(probed.n, probed.is_compressed, [_total_and_codec(times) for times in probed.times])
        self._under_way.clear()
        communicate_s = self._of_step.take().get("communicate", 0.0)
        if step is None:  # none has ended since, or it was given up half-way
            return False
        if self.is_warming_up(step):
            return not self.is_warming_up(step + 1) and self._agree(communicator)
        if self.table is None:
            return False
        if self._is_due:
            self._is_due = False
            return self._agree(communicator)
        self._communicate_s.append(communicate_s)
        if self.drift_every and not (step + 1) % self.drift_every:
            self._is_due = self._is_outdated(communicator)
        return False

    def _send(self, n: int, is_compressed: bool, probe: DeviceProbe) -> DeviceTimes:
        values = self._site.scratch("probe", n, self._sample.dtype).copy_(self._sample[:n])
        self._site.group.sum(self._site.scratch("start", 1, torch.float32).zero_())  # ranks start together
        times = DeviceTimes(self._site.device)
        probe(values, is_compressed, times)
        return times


def _total_and_codec(times: DeviceTimes) -> tuple[float, float]:
    taken = times.take()
    codec_s = taken.get("encode", 0.0) + taken.get("decode", 0.0)
    return codec_s + taken["communicate"], codec_s
