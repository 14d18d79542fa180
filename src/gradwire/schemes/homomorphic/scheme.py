"""The scheme `homomorphic`: lossless compression whose messages are summed as they are (Li et al., ICML 2024).

    Phase I, compression                                                        Phase II, recovery
    index B of X  --- OR over the ranks ---> B of sum X   (3.2, 3.3)            X <- peel(Y, B)        (3.2)
    count sketch Y of X, as large as B asks for --- sum over the ranks ---> Y of sum X    (3.1, 3.4)

Where this departs from the paper: Y is sized by the OR-ed index, which comes first, so peeling is known to succeed before
a value is sent; the order of peeling is worked out while Y travels; the few values that do not peel are summed densely.

When not to use this: for gradients that are not sparse. From about 67 % of non-zeros on (float32) index and sketch save
less than a tenth, and such buckets are sent plainly. What counts is the union over the ranks: four ranks with 1 % at
places of their own have 3.9 %. And where the network moves a gradient faster than one core compresses and recovers it:
2.7 GB/s at 1 %, 1.3 GB/s at 5 % (docs/results.md).
"""

from __future__ import annotations

import logging
import math
from typing import Any

import torch

from gradwire import _native
from gradwire.codecs.count_sketch import MAX_ATTEMPTS, MAX_CORE, MIN_GAMMA, CountSketch, FixedPoint, Outcome
from gradwire.control.checks import share as check_share
from gradwire.core.bucket import Bucket
from gradwire.core.feedback import Feedback, Withheld, holds_nonzero
from gradwire.core.session import Session
from gradwire.errors import CorruptMessage, InvalidArgument, Unsupported
from gradwire.exchange import aggregators
from gradwire.exchange.aggregators import Aggregator
from gradwire.schemes.compressed import Redoing, count_of
from gradwire.schemes.homomorphic.shared_index import SharedIndex, Union
from gradwire.wire.wire import Wire

_log = logging.getLogger(__name__)
_MODES = ("lossless", "exact", "lossy")
_INDICES = ("auto", "bitmap", "bloom")
_SPARSIFIERS = (None, "top-k")
_INTEGERS = {32: torch.int32, 64: torch.int64}
_TOO_DENSE = "too dense to gain: this bucket was sent uncompressed"

# Plain, if index and sketch together would take more than this share of it.
_MAX_SHARE = 0.9
# A bucket that was too dense is tried again in every so many steps: an index that tells nothing new costs 3 %.
_STEPS_BETWEEN_TRIES = 16
# Small tables may need another salt (5 in 100 of 1,000 non-zeros), so they are peeled before they are sent; larger ones
# never have, and are peeled while they travel.
_PEEL_FIRST_NONZEROS = 1 << 14
# Sums in float32 cells stay finite if no value is above 2^_MAX_EXPONENT / world size: a cell holds fewer than 2^16 values.
_MAX_EXPONENT = 110
# 1 KiB, whatever the budget: a small bucket would be left with no table at all.
_MIN_BUDGET_CELLS = 256
# So few values are sent densely in lossy mode too.
_MAX_DENSE_CORE = 64


