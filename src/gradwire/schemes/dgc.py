"""The scheme `dgc`: deep gradient compression (Lin et al., ICLR 2018).

u = momentum x u + gradient; v = v + u; the largest of v are sent, and v and u are zero there (momentum correction and factor
masking). With Nesterov's momentum v = v + gradient + momentum x u. One-dimensional parameters are sent whole, and get their
momentum after the mean.

The mean that comes back is an update with momentum, for SGD(momentum=0, weight_decay=0): momentum, Nesterov's or not, and
weight decay are options here. The optimizer's own weight decay would be added after the mean, and get no momentum.

When not to use this: with an optimizer that has momentum of its own; with Adam; with many ranks, since each receives the
elements of every other.
"""

import logging
import math
from typing import Any

import torch
from torch import Tensor

from gradwire import checks
from gradwire.codecs.chunks import CHUNK, add_chunks, take_chunks
from gradwire.codecs.selection import Sample, add_elements, take_by_sample
from gradwire.codecs.tensors import check_positive
from gradwire.core.bucket import Bucket, Slot, local_of
from gradwire.core.feedback import Feedback, Part, Unused
from gradwire.core.session import Session
from gradwire.errors import InvalidArgument
from gradwire.schemes.compressed import Compressed, count_of
from gradwire.schemes.momenta import as_lying
from gradwire.schemes.selection import ByName, Names, Selection, matrices
from gradwire.schemes.top_k import CODES
from gradwire.wire.wire import Wire

_log = logging.getLogger(__name__)
_SAMPLED_SHARE = 0.01
_MIN_SAMPLES = 4_096  # fewer are no faster to look through, and buckets below are selected from exactly

_Spans = list[tuple[int, int]]


