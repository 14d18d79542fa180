"""The scheme `dgc`: deep gradient compression (Lin et al., ICLR 2018): the largest accumulated updates of every rank.

u = momentum x u + gradient; v = v + u; the largest of v are sent, and v and u are zero there (momentum correction and factor
masking). With Nesterov's momentum v = v + gradient + momentum x u. One-dimensional parameters are sent whole, and get their
momentum after the mean.

The mean that comes back is an update with momentum, for SGD(momentum=0, weight_decay=0): momentum, Nesterov's or not, and
weight decay are options here. The optimizer's own weight decay would be added after the mean, and get no momentum.

When not to use this: with an optimizer that has momentum of its own; with Adam; with many ranks, since each receives the
elements of every other.
"""

from __future__ import annotations

import logging
import math
from typing import Any

import torch

from gradwire import _native
from gradwire.codecs.tensors import check_positive
from gradwire.control.checks import choice as check_choice
from gradwire.control.checks import share as check_share
from gradwire.core.bucket import Bucket
from gradwire.core.feedback import Withheld, holds_nonzero
from gradwire.core.session import Session
from gradwire.core.site import DeviceSite
from gradwire.core.slot import Slot, flatten_like, local_of
from gradwire.errors import CorruptMessage, InvalidArgument
from gradwire.gpu.selection import Sample
from gradwire.schemes.compressed import WithMomenta, count_of
from gradwire.schemes.dgc_on_device import DgcOnDevice
from gradwire.schemes.on_device import Placing, StepsOnDevice
from gradwire.schemes.plain_first import check_steps
from gradwire.schemes.selection import Selection, matrices
from gradwire.wire.wire import Wire

_log = logging.getLogger(__name__)
_MAX_ADAPTATIONS = 10
_SAMPLED_SHARE = 0.01
_MIN_SAMPLES = 4_096  # fewer are no faster to look through, and buckets below are selected from exactly
# A threshold is good enough if it selects between these multiples of what was asked for.
_FEWEST, _MOST = 0.8, 1.3