class Homomorphic(Redoing):
    """Mean over the ranks of gradients with many zeros, by OR and sum alone.

    Args:
        mode: "lossless": sums of float32, as exact as their rounding (relative error of the result 3e-7 to 7e-7 by
            norms; a value that is small beside its cell-mates loses digits). "exact": sums of integers, each gradient
            rounded once to fixed point with an exponent that all ranks share. "lossy": a sketch of `budget`; what does
            not come out of it is estimated.
        budget: lossy mode: size of the sketch as a share of the gradient's, in (0, 1]; the index comes on top.
        integer_bits: exact mode: 32 (a value keeps 31 - ceil(log2 world size) bits below the largest one's exponent)
            or 64.
        sparsifier: "top-k" sends of each rank's gradient only its `density` of largest values, without gathering.
        density: share of values that the sparsifier keeps, in (0, 1].
        error_feedback: add what sparsifier and lossy mode left out to the next gradient. Default: with a sparsifier.
            With it, estimates are shrunk by their variance, or what is fed back would grow; without it they are right
            in the mean, which trains better (docs/results.md).
        index: "bitmap", "bloom" (from each layout's second step on), or "auto", whichever is smaller.
        batch_values, gamma, seed: see CountSketch.
        aggregator: what sums: "process-group", "switch", or an Aggregator.
    """

    name = "homomorphic"

    def __init__(
        self,
        mode: str = "lossless",
        budget: float = 0.1,
        integer_bits: int = 32,
        sparsifier: str | None = None,
        density: float = 0.01,
        error_feedback: bool | None = None,
        index: str = "auto",
        batch_values: int = 1024,
        gamma: float = MIN_GAMMA,
        seed: int = 0,
        aggregator: str | Aggregator = "process-group",
    ) -> None:
        for what, value, known in (
            ("mode", mode, _MODES),
            ("index", index, _INDICES),
            ("sparsifier", sparsifier, _SPARSIFIERS),
            ("integer_bits", integer_bits, tuple(_INTEGERS)),
        ):
            if value not in known:
                raise InvalidArgument(f"{what} is one of {', '.join(map(str, known))}, not {value!r}")
        leaves_out = sparsifier is not None or mode == "lossy"
        if error_feedback and not leaves_out:
            raise InvalidArgument('error_feedback needs something that is left out: a sparsifier, or mode="lossy"')
        super().__init__(sparsifier is not None if error_feedback is None else error_feedback)
        self.state_is_per_world = self.error_feedback
        self.mode, self.budget, self.integer_bits = mode, check_share("budget", budget), integer_bits
        self.sparsifier, self.density = sparsifier, check_share("density", density)
        self.aggregator = aggregators.by_name(aggregator) if isinstance(aggregator, str) else aggregator
        self._sketch = CountSketch(batch_values, gamma, seed)
        self._index = SharedIndex(index, gamma, seed)
        self._tries_in: dict[str, int] = {}  # steps until a bucket that was too dense is tried again
        self._next_tries_in: dict[str, int] = {}  # after this step
        self._n_too_dense = self._n_resent = self._n_core = 0
        self._is_aggregator_bound = False

    @property
    def configuration(self) -> dict[str, Any]:
        sketch = self._sketch
        return {
            "mode": self.mode,
            "budget": self.budget if self.mode == "lossy" else None,
            "integer_bits": self.integer_bits if self.mode == "exact" else None,
            "sparsifier": self.sparsifier,
            "density": self.density if self.sparsifier else None,
            "error_feedback": self.error_feedback,
            "index": self._index.kind,
            "batch_values": sketch.batch_values,
            "gamma": sketch.gamma,
            "seed": sketch.seed,
            "aggregator": self.aggregator.name,
        }

    def bind(self, session: Session) -> None:
        """Raises: Unsupported (an aggregator that cannot sum what this mode sends)."""
        if not self.aggregator.sums_floats and (self.mode, self.integer_bits) != ("exact", 32):
            raise Unsupported(
                f"the aggregator {self.aggregator.name!r} adds 32-bit integers only; "
                'use homomorphic(mode="exact", integer_bits=32) with it, or aggregator="process-group"'
            )
        self.aggregator.bind(session.communicator, session.recorder)
        self._is_aggregator_bound = True
        super().bind(session)

    # ---- one bucket

    def _send(self, bucket: Bucket, wire: Wire) -> bool:
        key = f"{bucket.index}:{bucket.layout_hash:08x}"
        if self._is_known_as_dense(key):
            return self._send_plainly(bucket, wire)
        values, unsent = self._values_to_send(bucket, wire)
        union = self._index.agree(values, wire.checksum, key, bucket, self.session.communicator, self.aggregator)
        if not union.ranks_agree:
            wire.name_mismatch()
        if not union.is_finite or self._may_overflow(union):
            return False
        # Estimates that missed the same way at every step would bend the training; peeled values do not care.
        step = bucket.step & 0xFFFFFFFF if self.mode == "lossy" else 0
        n_cells = self._sketch.prepare(union.words, bucket.n_elements, max_cells=self._max_cells(bucket), step=step)
        self._index.remember(key, self._sketch.n_nonzeros)
        cell_bytes = 8 if self.mode == "exact" and self.integer_bits == 64 else 4
        if cell_bytes * n_cells + bucket.n_elements / 8 > _MAX_SHARE * bucket.original_bytes and n_cells:
            self._next_tries_in[key] = _STEPS_BETWEEN_TRIES
            return self._send_plainly(bucket, wire)
        self._send_sketch(bucket, wire, values, unsent, union)
        return True

    def _values_to_send(self, bucket: Bucket, wire: Wire) -> tuple[torch.Tensor, _Unsent | None]:
        """(n,) float32 or bfloat16 to be summed, and with error feedback what is kept of it."""
        n, gradient = bucket.n_elements, bucket.buffer
        with wire.timing("encode"):
            if not self.error_feedback and not self.sparsifier:
                if gradient.dtype == torch.float16:
                    return wire.scratch("values", n).copy_(gradient), None
                return gradient, None
            corrected, unsent = wire.scratch("corrected", n).copy_(gradient), None
            if self.error_feedback:
                unsent = _Unsent(self.session.feedback, bucket, self.session.loss_scale(), corrected)
            if not self.sparsifier:
                return corrected, unsent
            kept = wire.scratch("kept", n).zero_()
            largest = torch.empty(count_of(self.density, n), dtype=torch.int32)
            if _native.select_largest(corrected, largest) == 0:
                places = largest.long()
                kept[places] = corrected[places]
                corrected[places] = 0
            else:
                kept[0] = float("nan")  # not finite: this bucket is going to be redone
            if unsent is not None:
                unsent.left_out = corrected
            return kept, unsent

    def _send_sketch(
        self, bucket: Bucket, wire: Wire, values: torch.Tensor, unsent: _Unsent | None, union: Union
    ) -> None:
        """Sum the sketch, peel it while it travels, and put the mean into the bucket."""
        sketch = self._sketch
        fixed = self._fixed_point(union)
        dtype = torch.float32 if fixed is None else fixed.dtype
        peel_first = sketch.n_nonzeros < _PEEL_FIRST_NONZEROS
        attempt = 0
        while True:
            n_core = self._peel(wire, union) if peel_first else 0
            if self._has_to_try_again(n_core, attempt):
                attempt += 1
                sketch.prepare(union.words, bucket.n_elements, attempt)
                continue
            cells = wire.scratch("cells", sketch.n_cells, dtype)
            with wire.timing("encode"):
                sketch.add(values, union.own, cells, fixed)
            total = self.aggregator.start_sum(cells, wire.record) if cells.numel() else None
            if not peel_first:
                n_core = self._peel(wire, union)
            if total is not None:
                total.wait()
            if not self._has_to_try_again(n_core, attempt):
                break
            self._n_resent += 1
            attempt += 1
            sketch.prepare(union.words, bucket.n_elements, attempt)

        estimate = self.mode == "lossy" and n_core > _MAX_DENSE_CORE
        core = sketch.core() if n_core and (self.error_feedback or not estimate) else None
        scale = (1.0 if fixed is None else fixed.scale) / wire.world_size
        core_mean = None if estimate or core is None else self._sum_core(wire, values, core, fixed) * scale
        is_direct = not self.error_feedback and bucket.buffer.dtype in (torch.float32, torch.bfloat16)
        with wire.timing("decode"):
            out = bucket.buffer if is_direct else wire.scratch("mean", bucket.n_elements)
            if sketch.recover(cells, scale, out, estimate) is not Outcome.COMPLETE:
                raise CorruptMessage(
                    f"the summed sketch of bucket {bucket.index} in step {bucket.step} is not that of its index: it was "
                    f"altered on its way through the aggregator {self.aggregator.name!r}; restart from the last checkpoint"
                )
            if core_mean is not None:
                out[core] = core_mean.float().to(out.dtype)  # rounded as the others are
            elif core is not None:
                out[core] *= sketch.estimate_shrinkage
            if unsent is not None:
                unsent.stage(values, out, core if estimate else None)
            if not is_direct:
                bucket.buffer.copy_(out)

    def _peel(self, wire: Wire, union: Union) -> int:
        with wire.timing("decode"):
            return self._sketch.peel(union.words)

    def _has_to_try_again(self, n_core: int, attempt: int) -> bool:
        return n_core > MAX_CORE and self._sketch.n_cells > 0 and attempt < MAX_ATTEMPTS and self.mode != "lossy"

    def _sum_core(self, wire: Wire, values: torch.Tensor, core: torch.Tensor, fixed: FixedPoint | None) -> torch.Tensor:
        """(n_core,) float64 sums over the ranks of what the sketch does not give back."""
        own = values[core]
        if fixed is None:
            own = own.float()
        else:
            own = own.double().mul_(math.ldexp(1.0, fixed.shift)).round_().clamp_(-fixed.limit, fixed.limit)
            own = own.to(fixed.dtype)
        self.aggregator.start_sum(own, wire.record).wait()
        self._n_core += core.numel()
        return own.double()

    # ---- what all ranks decide alike

    def _fixed_point(self, union: Union) -> FixedPoint | None:
        if self.mode != "exact":
            return None
        exponent = union.exponent if union.exponent is not None else 0
        return FixedPoint.fit(exponent, self.session.communicator.world_size, _INTEGERS[self.integer_bits])

    def _may_overflow(self, union: Union) -> bool:
        bits_of_world = self.session.communicator.world_size.bit_length()
        return self.mode != "exact" and union.exponent is not None and union.exponent + bits_of_world > _MAX_EXPONENT

    def _max_cells(self, bucket: Bucket) -> int:
        if self.mode != "lossy":
            return 0
        return max(_MIN_BUDGET_CELLS, int(self.budget * bucket.original_bytes / 4))

    def _is_known_as_dense(self, key: str) -> bool:
        steps = self._tries_in.get(key, 0)
        self._next_tries_in[key] = max(0, steps - 1)
        return steps > 1

    def _send_plainly(self, bucket: Bucket, wire: Wire) -> bool:
        if not self._n_too_dense:
            _log.info("gradwire %s: %s (step %d)", self.name, _TOO_DENSE, bucket.step)
        self._n_too_dense += 1
        bucket.record.fallbacks.append(_TOO_DENSE)
        wire.mean_plainly(bucket.buffer)
        if self.error_feedback and not bool(bucket.buffer.isfinite().all()):
            self._is_step_finite = False  # the other buckets' residuals are not to be kept
        return True

    # ---- between steps

    def end_step(self, step: int) -> None:
        super().end_step(step)
        if self._is_step_finite:  # what was learnt counts only then: the next step is as if this one had not been
            self._index.counts.update(self._index.next_counts)
            self._tries_in.update(self._next_tries_in)
        self._index.next_counts.clear()
        self._next_tries_in.clear()

    def stats(self) -> dict[str, Any]:
        """Buckets redone (not finite) and sent plainly (too dense), filters used and given up, sketches sent again,
        values summed beside a sketch."""
        return {
            **super().stats(),
            "n_buckets_too_dense": self._n_too_dense,
            "n_bloom_indices": self._index.n_blooms,
            "n_bloom_fallbacks": self._index.n_bloom_fallbacks,
            "n_sketches_resent": self._n_resent,
            "n_core_values": self._n_core,
            **{f"aggregator_{name}": value for name, value in self.aggregator.stats().items()},
        }

    def state_dict(self) -> dict[str, Any]:
        return {
            **super().state_dict(),
            "n_nonzeros": dict(self._index.counts),
            "dense_for_steps": dict(self._tries_in),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Raises: InvalidArgument."""
        for name in ("n_nonzeros", "dense_for_steps"):
            counts = state.get(name)
            if not isinstance(counts, dict) or not all(
                isinstance(key, str) and isinstance(value, int) and value >= 0 for key, value in counts.items()
            ):
                raise InvalidArgument(f"this is not the state of scheme homomorphic: it lacks {name}")
        super().load_state_dict(state)
        self._index.counts = dict(state["n_nonzeros"])
        self._tries_in = dict(state["dense_for_steps"])

    def close(self) -> None:
        super().close()
        self._index.counts.clear()
        self._tries_in.clear()
        if self._is_aggregator_bound:
            self.aggregator.close()
            self._is_aggregator_bound = False


class _Unsent:
    """What error feedback keeps of one bucket: what the sparsifier left out, and for an estimate the distance to it.

    The ranks' distances add up to what all of them together sent, less what all of them got.
    """

    def __init__(self, feedback: Feedback, bucket: Bucket, loss_scale: float, corrected: torch.Tensor) -> None:
        """Adds the residual to `corrected`, (n,) float32."""
        self._feedback, self._bucket, self._loss_scale = feedback, bucket, loss_scale
        residual, self._room = feedback.pair(bucket)
        is_used = [holds_nonzero(bucket.buffer[start:end]) for start, end in bucket.spans]
        self._withheld = Withheld(bucket.spans, is_used, residual)
        corrected.add_(residual, alpha=loss_scale)
        self._withheld.put_back()
        self.left_out: torch.Tensor | None = None

    def stage(self, values: torch.Tensor, mean: torch.Tensor, estimated: torch.Tensor | None) -> None:
        unsent = self._room.zero_() if self.left_out is None else self._room.copy_(self.left_out)
        if estimated is not None:
            unsent[estimated] += values[estimated] - mean[estimated]
        unsent.div_(self._loss_scale)
        self._withheld.keep(unsent, [True] * len(self._bucket.spans))
        self._feedback.stage_bucket(self._bucket, unsent)
