"""Modes "sketch", "exact" and "lossy": the ranks' count sketches are summed, and peeled while they travel."""

from __future__ import annotations

from collections.abc import Callable

import torch

from gradwire.codecs.count_sketch import MAX_ATTEMPTS, MAX_CORE, CountSketch, FixedPoint, Outcome
from gradwire.core.bucket import Bucket
from gradwire.errors import CorruptMessage
from gradwire.exchange.aggregators import Aggregator
from gradwire.schemes.homomorphic.by_bucket import NumberByBucket, is_too_dense
from gradwire.schemes.homomorphic.expected_tables import ExpectedTables
from gradwire.schemes.homomorphic.shared_index import Union
from gradwire.schemes.homomorphic.unsent import Summand, quantised
from gradwire.wire.wire import Wire

# Small tables may need another salt (5 in 100 of 1,000 non-zeros), so they are peeled before they are sent; larger ones
# never have, and are peeled while they travel.
_PEEL_FIRST_NONZEROS = 1 << 14
# 1 KiB, whatever the budget: a small bucket would be left with no table at all.
_MIN_BUDGET_CELLS = 256
# So few values are sent densely in lossy mode too.
_MAX_DENSE_CORE = 64


class SketchSum:
    """Sums sketches, bucket by bucket; what it learns of a bucket counts from the next step on.

    Args: mode, budget: as of the scheme. aggregator: what sums.
    """

    def __init__(self, sketch: CountSketch, mode: str, budget: float, aggregator: Aggregator) -> None:
        self.sketch, self.mode, self.budget, self.aggregator = sketch, mode, budget, aggregator
        self.attempts = NumberByBucket()  # the salt with which a bucket peeled last
        self.expected = ExpectedTables()
        self._cells = torch.empty(0)  # on their way together with an index
        self.n_core = self.n_resent = self.n_at_once = 0

    def assumed(
        self, values: torch.Tensor, bucket: Bucket, wire: Wire, key: str
    ) -> Callable[[torch.Tensor], torch.Tensor] | None:
        """Mode "sketch", once the last steps say how large the table has to be: it goes along with the index."""
        table = self.expected.rows(key, self.sketch.gamma) if self.mode == "sketch" else None
        if table is None:
            return None

        def cells_of(own_index: torch.Tensor) -> torch.Tensor:
            with wire.timing("encode"):
                n_cells = self.sketch.assume(bucket.n_elements, *table, self.attempts.of(key))
                self._cells = wire.scratch("cells", n_cells, torch.float32)
                self.sketch.add(values, own_index, self._cells)
            return self._cells

        return cells_of

    def take_at_once(self, summand: Summand) -> bool:
        """Whether all values come out of the sketch that was sent with its index; the mean then lies in the bucket."""
        bucket, wire, key, _, _, union = summand
        assert union.total is not None
        with wire.timing("decode"):
            self.sketch.adopt(union.words)
        n_core = self._peel(wire, union)
        union.total.wait()
        if n_core > MAX_CORE:
            self.n_resent += 1
            return False
        if is_too_dense(bucket, 4, self.sketch.n_cells):
            self.expected.forget(key)  # the next index comes alone, and decides
        else:
            self.expected.note(key, self.sketch)
        self.n_at_once += 1
        self._recover(summand, self._cells, n_core, None)
        return True

    def prepare(self, bucket: Bucket, key: str, union: Union) -> int:
        """Lay out a table for the union. Returns: its cells."""
        self.expected.forget(key)
        # Estimates that missed the same way at every step would bend the training; peeled values do not care.
        step, max_cells = 0, 0
        if self.mode == "lossy":
            step = bucket.step & 0xFFFFFFFF
            max_cells = max(_MIN_BUDGET_CELLS, int(self.budget * bucket.original_bytes / 4))
        return self.sketch.prepare(union.words, bucket.n_elements, self.attempts.of(key), max_cells, step)

    def send(self, summand: Summand, fixed: FixedPoint | None) -> None:
        """Sum the sketch that was laid out, peel it while it travels, and put the mean into the bucket."""
        bucket, wire, key, values, _, union = summand
        sketch = self.sketch
        dtype = torch.float32 if fixed is None else fixed.dtype
        peel_first = sketch.n_nonzeros < _PEEL_FIRST_NONZEROS
        attempt = self.attempts.of(key)
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
            self.n_resent += 1
            attempt += 1
            peel_first = True
            sketch.prepare(union.words, bucket.n_elements, attempt)
        if attempt != self.attempts.of(key):
            self.attempts.learn(key, attempt if attempt < MAX_ATTEMPTS else 0)
        if self.mode == "sketch":
            self.expected.note(key, sketch)
        self._recover(summand, cells, n_core, fixed)

    def end_step(self, is_finite: bool) -> None:
        """Keep what the step has learnt, or forget it."""
        if is_finite:
            self.expected.commit()
        self.expected.clear_step()
        self.attempts.end_step(is_finite)

    def _recover(self, summand: Summand, cells: torch.Tensor, n_core: int, fixed: FixedPoint | None) -> None:
        """Put the mean into the bucket, from summed cells and the order of peeling."""
        bucket, wire, _, values, unsent, union = summand
        sketch = self.sketch
        estimate = self.mode == "lossy" and n_core > _MAX_DENSE_CORE
        core = sketch.core() if n_core and (unsent is not None or not estimate) else None
        scale = (1.0 if fixed is None else fixed.scale) / wire.world_size
        core_mean = None if estimate or core is None else self._sum_core(wire, values, core, fixed) * scale
        is_direct = unsent is None and bucket.buffer.dtype in (torch.float32, torch.bfloat16)
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
            return self.sketch.peel(union.words)

    def _has_to_try_again(self, n_core: int, attempt: int) -> bool:
        return n_core > MAX_CORE and self.sketch.n_cells > 0 and attempt < MAX_ATTEMPTS and self.mode != "lossy"

    def _sum_core(self, wire: Wire, values: torch.Tensor, core: torch.Tensor, fixed: FixedPoint | None) -> torch.Tensor:
        """(n_core,) float64 sums over the ranks of what the sketch does not give back."""
        own = values[core].float() if fixed is None else quantised(values[core], fixed)
        self.aggregator.start_sum(own, wire.record).wait()
        self.n_core += core.numel()
        return own.double()
