"""The scheme `terngrad`: -1, 0 or 1 times a scale that all ranks share, summed as integers (Wen et al., NeurIPS 2017).

Up to 7 ranks a value takes 4 bits on the wire (the sum of all ranks has to fit), up to 127 ranks 8 bits.

When not to use this: with more than 127 ranks; where one-bit or two-bit can be used, which send less and feed their errors
back: the variance of ternary rounding stays, and asks for smaller learning rates.
"""

import torch

from gradwire.checks import choice as check_choice
from gradwire.codecs.ternary import Ternary
from gradwire.core.feedback import Part
from gradwire.core.session import Session
from gradwire.schemes.compressed import Compressed
from gradwire.schemes.selection import ByName, Names
from gradwire.wire.wire import Wire


class TernGrad(Compressed):
    """Right on average but for what is clipped; without error feedback, as published.

    Args:
        clip: in standard deviations of what shares a scale (taken from zero).
        seed: of the drawing; the same on all ranks, which draw independently nevertheless.
        per: what shares a scale: "layer", a tensor, as published; or "bucket", where the tensors of small gradients are next
            to all zeros, and clipping takes most from those of large ones.
        exempt, only: see `ByName`.
    """

    name = "terngrad"
    options_of = ByName
    shared = ("clip", "seed", "per")

    def __init__(self, clip: float = 2.5, seed: int = 0, per: str = "layer", **names: Names) -> None:
        super().__init__(select=ByName(**names))
        self.codec, self.per = Ternary(clip, seed), check_choice("per", per, ("layer", "bucket"))
        self.clip, self.seed = self.codec.clip, self.codec.seed

    def bind(self, session: Session) -> None:
        """Raises: Unsupported (more ranks than can be summed)."""
        self.codec.field_bits(session.communicator.world_size)
        super().bind(session)

    def step(self, part: Part, wire: Wire) -> None:
        """Find the largest scale of all ranks, draw by it, and sum integers."""
        bucket, codec, values, n_ranks = part.bucket, self.codec, part.values, wire.world_size
        spans = bucket.spans if self.per == "layer" and bucket.slots else [(0, bucket.n_elements)]
        shares = codec.share(bucket.n_elements, spans, wire.device)
        part.used_by_any, scales = wire.largest(
            part.is_used, len(shares.spans), lambda out: codec.write_scales(values, shares, out)
        )
        counts = wire.scratch("counts", codec.count_bytes(bucket.n_elements, n_ranks), torch.uint8)
        with wire.timing("encode"):
            codec.write_counts(values, shares, scales, n_ranks, counts, bucket.draw(wire.rank))
        wire.sum(counts)
        with wire.timing("decode"):
            codec.read_counts(counts, shares, scales, n_ranks, values)
            part.zero_unused()