class Dgc(Placing, WithMomenta):
    """Mean over the ranks of each rank's largest accumulated updates. Its own state, u and v, is its error feedback.

    With one rank nothing is left out: the result is the gradient with momentum.

    Args:
        share: of a bucket's elements that are sent after the warm-up, 0.001 in the paper; 0.1 in SlimGC's comparison.
        momentum: 0.9, taken over from the optimizer, which then must have none.
        warmup_steps: in how many steps the share falls exponentially to `share`.
        max_norm: clip each parameter's gradient to this norm / sqrt(ranks) before it is added; None for no clipping.
        seed: of the sample that the threshold is taken from.
        per: "layer": the share is taken of each tensor, as the paper has it; "bucket": of a bucket's elements together,
            where tensors of small gradients send nothing for long.
        nesterov: Nesterov's momentum, as SGD's own.
        weight_decay: this share of a parameter is added to its gradient before all else, as SGD does; by the ranks that
            have a gradient of it.
    """

    name = "dgc"
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

    def bind(self, session: Session) -> None:
        super().bind(session)
        groups = session.optimizer.param_groups if session.optimizer is not None else []
        if self.momentum and any(group.get("momentum") or "betas" in group for group in groups):
            _log.warning(
                "gradwire dgc: its result already has momentum %g, and the optimizer adds its own: "
                "use SGD(momentum=0), or dgc with momentum=0",
                self.momentum,
            )
        elif self.momentum and any(group.get("weight_decay") for group in groups):
            _log.warning(
                "gradwire dgc: the optimizer adds its weight decay after the momentum %g; "
                "to have it as SGD(momentum=%g) does, give dgc the weight_decay, and the optimizer none",
                self.momentum,
                self.momentum,
            )

    def share_at(self, step: int) -> float:
        """The share that is sent in `step`: share^((step + 1) / (warmup_steps + 1)) while it warms up."""
        return self.share ** min(1.0, (step + 1) / (self.warmup_steps + 1))

    def _send(self, bucket: Bucket, wire: Wire) -> bool:
        scale = self.session.loss_scale()
        with wire.timing("encode"):
            momenta, new_momenta = self._momenta.pair(bucket)
            sums, new_sums = self.session.feedback.pair(bucket)
            spans = bucket.spans
            whole = self.whole_spans(bucket, spans)
            # What this rank did not use waits; the momentum of parameters that are sent whole is the same on all ranks.
            is_used = [span in whole or holds_nonzero(bucket.buffer[slice(*span)]) for span in spans]
            waiting = [Withheld(spans, is_used, state) for state in (momenta, sums)]
            gradient = self._clipped(bucket, spans, scale)
            for slot, span, used in zip(bucket.slots, spans, is_used, strict=True):
                if used and span not in whole:
                    self.decay(slot, gradient[slice(*span)])
            torch.add(gradient, momenta, alpha=self.momentum, out=new_momenta)
            self.update(gradient, new_momenta, new_sums).add_(sums)
            for withheld in waiting:
                withheld.put_back()
            # One pass without a copy: the largest magnitude is NaN or Inf if anything is.
            is_finite = all(
                math.isfinite(float(torch.linalg.vector_norm(values, float("inf")))) for values in (gradient, new_sums)
            )
            dense = torch.cat([gradient[start:end] for start, end in whole]) if whole else None
            for start, end in whole:
                new_sums[start:end] = 0
            indices, count = self._select(bucket, new_sums, whole, is_finite)
            values = torch.zeros(indices.numel())
            values[:count] = new_sums[indices[:count].long()]
        messages: torch.Tensor | None = None
        if wire.world_size > 1:
            payload = torch.cat([torch.tensor([count], dtype=torch.int32), indices, values.view(torch.int32)])
            messages = wire.gather(payload, is_finite)
            if messages is None:
                return False
        elif not is_finite:
            return False
        if dense is not None and wire.world_size > 1:
            wire.sum(dense).div_(wire.world_size)
        with wire.timing("decode"):
            for state in (new_momenta, new_sums):
                state[indices[:count].long()] = 0
            mean = self._mean_of(bucket, messages, gradient)
            if dense is not None:
                self._add_whole(bucket, whole, dense, mean, momenta, new_momenta)
            for withheld, new in zip(waiting, (new_momenta, new_sums), strict=True):
                withheld.keep(new, [False] * len(spans))
            self._momenta.stage_bucket(bucket, new_momenta)
            self.session.feedback.stage_bucket(bucket, new_sums)
            bucket.buffer.copy_(mean.mul_(scale))
        return True

    def _clipped(self, bucket: Bucket, spans: list[tuple[int, int]], scale: float) -> torch.Tensor:
        """(n,) float32, scratch: the gradient without the loss scale, each parameter's clipped."""
        scratch = self.session.communicator.scratch("dgc gradient", 4 * bucket.n_elements).view(torch.float32)
        torch.div(bucket.buffer, scale, out=scratch) if bucket.buffer.dtype == torch.float32 else scratch.copy_(
            bucket.buffer
        ).div_(scale)
        if self.max_norm is not None:
            limit = self.max_norm / math.sqrt(self.session.communicator.world_size)
            for start, end in spans:
                norm = float(torch.linalg.vector_norm(scratch[start:end]))
                if norm > limit:
                    scratch[start:end].mul_(limit / norm)
        return scratch

    def _select(
        self, bucket: Bucket, sums: torch.Tensor, whole: list[tuple[int, int]], is_finite: bool
    ) -> tuple[torch.Tensor, int]:
        """Room for as many indices as the share allows, and how many of them are used."""
        spans, counts = self.spans_and_counts(bucket, whole)
        indices = torch.zeros(sum(counts), dtype=torch.int32)
        if not is_finite:
            return indices, 0
        generator = self._generator(bucket)
        n_chosen = 0
        for (start, end), k in zip(spans, counts, strict=True):
            if k:
                chosen = select_by_sample(sums[start:end], k, generator)
                indices[n_chosen : n_chosen + chosen.numel()] = chosen + start
                n_chosen += chosen.numel()
        return indices, n_chosen

    def _mean_of(self, bucket: Bucket, messages: torch.Tensor | None, scratch: torch.Tensor) -> torch.Tensor:
        """(n,) float32 in `scratch`: the mean of what was sent sparsely."""
        mean = scratch.zero_()
        if messages is None:
            return mean
        k = (messages.shape[1] - 1) // 2
        for rank, message in enumerate(messages):  # in rank order: the same sum everywhere
            count = int(message[0])
            places = message[1 : 1 + k][: max(0, count)].long()
            outside = count and (int(places.min()) < 0 or int(places.max()) >= bucket.n_elements)
            if not 0 <= count <= k or outside:
                raise CorruptMessage(
                    f"rank {rank} sent {count} of at most {k} elements, or an index outside of bucket {bucket.index} "
                    f"({bucket.n_elements} elements) in step {bucket.step}; restart from the last checkpoint"
                )
            mean.index_add_(0, places, message[1 + k :][:count].view(torch.float32))
        return mean.div_(len(messages))

    def _add_whole(
        self,
        bucket: Bucket,
        whole: list[tuple[int, int]],
        dense: torch.Tensor,
        mean: torch.Tensor,
        momenta: torch.Tensor,
        new_momenta: torch.Tensor,
    ) -> None:
        """Parameters that are sent whole: their mean, `dense`, then their momentum, alike on all ranks."""
        first, slots = 0, dict(zip(bucket.spans, bucket.slots, strict=True))
        for start, end in whole:
            part = dense[first : first + end - start]
            first += end - start
            if not part.any():  # unused on all ranks: DDP throws the result away, so its momentum waits
                new_momenta[start:end], mean[start:end] = momenta[start:end], part
                continue
            self.decay(slots.get((start, end)), part)
            torch.add(part, momenta[start:end], alpha=self.momentum, out=new_momenta[start:end])
            self.update(part, new_momenta[start:end], mean[start:end])

    # ---- on a device

    def _go_to(self, site: DeviceSite, session: Session) -> StepsOnDevice:
        return DgcOnDevice(session, site, self, self._momenta)

    # ---- what does not depend on where it works

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


