"""The scheme `top-k`: every rank sends its largest elements and their places; the rest waits (Shi et al., MLSys 2021).

The published selection bisects a threshold in 20 rounds over the gradient. A histogram of magnitudes finds it in one pass, and
exactly.

When not to use this: on fast networks, with many ranks (each receives the elements of every other), or where a share
large enough to converge is no longer small.
"""

import torch

from gradwire import checks
from gradwire.codecs.chunks import CHUNK, add_chunks, take_chunks
from gradwire.codecs.selection import add_elements, take_largest
from gradwire.core.feedback import Part
from gradwire.schemes.compressed import Compressed, count_of
from gradwire.schemes.plain_steps import PlainSteps
from gradwire.schemes.selection import ByName, Names
from gradwire.wire.wire import Wire

CODES = ("elements", "chunks")


class TopK(Compressed):
    """Mean over the ranks of each rank's largest elements: (index int32, value float32) of each, with error feedback.

    Args:
        share: of a bucket's elements that are sent, at least one.
        error_feedback: add what was not sent to the next gradient.
        warmup_steps: the first steps of the training, which are reduced plainly. None: 50 beside all but SGD, else 0.
        code: "elements", 64 bits each, as published; or "chunks": of every 4,096 values equally many, in 14 bits each, and what
            they lose stays too; for exchanges that are rare or far (SparseLoCo, arXiv 2508.15706).
        exempt, only: see `ByName`.
    """

    name = "top-k"
    options_of = ByName
    shared = ("share", "error_feedback", "code")

    def __init__(
        self,
        share: float = 0.001,
        error_feedback: bool = True,
        warmup_steps: int | None = None,
        code: str = "elements",
        **names: Names,
    ) -> None:
        plain = PlainSteps(self.name, asked=warmup_steps)
        super().__init__(error_feedback=error_feedback, plain=plain, select=ByName(**names))
        self.share, self.code = checks.share("share", share), checks.choice("code", code, CODES)

    def step(self, part: Part, wire: Wire) -> None:
        with wire.timing("encode"):
            total = part.total()
            if self.code == "chunks":
                is_finite, payload = wire.all_finite(total), take_chunks(total, count_of(self.share, CHUNK))
            else:  # k indices, ascending, then k values
                indices, taken, is_finite = take_largest(total, count_of(self.share, total.numel()))
                payload = torch.cat([indices, taken.view(torch.int32)])
            part.keep()
        payloads = wire.gather(payload, is_finite)
        with wire.timing("decode"):
            mean = wire.scratch("mean", part.bucket.n_elements).zero_()
            for rank, received in enumerate(payloads):  # in rank order: the same sum everywhere
                if self.code == "chunks":
                    add_chunks(received, count_of(self.share, CHUNK), mean)
                else:
                    indices, taken = received.chunk(2)
                    add_elements(indices, taken.view(torch.float32), mean, wire.error)
                wire.check(rank)
            part.values.copy_(wire.divide(mean, wire.world_size))
