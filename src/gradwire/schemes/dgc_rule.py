"""The rule of deep gradient compression, wherever it works: its options, what it takes the largest of, and how many."""

from __future__ import annotations

import math
from typing import Any

import torch

from gradwire.codecs.selection import Sample
from gradwire.codecs.tensors import check_positive
from gradwire.control.checks import choice as check_choice
from gradwire.control.checks import share as check_share
from gradwire.core.bucket import Bucket
from gradwire.core.slot import Slot, flatten_like, local_of
from gradwire.errors import InvalidArgument
from gradwire.schemes.compressed import WithMomenta, count_of
from gradwire.schemes.plain_first import check_steps
from gradwire.schemes.selection import Selection, matrices

_SAMPLED_SHARE = 0.01
_MIN_SAMPLES = 4_096  # fewer are no faster to look through, and buckets below are selected from exactly


class DgcRule(WithMomenta):
    """See `Dgc` for the options."""

    state_is_per_world = True
    acts_alone = True

    def __init__(
        self,
        share: float = 0.001,
        momentum: float = 0.9,
        warmup_steps: int = 0,
        max_norm: float | None = None,
        seed: int = 0,
        per: str = "layer",
        nesterov: bool = False,
        weight_decay: float = 0.0,
    ) -> None:
        super().__init__(error_feedback=True)
        self.share = check_share("share", share)
        if not 0 <= momentum < 1:
            raise InvalidArgument(f"momentum must be from 0 to less than 1, got {momentum}")
        if not isinstance(seed, int):
            raise InvalidArgument(f"seed must be an integer, got {seed!r}")
        if nesterov and not momentum:
            raise InvalidArgument("nesterov=True needs a momentum above 0")
        if isinstance(weight_decay, bool) or not (weight_decay >= 0 and math.isfinite(weight_decay)):
            raise InvalidArgument(f"weight_decay must be finite and not negative, got {weight_decay!r}")
        self.momentum, self.nesterov, self.weight_decay = float(momentum), bool(nesterov), float(weight_decay)
        self.per = check_choice("per", per, ("layer", "bucket"))
        self.warmup_steps = check_steps("warmup_steps", warmup_steps)
        self.max_norm = None if max_norm is None else check_positive("max_norm", max_norm)
        self.seed = seed

    @property
    def settling_steps(self) -> int:
        """The steps in which the share falls."""
        return self.warmup_steps

    @property
    def configuration(self) -> dict[str, Any]:
        return {
            "share": self.share,
            "momentum": self.momentum,
            "warmup_steps": self.warmup_steps,
            "max_norm": self.max_norm,
            "seed": self.seed,
            "per": self.per,
            "nesterov": self.nesterov,
            "weight_decay": self.weight_decay,
        }

    def share_at(self, step: int) -> float:
        """The share that is sent in `step`: share^((step + 1) / (warmup_steps + 1)) while it warms up."""
        return self.share ** min(1.0, (step + 1) / (self.warmup_steps + 1))

    def spans_and_counts(self, bucket: Bucket, whole: list[tuple[int, int]]) -> tuple[list[tuple[int, int]], list[int]]:
        """What the largest are taken of, and how many at most of each."""
        spans, share = [(0, bucket.n_elements)], self.share_at(bucket.step)
        counts = [bucket.n_elements - sum(end - start for start, end in whole)]  # what is whole holds zeros by now
        if self.per == "layer" and bucket.slots:
            spans = [span for span in bucket.spans if span not in whole and span[1] > span[0]]
            counts = [end - start for start, end in spans]
        return spans, [count_of(share, n) if n else 0 for n in counts]

    def samples(self, bucket: Bucket, spans: list[tuple[int, int]], counts: list[int]) -> list[Sample]:
        """What the threshold of each span is taken from in this step of this rank."""
        generator = self._generator(bucket)
        return [
            draw_sample(end - start, k, generator) if k else Sample(None, 0)
            for (start, end), k in zip(spans, counts, strict=True)
        ]

    def _generator(self, bucket: Bucket) -> torch.Generator:
        draw = bucket.draw(self.session.communicator.rank, self.seed)
        return torch.Generator().manual_seed(draw & 0x7FFF_FFFF_FFFF_FFFF)

    def whole_spans(self, bucket: Bucket, spans: list[tuple[int, int]]) -> list[tuple[int, int]]:
        """Where what is sent whole lies: everything, with one rank."""
        if self.session.communicator.world_size == 1:
            return spans or [(0, bucket.n_elements)]
        return [(span.offset, span.offset + span.n_elements) for span in Selection(bucket, matrices).raw]

    def decay(self, slot: Slot | None, gradient: torch.Tensor) -> None:
        """Add weight decay to the gradient (n,) of a slot."""
        if self.weight_decay and slot is not None and slot.parameter is not None:
            parameter = local_of(slot.parameter.detach())
            flat = flatten_like(parameter, parameter)[slot.start : slot.start + slot.numel()]
            gradient.add_(flat.to(device=gradient.device, dtype=torch.float32), alpha=self.weight_decay)

    def update(self, gradient: torch.Tensor, momenta: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        """What SGD with momentum takes off the parameters, into `out`."""
        if not self.nesterov:
            return out.copy_(momenta)
        return torch.add(gradient, momenta, alpha=self.momentum, out=out)


def draw_sample(n_elements: int, k: int, generator: torch.Generator) -> Sample:
    """Draw the values of n that the threshold for the largest k is taken from: 1 % of them, and at least 2 n / k, so that two
    of the largest are among them.
    """
    n_samples = max(math.ceil(_SAMPLED_SHARE * n_elements), math.ceil(2 * n_elements / max(k, 1)), _MIN_SAMPLES)
    if n_samples >= n_elements:
        return Sample(None, k)
    places = torch.randint(n_elements, (n_samples,), generator=generator)
    return Sample(places, max(1, round(n_samples * k / n_elements)))
