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

import logging
from typing import Any

import torch
from torch import Tensor

from gradwire.checks import choice as check_choice
from gradwire.checks import share as check_share
from gradwire.codecs import packed_values
from gradwire.codecs.count_sketch import CountSketch, FixedPoint, NarrowCells
from gradwire.codecs.packed_values import FLAGS_AT, NOT_FINITE
from gradwire.codecs.selection import take_largest
from gradwire.core.feedback import Part
from gradwire.core.session import Session
from gradwire.errors import InvalidArgument, Unsupported
from gradwire.exchange import aggregators
from gradwire.exchange.aggregators import Aggregator
from gradwire.schemes.compressed import Compressed, count_of
from gradwire.schemes.homomorphic.learnt import Learnt, is_too_dense
from gradwire.schemes.homomorphic.shared_index import SharedIndex, Union
from gradwire.schemes.homomorphic.sketch_sum import SketchSum, Summand
from gradwire.wire.wire import Wire

_log = logging.getLogger(__name__)
_INTEGERS = {8: torch.int8, 16: torch.int16, 32: torch.int32, 64: torch.int64}
_MIN_WORLD_BITS = 3  # a value keeps so many beside its sign, whatever the world size
_TOO_DENSE = "too dense to gain: this bucket was sent uncompressed"
_TOO_LARGE = "too large for a sketch of float32 to hold its sums: this bucket was sent uncompressed"

# Sums in float32 cells stay finite if no value is above 2^_MAX_EXPONENT / world size: a cell holds fewer than 2^16 values.
_MAX_EXPONENT = 110


