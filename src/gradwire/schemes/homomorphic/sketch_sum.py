"""Modes "sketch", "exact" and "lossy": the ranks' count sketches are summed, and peeled while they travel."""

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from gradwire.codecs.count_sketch import MAX_ATTEMPTS, MAX_CORE, CountSketch, FixedPoint, NarrowCells, Outcome
from gradwire.core.feedback import Part
from gradwire.errors import CorruptMessage
from gradwire.exchange.aggregators import Aggregator
from gradwire.schemes.homomorphic.learnt import COUNTS_KEPT, Learnt, is_too_dense
from gradwire.schemes.homomorphic.shared_index import Union
from gradwire.wire.wire import Wire

# Small tables may need another salt (5 in 100 of 1,000 non-zeros), so they are peeled before they are sent; larger ones
# never have, and are peeled while they travel.
_PEEL_FIRST_NONZEROS = 1 << 14
# 1 KiB, whatever the budget: a small bucket would be left with no table at all.
_MIN_BUDGET_CELLS = 256
# So few values are sent densely in lossy mode too.
_MAX_DENSE_CORE = 64
# A table that goes with its index is so much larger than gamma asks for: beside the most non-zeros of the last steps, and
# of their standard deviation if they come at random.
_MARGIN, _DEVIATIONS = 1.02, 2.0
# A union with so small a share of what was expected wastes more than the round that is saved.
_MIN_SHARE = 0.5


class Summand(NamedTuple):
    """This rank's addend to the sum of one bucket, and the union that all ranks know."""

    part: Part
    wire: Wire
    key: str  # the bucket's, for what is learnt of it
    values: Tensor  # (n,) float32 or bfloat16
    union: Union


