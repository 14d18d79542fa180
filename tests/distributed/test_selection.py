"""exempt= and only=: what is named travels plainly, by name, in quantising and low-rank schemes alike."""

import itertools
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import gradwire
from buckets import Driver, gradients_of, mean_over_ranks
from gradwire import InvalidArgument, schemes
from gradwire.telemetry.recorder import Recorder
from gradwire.wire.communicator import Communicator, ring_bytes
from gradwire.wire.preamble import Preamble
from gradwire.wire.wire import Wire
from ranks import agree, on_ranks

SHAPES = [(30, 20), (7,), (40, 30), (9, 8)]


def scaled(rank: int, step: int) -> list[Tensor]:
    return [one * 10.0**place for place, one in enumerate(gradients_of(rank, step, shapes=SHAPES))]


def is_small_or_ninefold(name: str, shape: tuple[int, ...]) -> bool:
    return len(shape) < 2 or shape[0] == 9


@pytest.mark.parametrize(
    ("name", "options", "plain"),
    [
        ("one-bit", {"exempt": "p0+p3"}, {0, 3}),
        ("one-bit", {"exempt": ["p[03]"], "scale_values": 64}, {0, 3}),
        ("two-bit", {"only": "p2"}, {0, 1, 3}),
        ("one-bit", {"exempt": is_small_or_ninefold}, {1, 3}),
        ("embedded-float", {"exempt": "p0+p3", "bits": 3}, {0, 3}),
        ("truncated-float", {"only": "p2", "bits": 4}, {0, 1, 3}),
        ("qsgd", {"exempt": "p1"}, {1}),
        ("terngrad", {"exempt": "p0"}, {0}),
        ("thc", {"only": "p3+p2"}, {0, 1}),
        ("top-k", {"exempt": "p1+p3", "share": 0.05}, {1, 3}),
        ("dgc", {"exempt": "p0", "share": 0.1, "momentum": 0.0}, {0, 1}),  # p1 is a vector
        ("sign-sgd", {"only": "p2"}, {0, 1, 3}),
        ("acp-sgd", {"exempt": ["p0"], "rank": 1}, {0, 1}),  # p1 is a vector
        ("power-sgd", {"only": ["p0"], "rank": 1}, {1, 2, 3}),
    ],
)
@on_ranks(2)
def test_what_is_exempt_is_the_mean(rank: int, world_size: int, name: str, options: Any, plain: set[int]) -> Any:
    """In the second of two steps."""
    driver = Driver(schemes.by_name(name, **options), [torch.zeros(shape) for shape in SHAPES], [2, 2])
    for step in range(2):
        results = driver.reduce(scaled(rank, step))
    for place, of_ranks in enumerate(zip(scaled(0, 1), scaled(1, 1), strict=True)):
        mean = torch.stack(of_ranks).mean(0)
        deviation = float((results[place] - mean).norm() / mean.norm())
        assert deviation < 1e-6 if place in plain else deviation > 0.05, (place, deviation)
    return results


# A vector, a norm and a scalar among 20,617 values; and the same where they are more than a fiftieth.
FEW, MANY = ([(200, 100), (9,), (30, 20), (7, 1), ()], [(30, 20), (9,), (9, 8), (7, 1), ()])
SMALL = (1, 3, 4)
LOSSY: dict[str, dict[str, Any]] = {
    **{"embedded-float": {"bits": 3}, "truncated-float": {"bits": 4}, "top-k": {"share": 0.1}},
    **{name: {} for name in ("one-bit", "two-bit", "qsgd", "terngrad", "thc")},
}


class Named(nn.Module):
    """Tensors of which one is a norm by its name alone."""

    def __init__(self, shapes: list[tuple[int, ...]]) -> None:
        super().__init__()
        names = ("first", "one", "second", "last_norm", "scalar")
        for name, shape in zip(names, shapes, strict=True):
            self.register_parameter(name, nn.Parameter(torch.zeros(shape)))

    def forward(self, gradients: dict[str, Tensor]) -> Tensor:
        return torch.stack([(one * gradients[key]).sum() for key, one in self.named_parameters()]).sum()


@pytest.mark.parametrize("door", ["ddp", "named"])
@on_ranks(3)
def test_small_tensors_are_spared_as_long_as_they_are_few(rank: int, world_size: int, door: str) -> None:
    for (name, options), shapes, exempt in itertools.product(LOSSY.items(), (FEW, MANY), (None, ())):
        model = Named(shapes)
        generators = [torch.Generator().manual_seed(other) for other in range(world_size)]
        scheme = schemes.by_name(name, exempt=exempt, **options)
        state: Any
        if door == "ddp":
            ddp = DistributedDataParallel(model)
            state = gradwire.attach(ddp, torch.optim.SGD(ddp.parameters(), 0.1), scheme)
        else:
            state = gradwire.Reducer(scheme)
        for _ in range(3):
            shares = [[torch.randn(shape, generator=own) for shape in shapes] for own in generators]
            names = dict(model.named_parameters())
            gradients = {key: mine.clone() for key, mine in zip(names, shares[rank], strict=True)}
            if door == "ddp":
                ddp.zero_grad()
                ddp(gradients).backward()
                gradients = {key: one.grad for key, one in model.named_parameters()}
            else:
                state.all_reduce(gradients).wait()
            results = list(gradients.values())
        stats, kept = state.stats(), scheme.state_dict().get("residuals", {})
        state.close()
        is_spared = shapes is FEW and exempt is None
        expected = (17, 17 / 20_617) if is_spared else (None, None) if exempt == () else (0, 0.0)
        assert (stats.get("n_spared_values"), stats.get("spared_share")) == expected
        assert agree(torch.cat([result.view(-1) for result in results])), name
        for place in SMALL[:2]:
            mean = torch.stack([of_rank[place] for of_rank in shares]).mean(0)
            deviation = float((results[place] - mean).norm() / mean.norm())
            assert deviation < 2.0**-7 if is_spared else deviation > 0.01, (name, shapes, exempt, deviation)
        left = [float(values.abs().max()) for key, values in kept.items() if key in ("one", "last_norm", "scalar")]
        assert not kept or (max(left) > 0) != is_spared, name


