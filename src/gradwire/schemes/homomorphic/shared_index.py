"""The index that all ranks end up with: one OR, which also carries what they must agree on before any value is sent.

A message is `HEAD_WORDS` words, then a bitmap or a Bloom filter. An OR can say more than it seems: it tells that ranks
differ (a bit and its complement are both set), that one of them has an Inf or NaN, and the largest exponent of all (each
sets a bit for every exponent up to its own; the longest run survives).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from gradwire.codecs import bloom_filter
from gradwire.codecs.bloom_filter import BloomShape, Found
from gradwire.codecs.count_sketch import IndexFacts, index_words, write_index
from gradwire.codecs.packed_values import HEAD_WORDS, head_of, read_head
from gradwire.core.bucket import Bucket
from gradwire.exchange.aggregators import Aggregator, Sum
from gradwire.wire.communicator import Communicator

_MIN_GAIN = 0.9  # a filter is worth its queries where it saves a tenth
# A filter that is fuller, or lets through more than so many times what was expected, was made for far fewer non-zeros.
_MAX_SHARE_SET = 0.9
_MAX_OVER_EXPECTED = 4
_COUNTS_KEPT = 8  # steps; a filter is made for the most non-zeros of them


@dataclass(frozen=True)
class Union:
    """What all ranks know after the OR.

    Attributes:
        own: (words,) int32, scratch: this rank's non-zeros.
        words: (words,) int32, scratch: those of all ranks, and with a Bloom filter some zeros.
        exponent: every value of every rank is below 2^exponent; None if all are zero.
        is_finite: no rank holds Inf or NaN; otherwise `words` means nothing.
        ranks_agree: on scheme, options, layout and step.
        total: the sum that was started along with the index, if one was.
    """

    own: torch.Tensor
    words: torch.Tensor
    exponent: int | None
    is_finite: bool
    ranks_agree: bool
    total: Sum | None = None


class SharedIndex:
    """Finds the union, bucket by bucket; remembers how many non-zeros each had lately, to size the next Bloom filter."""

    def __init__(self, kind: str, seed: int) -> None:
        self.kind, self.seed = kind, seed
        self.counts: dict[str, list[int]] = {}  # of the last steps that count
        self.next_counts: dict[str, int] = {}  # of this one
        self.n_blooms = 0
        self.n_bloom_fallbacks = 0

    def agree(
        self,
        values: torch.Tensor,
        facts: int,
        key: str,
        bucket: Bucket,
        communicator: Communicator,
        aggregator: Aggregator,
        cell_bits: float,
        cells_of: Callable[[torch.Tensor], torch.Tensor] | None = None,
    ) -> Union:
        """The union of all ranks' non-zeros in `values` (n,); each will cost `cell_bits` when they are summed.

        Args: cells_of: this rank's index to cells, which are to be summed along with it.
        """
        n_elements = values.numel()
        n_words = index_words(n_elements)
        own = communicator.scratch("own index", 4 * n_words).view(torch.int32)
        with bucket.record.timing("encode"):
            found = write_index(values, own)
        cells = None if cells_of is None else cells_of(own)
        total: Sum | None = None

        def exchange(message: torch.Tensor) -> None:
            nonlocal total
            if cells is None or total is not None:
                aggregator.or_words(message, bucket.record)
                return
            ored, total = aggregator.start_or_and_sum(message, cells, bucket.record)
            ored.wait()

        shape = self._choose(key, n_elements, cell_bits)
        if shape is not None:
            message = self._message(communicator, "bloom", facts, found, shape.n_words)
            with bucket.record.timing("encode"):
                bloom_filter.insert(own, n_elements, shape, self.seed, message[HEAD_WORDS:])
            exchange(message)
            union = communicator.scratch("union", 4 * n_words).view(torch.int32)
            with bucket.record.timing("decode"):
                body = message[HEAD_WORDS:]
                candidates = bloom_filter.query(body, n_elements, shape, self.seed, union)
            result = _read(message, own, union, total)
            if not result.is_finite or not result.ranks_agree:
                return result
            if _is_worth(candidates, shape, n_elements, cell_bits):
                self.next_counts[key] = candidates.n_nonzeros
                self.n_blooms += 1
                return result
            self.n_bloom_fallbacks += 1
            bucket.record.fallbacks.append("more non-zeros than the Bloom filter was made for: the bitmap was sent too")

        message = self._message(communicator, "bitmap", facts, found, n_words)
        message[HEAD_WORDS:] = own
        exchange(message)
        return _read(message, own, message[HEAD_WORDS:], total)

    def remember(self, key: str, n_nonzeros: int) -> None:
        """Note how many bits a union had that came as a bitmap; a filter's were estimated from the filter."""
        if self.kind != "bitmap":
            self.next_counts.setdefault(key, n_nonzeros)

    def commit(self) -> None:
        """Keep what this step has counted."""
        for key, n_nonzeros in self.next_counts.items():
            self.counts[key] = [*self.counts.get(key, []), n_nonzeros][-_COUNTS_KEPT:]

    def _choose(self, key: str, n_elements: int, cell_bits: float) -> BloomShape | None:
        """A filter, if this bucket's last counts are known and promise that it is smaller than a bitmap."""
        counts = self.counts.get(key)
        if self.kind == "bitmap" or not counts:
            return None
        n_nonzeros = max(counts)
        shape = BloomShape.fit(n_nonzeros, n_elements, cell_bits / 32)
        bitmap_bits = n_elements + cell_bits * n_nonzeros
        return shape if self.kind == "bloom" or shape.expected_bits < _MIN_GAIN * bitmap_bits else None

    @staticmethod
    def _message(communicator: Communicator, name: str, facts: int, found: IndexFacts, n_words: int) -> torch.Tensor:
        message = communicator.scratch(f"{name} message", 4 * (HEAD_WORDS + n_words)).view(torch.int32)
        message[:HEAD_WORDS] = head_of(facts, found)
        return message


def _is_worth(found: Found, shape: BloomShape, n_elements: int, cell_bits: float) -> bool:
    """Whether summing all candidates costs no more than a bitmap and the non-zeros, as far as the filter can tell."""
    if found.share_set > _MAX_SHARE_SET or found.n_candidates > _MAX_OVER_EXPECTED * shape.expected_candidates:
        return False
    return cell_bits * found.n_candidates <= n_elements + cell_bits * found.n_nonzeros


def _read(message: torch.Tensor, own: torch.Tensor, union: torch.Tensor, total: Sum | None) -> Union:
    head = read_head(message[:HEAD_WORDS].tolist())
    return Union(own, union, head.exponent, head.is_finite, head.ranks_agree, total)
