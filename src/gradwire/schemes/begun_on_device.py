"""Which parameters have had a gradient, where their optimizer's state is on a device: known when the next step begins."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from gradwire.core.site import Reading


class BegunOnDevice:
    """Of each parameter, whether its variance holds anything but zeros. One that does goes on doing so."""

    def __init__(self) -> None:
        self._known: dict[Tensor, Tensor] = {}  # variances that do, by parameter
        self._looked: list[tuple[Tensor, Tensor]] = []
        self._reading: Reading | None = None

    def look(self, variances: Mapping[Tensor, Tensor]) -> None:
        """Start reading those that are not known yet; after the optimizer's step, with its stream current."""
        looked = [(p, v) for p, v in variances.items() if self._known.get(p) is not v and v.numel()]
        if looked:
            self._start(looked)

    def has(self, parameter: Tensor, variance: Tensor) -> bool:
        """Waits for the last `look`; and for the current stream, if that has not seen this variance: it was loaded since."""
        self._finish()
        if self._known.get(parameter) is variance:
            return True
        if not variance.numel() or any(v is variance for _, v in self._looked):
            return False
        self._start([*self._looked, (parameter, variance)])
        self._finish()
        return self._known.get(parameter) is variance

    def _start(self, looked: list[tuple[Tensor, Tensor]]) -> None:
        largest = [torch.linalg.vector_norm(v, float("inf")).float() for _, v in looked]
        self._looked, self._reading = looked, Reading(torch.stack(largest) != 0)

    def _finish(self) -> None:
        if self._reading is None:
            return
        found, self._reading = self._reading.wait().tolist(), None
        self._known |= {p: v for (p, v), has_begun in zip(self._looked, found, strict=True) if has_begun}
