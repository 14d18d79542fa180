"""The scheme `homomorphic`: lossless compression whose messages are summed as they are (Li et al., ICML 2024).

    Phase I, compression                                                        Phase II, recovery
    index B of X  --- OR over the ranks ---> B of sum X   (3.2, 3.3)            X <- peel(Y, B)        (3.2)
    count sketch Y of X, as large as B asks for --- sum over the ranks ---> Y of sum X    (3.1, 3.4)

Where this departs from the paper: B comes first, so every rank knows the union of the non-zeros before a value is sent. By
default ("packed") no sketch is needed then: the values at the union, one after the other, are summed as they are. With
"sketch" Y goes along with B, as in the paper, once the last steps say how large it has to be; else Y is sized by B. The order
of peeling is worked out while Y travels; the few values that do not peel are summed densely.

When not to use this: for gradients that are not sparse. From about 87 % of non-zeros on (float32; sketches 67 %) index and
values save less than a tenth, and such buckets are sent plainly. What counts is the union over the ranks: four ranks with
1 % at places of their own have 3.9 %. -0.0 counts as zero: where all ranks hold zeros, the mean is 0.0.
"""

from __future__ import annotations

import logging
from typing import Any

import torch

from gradwire.checks import choice as check_choice
from gradwire.checks import share as check_share
from gradwire.codecs import packed_values
from gradwire.codecs.count_sketch import CountSketch, FixedPoint
from gradwire.core.bucket import Bucket
from gradwire.core.checkpoint import not_the_state
from gradwire.core.session import Session
from gradwire.core.site import DeviceSite
from gradwire.errors import InvalidArgument, Unsupported
from gradwire.exchange import aggregators
from gradwire.exchange.aggregators import Aggregator
from gradwire.schemes.compressed import Redoing
from gradwire.schemes.homomorphic.by_bucket import DenseBuckets, are_counts, is_too_dense
from gradwire.schemes.homomorphic.on_device import PackedOnDevice, Policy
from gradwire.schemes.homomorphic.packed_sum import sum_packed
from gradwire.schemes.homomorphic.shared_index import SharedIndex, Union
from gradwire.schemes.homomorphic.sketch_sum import SketchSum
from gradwire.schemes.homomorphic.unsent import Summand, values_to_send
from gradwire.schemes.on_device import Placing, StepsOnDevice
from gradwire.wire.step_check import StepCheck
from gradwire.wire.wire import Wire

_log = logging.getLogger(__name__)
_MODES = ("packed", "sketch", "exact", "lossy")
_INDICES = ("auto", "bitmap", "bloom")
_SPARSIFIERS = (None, "top-k")
_INTEGERS = {32: torch.int32, 64: torch.int64}
_TOO_DENSE = "too dense to gain: this bucket was sent uncompressed"

# Sums in float32 cells stay finite if no value is above 2^_MAX_EXPONENT / world size: a cell holds fewer than 2^16 values.
_MAX_EXPONENT = 110


