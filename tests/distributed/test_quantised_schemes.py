"""Quantisers, signs, top-k, narrow floats and dgc among ranks: against transcriptions that know all ranks; and under DDP."""

import itertools
import math
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import gradwire
import quantiser_oracles as oracle
from buckets import SHAPES, Driver, by_bucket, drive, flat, gradients_of
from float_messages import same_bits, there_and_back
from gradwire import codecs, schemes
from gradwire.codecs import Codec
from gradwire.codecs.selection import take_by_sample
from gradwire.core.bucket import Bucket
from gradwire.schemes.dgc import Dgc, draw_sample
from ranks import on_ranks
from small_training import Training, copying, small_layers

CASES: list[tuple[str, dict[str, Any]]] = [
    ("one-bit", {}), ("one-bit", {"scale": "two-means", "pull": "raw"}),
    ("one-bit", {"scale": "fixed", "chunk_elements": 64}), ("one-bit", {"error_feedback": False}),
    ("two-bit", {"chunk_elements": 100}), ("two-bit", {"threshold": 1.0, "relative": False, "pull": "raw"}),
    ("qsgd", {"seed": 5, "chunk_elements": 128}), ("qsgd", {"levels": 3, "pull": "compressed"}),
    ("qsgd", {"levels": 127, "block": 128, "pull": "raw"}),
]  # fmt: skip
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
        return oracle.decode(codec, oracle.encode(codec, values, **step), values.numel())

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


@on_ranks([2, 3, 4])
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


@pytest.mark.parametrize(("pull", "low", "high"), [("8-bit", 0.5, 0.6), ("raw", 0.5, 0.6), ("compressed", 1.3, 1.5)])
@on_ranks(4)
def test_error_of_qsgd_averages_over_the_ranks(rank: int, world_size: int, pull: str, low: float, high: float) -> None:
    """Unless sums are as coarse."""
    gradient = torch.randn(65_536, generator=torch.Generator().manual_seed(1))
    driver = Driver(schemes.by_name("qsgd", pull=pull), [gradient])
    (mean,) = driver.reduce([gradient.clone()])
    assert low < float((mean - gradient).norm() / gradient.norm()) < high


DTYPES = (torch.float32, torch.bfloat16, torch.float16)
LOW_RANK = {"rank": 1, "min_compression_rate": 1}
# Options of a scheme, the learning rate of its training, the steps of it, and the share of the loss that is left then at most.
TRAINED: dict[str, tuple[dict[str, Any], float, int, float]] = {
    "top-k": ({"share": 0.05}, 0.3, 100, 0.8),
    "sign-sgd": ({}, 1e-3, 100, 0.8),
    **{name: ({}, 0.3, 100, 0.8) for name in ("one-bit", "two-bit", "thc")},
    "qsgd": ({"block": 128}, 0.1, 100, 0.8),
    "terngrad": ({}, 0.1, 100, 0.8),
    "dgc": ({"share": 0.05}, 0.03, 100, 0.8),
    **dict.fromkeys(("acp-sgd", "power-sgd", "power-sgd-overlap"), (LOW_RANK, 0.3, 300, 0.7)),
}


# ---- sign-sgd and top-k
@on_ranks([1, 2, 3, 4])
def test_sign_sgd_is_the_majority_of_signs_in_units_of_the_loss_scale(rank: int, world_size: int) -> None:
    for dtype, ties in itertools.product(DTYPES, ("zero", "positive")):
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
        means, left = oracle.top_k(given, torch.zeros(world_size, n), max(1, round(share * n)), float(feedback))
        for step, expected in enumerate(means):
            found = by_bucket(results[step])[index].double() / 2.0**step
            assert torch.allclose(found, expected, atol=1e-5), (step, index)
        kept.append(left[rank])
    if feedback:
        assert torch.allclose(driver.state().double(), torch.cat(kept), atol=1e-5)


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


@on_ranks([2, 3])
def test_every_rank_gets_the_same_mean_and_sees_a_non_finite_gradient(rank: int, world_size: int) -> list[torch.Tensor]:
    results = []
    for (name, options), dtype in itertools.product(FLOATS, DTYPES[:2]):
        driver = Driver(schemes.by_name(name, **options), [torch.zeros(N, dtype=dtype)])
        (first,), (second,) = (driver.reduce([gradient_of(rank, dtype)]) for _ in range(2))
        bad = gradient_of(rank, dtype)
        if rank == 1:
            bad[1234] = float("inf")
        (infinite,) = driver.reduce([bad])
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
@on_ranks([1, 2, 3, 4], timeout_s=170)
def test_parameters_are_identical_on_all_ranks_and_the_loss_falls(rank: int, world_size: int) -> Any:
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


