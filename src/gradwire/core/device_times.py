"""How long pieces of work took on a device: noted on the stream as it goes, known to the host when it has passed."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch


class DeviceTimes:
    """Durations by kind, of work on the streams that are current."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._spans: list[tuple[str, torch.Event, torch.Event]] = []

    @contextlib.contextmanager
    def timing(self, kind: str) -> Iterator[None]:
        """Note how long the device takes for what is enqueued inside."""
        begun = self._now()
        yield
        self._spans.append((kind, begun, self._now()))

    def take(self) -> dict[str, float]:
        """Seconds by kind, once all of them are over: the host waits. Forgets them."""
        spans, self._spans = self._spans, []
        taken: dict[str, float] = {}
        for kind, begun, ended in spans:
            ended.synchronize()
            taken[kind] = taken.get(kind, 0.0) + begun.elapsed_time(ended) / 1e3
        return taken

    def _now(self) -> torch.Event:
        event = torch.Event(device=self._device, enable_timing=True)
        event.record(torch.accelerator.current_stream(self._device))
        return event
