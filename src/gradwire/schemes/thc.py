"""The scheme `thc`: rotated values on 16 levels whose integers are summed in flight (Li et al., NSDI 2024).

Up to 8 ranks a value takes a byte on the wire, up to 1,000 ranks two (the published system sums in a switch or server, from 4
bits a value). Each block of 1,024 values shares the largest of the ranks' norms.

When not to use this: with more than 8 ranks, unless two bytes a value are little enough; where the codec's time counts.
"""

import torch

from gradwire.codecs.hadamard import Thc
from gradwire.core.feedback import Part
from gradwire.core.session import Session
from gradwire.schemes.compressed import Compressed
from gradwire.schemes.selection import ByName, Names
from gradwire.wire.wire import Wire

_NO_RANK = -1  # what is drawn by this number is the same on all ranks


class ThcScheme(Compressed):
    """Sums of what each rank's gradient + residual rounds to, rotated back once.

    Args:
        clip: in standard deviations of the rotated values.
        seed: of signs and rounding; the same on all ranks, which round independently nevertheless.
        error_feedback: add what was clamped and rounded off to the next gradient.
        exempt, only: see `ByName`.
    """

    name = "thc"
    options_of = ByName
    shared = ("clip", "seed", "error_feedback")

    def __init__(self, clip: float = 2.15, seed: int = 0, error_feedback: bool = True, **names: Names) -> None:
        super().__init__(error_feedback=error_feedback, select=ByName(**names))
        self.codec = Thc(clip, seed)
        self.clip, self.seed = self.codec.clip, self.codec.seed

    def bind(self, session: Session) -> None:
        """Raises: Unsupported (more ranks than can be summed)."""
        self.codec.sums_are_wide(session.communicator.world_size)
        super().bind(session)

    def step(self, part: Part, wire: Wire) -> None:
        """Find the largest norm of all ranks for each block, round by it, and sum integers."""
        bucket, codec, values, n_ranks = part.bucket, self.codec, part.values, wire.world_size
        part.used_by_any, norms = wire.largest(
            part.is_used,
            codec.n_norms(bucket.n_elements),
            lambda out: codec.write_norms(values, out, part.residual, part.loss_scale),
        )
        sign_step = bucket.draw(_NO_RANK)
        codes = wire.scratch("codes", codec.code_bytes(bucket.n_elements, n_ranks), torch.uint8)
        with wire.timing("encode"):
            codec.write_codes(
                values, norms, codes, n_ranks=n_ranks, sign_step=sign_step, step=bucket.draw(wire.rank),
                residual=part.residual, new_residual=part.unsent, residual_scale=part.loss_scale,
            )  # fmt: skip
        sums = wire.sum(codec.summable(codes, n_ranks))
        with wire.timing("decode"):
            codec.read_sums(sums.view(torch.uint8), norms, n_ranks, values, sign_step=sign_step)
            part.zero_unused()
