"""Quantisers, sign-sgd, top-k and narrow floats among ranks: against transcriptions that know all ranks; and under DDP."""

import itertools
from typing import Any

import pytest
import torch

import gradwire
from buckets import Driver, by_bucket, drive, flat, gradients_of
from float_messages import same_bits, there_and_back
from gradwire import codecs, schemes
from gradwire.codecs import Codec
from gradwire.core.bucket import Bucket
from quantiser_oracles import decode, encode, top_k
from ranks import on_ranks
from small_training import Training, copying, small_layers

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
        # A fixed scale is in units of what it is given: the scaled gradient.
        is_fixed = options.get("scale") == "fixed" or options.get("relative") is False
        for step in range(4):
            driver.loss_scale = 1.0 if is_fixed else 2.0**step
            everyone = [gradients_of(other, step) for other in range(world_size)]
            found = driver.reduce([gradient * driver.loss_scale for gradient in everyone[rank]])
            for index, mean in enumerate(by_bucket(found)):
                expected = followed[index].reduce([by_bucket(one)[index] for one in everyone], step)
                assert torch.allclose(mean / driver.loss_scale, expected, atol=1e-5), (name, options, step)
        if followed[0].feeds_back:
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


DTYPES = (torch.float32, torch.bfloat16, torch.float16)
LOW_RANK = {"rank": 1, "min_compression_rate": 1}
# Options of a scheme, the learning rate of its training, the steps of it, and the share of the loss that is left then at most.
TRAINED: dict[str, tuple[dict[str, Any], float, int, float]] = {
    "top-k": ({"share": 0.05}, 0.3, 100, 0.8),
    "sign-sgd": ({}, 1e-3, 100, 0.8),
    "one-bit": ({}, 0.3, 100, 0.8),
    "two-bit": ({}, 0.3, 100, 0.8),
    "qsgd": ({"block": 128}, 0.1, 100, 0.8),
    "terngrad": ({}, 0.1, 100, 0.8),
    "thc": ({}, 0.3, 100, 0.8),
    "dgc": ({"share": 0.05}, 0.03, 100, 0.8),
    "acp-sgd": (LOW_RANK, 0.3, 300, 0.7),
    "power-sgd": (LOW_RANK, 0.3, 300, 0.7),
    "power-sgd-overlap": (LOW_RANK, 0.3, 300, 0.7),
}


# ---- sign-sgd and top-k


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
@on_ranks()
def test_sign_sgd_is_the_majority_of_signs_in_units_of_the_loss_scale(rank: int, world_size: int) -> None:
    for dtype in DTYPES:
        for ties in ("zero", "positive"):
            driver = drive("sign-sgd", {"ties": ties}, dtype)
            everyone = [gradients_of(other, 1, dtype) for other in range(world_size)]
            for tensors in everyone:
                tensors[0][::3] = 0
            expected = torch.stack([torch.where(flat(tensors).float() < 0, -1.0, 1.0) for tensors in everyone]).sum(0)
            expected = torch.where(expected == 0, float(ties == "positive"), expected.sign())
            for scale in (1.0, 1024.0):
                driver.loss_scale = scale
                result = flat(driver.reduce(everyone[rank]))
                assert result.dtype == dtype
                assert torch.equal(result.float(), scale * expected)
            driver.close()


@pytest.mark.parametrize(("world_size", "feedback"), [(2, True), (3, False), (4, True)])
@on_ranks()
def test_top_k_follows_its_float64_transcription(rank: int, world_size: int, feedback: bool) -> None:
    """Six steps in float64, all ranks at once: choose, take the mean, keep the rest."""
    share, n_steps = 0.05, 6
    driver = drive("top-k", {"share": share, "error_feedback": feedback})
    results = []
    for step in range(n_steps):
        driver.loss_scale = 2.0**step
        results.append(driver.reduce([one * driver.loss_scale for one in gradients_of(rank, step)]))
    every = [[by_bucket(gradients_of(other, step)) for other in range(world_size)] for step in range(n_steps)]
    kept = []
    for index in range(2):
        given = torch.stack([torch.stack([ranks[index] for ranks in of_step]) for of_step in every])
        n = given.shape[-1]
        means, left = top_k(given, torch.zeros(world_size, n), max(1, round(share * n)), float(feedback))
        for step, expected in enumerate(means):
            found = by_bucket(results[step])[index].double() / 2.0**step
            assert torch.allclose(found, expected, atol=1e-5), (step, index)
        kept.append(left[rank])
    if feedback:
        assert torch.allclose(driver.state().double(), torch.cat(kept), atol=1e-5)
    driver.close()


