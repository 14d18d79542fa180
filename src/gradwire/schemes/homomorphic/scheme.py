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
from collections.abc import Callable
from typing import Any

import torch

from gradwire.codecs import packed_values
from gradwire.codecs.count_sketch import MAX_ATTEMPTS, MAX_CORE, CountSketch, FixedPoint, Outcome
from gradwire.control.checks import share as check_share
from gradwire.core.bucket import Bucket
from gradwire.core.checkpoint import not_the_state
from gradwire.core.session import Session
from gradwire.errors import CorruptMessage, InvalidArgument, Unsupported
from gradwire.exchange import aggregators
from gradwire.exchange.aggregators import Aggregator
from gradwire.schemes.compressed import Redoing
from gradwire.schemes.homomorphic.by_bucket import DenseBuckets, NumberByBucket, are_counts, is_too_dense
from gradwire.schemes.homomorphic.expected_tables import ExpectedTables
from gradwire.schemes.homomorphic.packed_sum import sum_packed
from gradwire.schemes.homomorphic.shared_index import SharedIndex, Union
from gradwire.schemes.homomorphic.unsent import Unsent, quantised, values_to_send
from gradwire.wire.step_check import StepCheck
from gradwire.wire.wire import Wire

_log = logging.getLogger(__name__)
_MODES = ("packed", "sketch", "exact", "lossy")
_INDICES = ("auto", "bitmap", "bloom")
_SPARSIFIERS = (None, "top-k")
_INTEGERS = {32: torch.int32, 64: torch.int64}
_TOO_DENSE = "too dense to gain: this bucket was sent uncompressed"

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
        self._sketch = CountSketch(**sketch)
        self._index = SharedIndex(index, self._sketch.seed)
        self._dense = DenseBuckets()
        self._attempts = NumberByBucket()  # the salt with which a bucket peeled last
        self._expected = ExpectedTables()
        self._cells = torch.empty(0)  # on their way together with an index
        self._n_too_dense = self._n_resent = self._n_core = self._n_at_once = 0
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
        self.aggregator.bind(session.communicator, session.recorder)
        self._is_aggregator_bound = True
        self._check = StepCheck(session.communicator)
        super().bind(session)

    # ---- one bucket

    def _send(self, bucket: Bucket, wire: Wire) -> bool:
        key = f"{bucket.index}:{bucket.layout_hash:08x}"
        if self._dense.is_known(key):
            self._check.start(self.preamble(bucket), wire.record)  # no index goes before it, to say what ranks share
            return self._send_plainly(bucket, wire)
        keep = self.density if self.sparsifier else None
        values, unsent = values_to_send(self.session, bucket, wire, self.error_feedback, keep, self.mode == "packed")
        cell_bytes = self.integer_bits // 8 if self._sums_integers else values.element_size()
        cell_bits = 8.0 * cell_bytes if self.mode == "packed" else 32 * self._sketch.gamma
        union = self._index.agree(
            values, wire.checksum, key, bucket, self.session.communicator, self.aggregator, cell_bits,
            self._assumed_sketch(values, bucket, wire, key),
        )  # fmt: skip
        if not union.ranks_agree:
            wire.name_mismatch()
        if not union.is_finite or self._may_overflow(union):
            if union.total is not None:
                union.total.wait()
            return False
        if union.total is not None and self._take_at_once(bucket, wire, values, unsent, union, key):
            return True
        if self.mode == "packed":
            n_cells = n_nonzeros = packed_values.count(union.words, bucket.n_elements)
        else:
            # Estimates that missed the same way at every step would bend the training; peeled values do not care.
            step = bucket.step & 0xFFFFFFFF if self.mode == "lossy" else 0
            n_cells = self._sketch.prepare(
                union.words, bucket.n_elements, self._attempts.of(key), self._max_cells(bucket), step
            )
            n_nonzeros = self._sketch.n_nonzeros
            cell_bytes = max(4, cell_bytes)
        self._index.remember(key, n_nonzeros)
        self._expected.forget(key)
        if is_too_dense(bucket, cell_bytes, n_cells):
            self._dense.note(key)
            return self._send_plainly(bucket, wire)
        if self.mode == "packed":
            sum_packed(self.aggregator, bucket, wire, values, unsent, union, n_nonzeros, self._fixed_point(union))
        else:
            self._send_sketch(bucket, wire, values, unsent, union, key)
        return True

    def _assumed_sketch(
        self, values: torch.Tensor, bucket: Bucket, wire: Wire, key: str
    ) -> Callable[[torch.Tensor], torch.Tensor] | None:
        """Mode "sketch", once the last steps say how large the table has to be: it goes along with the index."""
        table = self._expected.rows(key, self._sketch.gamma) if self.mode == "sketch" else None
        if table is None:
            return None

        def cells_of(own_index: torch.Tensor) -> torch.Tensor:
            with wire.timing("encode"):
                n_cells = self._sketch.assume(bucket.n_elements, *table, self._attempts.of(key))
                self._cells = wire.scratch("cells", n_cells, torch.float32)
                self._sketch.add(values, own_index, self._cells)
            return self._cells

        return cells_of

    def _take_at_once(
        self, bucket: Bucket, wire: Wire, values: torch.Tensor, unsent: Unsent | None, union: Union, key: str
    ) -> bool:
        """Whether all values come out of the sketch that was sent with its index; the mean then lies in the bucket."""
        assert union.total is not None
        with wire.timing("decode"):
            self._sketch.adopt(union.words)
        n_core = self._peel(wire, union)
        union.total.wait()
        if n_core > MAX_CORE:
            self._n_resent += 1
            return False
        self._index.remember(key, self._sketch.n_nonzeros)
        if is_too_dense(bucket, 4, self._sketch.n_cells):
            self._expected.forget(key)  # the next index comes alone, and decides
        else:
            self._expected.note(key, self._sketch)
        self._n_at_once += 1
        self._recover(bucket, wire, values, unsent, union, self._cells, n_core, None)
        return True

    def _send_sketch(
        self, bucket: Bucket, wire: Wire, values: torch.Tensor, unsent: Unsent | None, union: Union, key: str
    ) -> None:
        """Sum the sketch, peel it while it travels, and put the mean into the bucket."""
        sketch = self._sketch
        fixed = self._fixed_point(union)
        dtype = torch.float32 if fixed is None else fixed.dtype
        peel_first = sketch.n_nonzeros < _PEEL_FIRST_NONZEROS
        attempt = self._attempts.of(key)
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
            peel_first = True
            sketch.prepare(union.words, bucket.n_elements, attempt)
        if attempt != self._attempts.of(key):
            self._attempts.learn(key, attempt if attempt < MAX_ATTEMPTS else 0)
        if self.mode == "sketch":
            self._expected.note(key, sketch)
        self._recover(bucket, wire, values, unsent, union, cells, n_core, fixed)

    def _recover(
        self, bucket: Bucket, wire: Wire, values: torch.Tensor, unsent: Unsent | None, union: Union,
        cells: torch.Tensor, n_core: int, fixed: FixedPoint | None,
    ) -> None:  # fmt: skip
        """Put the mean into the bucket, from summed cells and the order of peeling."""
        sketch = self._sketch
        estimate = self.mode == "lossy" and n_core > _MAX_DENSE_CORE
        core = sketch.core() if n_core and (self.error_feedback or not estimate) else None
        scale = (1.0 if fixed is None else fixed.scale) / wire.world_size
        core_mean = None if estimate or core is None else self._sum_core(wire, values, core, fixed) * scale
        is_direct = not self.error_feedback and bucket.buffer.dtype in (torch.float32, torch.bfloat16)
        with wire.timing("decode"):
            out = bucket.buffer if is_direct else wire.scratch("mean", bucket.n_elements)
            # From all ranks' values, not from their sums: those may cancel, and rounding does not.
            bound = wire.world_size * 2.0**union.exponent if union.exponent is not None else 0.0
            if sketch.recover(cells, scale, out, estimate, bound) is not Outcome.COMPLETE:
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
        own = values[core].float() if fixed is None else quantised(values[core], fixed)
        self.aggregator.start_sum(own, wire.record).wait()
        self._n_core += core.numel()
        return own.double()

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

    def _max_cells(self, bucket: Bucket) -> int:
        cells = max(_MIN_BUDGET_CELLS, int(self.budget * bucket.original_bytes / 4))
        return cells if self.mode == "lossy" else 0

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
            self._index.commit()
            self._expected.commit()
        self._index.next_counts.clear()
        self._expected.clear_step()
        for learnt in (self._dense, self._attempts):
            learnt.end_step(self._is_step_finite)

    def stats(self) -> dict[str, Any]:
        """Buckets redone (not finite) and sent plainly (too dense), filters used and given up, sketches sent
        together with their index, and sent again, values summed beside a sketch."""
        return {
            **super().stats(),
            "n_buckets_too_dense": self._n_too_dense,
            "n_bloom_indices": self._index.n_blooms,
            "n_bloom_fallbacks": self._index.n_bloom_fallbacks,
            "n_sketches_at_once": self._n_at_once,
            "n_sketches_resent": self._n_resent,
            "n_core_values": self._n_core,
            **{f"aggregator_{name}": value for name, value in self.aggregator.stats().items()},
        }

    def state_dict(self) -> dict[str, Any]:
        return {
            **super().state_dict(),
            "n_nonzeros": {key: list(counts) for key, counts in self._index.counts.items()},
            "dense_for_steps": self._dense.state_dict(),
            "attempts": self._attempts.state_dict(),
            "tables": self._expected.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Raises: InvalidArgument."""
        for name in ("n_nonzeros", "dense_for_steps", "attempts"):
            if not are_counts(state.get(name), name == "n_nonzeros"):
                raise not_the_state("scheme homomorphic", f"it lacks {name}")
        try:
            self._expected.load_state_dict(state.get("tables", {}))
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise not_the_state("scheme homomorphic", "its tables are none") from error
        super().load_state_dict(state)
        self._index.counts = {key: list(counts) for key, counts in state["n_nonzeros"].items()}
        self._dense.load_state_dict(state["dense_for_steps"])
        self._attempts.load_state_dict(state["attempts"])

    def close(self) -> None:
        super().close()
        self._index.counts.clear()
        for learnt in (self._dense, self._attempts):
            learnt.load_state_dict({})
        self._expected.tables.clear()
        if self._is_aggregator_bound:
            self.aggregator.close()
            self._is_aggregator_bound = False