# ---- terngrad and thc, whose integers are summed, and dgc
SEED = 9


def place_of(step: int, index: int) -> Bucket:
    return Bucket(torch.zeros(1), step=step, index=index)


def of_unlike_sizes(rank: int, step: int) -> list[torch.Tensor]:
    """Tensors whose gradients differ a thousandfold; one of them is zero on all ranks."""
    scales = [1.0, 1e-3, 1e3, 1.0, 0.0, 30.0]
    return [scale * gradient for scale, gradient in zip(scales, gradients_of(rank, step), strict=True)]


@pytest.mark.parametrize("per", ["layer", "bucket"])
@on_ranks([2, 4])
def test_terngrad_follows_its_transcription(rank: int, world_size: int, per: str) -> None:
    """A scale a tensor: each is divided by its own, and all are drawn in the order of their bucket."""
    driver = drive("terngrad", {"seed": SEED, "per": per})
    for step in range(3):
        everyone = [of_unlike_sizes(other, step) for other in range(world_size)]
        results = by_bucket(driver.reduce(of_unlike_sizes(rank, step)))
        for index, result in enumerate(results):
            mine = [ranks[:2] if index == 0 else ranks[2:] for ranks in everyone]
            shares = [flat(tensors).numpy() for tensors in mine]
            if per == "bucket":
                mine = [[flat(tensors)] for tensors in mine]
            scales = [
                max(oracle.ternary_scale(one.reshape(-1).numpy(), 2.5) if one.numel() else 0.0 for one in tensors)
                for tensors in zip(*mine, strict=True)
            ]
            by_value = np.repeat(np.array(scales, np.float32), [tensor.numel() for tensor in mine[0]])
            shared = scales[0]
            if per == "layer":
                shared, zeros = np.float32(1), np.zeros_like(by_value)
                shares = [np.divide(one, by_value, out=zeros.copy(), where=by_value > 0) for one in shares]
            place = place_of(step, index)
            drawn = [oracle.ternary(one, shared, SEED, place.draw(other)) for other, one in enumerate(shares)]
            expected = np.sum(drawn, 0) * by_value / world_size
            wrong = ~np.isclose(result.numpy(), expected, rtol=1e-5)
            assert wrong.sum() <= 1, (step, index)  # where numpy's scale differs in its last bit


@on_ranks([2, 3])
def test_thc_follows_its_transcription(rank: int, world_size: int) -> None:
    for feeds_back in (True, False):
        driver = drive("thc", {"seed": SEED, "error_feedback": feeds_back})
        sizes = [bucket.numel() for bucket in by_bucket(gradients_of(0, 0))]
        residuals = [[np.zeros(size) for size in sizes] for _ in range(world_size)]
        for step in range(3):
            driver.loss_scale = 4.0**step
            everyone = [by_bucket(gradients_of(other, step)) for other in range(world_size)]
            results = by_bucket(driver.reduce([driver.loss_scale * one for one in gradients_of(rank, step)]))
            for index, result in enumerate(results):
                given = [ranks[index].numpy() + residuals[other][index] for other, ranks in enumerate(everyone)]
                norms = np.max([oracle.thc_norms(one) for one in given], 0)
                place = place_of(step, index)
                sign = place.draw(-1)
                codes = [oracle.thc_codes(one, norms, 2.15, SEED, sign, place.draw(r)) for r, one in enumerate(given)]
                expected = oracle.thc_mean(np.sum(codes, 0), sizes[index], world_size, norms, 2.15, SEED, sign)
                # One code in many may fall to the other side of an edge, float32 against float64.
                off = np.linalg.norm(result.numpy() / driver.loss_scale - expected)
                assert off < 0.05 * np.linalg.norm(expected), (step, index)
                if feeds_back:
                    for other, one in enumerate(codes):
                        own = oracle.thc_mean(one, sizes[index], 1, norms, 2.15, SEED, sign)
                        residuals[other][index] = given[other] - own
        if feeds_back:
            expected = np.concatenate(residuals[rank])
            assert np.linalg.norm(driver.state().numpy() - expected) < 0.1 * np.linalg.norm(expected)


def layers_of(shapes: list[tuple[int, ...]]) -> list[torch.Tensor]:
    """The places of each matrix in a bucket of these."""
    sizes = [math.prod(shape) for shape in shapes]
    spans = torch.arange(sum(sizes)).split(sizes)
    return [span for shape, span in zip(shapes, spans, strict=True) if len(shape) > 1 and len(span)]


