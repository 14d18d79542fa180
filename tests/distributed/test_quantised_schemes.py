"""one-bit, two-bit and qsgd among ranks: push, sum at the owner, pull, against a transcription that knows all ranks."""

from typing import Any

import pytest
import torch

from buckets import Driver, by_bucket, drive, gradients_of
from gradwire import codecs, schemes
from gradwire.core.bucket import Bucket
from quantiser_oracles import decode, encode
from ranks import on_ranks

CASES: list[tuple[str, dict[str, Any]]] = [
    ("one-bit", {}),
    ("one-bit", {"scale": "two-means", "pull": "raw"}),
    ("one-bit", {"scale": "fixed", "chunk_elements": 64}),
    ("one-bit", {"error_feedback": False}),
    ("two-bit", {"chunk_elements": 100}),
    ("two-bit", {"threshold": 1.0, "relative": False, "pull": "raw"}),
    ("qsgd", {"seed": 5, "chunk_elements": 128}),
    ("qsgd", {"levels": 3, "pull": "compressed"}),
    ("qsgd", {"levels": 127, "block": 128, "pull": "raw"}),
]
OF_SCHEMES = ("error_feedback", "pull", "chunk_elements")


def cut(n: int, pieces: int, piece: int) -> slice:
    return slice(n * piece // pieces, n * (piece + 1) // pieces)


class AllRanks:
    """Every rank's residuals of one bucket, and what the scheme makes of every rank's gradient."""

    def __init__(self, name: str, options: dict[str, Any], n: int, world_size: int, index: int) -> None:
        self.codec: Any = codecs.by_name(name, **{key: v for key, v in options.items() if key not in OF_SCHEMES})
        self.answering = self.codec
        if name == "qsgd" and options.get("pull", "8-bit") == "8-bit":
            self.answering = codecs.by_name("qsgd", levels=127, block=self.codec.block, seed=self.codec.seed)
        self.feeds_back = name != "qsgd" and options.get("error_feedback", True)
        self.pulls_raw = options.get("pull") == "raw"
        self.chunk_elements = options.get("chunk_elements", 1 << 18)
        self.is_stochastic = name == "qsgd"
        self.n, self.world_size, self.index = n, world_size, index
        self.residuals = [torch.zeros(n) for _ in range(world_size)]

    def quantise(self, codec: Any, values: torch.Tensor, stream: int) -> torch.Tensor:
        step = {"step": stream} if self.is_stochastic else {}
        return decode(codec, encode(codec, values, **step), values.numel())

    def reduce(self, gradients: list[torch.Tensor], step: int) -> torch.Tensor:
        bucket = Bucket(torch.zeros(self.n), step=step, index=self.index)
        result, world = torch.empty(self.n), self.world_size
        largest_part = -(-self.n // world)
        n_chunks = max(1, -(-largest_part // self.chunk_elements), min(5, largest_part // 4096))
        for owner in range(world):
            part = cut(self.n, world, owner)
            for chunk in range(n_chunks):
                inner = cut(part.stop - part.start, n_chunks, chunk)
                place = slice(part.start + inner.start, part.start + inner.stop)
                total = torch.zeros(place.stop - place.start)
                for rank in range(world):
                    if rank == owner:
                        total += gradients[rank][place]
                        continue
                    corrected = gradients[rank][place] + self.residuals[rank][place]
                    sent = self.quantise(self.codec, corrected, bucket.draw(rank, owner, chunk, False))
                    total += sent
                    if self.feeds_back:
                        self.residuals[rank][place] = corrected - sent
                total = total + self.residuals[owner][place]
                stream = bucket.draw(owner, owner, chunk, True)
                sent = total if self.pulls_raw else self.quantise(self.answering, total, stream)
                if self.feeds_back:
                    self.residuals[owner][place] = total - sent
                result[place] = sent / world
        return result


@pytest.mark.parametrize("world_size", [2, 3, 4])
@on_ranks()
def test_scheme_follows_its_transcription(rank: int, world_size: int) -> None:
    for name, options in CASES:
        scheme = schemes.by_name(name, **options)
        driver = drive(scheme)
        sizes = [bucket.numel() for bucket in by_bucket(gradients_of(0, 0))]
        followed = [AllRanks(name, options, size, world_size, index) for index, size in enumerate(sizes)]
        for step in range(4):
            driver.loss_scale = 2.0**step
            everyone = [gradients_of(other, step) for other in range(world_size)]
            found = driver.reduce([gradient * driver.loss_scale for gradient in everyone[rank]])
            if options.get("scale") == "fixed" or options.get("relative") is False:
                # A fixed scale is in units of what it is given: the scaled gradient.
                break
            for index, mean in enumerate(by_bucket(found)):
                expected = followed[index].reduce([by_bucket(one)[index] for one in everyone], step)
                assert torch.allclose(mean / driver.loss_scale, expected, atol=1e-5), (name, options, step)
        if followed[0].feeds_back and step == 3:
            assert torch.allclose(driver.state(), torch.cat([one.residuals[rank] for one in followed]), atol=1e-4), name
        driver.close()


@pytest.mark.parametrize(("pull", "low", "high"), [("8-bit", 0.5, 0.6), ("raw", 0.5, 0.6), ("compressed", 1.3, 1.5)])
@on_ranks(4)
def test_error_of_qsgd_averages_over_the_ranks_unless_sums_are_as_coarse(
    rank: int, world_size: int, pull: str, low: float, high: float
) -> None:
    gradient = torch.randn(65_536, generator=torch.Generator().manual_seed(1))
    driver = Driver(schemes.by_name("qsgd", pull=pull), [gradient])
    (mean,) = driver.reduce([gradient.clone()])
    driver.close()
    assert low < float((mean - gradient).norm() / gradient.norm()) < high