def select_by_sample(values: torch.Tensor, k: int, generator: torch.Generator) -> torch.Tensor:
    """(at most k,) int32, ascending: the largest magnitudes of `values` (n,) float32, about k of them.

    A threshold is taken from a sample of 1 % (and at least of 2 n / k elements, so that two of the largest are in it), and
    moved up to ten times until it selects from 0.8 k to 1.3 k elements; of too many, the k largest stay. A threshold that
    never settles gives way to an exact one.
    """
    n = values.numel()
    places, n_top = draw_sample(n, k, generator)
    sample = values if places is None else values[places]
    threshold = float(sample.abs().topk(n_top).values[-1])
    found = torch.empty(min(n, 2 * k + 1), dtype=torch.int32)
    lowest, highest = 0.0, math.inf  # thresholds known to select too many, too few
    count = _native.select_from(values, threshold, found)
    for _ in range(_MAX_ADAPTATIONS):
        if count > _MOST * k:
            lowest = max(threshold, torch.finfo(torch.float32).tiny)
        elif count < _FEWEST * k and threshold > 0:
            highest = threshold
        else:
            break
        # As published by a factor, until it has been passed on both sides.
        is_bracketed = lowest > 0 and highest < math.inf
        threshold = (lowest + highest) / 2 if is_bracketed else lowest * _MOST or highest * _FEWEST
        count = _native.select_from(values, threshold, found)
    if count > found.numel() or (count < _FEWEST * k and threshold > 0):
        found = torch.empty(k, dtype=torch.int32)
        _native.select_largest(values, found)
        return found[values[found.long()] != 0]
    found = found[:count]
    if count > k:  # of equal magnitudes the first
        kept = torch.empty(k, dtype=torch.int32)
        _native.select_largest(values[found.long()], kept)
        found = found[kept.long()]
    return found


def draw_sample(n_elements: int, k: int, generator: torch.Generator) -> Sample:
    """Which of n values the threshold for the largest k is taken from."""
    n_samples = max(math.ceil(_SAMPLED_SHARE * n_elements), math.ceil(2 * n_elements / max(k, 1)), _MIN_SAMPLES)
    if n_samples >= n_elements:
        return Sample(None, k)
    places = torch.randint(n_elements, (n_samples,), generator=generator)
    return Sample(places, max(1, round(n_samples * k / n_elements)))