@on_ranks([2, 3])
def test_dgc_follows_its_float64_transcription(rank: int, world_size: int) -> None:
    """Six steps in float64, all ranks at once; in buckets this small every element is sampled, so the selection is exact."""
    for options in ({}, {"momentum": 0.5, "warmup_steps": 3}, {"max_norm": 4.0}, {"nesterov": True}, {"per": "layer"}):
        driver = drive(Dgc(**{"share": 0.05, "per": "bucket", **options}))
        momentum = options.get("momentum", 0.9)
        is_whole = [flat([torch.full(shape, len(shape) < 2) for shape in part]) for part in (SHAPES[:2], SHAPES[2:])]
        places = [[torch.where(~whole)[0]] for whole in is_whole]  # among which a share is chosen
        if "per" in options:
            places = [layers_of(SHAPES[:2]), layers_of(SHAPES[2:])]
        sizes = [one.numel() for one in is_whole]
        u, v = ([[torch.zeros(size).double() for size in sizes] for _ in range(world_size)] for _ in range(2))
        for step in range(6):
            driver.loss_scale = 2.0**step
            everyone = [[one.double() for one in gradients_of(other, step)] for other in range(world_size)]
            results = by_bucket(driver.reduce([driver.loss_scale * one for one in gradients_of(rank, step)]))
            limit = options.get("max_norm", math.inf) / world_size**0.5
            everyone = [[one * min(1, limit / max(1e-30, float(one.norm()))) for one in ranks] for ranks in everyone]
            share = 0.05 ** min(1, (step + 1) / (options.get("warmup_steps", 0) + 1))
            for index, result in enumerate(results):
                expected = torch.zeros(sizes[index], dtype=torch.float64)
                whole = is_whole[index]
                means = torch.stack([by_bucket(ranks)[index] for ranks in everyone]).mean(0)
                for other in range(world_size):
                    gradient = by_bucket(everyone[other])[index]
                    u[other][index] = momentum * u[other][index] + torch.where(whole, means, gradient)
                    update = gradient + momentum * u[other][index] if "nesterov" in options else u[other][index]
                    v[other][index] = torch.where(whole, 0, v[other][index] + update)
                    counts = [max(1, round(share * one.numel())) for one in places[index]]
                    largest = [v[other][index][one].abs().topk(k) for one, k in zip(places[index], counts, strict=True)]
                    chosen = torch.cat([one[top.indices] for one, top in zip(places[index], largest, strict=True)])
                    expected[chosen] += v[other][index][chosen] / world_size
                    u[other][index][chosen] = 0  # momentum factor masking
                    v[other][index][chosen] = 0
                moved = means + momentum * u[rank][index] if "nesterov" in options else u[rank][index]
                expected = torch.where(whole, moved, expected)
                assert torch.allclose(result.double() / driver.loss_scale, expected, atol=1e-4), (options, step, index)
        for kind, ours in (("momenta", u), ("residuals", v)):
            assert torch.allclose(driver.state(kind).double(), torch.cat(ours[rank]), atol=1e-4), kind


@pytest.mark.parametrize("nesterov", [False, True])
@on_ranks(1)
def test_dgc_alone_is_sgd_with_momentum_and_weight_decay(rank: int, world_size: int, nesterov: bool) -> None:
    """dgc's momentum and weight decay over bare SGD, beside SGD with its own: several buckets, a convolution's memory order."""

    def convolutional() -> nn.Module:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 16, 5))
        return model.to(memory_format=torch.channels_last)

    def loss(model: nn.Module, rank: int, step: int) -> torch.Tensor:
        return model(torch.randn(4, 3, 6, 6, generator=torch.Generator().manual_seed(step))).square().mean()

    def ended(scheme: Dgc | None, **options: Any) -> torch.Tensor:
        sgd = partial(torch.optim.SGD, lr=0.05, **options)
        return Training(rank, scheme, sgd, convolutional, loss, ddp={"bucket_cap_mb": 25}).after(range(6)).flat()

    ours = ended(Dgc(nesterov=nesterov, weight_decay=0.1))
    assert torch.allclose(ours, ended(None, momentum=0.9, nesterov=nesterov, weight_decay=0.1), rtol=1e-5, atol=1e-6)