class SketchSum:
    """Sums sketches, bucket by bucket; `mode` and `budget` as of the scheme."""

    def __init__(self, sketch: CountSketch, mode: str, budget: float, learnt: Learnt, aggregator: Aggregator) -> None:
        self.sketch, self.mode, self.budget = sketch, mode, budget
        self._learnt, self._aggregator = learnt, aggregator
        self._cells = torch.empty(0, dtype=torch.float32, device="cpu")  # on their way together with an index
        self.n_core = self.n_resent = self.n_at_once = 0

    def assumed(self, values: Tensor, wire: Wire, key: str) -> Callable[[Tensor], Tensor] | None:
        """Mode "sketch", once the last steps say how large the table has to be: it goes along with the index."""
        table = self._learnt.of("tables", key) if self.mode == "sketch" else None
        if table is None:
            return None
        c, gamma = table["batch_values"], self.sketch.gamma
        expected = [_MARGIN * max(block) + _DEVIATIONS * math.sqrt(max(block)) for block in table["counts"]]
        rows = [max(3, math.ceil(gamma * n / c)) if n else 0 for n in expected]

        def cells_of(own_index: Tensor) -> Tensor:
            with wire.timing("encode"):
                n_cells = self.sketch.assume(values.numel(), c, rows, self._attempt(key))
                self._cells = wire.scratch("cells", n_cells)
                self.sketch.add(values, own_index, self._cells)
            return self._cells

        return cells_of

    def take_at_once(self, summand: Summand) -> bool:
        """Return whether all values come out of the sketch sent with its index; the mean then lies in the bucket."""
        part, wire, key, _, union = summand
        assert union.total is not None
        with wire.timing("decode"):
            self.sketch.adopt(union.words)
        n_core = self._peel(wire, union)
        union.total()
        if n_core > MAX_CORE:
            self.n_resent += 1
            return False
        if is_too_dense(part.bucket, 4, self.sketch.n_cells):
            self._learnt.learn("tables", key, None)  # the next index comes alone, and decides
        else:
            self._learn_table(key)
        self.n_at_once += 1
        self._recover(summand, self._cells, n_core, None, 1.0)
        return True

    def prepare(self, summand: Summand) -> int:
        """Lay out a table for the union. Returns: its cells."""
        bucket, key = summand.part.bucket, summand.key
        self._learnt.learn("tables", key, None)  # unless it is sent: the next step's sketch waits for the index
        # Estimates that missed the same way at every step would bend the training; peeled values do not care.
        step, max_cells = 0, 0
        if self.mode == "lossy":
            step = bucket.step & 0xFFFFFFFF
            max_cells = max(_MIN_BUDGET_CELLS, int(self.budget * bucket.original_bytes / 4))
        return self.sketch.prepare(summand.union.words, bucket.n_elements, self._attempt(key), max_cells, step)

    def send(self, summand: Summand, fixed: FixedPoint | None, narrow: NarrowCells | None) -> None:
        """Sum the sketch that was laid out, its cells `narrow` or as they are, peel it meanwhile, and take the mean."""
        part, wire, key, values, union = summand
        sketch = self.sketch
        dtype = torch.float32 if fixed is None else fixed.dtype
        peel_first = sketch.n_nonzeros < _PEEL_FIRST_NONZEROS
        attempt = self._attempt(key)
        if narrow is not None and fixed is not None and part.unsent is not None:
            part.unsent += values - fixed.quantise(values) * fixed.scale
        while True:
            n_core = self._peel(wire, union) if peel_first else 0
            if not self._has_to_try_again(n_core, attempt):
                cells = wire.scratch("cells", sketch.n_cells, dtype)
                with wire.timing("encode"):
                    sketch.add(values, union.own, cells, fixed)
                    words = cells if narrow is None else narrow.narrow(cells)
                total = self._aggregator.start_sum(words, wire) if cells.numel() else None
                if not peel_first:
                    n_core = self._peel(wire, union)
                if total is not None:
                    total()
                if not self._has_to_try_again(n_core, attempt):
                    break
                self.n_resent += 1
                peel_first = True
            attempt += 1
            sketch.prepare(union.words, part.bucket.n_elements, attempt)
        if attempt != self._attempt(key):
            self._learnt.learn("attempts", key, attempt if attempt < MAX_ATTEMPTS else 0)
        if self.mode == "sketch":
            self._learn_table(key)
        self._recover(summand, cells, n_core, fixed, 1.0 if narrow is None else narrow.widen(words, cells))

    def _attempt(self, key: str) -> int:
        return self._learnt.of("attempts", key) or 0

    def _learn_table(self, key: str) -> None:
        """This step's union, which the sketch has peeled."""
        table, sketch = self._learnt.of("tables", key), self.sketch
        c, counts = sketch.table_batch_values, sketch.block_nonzeros()
        if table is None or (table["batch_values"], len(table["counts"])) != (c, len(counts)):
            table = {"batch_values": c, "counts": [[] for _ in counts]}
        elif sum(counts) < _MIN_SHARE * sum(max(block) for block in table["counts"]):
            table = None
        if table is not None:
            kept = [[*block, n][-COUNTS_KEPT:] for block, n in zip(table["counts"], counts, strict=True)]
            table = {"batch_values": c, "counts": kept} if sketch.n_cells else None
        self._learnt.learn("tables", key, table)

    def _recover(self, summand: Summand, cells: Tensor, n_core: int, fixed: FixedPoint | None, unit: float) -> None:
        """Put the mean into the bucket, from summed cells, in which 1 stands for `unit`, and the order of peeling."""
        part, wire, _, values, union = summand
        sketch, unsent = self.sketch, part.unsent
        estimate = self.mode == "lossy" and n_core > _MAX_DENSE_CORE
        core = sketch.core() if n_core and (unsent is not None or not estimate) else None
        scale = (1.0 if fixed is None else fixed.scale) / wire.world_size
        core_mean = None if estimate or core is None else self._sum_core(wire, values, core, fixed) * scale
        # With feedback, estimates are told from what was sent as exactly as they are.
        is_direct = part.values.dtype == torch.float32 or (unsent is None and part.values.dtype == torch.bfloat16)
        with wire.timing("decode"):
            out = part.values if is_direct else wire.scratch("mean", values.numel())
            # From all ranks' values, not from their sums: those may cancel, and rounding does not.
            bound = wire.world_size * 2.0**union.head.exponent if union.head.exponent is not None else 0.0
            if sketch.recover(cells, unit * scale, out, estimate, bound) is not Outcome.COMPLETE:
                raise CorruptMessage(
                    f"the summed sketch of bucket {wire.facts.bucket} in step {wire.facts.step} is not that of its index: it "
                    f"was altered on its way through the aggregator {self._aggregator.name!r}; restart from the last checkpoint"
                )
            if core_mean is not None:
                out[core] = core_mean.float().to(out.dtype)  # rounded as the others are
            elif core is not None and unsent is not None:
                out[core] *= sketch.estimate_shrinkage
                # The ranks' distances add up to what all of them together sent, less what all of them got.
                unsent[core] += values[core] - out[core]
            if not is_direct:
                part.values.copy_(out)

    def _peel(self, wire: Wire, union: Union) -> int:
        with wire.timing("decode"):
            return self.sketch.peel(union.words)

    def _has_to_try_again(self, n_core: int, attempt: int) -> bool:
        return n_core > MAX_CORE and self.sketch.n_cells > 0 and attempt < MAX_ATTEMPTS and self.mode != "lossy"

    def _sum_core(self, wire: Wire, values: Tensor, core: Tensor, fixed: FixedPoint | None) -> Tensor:
        """(n_core,) float64 sums over the ranks of what the sketch does not give back."""
        own = values[core].float() if fixed is None else fixed.quantise(values[core])
        self._aggregator.start_sum(own, wire)()
        self.n_core += core.numel()
        return own.double()
