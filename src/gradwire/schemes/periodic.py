"""The scheme `periodic`: all-reduce in one step of `every` only, the sparsification that GComp's Fig. 18 compares with."""

from __future__ import annotations

from typing import Any

from gradwire import codecs
from gradwire.core.feedback import Part
from gradwire.errors import InvalidArgument
from gradwire.exchange.ring import Ring
from gradwire.schemes.compressed import Compressed
from gradwire.wire.wire import Wire


class Periodic(Compressed):
    """Mean over the ranks in every `every`-th step, this rank's own gradient in the others.

    When not to use this: for training. Replicas drift apart by definition: the one scheme whose ranks do not agree.
    """

    name = "periodic"
    replicas_may_differ = True
    works_on_device = False

    def __init__(self, every: int = 8) -> None:
        if every < 1:
            raise InvalidArgument(f"every must be at least 1, got {every}")
        super().__init__()
        self._ring, self.every = Ring(codecs.by_name("raw")), every

    @property
    def configuration(self) -> dict[str, Any]:
        return {**self._ring.configuration, "every": self.every}

    def step(self, part: Part, wire: Wire) -> None:
        if part.bucket.step % self.every == self.every - 1:
            self._ring.mean(part.bucket, wire)
