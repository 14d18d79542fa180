"""The index that all ranks end up with: one OR, which also carries what they must agree on before any value is sent.

A message is a head, then a bitmap or a Bloom filter. An OR can say more than it seems: it tells that ranks differ (a bit and
its complement are both set), that one of them has an Inf or NaN, and the largest exponent of all (each sets a bit for every
exponent up to its own; the longest run survives).
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from gradwire.codecs import bloom_filter, packed_values
from gradwire.codecs.bloom_filter import BloomShape, Found
from gradwire.codecs.count_sketch import index_words
from gradwire.codecs.packed_values import HEAD_WORDS, PAST_THE_END, Head
from gradwire.errors import CorruptMessage
from gradwire.exchange.aggregators import Aggregator, Sum
from gradwire.schemes.homomorphic.learnt import Learnt
from gradwire.wire.wire import Wire

_MIN_GAIN = 0.9  # a filter is worth its queries where it saves a tenth
# A filter that is fuller, or lets through more than so many times what was expected, was made for far fewer non-zeros.
_MAX_SHARE_SET = 0.9
_MAX_OVER_EXPECTED = 4


class Union(NamedTuple):
    """The united index, which all ranks know after the OR.

    Attributes:
        own: (words,) int32, scratch: this rank's non-zeros.
        message: (HEAD_WORDS + words,) int32, scratch: those of all ranks, and with a Bloom filter some zeros.
        head: what the ranks' heads say; if not all is finite, the rest means nothing.
        ends, n_set: if asked for: as `packed_values.count` gives it, and how many bits are set.
        total: the sum that was started along with the index, if one was.
    """

    own: Tensor
    message: Tensor
    head: Head
    ends: Tensor
    n_set: int
    total: Sum | None

    @property
    def words(self) -> Tensor:
        """The message without its head."""
        return self.message[HEAD_WORDS:]


class SharedIndex:
    """Finds the union, bucket by bucket, and sizes Bloom filters by what steps have learnt.

    Args:
        kind, mode, seed: as of the scheme. "packed" counts the bits that are set. Sketches of floats have each filter
            confirmed by a bit for each of its candidates, so that no zero is among them; other sums give back 0 by themselves.
    """

    def __init__(self, kind: str, mode: str, seed: int, learnt: Learnt, aggregator: Aggregator) -> None:
        self.kind, self._seed, self._learnt, self._aggregator = kind, seed, learnt, aggregator
        self._counts, self._confirms = mode == "packed", mode in ("sketch", "lossy")
        self.n_blooms = self.n_bloom_fallbacks = 0

    def agree(
        self, values: Tensor, wire: Wire, key: str, cell_bits: float, cells_of: Callable[[Tensor], Tensor] | None
    ) -> Union:
        """The union of all ranks' non-zeros in `values` (n,); each will cost `cell_bits` when they are summed.
        `cells_of` this rank's index are summed along with it. Raises: RankMismatch, CorruptMessage."""
        n = values.numel()
        message = wire.scratch("index", HEAD_WORDS + index_words(n), torch.int32)
        bitmap = message[HEAD_WORDS:]
        with wire.timing("encode"):
            packed_values.write_index(values, message, wire.checksum)
            own = wire.scratch("own index", bitmap.numel(), torch.int32).copy_(bitmap)
        cells = None if cells_of is None else cells_of(own)
        total: Sum | None = None

        def unite(words: Tensor) -> None:
            nonlocal total
            if cells is None or total is not None:
                self._aggregator.or_words(words, wire)
            else:
                wait, total = self._aggregator.start_or_and_sum(words, cells, wire)
                wait()

        shape = self._choose(key, n, cell_bits)
        if shape is not None:
            filtered = wire.scratch("filter", HEAD_WORDS + shape.n_words, torch.int32)
            head, bits = filtered[:HEAD_WORDS].copy_(message[:HEAD_WORDS]), filtered[HEAD_WORDS:]
            with wire.timing("encode"):
                bloom_filter.insert(own, n, shape, self._seed, bits)
            unite(filtered)
            with wire.timing("decode"):
                candidates = bloom_filter.query(bits, n, shape, self._seed, bitmap)
                message[:HEAD_WORDS].copy_(head)  # which an OR with the others leaves as it is
            union = self._read(own, message, n, total, wire)
            if not union.head.is_finite:
                return union
            if _is_worth(candidates, shape, n, 1 if self._confirms else cell_bits):
                self.n_blooms += 1
                if not self._confirms:
                    self.remember(key, candidates.n_nonzeros)
                elif candidates.n_candidates:  # while the cells travel
                    self._confirm(own, bitmap, candidates.n_candidates, wire)
                return union
            self.n_bloom_fallbacks += 1
            wire.record.fallbacks.append("more non-zeros than the Bloom filter was made for: the bitmap was sent too")
            bitmap.copy_(own)
        unite(message)
        return self._read(own, message, n, total, wire)

    def _confirm(self, own: Tensor, candidates: Tensor, n_candidates: int, wire: Wire) -> None:
        """Leave of the candidates those that some rank has."""
        bits = wire.scratch("candidates", index_words(n_candidates), torch.int32)
        with wire.timing("encode"):
            bloom_filter.bits_of(own, candidates, bits)
        self._aggregator.or_words(bits, wire)
        with wire.timing("decode"):
            bloom_filter.keep(bits, candidates)

    def remember(self, key: str, n_nonzeros: int) -> None:
        """Note how many bits a union had that came as a bitmap; a filter's were estimated from the filter."""
        if self.kind != "bitmap":
            self._learnt.count(key, n_nonzeros)

    def _choose(self, key: str, n_elements: int, cell_bits: float) -> BloomShape | None:
        """A filter, if this bucket's last counts are known and promise that it is smaller than a bitmap."""
        counts = self._learnt.of("n_nonzeros", key)
        if self.kind == "bitmap" or not counts:
            return None
        n_nonzeros = max(counts)
        shape = BloomShape.fit(n_nonzeros, n_elements, cell_bits, 1.0 if self._confirms else None)
        bitmap_bits = n_elements + cell_bits * n_nonzeros
        return shape if self.kind == "bloom" or shape.expected_bits < _MIN_GAIN * bitmap_bits else None

    def _read(self, own: Tensor, message: Tensor, n_elements: int, total: Sum | None, wire: Wire) -> Union:
        """Read the united message; on a device the lane waits for it. Raises: RankMismatch, CorruptMessage."""
        own_head, index = message[:HEAD_WORDS], message[HEAD_WORDS:]
        ends = packed_values.count(index, n_elements, own_head) if self._counts else message[:0]
        with wire.record.timing("communicate"):
            numbers = wire.read(own_head, ends[-1:])
        head = packed_values.read_head(numbers[:HEAD_WORDS])
        if not head.ranks_agree:
            wire.name_mismatch()
        if head.flags & PAST_THE_END:
            raise CorruptMessage(
                f"the index of bucket {wire.facts.bucket} in step {wire.facts.step} has bits set past its {n_elements} values: "
                "it was altered on its way; restart from the last checkpoint"
            )
        return Union(own, message, head, ends, numbers[-1], total)


def _is_worth(found: Found, shape: BloomShape, n_elements: int, spill_bits: float) -> bool:
    """Return whether the candidates that are zeros cost no more than a bitmap, as far as the filter can tell."""
    if found.share_set > _MAX_SHARE_SET or found.n_candidates > _MAX_OVER_EXPECTED * shape.expected_candidates:
        return False
    return spill_bits * (found.n_candidates - found.n_nonzeros) <= n_elements