class Dgc(Compressed):
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
        code: "elements" or "chunks", of which the share is taken of every 4,096 values of a bucket; as `top-k`'s.
        exempt, only: which tensors are sent whole besides; see `ByName`.
    """

    name = "dgc"
    acts_alone = True
    settles_plainly = False
    options_of = ByName
    shared = ("share", "momentum", "warmup_steps", "max_norm", "seed", "per", "nesterov", "weight_decay", "code")
    momenta: Feedback

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
        code: str = "elements",
        **names: Names,
    ) -> None:
        super().__init__(error_feedback=True, momenta=True, select=ByName(**{"exempt": (), **names}))
        self.share = checks.share("share", share)
        if not 0 <= momentum < 1:
            raise InvalidArgument(f"momentum must be from 0 to less than 1, got {momentum}")
        if not isinstance(seed, int):
            raise InvalidArgument(f"seed must be an integer, got {seed!r}")
        if nesterov and not momentum:
            raise InvalidArgument("nesterov=True needs a momentum above 0")
        if isinstance(weight_decay, bool) or not (weight_decay >= 0 and math.isfinite(weight_decay)):
            raise InvalidArgument(f"weight_decay must be finite and not negative, got {weight_decay!r}")
        self.momentum, self.nesterov, self.weight_decay = float(momentum), bool(nesterov), float(weight_decay)
        self.seed = seed
        self.per, self.code = checks.choice("per", per, ("layer", "bucket")), checks.choice("code", code, CODES)
        self.warmup_steps = checks.count("warmup_steps", warmup_steps, at_least=0)
        self.max_norm = None if max_norm is None else check_positive("max_norm", max_norm)

    @property
    def settling_steps(self) -> int:
        """The steps in which the share falls."""
        return self.warmup_steps

    def share_at(self, step: int) -> float:
        """The share that is sent in `step`: share^((step + 1) / (warmup_steps + 1)) while it warms up."""
        return self.share ** min(1.0, (step + 1) / (self.warmup_steps + 1))

    def bind(self, session: Session) -> None:
        """Raises: Unsupported (no kernels on the device)."""
        super().bind(session)
        groups = session.optimizers.param_groups
        if self.momentum and any(group.get("momentum") or "betas" in group for group in groups):
            _log.warning(
                "gradwire dgc: its result already has momentum %g, and the optimizer adds its own: "
                "use SGD(momentum=0), or dgc with momentum=0", self.momentum,
            )  # fmt: skip
        elif self.momentum and any(group.get("weight_decay") for group in groups):
            _log.warning(
                "gradwire dgc: the optimizer adds its weight decay after the momentum %g; "
                "to have it as SGD(momentum=%g) does, give dgc the weight_decay, and the optimizer none",
                self.momentum, self.momentum,
            )  # fmt: skip

    def choose(self, bucket: Bucket) -> None:
        """The bucket as it lies: what travels whole has a momentum too."""

    def step(self, part: Part, wire: Wire) -> None:
        """u and v move on, the largest of v are sent, and tensors that travel whole get their momentum after the mean."""
        bucket, spans = part.bucket, part.bucket.spans
        sums: Any = part.residual
        new_sums: Any = part.unsent
        with wire.timing("encode"):
            momenta, new_momenta = self.momenta.pair(bucket)
            # With one rank everything is sent whole.
            raw = Selection(bucket, lambda slot: matrices(slot) and self.select(slot)).raw
            whole = [(span.offset, span.offset + span.n_elements) for span in raw]
            if wire.world_size == 1:
                whole = spans or [(0, bucket.n_elements)]
            # What this rank did not use waits; the momentum of tensors that are sent whole is the same on all ranks.
            is_used = [used or span in whole for used, span in zip(part.is_used, spans, strict=True)]
            waiting = Unused(spans, is_used, momenta)
            gradient = wire.scratch("dgc gradient", bucket.n_elements).copy_(part.values)
            wire.divide(gradient, part.loss_scale)
            if self.max_norm is not None:
                limit = self.max_norm / math.sqrt(wire.world_size)
                for start, end in spans:
                    norm = torch.linalg.vector_norm(gradient[start:end]).double()
                    gradient[start:end].mul_(torch.where(norm > limit, limit / norm, 1.0).float())
            for slot, span, used in zip(bucket.slots, spans, is_used, strict=True):
                if used and span not in whole:
                    self._decay(slot, gradient[slice(*span)])
            torch.add(gradient, momenta, alpha=self.momentum, out=new_momenta)  # u, momentum correction
            self._update(gradient, new_momenta, new_sums).add_(sums)  # v
            waiting.put_back()
            is_finite = wire.all_finite(gradient) & wire.all_finite(new_sums)
            dense = torch.cat([gradient[start:end] for start, end in whole]) if whole else None
            for start, end in whole:
                new_sums[start:end].zero_()
        payloads = self._gather(bucket, wire, new_sums, new_momenta, whole, is_finite)
        if dense is not None and wire.world_size > 1:
            wire.divide(wire.sum(dense), wire.world_size)
        with wire.timing("decode"):
            mean = gradient.zero_()
            for rank, received in enumerate(payloads):  # in rank order: the same sum everywhere
                if self.code == "chunks":
                    add_chunks(received, count_of(self.share_at(bucket.step), CHUNK), mean)
                else:
                    n_taken, indices, taken = received.tensor_split([1, (1 + received.numel()) // 2])
                    add_elements(indices, taken.view(torch.float32), mean, wire.error, n_taken)
                wire.check(rank)
            wire.divide(mean, wire.world_size)
            if dense is not None:
                self._add_whole(part, wire, whole, dense, mean, (momenta, new_momenta))
            waiting.keep(new_momenta, is_used)
            self.momenta.stage_bucket(bucket, new_momenta)
            part.values.copy_(mean.mul_(part.loss_scale))

    def _gather(
        self, bucket: Bucket, wire: Wire, sums: Tensor, momenta: Tensor, whole: _Spans, is_finite: Any
    ) -> list[Tensor]:
        """Every rank's largest of `sums`, where zeros are left, as in `momenta` (factor masking); none with one rank."""
        if wire.world_size == 1:
            wire.note_message(is_finite)
            return []
        share = self.share_at(bucket.step)
        if self.code == "chunks":
            with wire.timing("encode"):
                payload = take_chunks(sums, count_of(share, CHUNK), beside=momenta)
            return list(wire.gather(payload, is_finite))
        with wire.timing("encode"):
            spans = [(0, bucket.n_elements)]  # that the largest are taken of
            sizes = [bucket.n_elements - sum(end - start for start, end in whole)]  # what is whole holds zeros by now
            if self.per == "layer" and bucket.slots:
                spans = [span for span in bucket.spans if span not in whole and span[1] > span[0]]
                sizes = [end - start for start, end in spans]
            counts = [count_of(share, n) for n in sizes]
            generator = torch.Generator().manual_seed(bucket.draw(wire.rank, self.seed) & 0x7FFF_FFFF_FFFF_FFFF)
            samples = [
                draw_sample(end - start, k, generator) if k else Sample(None, 0)
                for (start, end), k in zip(spans, counts, strict=True)
            ]
            n_taken, indices, taken = take_by_sample(sums, spans, counts, samples, beside=momenta)
        return list(wire.gather(torch.cat([n_taken, indices, taken.view(torch.int32)]), is_finite))

    def _add_whole(
        self, part: Part, wire: Wire, whole: _Spans, dense: Tensor, mean: Tensor, momenta: tuple[Tensor, Tensor]
    ) -> None:
        """Tensors that are sent whole: their mean, `dense`, then their momentum, alike on all ranks."""
        first, (old, new), slots = 0, momenta, dict(zip(part.bucket.spans, part.bucket.slots, strict=True))
        for start, end in whole:
            gradient = dense[first : first + end - start]
            first += end - start
            # Unused on all ranks, DDP throws the result away, so the momentum waits; a device would have to be asked.
            if not wire.on_device and not gradient.any():
                new[start:end], mean[start:end] = old[start:end], gradient
                continue
            self._decay(slots.get((start, end)), gradient)
            torch.add(gradient, old[start:end], alpha=self.momentum, out=new[start:end])
            self._update(gradient, new[start:end], mean[start:end])

    def _decay(self, slot: Slot | None, gradient: Tensor) -> None:
        """Add weight decay to the gradient (n,) of a slot."""
        if self.weight_decay and slot is not None and slot.parameter is not None:
            values = as_lying(local_of(slot.parameter.detach()), slot, gradient.device)
            gradient.add_(values, alpha=self.weight_decay)

    def _update(self, gradient: Tensor, momenta: Tensor, out: Tensor) -> Tensor:
        """Write what SGD with momentum takes off the parameters to `out`."""
        return torch.add(gradient, momenta, alpha=self.momentum, out=out) if self.nesterov else out.copy_(momenta)


def draw_sample(n_elements: int, k: int, generator: torch.Generator) -> Sample:
    """Draw the values that the threshold for the largest k of n is taken from."""
    n_samples = max(math.ceil(_SAMPLED_SHARE * n_elements), math.ceil(2 * n_elements / max(k, 1)), _MIN_SAMPLES)
    if n_samples >= n_elements:
        return Sample(None, k)
    places = torch.randint(n_elements, (n_samples,), generator=generator, dtype=torch.int64, device="cpu")
    return Sample(places, max(1, round(n_samples * k / n_elements)))