class Homomorphic(Placing, Redoing):
    """Mean over the ranks of gradients with many zeros, by OR and sum alone.

    Args:
        mode: "packed": the union's values in the gradient's own dtype, divided by the world size and summed, as DDP does
            it; over an aggregator that adds integers only, in fixed point as in "exact". "sketch": count sketches of
            float32. Their relative error is 3e-7 to 7e-7 by norms, but they are *not* lossless element by element: a
            value that is small beside its cell-mates loses digits, or all of them, and Adam divides each value by its
            own size. "exact": sketches of integers, each gradient rounded once to fixed point with an exponent that
            all ranks share. "lossy": a sketch of `budget`; what does not come out of it is estimated.
        budget: lossy mode: size of the sketch as a share of the gradient's, in (0, 1]; the index comes on top.
        integer_bits: fixed point: 32 (a value keeps 31 - ceil(log2 world size) bits below the largest one's exponent)
            or 64.
        sparsifier: "top-k" sends of each rank's gradient only its `density` of largest values, without gathering.
        density: share of values that the sparsifier keeps, in (0, 1].
        error_feedback: add what sparsifier and lossy mode left out to the next gradient. Default: with a sparsifier.
            With it, estimates are shrunk by their variance, or what is fed back would grow; without it they are right
            in the mean, which trains better (docs/results.md).
        index: "bitmap", "bloom" (from each layout's second step on), or "auto", whichever is smaller.
        aggregator: what sums: "process-group", "switch", or an Aggregator.
        sketch: batch_values, gamma and seed; see CountSketch.
    """

    name = "homomorphic"
    options_of = CountSketch

    def __init__(
        self,
        mode: str = "packed",
        budget: float = 0.1,
        integer_bits: int = 32,
        sparsifier: str | None = None,
        density: float = 0.01,
        error_feedback: bool | None = None,
        index: str = "auto",
        aggregator: str | Aggregator = "process-group",
        **sketch: Any,
    ) -> None:
        for what, value, known in (
            ("mode", mode, _MODES),
            ("index", index, _INDICES),
            ("sparsifier", sparsifier, _SPARSIFIERS),
            ("integer_bits", integer_bits, tuple(_INTEGERS)),
        ):
            check_choice(what, value, known)
        leaves_out = sparsifier is not None or mode == "lossy"
        if error_feedback and not leaves_out:
            raise InvalidArgument('error_feedback needs something that is left out: a sparsifier, or mode="lossy"')
        super().__init__(sparsifier is not None if error_feedback is None else error_feedback)
        self.state_is_per_world = self.error_feedback
        self.mode, self.budget, self.integer_bits = mode, check_share("budget", budget), integer_bits
        self.sparsifier, self.density = sparsifier, check_share("density", density)
        self.aggregator = aggregators.by_name(aggregator) if isinstance(aggregator, str) else aggregator
        self._sketch = CountSketch(**sketch)
        self._index = SharedIndex(index, self._sketch.seed)
        self._dense = DenseBuckets()
        self._sketches = SketchSum(self._sketch, mode, self.budget, self.aggregator)
        self._n_too_dense = 0
        self._is_aggregator_bound = False

    @property
    def configuration(self) -> dict[str, Any]:
        sketch = self._sketch
        return {
            "mode": self.mode,
            "budget": self.budget if self.mode == "lossy" else None,
            "integer_bits": self.integer_bits if self._sums_integers else None,
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
        if not self.aggregator.sums_floats and not (self._sums_integers and self.integer_bits == 32):
            raise Unsupported(
                f"the aggregator {self.aggregator.name!r} adds 32-bit integers only; use homomorphic with "
                'mode="packed" or mode="exact", integer_bits=32 with it, or aggregator="process-group"'
            )
        if session.site is not None:
            self._check_device()
        self.aggregator.bind(session.communicator, session.recorder)
        self._is_aggregator_bound = True
        self._check = StepCheck(session.communicator)
        super().bind(session)

    # ---- on a device

    def _check_device(self) -> None:
        """Raises: Unsupported (what needs the host)."""
        aggregator = self.aggregator.name
        for is_there, what, instead in (
            (self.mode == "packed", f"mode={self.mode!r}", 'mode="packed", which sums the values as they are'),
            (self._index.kind != "bloom", 'index="bloom"', 'index="bitmap"'),
            (aggregator == "process-group", f"aggregator={aggregator!r}", 'aggregator="process-group"'),
        ):
            if not is_there:
                raise Unsupported(
                    f"homomorphic with {what} works on host memory: leave placement out, or on a device take {instead}"
                )

    def _go_to(self, site: DeviceSite, session: Session) -> StepsOnDevice:
        keep = self.density if self.sparsifier else None
        policy = Policy(keep, self.error_feedback, self._dense, self._note_redone, self._note_too_dense)
        return PackedOnDevice(session, site, policy)

    def _facts_on_device(self, bucket: Bucket) -> tuple[Any, ...]:
        return self._key_of(bucket), self.wire(bucket)

    # ---- one bucket

    @staticmethod
    def _key_of(bucket: Bucket) -> str:
        return f"{bucket.index}:{bucket.layout_hash:08x}"

    def _send(self, bucket: Bucket, wire: Wire) -> bool:
        is_sent = self._sum(bucket, wire)
        # A mean that was finite in float32 may not be in the bucket's float16. Its step is going to be skipped: no
        # bucket's residual is to be kept.
        if is_sent and self.error_feedback and not bool(bucket.buffer.isfinite().all()):
            self._is_step_finite = False
        return is_sent

    def _sum(self, bucket: Bucket, wire: Wire) -> bool:
        key = self._key_of(bucket)
        if self._dense.is_known(key):
            self._check.start(self.preamble(bucket), wire.record)  # no index goes before it, to say what ranks share
            return self._send_plainly(bucket, wire)
        keep = self.density if self.sparsifier else None
        values, unsent = values_to_send(self.session, bucket, wire, self.error_feedback, keep, self.mode == "packed")
        cell_bytes = self.integer_bits // 8 if self._sums_integers else values.element_size()
        cell_bits = 8.0 * cell_bytes if self.mode == "packed" else 32 * self._sketch.gamma
        union = self._index.agree(
            values, wire.checksum, key, bucket, self.session.communicator, self.aggregator, cell_bits,
            self._sketches.assumed(values, bucket, wire, key),
        )  # fmt: skip
        if not union.ranks_agree:
            wire.name_mismatch()
        if not union.is_finite or self._may_overflow(union):
            if union.total is not None:
                union.total.wait()
            return False
        summand = Summand(bucket, wire, key, values, unsent, union)
        if union.total is not None and self._sketches.take_at_once(summand):
            self._index.remember(key, self._sketch.n_nonzeros)
            return True
        if self.mode == "packed":
            n_cells = n_nonzeros = packed_values.count(union.words, bucket.n_elements)
        else:
            n_cells, n_nonzeros = self._sketches.prepare(bucket, key, union), self._sketch.n_nonzeros
            cell_bytes = max(4, cell_bytes)
        self._index.remember(key, n_nonzeros)
        if is_too_dense(bucket, cell_bytes, n_cells):
            self._dense.note(key)
            return self._send_plainly(bucket, wire)
        if self.mode == "packed":
            sum_packed(self.aggregator, summand, n_nonzeros, self._fixed_point(union))
        else:
            self._sketches.send(summand, self._fixed_point(union))
        return True

    # ---- what all ranks decide alike

    @property
    def _sums_integers(self) -> bool:
        return self.mode == "exact" or (self.mode == "packed" and not self.aggregator.sums_floats)

    def _fixed_point(self, union: Union) -> FixedPoint | None:
        if not self._sums_integers:
            return None
        exponent = union.exponent if union.exponent is not None else 0
        return FixedPoint.fit(exponent, self.session.communicator.world_size, _INTEGERS[self.integer_bits])

    def _may_overflow(self, union: Union) -> bool:
        bits_of_world = self.session.communicator.world_size.bit_length()
        is_sketch_of_floats = self.mode in ("sketch", "lossy")
        return is_sketch_of_floats and union.exponent is not None and union.exponent + bits_of_world > _MAX_EXPONENT

    def _send_plainly(self, bucket: Bucket, wire: Wire) -> bool:
        self._note_too_dense(bucket)
        wire.mean_plainly(bucket.buffer)
        return True

    def _note_too_dense(self, bucket: Bucket) -> None:
        if not self._n_too_dense:
            _log.info("gradwire %s: %s (step %d)", self.name, _TOO_DENSE, bucket.step)
        self._n_too_dense += 1
        bucket.record.fallbacks.append(_TOO_DENSE)

    # ---- between steps

    def end_step(self, step: int) -> None:
        super().end_step(step)
        if self.session.site is not None:
            return  # what was learnt there counts when the step is settled
        if self._is_step_finite:  # what was learnt counts only then: the next step is as if this one had not been
            self._index.commit()
        self._index.next_counts.clear()
        for learnt in (self._dense, self._sketches):
            learnt.end_step(self._is_step_finite)

    def stats(self) -> dict[str, Any]:
        """Buckets redone (not finite) and sent plainly (too dense), filters used and given up, sketches sent
        together with their index, and sent again, values summed beside a sketch."""
        return {
            **super().stats(),
            "n_buckets_redone": self._n_redone,
            "n_buckets_too_dense": self._n_too_dense,
            "n_bloom_indices": self._index.n_blooms,
            "n_bloom_fallbacks": self._index.n_bloom_fallbacks,
            "n_sketches_at_once": self._sketches.n_at_once,
            "n_sketches_resent": self._sketches.n_resent,
            "n_core_values": self._sketches.n_core,
            **{f"aggregator_{name}": value for name, value in self.aggregator.stats().items()},
        }

    def state_dict(self) -> dict[str, Any]:
        return {
            **super().state_dict(),
            "n_nonzeros": {key: list(counts) for key, counts in self._index.counts.items()},
            "dense_for_steps": self._dense.state_dict(),
            "attempts": self._sketches.attempts.state_dict(),
            "tables": self._sketches.expected.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Raises: InvalidArgument."""
        for name in ("n_nonzeros", "dense_for_steps", "attempts"):
            if not are_counts(state.get(name), name == "n_nonzeros"):
                raise not_the_state("scheme homomorphic", f"it lacks {name}")
        try:
            self._sketches.expected.load_state_dict(state.get("tables", {}))
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise not_the_state("scheme homomorphic", "its tables are none") from error
        super().load_state_dict(state)
        self._index.counts = {key: list(counts) for key, counts in state["n_nonzeros"].items()}
        self._dense.load_state_dict(state["dense_for_steps"])
        self._sketches.attempts.load_state_dict(state["attempts"])

    def close(self) -> None:
        super().close()
        self._index.counts.clear()
        for learnt in (self._dense, self._sketches.attempts):
            learnt.load_state_dict({})
        self._sketches.expected.tables.clear()
        if self._is_aggregator_bound:
            self.aggregator.close()
            self._is_aggregator_bound = False