@pytest.mark.parametrize("scheme", ["top-k", "sign-sgd"])
@on_ranks(3, raises=gradwire.CorruptMessage, match="message of rank 0 for bucket 0 of step 1 was altered")
def test_altered_message_is_a_corrupt_message_on_every_rank(rank: int, world_size: int, scheme: str) -> None:
    """Rank 1 receives one bit of rank 0's payload turned."""
    driver = drive(scheme, TRAINED[scheme][0])
    driver.reduce(gradients_of(rank, 0))
    gather = driver.communicator.all_gather

    def gather_altered(tensor: torch.Tensor) -> torch.Tensor:
        messages = gather(tensor)
        messages[0, -1] ^= 1 << 9
        return messages

    if rank == 1:
        driver.communicator.all_gather = gather_altered
    driver.reduce(gradients_of(rank, 1))
    driver.reduce(gradients_of(rank, 2))


# ---- truncated-float and embedded-float, in ring and direct


N = 3001
FLOATS: list[tuple[str, dict[str, Any]]] = [
    ("truncated-float", {"bits": 4}),
    ("truncated-float", {"bits": 8, "topology": "direct"}),
    ("truncated-float", {"bits": 12, "format": "native", "rounding": "stochastic", "seed": 5}),
    ("truncated-float", {"bits": 8, "rounding": "stochastic", "topology": "direct", "chunk_elements": 500}),
    ("embedded-float", {"bits": 8}),
    ("embedded-float", {"bits": 5, "topology": "direct", "chunk_elements": 640}),
]


def gradient_of(rank: int, dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(rank)
    return (torch.randn(N, generator=generator) * 1e-3).to(dtype)


def ring_oracle(codec: Codec, gradients: list[torch.Tensor]) -> torch.Tensor:
    """Part p goes round from rank p on; each hop adds to what it decoded, the last one's message is the result."""
    world_size, result = len(gradients), torch.empty_like(gradients[0])
    for part in range(world_size):
        start, end = N * part // world_size, N * (part + 1) // world_size
        total = gradients[part][start:end].clone()
        for k in range(1, world_size):
            total = there_and_back(codec, total) + gradients[(part + k) % world_size][start:end]
        result[start:end] = there_and_back(codec, total) / world_size
    return result


@pytest.mark.parametrize("world_size", [2, 3])
@on_ranks()
def test_every_rank_gets_the_same_mean_and_sees_a_non_finite_gradient(rank: int, world_size: int) -> list[torch.Tensor]:
    results = []
    for (name, options), dtype in itertools.product(FLOATS, DTYPES[:2]):
        driver = Driver(schemes.by_name(name, **options), [torch.zeros(N, dtype=dtype)])
        (first,), (second,) = (driver.reduce([gradient_of(rank, dtype)]) for _ in range(2))
        bad = gradient_of(rank, dtype)
        if rank == 1:
            bad[1234] = float("inf")
        (infinite,) = driver.reduce([bad])
        driver.close()
        gradients = [gradient_of(other, dtype) for other in range(world_size)]
        exact = torch.stack([gradient.double() for gradient in gradients]).mean(0)
        is_random = options.get("rounding") == "stochastic"
        assert same_bits(first, second) != is_random, (name, options)  # each step draws anew
        error = (first.double() - exact).norm() / exact.norm()
        assert error < {4: 0.4, 5: 0.5}.get(options["bits"], 0.15), (name, options, error)
        assert infinite[1234].isnan()
        assert infinite.isfinite().sum() >= N - 512
        if "topology" not in options and not is_random:
            codec = codecs.by_name(name, bits=options["bits"])
            assert same_bits(first, ring_oracle(codec, gradients)), (name, options, dtype)
        results += [first, second, infinite]
    return results


# ---- under DDP


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
@on_ranks(timeout_s=170)
def test_parameters_are_identical_on_all_ranks_and_the_loss_falls(
    rank: int, world_size: int
) -> dict[str, torch.Tensor]:
    parameters = {}
    for scheme, (options, rate, n_steps, left) in TRAINED.items():
        made, ddp = schemes.by_name(scheme, **options), {"bucket_cap_mb": 0.005}
        training = Training(rank, made, lambda p, rate=rate: torch.optim.SGD(p, lr=rate), small_layers, copying, ddp)
        losses = training.take_steps(range(n_steps))
        stats = training.close()
        assert sum(losses[-20:]) < left * sum(losses[:20]), scheme
        assert stats["n_fallbacks"] == 0, scheme
        if world_size > 1:
            assert 0 < stats["ratio"] < 0.5, scheme
        parameters[scheme] = training.flat()
    return parameters