@on_ranks(2)
def test_what_a_spared_tensor_had_not_sent_is_sent(rank: int, world_size: int) -> None:
    """A state that was saved while it was compressed; and its Inf, from which no residual lives on."""
    made = [schemes.by_name("one-bit", exempt=exempt) for exempt in ((), None)]
    drivers = [Driver(scheme, [torch.zeros(shape) for shape in FEW]) for scheme in made]
    gradients = gradients_of(rank, 0, shapes=FEW)
    drivers[0].reduce([gradient.clone() for gradient in gradients])
    drivers[1].scheme.load_state_dict(drivers[0].scheme.state_dict())
    waiting = drivers[0].state()[20_000:20_009]
    assert float(waiting.abs().max()) > 0
    (_, result, *_) = drivers[1].reduce([gradient.clone() for gradient in gradients])
    assert torch.allclose(result.double(), mean_over_ranks(gradients[1] + waiting), atol=2.0**-6)
    before = drivers[1].state()
    assert not before[20_000:20_009].any()
    gradients[1][3] = math.inf if rank == 1 else 1.0
    assert not drivers[1].reduce(gradients)[1].isfinite().all()
    assert torch.equal(drivers[1].state(), before)
    for bits, dtype in ((8, torch.bfloat16), (9, torch.float32)):  # never worse than the others
        assert schemes.by_name("embedded-float", bits=bits).small_dtype(torch.float32) == dtype


@on_ranks(3)
def test_few_values_are_added_in_the_order_of_ranks(rank: int, world_size: int) -> None:
    """In one hop, beside another exchange; where they are many, by the backend."""
    communicator, recorder = Communicator(timeout_s=60), Recorder(rank, world_size)
    rows = torch.randn((world_size, 100), generator=torch.Generator().manual_seed(0)).bfloat16()

    def on_lane() -> None:
        wire = Wire(communicator).for_bucket(Preamble(1, 0, "", 2, 3, 4, 100), recorder.open_bucket(4, 0, 400))
        few, many = rows[rank].clone(), rows[rank].clone()
        wait = wire.start_sum_of_few(few, 64 * 2 * 200)
        wire.start_sum_of_few(many, 64 * 2 * 200 - 1)()
        wait()
        assert torch.equal(few, (rows[0] + rows[1]) + rows[2])
        assert torch.allclose(many.float(), rows.float().sum(0), rtol=2.0**-6, atol=2.0**-6)
        assert wire.record.bytes_sent == 2 * 200 + ring_bytes(200, 3)

    communicator.submit(on_lane).wait()
    communicator.close()


@on_ranks(1)
def test_names_of_nothing(rank: int, world_size: int) -> None:
    ddp = DistributedDataParallel(nn.Sequential(nn.Embedding(9, 4), nn.Linear(4, 9)))
    optimizer = torch.optim.SGD(ddp.parameters(), 0.1)
    for name in ("acp-sgd", "power-sgd", "dgc", "sign-sgd", *LOSSY):
        told = r"only='tail' matches no tensor; there are 0\.weight, 1\.weight, 1\.bias"
        with pytest.raises(InvalidArgument, match=told):
            gradwire.attach(ddp, optimizer, schemes.by_name(name, only=["tail"]))


@pytest.mark.parametrize(("adam", "exempt", "expected"), [(True, None, 1), (True, (), 3), (False, None, 3)])
@on_ranks(2)
def test_low_rank_leaves_words_to_adam(rank: int, world_size: int, adam: bool, exempt: Any, expected: int) -> None:
    torch.manual_seed(0)
    ddp = DistributedDataParallel(nn.Sequential(nn.Embedding(90, 40), nn.Linear(40, 40), nn.Linear(40, 90, bias=False)))
    optimizer = torch.optim.AdamW(ddp.parameters()) if adam else torch.optim.SGD(ddp.parameters(), 0.1)
    attachment = gradwire.attach(ddp, optimizer, schemes.by_name("acp-sgd", rank=2, exempt=exempt, start_step=0))
    ddp(torch.arange(8)).square().mean().backward()
    assert attachment.stats()["n_matrices"] == expected
    attachment.close()


@pytest.mark.parametrize("per", ["layer", "bucket"])
@on_ranks(2)
def test_dgc_takes_its_share_of_every_layer_or_of_the_bucket(rank: int, world_size: int, per: str) -> None:
    """Of two layers, whose gradients differ a thousandfold, a hundredth is sent."""
    shapes = [(200, 100), (100, 100)]
    driver = Driver(schemes.by_name("dgc", share=0.01, per=per), [torch.zeros(shape) for shape in shapes])
    first, second = gradients_of(rank, 0, shapes=shapes)
    n_first, n_second = (int((one != 0).sum()) for one in driver.reduce([1e3 * first, second]))
    if per == "layer":  # of both ranks, hardly any in common
        assert 2 * 160 <= n_first <= 2 * 260
        assert 2 * 80 <= n_second <= 2 * 130
    else:
        assert n_second == 0
