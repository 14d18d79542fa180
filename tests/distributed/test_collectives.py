"""ring and direct: the mean over the ranks, the same bits everywhere, for any world, length, chunking and dtype."""

import functools
from typing import Any
from unittest.mock import Mock, patch

import pytest
import torch

from buckets import Driver
from gradwire import schemes
from gradwire.core.bucket import Bucket
from gradwire.exchange.ring import mean_through_codec
from gradwire.schemes.plain import start_plain_mean
from gradwire.telemetry.recorder import BucketRecord, Recorder
from gradwire.wire.communicator import Communicator
from gradwire.wire.preamble import FORMAT_VERSION, Preamble
from gradwire.wire.wire import Wire
from ranks import on_ranks

LENGTHS = [0, 1, 2, 3, 5, 7, 64, 65, 1_000, 20_011]


def wire_of(communicator: Communicator, record: BucketRecord) -> Wire:
    """The wire of bucket 4 in step 3."""
    return Wire(communicator).for_bucket(Preamble(FORMAT_VERSION, 4, "mean", 1, 2, 3, 0), record)


class TrailingZeros:
    """A lossless codec whose messages vary in length: trailing zeros are not sent."""

    name = "trailing-zeros"

    def max_encoded_bytes(self, n_elements: int, dtype: torch.dtype) -> int:
        return n_elements * dtype.itemsize

    def encode(self, gradient: torch.Tensor, out: torch.Tensor, importance: torch.Tensor | None = None) -> int:
        raw = gradient.contiguous().view(torch.uint8)
        n_bytes = int(raw.nonzero().max()) + 1 if raw.any() else 0
        out[:n_bytes].copy_(raw[:n_bytes])
        return n_bytes

    def decode(self, message: torch.Tensor, out: torch.Tensor) -> None:
        raw = out.view(torch.uint8)
        raw.zero_()
        raw[: message.numel()].copy_(message)


def gradient_of(rank: int, n: int, dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1_000 * rank + n)
    gradient = torch.randn(n, generator=generator)
    gradient[n // 2 + rank :: 3] = 0
    gradient[n - n // 5 :] = 0
    return gradient.to(dtype)


def expected_mean(which: str, world_size: int, n: int, dtype: torch.dtype) -> torch.Tensor:
    """Bit for bit: part p is summed in the order of the ring from rank p on, or in rank order, in the dtype itself.
    float16 is divided first, so that no sum leaves its range."""
    before, after = (world_size, 1) if dtype == torch.float16 else (1, world_size)
    gradients = [gradient_of(rank, n, dtype) / before for rank in range(world_size)]
    result = torch.empty(n, dtype=dtype)
    for part in range(world_size):
        start, end = n * part // world_size, n * (part + 1) // world_size
        first = part if which == "ring" else 0
        total = gradients[first][start:end].clone()
        for k in range(1, world_size):
            total += gradients[(first + k) % world_size][start:end]
        result[start:end] = total / after
    return result


@pytest.mark.parametrize("which", ["ring", "direct"])
@pytest.mark.parametrize(
    ("world_size", "chunk_elements"), [(1, 64), (2, 64), (2, 1 << 18), (3, 500), (4, 64), (5, 999)]
)
@on_ranks()
def test_mean_is_exact_and_the_same_on_all_ranks(rank: int, world_size: int, which: str, chunk_elements: int) -> Any:
    communicator = Communicator(timeout_s=100)
    recorder = Recorder(rank, world_size)
    results = []
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        for n in LENGTHS:
            buffer = gradient_of(rank, n, dtype)
            record = recorder.open_bucket(0, 0, buffer.numel() * buffer.element_size())
            mean = functools.partial(mean_through_codec, topology=which, chunk_elements=chunk_elements)
            communicator.submit(mean, wire_of(communicator, record), TrailingZeros(), buffer).wait()
            expected = expected_mean(which, world_size, n, dtype)
            assert torch.equal(buffer, expected), (which, world_size, n, dtype)
            assert record.bytes_sent == 0 if world_size == 1 or n == 0 else record.bytes_sent > 0
            results.append(buffer)
    communicator.close()
    return results


@pytest.mark.parametrize("which", ["ring", "direct"])
@on_ranks(4)
def test_what_is_sent_is_received_and_close_to_the_bound(rank: int, world_size: int, which: str) -> None:
    n, communicator = 400_000, Communicator(timeout_s=100)
    record = Recorder(rank, world_size).open_bucket(0, 0, 4 * n)
    mean = functools.partial(mean_through_codec, topology=which)
    communicator.submit(mean, wire_of(communicator, record), TrailingZeros(), torch.ones(n)).wait()
    communicator.close()
    bound = 2 * (world_size - 1) / world_size * 4 * n
    assert bound <= record.bytes_sent <= 1.002 * bound  # headers
    difference = torch.tensor(record.bytes_sent - record.bytes_received)
    torch.distributed.all_reduce(difference)
    assert difference == 0


@pytest.mark.parametrize("name", ["plain", "bf16"])
@on_ranks(2)
def test_plain_sums_are_left_to_the_backend_so_that_buckets_overlap(rank: int, world_size: int, name: str) -> None:
    driver = Driver(schemes.by_name(name), [torch.zeros(50), torch.zeros(50)], [1, 1])
    with patch.object(driver.communicator, "all_reduce", side_effect=AssertionError("the lane waits")):
        means = driver.reduce([torch.full((50,), float(rank)), torch.ones(50)])
    assert torch.equal(torch.cat(means), torch.cat([torch.full((50,), 0.5), torch.ones(50)]))


def test_a_rounded_sum_waits_for_the_one_before_whose_memory_it_takes() -> None:
    before, communicator = Mock(), Mock(world_size=2, scratch=lambda _, n: torch.empty(n, dtype=torch.uint8))
    under_way = {0: before}
    started = start_plain_mean(communicator, Bucket(torch.ones(4)), torch.bfloat16, under_way)
    before.wait.assert_called_once_with()
    assert under_way == {0: started}