class Homomorphic(Compressed):
    """Mean over the ranks of gradients with many zeros, by OR and sum alone.

    Args:
        mode: "packed": the union's values in the gradient's own dtype, divided by the world size and summed, as DDP does
            it; over an aggregator that adds integers only, in fixed point as in "exact". "sketch": count sketches of
            float32. Their relative error is 3e-7 to 7e-7 by norms, but they are *not* lossless element by element: a
            value that is small beside its cell-mates loses digits, or all of them, and Adam divides each value by its
            own size. "exact": sketches of integers, each gradient rounded once to fixed point with an exponent that
            all ranks share. "lossy": a sketch of `budget`; what does not come out of it is estimated. In every mode, where
            all ranks hold zeros the mean is 0.
        budget: lossy mode: size of the sketch as a share of the gradient's, in (0, 1]; the index comes on top.
        integer_bits: fixed point: 32 (a value keeps 31 - ceil(log2 world size) bits below the largest one's exponent)
            or 64 (62; over a switch, three words a value). Also 16 and 8, whatever the aggregator: a lossy sum of 2 or 1 bytes
            a value, which keeps 15 or 7 less ceil(log2 world size) bits, or a cell of a sketch, in which it keeps so many fewer
            once more: the paper's "any bit width".
        sparsifier: "top-k" sends of each rank's gradient only its `density` of largest values, without gathering.
        density: share of values that the sparsifier keeps, in (0, 1].
        error_feedback: add what sparsifier, lossy mode and integers of 8 or 16 bits left out to the next gradient.
            Default: with a sparsifier or such integers.
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
        check_choice("mode", mode, ("packed", "sketch", "exact", "lossy"))
        check_choice("index", index, ("auto", "bitmap", "bloom"))
        check_choice("sparsifier", sparsifier, (None, "top-k"))
        check_choice("integer_bits", integer_bits, tuple(_INTEGERS))
        self._is_rounded = integer_bits < 32
        if self._is_rounded and mode not in ("packed", "exact"):
            raise InvalidArgument(
                f'integer_bits={integer_bits} is for mode="packed" and mode="exact": {mode} sums floats'
            )
        feeds_back = sparsifier is not None or self._is_rounded
        if error_feedback and not feeds_back and mode != "lossy":
            raise InvalidArgument(
                'error_feedback needs something that is left out: a sparsifier, mode="lossy", or integer_bits=8 or 16'
            )
        super().__init__(error_feedback=feeds_back if error_feedback is None else error_feedback)
        self.mode, self.budget, self.integer_bits = mode, check_share("budget", budget), integer_bits
        self.sparsifier, self.density = sparsifier, check_share("density", density)
        self.aggregator = aggregators.by_name(aggregator) if isinstance(aggregator, str) else aggregator
        self.index, self._learnt, self._sketch = index, Learnt(), CountSketch(**sketch)
        self._index = SharedIndex(index, mode, self._sketch.seed, self._learnt, self.aggregator)
        self._sketches = SketchSum(self._sketch, mode, self.budget, self._learnt, self.aggregator)
        self._narrow: NarrowCells | None = None  # once bound, if cells of a sketch have fewer than 32 bits
        self._n_plain = {_TOO_DENSE: 0, _TOO_LARGE: 0}

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
            "index": self.index,
            "batch_values": sketch.batch_values,
            "gamma": sketch.gamma,
            "seed": sketch.seed,
            "aggregator": self.aggregator.name,
        }

    def bind(self, session: Session) -> None:
        """Raises: Unsupported (an aggregator that cannot sum what this mode sends)."""
        if not self.aggregator.sums_floats and not self._sums_integers:
            raise Unsupported(
                f"the aggregator {self.aggregator.name!r} adds integers only; use homomorphic with "
                'mode="packed" or mode="exact" with it, or aggregator="process-group"'
            )
        world_bits = (session.wire.world_size - 1).bit_length()
        is_narrow = self._is_rounded and self.mode == "exact"
        self._narrow = NarrowCells(_INTEGERS[self.integer_bits], world_bits) if is_narrow else None
        value_bits = self.integer_bits - 1 - world_bits if self._narrow is None else self._narrow.value_bits
        if value_bits < _MIN_WORLD_BITS:
            raise Unsupported(
                f"sums of {session.wire.world_size} ranks leave too little of {self.integer_bits} bits: take integer_bits=16"
            )
        if session.wire.on_device:
            self._check_device()
        self._index.kind = "bitmap" if session.wire.on_device else self.index  # which may be "auto"
        self.aggregator.bind(session.communicator, session.recorder)
        super().bind(session)

    def _check_device(self) -> None:
        """Raises: Unsupported (what needs the host)."""
        aggregator = self.aggregator.name
        for is_there, what, instead in (
            (self.mode == "packed", f"mode={self.mode!r}", 'mode="packed", which sums the values as they are'),
            (self.index != "bloom", 'index="bloom"', 'index="bitmap"'),
            (not self._is_rounded, f"integer_bits={self.integer_bits}", "integer_bits=32"),
            (aggregator == "process-group", f"aggregator={aggregator!r}", 'aggregator="process-group"'),
        ):
            if not is_there:
                raise Unsupported(
                    f"homomorphic with {what} works on host memory: leave placement out, or on a device take {instead}"
                )

    # ---- one bucket

    def step(self, part: Part, wire: Wire) -> None:
        """Find the union of all ranks' non-zeros, then sum what they have there."""
        bucket, key = part.bucket, f"{part.bucket.index}:{part.bucket.layout_hash:08x}"
        if self._learnt.is_dense(key):
            if not wire.on_device:  # no index goes before it, to say what ranks share
                self._check.start(self.preamble(bucket), wire.record)
            self._send_plainly(part, wire, _TOO_DENSE)
            return
        values = self._values_to_send(part, wire)
        is_packed = self.mode == "packed"
        cell_bytes = self.integer_bits // 8 if self._sums_integers else values.element_size() if is_packed else 4
        cell_bits = 8.0 * cell_bytes if is_packed else 8 * min(4, cell_bytes) * self._sketch.gamma
        union = self._index.agree(values, wire, key, cell_bits, self._sketches.assumed(values, wire, key))
        summand = Summand(part, wire, key, values, union)
        is_too_large = self._may_overflow(union)
        if union.total is not None and (is_too_large or not union.head.is_finite):
            union.total()
        if not union.head.is_finite:
            wire.note_message(union.message[FLAGS_AT].bitwise_and(NOT_FINITE) == 0)
        elif is_too_large:
            self._send_plainly(part, wire, _TOO_LARGE)
        elif union.total is not None and self._sketches.take_at_once(summand):
            self._index.remember(key, self._sketch.n_nonzeros)
        else:
            n_cells = union.n_set if is_packed else self._sketches.prepare(summand)
            self._index.remember(key, union.n_set if is_packed else self._sketch.n_nonzeros)
            if is_too_dense(bucket, cell_bytes, n_cells):
                self._learnt.note_dense(key)
                self._send_plainly(part, wire, _TOO_DENSE)
            elif is_packed:
                self._sum_packed(summand)
            else:
                self._sketches.send(summand, self._fixed_point(union), self._narrow)
        part.keep()

    def _values_to_send(self, part: Part, wire: Wire) -> Tensor:
        """(n,) float32, or the bucket itself (for sketches not in float16); with feedback, the rest stays in `part.unsent`."""
        n = part.bucket.n_elements
        with wire.timing("encode"):
            if not self.error_feedback and self.sparsifier is None:
                if self.mode == "packed" or part.values.dtype != torch.float16:
                    return part.values
                return wire.scratch("values", n).copy_(part.values)
            total, kept = part.total(), wire.scratch("kept", n)
            if self.sparsifier is None:
                kept.copy_(total)
                total.zero_()
            else:
                places, taken, _ = take_largest(total, count_of(self.density, n))  # what is not finite is among them
                kept.zero_().index_copy_(0, places.long(), taken)
            # What this rank has left out of parameters that only others use is kept too.
            part.used_by_any = [True] * len(part.bucket.spans)
        return kept

    def _sum_packed(self, summand: Summand) -> None:
        """Sum the values at the union, one after the other as they are, and put the mean into the bucket."""
        part, wire, _, values, union = summand
        fixed = self._fixed_point(union)
        packed = wire.scratch("packed", union.n_set, values.dtype)
        with wire.timing("encode"):
            packed_values.pack(values, union.words, packed, union.ends)
            # Divided before it is summed, by DDP's own product: with two ranks DDP's bits, and float16 stays in range.
            if fixed is None:
                cells = packed.mul_(1.0 / wire.world_size)
            else:
                integers = fixed.quantise(packed)
                cells = fixed.to_words(integers)
                if self._is_rounded and part.unsent is not None:
                    rounding = wire.scratch("rounding", values.numel())
                    packed_values.unpack(packed.sub_(integers * fixed.scale), union.words, rounding)
                    part.unsent += rounding
        if union.n_set:
            self.aggregator.start_sum(cells, wire)()
        with wire.timing("decode"):
            if fixed is not None:
                sums = fixed.read_words(cells, union.n_set, wire.world_size)
                packed.copy_(sums.double().mul_(fixed.scale / wire.world_size).float())
            is_direct = values.dtype == part.values.dtype
            out = part.values if is_direct else wire.scratch("mean", values.numel(), values.dtype)
            packed_values.unpack(packed, union.words, out, union.ends)
            if not is_direct:
                part.values.copy_(out)

    def _send_plainly(self, part: Part, wire: Wire, why: str) -> None:
        """Send the bucket as DDP does; the residual stays as it is."""
        if not self._n_plain[why]:
            _log.info("gradwire %s: %s (step %d)", self.name, why, part.bucket.step)
        self._n_plain[why] += 1
        wire.record.fallbacks.append(why)
        part.unsent = None
        wire.mean(part.values)
        wire.note(wire.all_finite(part.values))

    # ---- what all ranks decide alike

    @property
    def _sums_integers(self) -> bool:
        is_packed = self.mode == "packed"
        return self.mode == "exact" or self._is_rounded or (is_packed and not self.aggregator.sums_floats)

    def _fixed_point(self, union: Union) -> FixedPoint | None:
        if not self._sums_integers:
            return None
        if self._narrow is not None:
            return self._narrow.fixed_point(union.head.exponent or 0)
        return FixedPoint.fit(union.head.exponent or 0, self.session.wire.world_size, _INTEGERS[self.integer_bits])

    def _may_overflow(self, union: Union) -> bool:
        """Return whether sums of finite values may leave float32 in the cells of a sketch."""
        exponent, bits_of_world = union.head.exponent, self.session.wire.world_size.bit_length()
        return self.mode in ("sketch", "lossy") and exponent is not None and exponent + bits_of_world > _MAX_EXPONENT

    # ---- between steps

    def commit(self) -> None:
        super().commit()
        self._learnt.commit()

    def discard(self) -> None:
        super().discard()
        self._learnt.discard()

    def stats(self) -> dict[str, Any]:
        """Buckets sent plainly (too dense, too large for a sketch of floats), filters used and given up, sketches sent
        together with their index, and sent again, values summed beside a sketch."""
        return {
            **super().stats(),
            "n_buckets_too_dense": self._n_plain[_TOO_DENSE],
            "n_buckets_too_large": self._n_plain[_TOO_LARGE],
            "n_bloom_indices": self._index.n_blooms,
            "n_bloom_fallbacks": self._index.n_bloom_fallbacks,
            "n_sketches_at_once": self._sketches.n_at_once,
            "n_sketches_resent": self._sketches.n_resent,
            "n_core_values": self._sketches.n_core,
            **{f"aggregator_{name}": value for name, value in self.aggregator.stats().items()},
        }

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), **self._learnt.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Raises: InvalidArgument."""
        self._learnt.load_state_dict(state)
        super().load_state_dict(state)

    def close(self) -> None:
        super().close()
        self._learnt.clear()
        self.aggregator.close()
