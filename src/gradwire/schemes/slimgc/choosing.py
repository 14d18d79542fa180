"""A codec for every tensor among several, by the time that a step is longer for its communication.

Costs are lines through what was measured of each codec; what the backward pass hides costs nothing; and a coarser codec has to
save more than a margin, because measured times are noisy and its loss is not. Every function is pure.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from gradwire.schemes.slimgc.threshold import LinearCost

# Of the time that communication adds uncompressed: what a coarser choice has to save, and twice that to take another's place.
MARGIN = 0.1

Choice = tuple[int, ...]  # by tensor of one bucket: 0 for raw, else the place of its codec, from 1


@dataclass(frozen=True)
class BucketSizes:
    """One bucket: when the backward pass hands it over, and the bytes of its tensors, uncompressed."""

    ready_s: float
    tensor_bytes: tuple[int, ...]


def bucket_s(bucket: BucketSizes, choice: Choice, costs: Sequence[LinearCost]) -> float:
    """Seconds on the wire and in the codecs: tensors of one codec travel together, and each codec starts once."""
    sizes = [0] * len(costs)
    for n_bytes, codec in zip(bucket.tensor_bytes, choice, strict=True):
        sizes[codec] += n_bytes
    return sum(cost.alpha_s + cost.beta_s_per_byte * size for cost, size in zip(costs, sizes, strict=True) if size)


def exposed_s(buckets: Sequence[BucketSizes], choices: Sequence[Choice], costs: Sequence[LinearCost]) -> float:
    """Seconds from the end of the backward pass, when the last bucket is ready, to that of the communication."""
    done_s = 0.0
    for bucket, choice in zip(buckets, choices, strict=True):
        done_s = max(done_s, bucket.ready_s) + bucket_s(bucket, choice, costs)
    return done_s - buckets[-1].ready_s if buckets else 0.0


def choose(
    buckets: Sequence[BucketSizes], costs: Sequence[LinearCost], before: Sequence[Choice] | None = None
) -> tuple[Choice, ...]:
    """The finest codecs whose communication adds hardly more than the quickest's; `before`, if it is as good as these.

    Args:
        buckets: in the order in which they are ready.
        costs: raw, then of the codecs from the finest to the coarsest, encoding and decoding included.
        before: what is chosen now.
    """
    raw = tuple((0,) * len(bucket.tensor_bytes) for bucket in buckets)
    by_coarsest = [tuple(_quickest(bucket, costs[: n + 1]) for bucket in buckets) for n in range(len(costs))]
    slack_s = MARGIN * exposed_s(buckets, raw, costs)
    least_s = min(exposed_s(buckets, choices, costs) for choices in by_coarsest)
    if before is not None and exposed_s(buckets, before, costs) <= least_s + 2 * slack_s:
        return tuple(before)
    chosen = list(next(one for one in by_coarsest if exposed_s(buckets, one, costs) <= least_s + slack_s))
    for place in range(len(buckets)):  # what comes first is hidden best: there finer ones cost nothing
        for finer in by_coarsest:
            tried = [*chosen[:place], finer[place], *chosen[place + 1 :]]
            if exposed_s(buckets, tried, costs) <= least_s + slack_s:
                chosen = tried
                break
    return tuple(chosen)


def _quickest(bucket: BucketSizes, costs: Sequence[LinearCost]) -> Choice:
    """One codec for all tensors, or for each the quickest by itself."""
    each = [BucketSizes(0.0, (n_bytes,)) for n_bytes in bucket.tensor_bytes]
    by_tensor = [_best([bucket_s(one, (codec,), costs) for codec in range(len(costs))]) for one in each]
    of_one = [tuple(codec if n_bytes else 0 for n_bytes in bucket.tensor_bytes) for codec in range(len(costs))]
    choices = [*of_one, tuple(by_tensor)]
    return choices[_best([bucket_s(bucket, choice, costs) for choice in choices])]


def _best(times_s: Sequence[float]) -> int:
    """The place of the least time; a later one only if it saves more than the margin."""
    best = 0
    for place, time_s in enumerate(times_s):
        best = place if time_s < (1 - MARGIN) * times_s[best] else best
    return best