@on_ranks(2)
def test_dgc_takes_weight_decay_into_what_it_sends(rank: int, world_size: int) -> None:
    """Everything is sent, so that factor masking forgets all momentum: each step is Nesterov's first, of the ranks' mean."""

    def linear() -> nn.Module:
        torch.manual_seed(0)
        return nn.Linear(6, 4, bias=False)

    def loss(model: nn.Module, rank: int, step: int) -> torch.Tensor:
        return model(torch.randn(3, 6, generator=torch.Generator().manual_seed(10 * step + rank))).square().mean()

    scheme = Dgc(share=1.0, momentum=0.5, nesterov=True, weight_decay=0.2)
    training, twin = Training(rank, scheme, lambda p: torch.optim.SGD(p, 0.1), linear, loss), linear()
    for step in range(4):
        training.take_steps([step])
        theirs = torch.optim.SGD(twin.parameters(), 0.1, momentum=0.5, nesterov=True, weight_decay=0.2)
        theirs.zero_grad()
        (sum(loss(twin, one, step) for one in range(world_size)) / world_size).backward()
        theirs.step()
        assert torch.allclose(training.ddp.module.weight, twin.weight, rtol=1e-5, atol=1e-6)


@on_ranks(2)
def test_state_of_unused_parameters_waits(rank: int, world_size: int) -> None:
    """State of what a rank has no gradient of stays, and a result that nobody has a share in is zero."""
    for name in ("dgc", "thc"):
        driver = drive(name)
        driver.reduce(gradients_of(rank, 0))
        before = driver.scheme.state_dict()
        gradients = gradients_of(rank, 1)
        for unused in gradients[: 3 if rank == 0 else 2]:
            unused.zero_()
        results = driver.reduce(gradients)
        assert not flat(results[:2]).any()
        after = driver.scheme.state_dict()
        for kind in before:
            for parameter in ("p0", "p1"):
                assert torch.equal(before[kind][parameter], after[kind][parameter]), (name, kind)
            if name == "dgc" and rank == 0:
                assert torch.equal(before[kind]["p2"], after[kind]["p2"])


def chosen_of(values: torch.Tensor, k: int) -> torch.Tensor:
    n = values.numel()
    sample = draw_sample(n, k, torch.Generator().manual_seed(1))
    n_taken, indices, _ = take_by_sample(values.clone(), [(0, n)], [k], [sample])
    return indices[: int(n_taken)].long()


def test_sampled_threshold_selects_about_as_many_of_the_largest_as_were_asked_for() -> None:
    generator = torch.Generator().manual_seed(0)
    n = 300_000
    kinds = {
        "Gaussian": torch.randn(n, generator=generator),
        "heavy tails": torch.randn(n, generator=generator) ** 7,
        "mostly zero": torch.randn(n, generator=generator) * (torch.rand(n, generator=generator) < 0.005),
        "ordered": torch.linspace(-1, 1, n),
        "alike": torch.ones(n),
        "few values": torch.randint(-3, 4, (n,), generator=generator).float(),
    }
    for kind, values in kinds.items():
        for k in (300, 2_000, 3_000, 30_000):
            chosen = chosen_of(values, k)
            n_nonzero = int((values != 0).sum())
            assert len(chosen) <= k, kind
            assert len(chosen) >= min(0.8 * k, n_nonzero), (kind, k, len(chosen))
            assert (chosen[1:] > chosen[:-1]).all()
            rest = torch.ones(n, dtype=torch.bool)
            rest[chosen] = False
            assert float(values[chosen].abs().min()) >= float(values[rest].abs().max()), (kind, k)
            assert torch.equal(chosen_of(values * 2.0**-9, k), chosen), "a threshold has the scale of the values"
    assert chosen_of(torch.zeros(1_000), 10).numel() == 0
    assert chosen_of(torch.ones(1), 1).tolist() == [0]


@pytest.mark.parametrize("name", ["terngrad", "thc"])
@on_ranks(1)
def test_more_ranks_than_can_be_summed_are_refused(rank: int, world_size: int, name: str) -> None:
    scheme = schemes.by_name(name)
    driver = Driver(scheme, [torch.zeros(3)])
    scheme.unbind()
    driver.communicator.world_size = 2_000
    with pytest.raises(gradwire.Unsupported, match="two-bit"):
        scheme.bind(type("Many", (), {"communicator": driver.communicator})())  # type: ignore[arg-type]


@on_ranks(2)
def test_chosen_tensors_travel_in_the_dtype_of_their_bucket(rank: int, world_size: int) -> None:
    values = torch.randn(2, 500, generator=torch.Generator().manual_seed(rank)).bfloat16()
    chosen = Driver(schemes.by_name("one-bit", exempt="p0", pull="raw"), [*torch.zeros_like(values)])
    alone = Driver(schemes.by_name("one-bit", pull="raw"), [torch.zeros(500, dtype=torch.bfloat16)])
    assert torch.equal(chosen.reduce([*values])[1], alone.reduce([values[1]])[0])
    assert torch.equal(chosen.state()[500:], alone.state())
