"""The scheme `periodic`: all-reduce in one step of `every` only, the sparsification that GComp's Fig. 18 compares with."""

from __future__ import annotations

from typing import Any

from gradwire import codecs
from gradwire.core.bucket import Bucket
from gradwire.errors import InvalidArgument
from gradwire.schemes.through_codec import ThroughCodec


class Periodic(ThroughCodec):
    """Mean over the ranks in every `every`-th step, this rank's own gradient in the others.

    When not to use this: for training. Replicas drift apart by definition: the one scheme whose ranks do not agree.
    """

    name = "periodic"
    replicas_may_differ = True

    def __init__(self, every: int = 8) -> None:
        if every < 1:
            raise InvalidArgument(f"every must be at least 1, got {every}")
        super().__init__(codecs.by_name("raw"))
        self.every = every

    @property
    def configuration(self) -> dict[str, Any]:
        return {**super().configuration, "every": self.every}

    def _reduce_on_lane(self, bucket: Bucket) -> None:
        if bucket.step % self.every == self.every - 1:
            super()._reduce_on_lane(bucket)
