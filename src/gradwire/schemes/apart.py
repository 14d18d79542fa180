"""What is sent of the tensors that a scheme compresses apart from a bucket's others: in host memory and on devices alike."""

from __future__ import annotations

import torch

from gradwire.core.bucket import Bucket
from gradwire.schemes.selection import Selection


class Apart:
    """Their gradients, one after the other. Schemes that send something else of them say so here."""

    def part_dtype(self, bucket: Bucket) -> torch.dtype:
        """Of what is sent for the chosen tensors."""
        return bucket.buffer.dtype

    def fill(self, part: Bucket, bucket: Bucket, chosen: Selection) -> None:
        """Write what is sent for the chosen tensors, one after the other, to `part`."""
        torch.cat([run.in_bucket(bucket.buffer) for run in chosen.compressed_runs], out=part.buffer)

    def take(self, part: Bucket, bucket: Bucket, chosen: Selection) -> None:
        """Write the means in `part` to where the chosen tensors lie."""
        for run in chosen.compressed_runs:
            run.in_bucket(bucket.buffer).copy_(run.in_fused(part.buffer))
