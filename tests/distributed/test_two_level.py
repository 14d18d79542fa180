"""Two levels: sums inside a node, any scheme between nodes; the same bits on all ranks, each value out of a node once."""

import copy
import functools
import os

import pytest
import reducing_cases as cases
import torch
import torch.distributed as dist
from ddp_cases import N_STEPS, sgd, start

import gradwire
from gradwire import schemes
from gradwire.core.bucket import Slot
from gradwire.schemes.two_level import TwoLevel, cut_rows
from ranks import agree, assert_alike, on_ranks, patience, try_ranks

SHAPES = {"a": (40, 30), "b": (31,), "empty": (0, 3), "scalar": (), "c": (1, 50), "d": (9, 5, 6)}
Tensors = dict[str, torch.Tensor]
draw = functools.partial(cases.draw, SHAPES)


@pytest.mark.parametrize(
    ("world_size", "size", "names"),
    [
        (4, 2, cases.STATEFUL),
        (4, 4, ["plain", "one-bit"]),
        (4, 1, ["plain", "one-bit"]),
        (6, 3, ["plain", "acp-sgd", "qsgd"]),
        (6, 2, ["plain"]),
        (8, 4, ["plain", "gcomp", "one-bit", "acp-sgd", "qsgd", "top-k", "sign-sgd"]),
    ],
)
@on_ranks()
def test_inner_schemes_give_the_same_bits_and_resume(rank: int, world_size: int, size: int, names: list[str]) -> None:
    for name in names:
        make = functools.partial(TwoLevel, name, size, **cases.OPTIONS.get(name, {}))
        residuals = cases.reduce_and_resume(rank, make, SHAPES)["state"].get("residuals", {})
        rows = [cut_rows(Slot("", s), torch.Size(s).numel(), size) for s in SHAPES.values()]
        most = sum(max(end - start for start, end in of_tensor) for of_tensor in rows)
        assert sum(r.numel() for r in residuals.values()) <= most
    if "plain" in names:  # as flat, but for rounding
        reducer = gradwire.Reducer(TwoLevel("plain", size), bucket_mb=4 / 1024, timeout_s=100)
        exact = draw(rank, 0)
        means = cases.reduced(reducer, draw(rank, 0))
        reducer.close()
        for key, tensor in means.items():
            dist.all_reduce(exact[key])
            assert torch.allclose(tensor, exact[key] / world_size, atol=1e-6), key


@pytest.mark.parametrize(("world_size", "size"), [(4, 2), (2, 1)])
@on_ranks()
def test_what_is_sent_and_what_is_left_is_what_was_given(rank: int, world_size: int, size: int) -> None:
    """sum of mean(sent) + mean over nodes of what is left = sum of mean(given), value by value."""
    reducer = gradwire.Reducer(TwoLevel("one-bit", size), bucket_mb=4 / 1024, timeout_s=100)
    missing = {key: torch.zeros(shape, dtype=torch.float64) for key, shape in SHAPES.items()}
    for step in range(6):
        for key, tensor in cases.reduced(reducer, draw(rank, step)).items():
            given = [draw(other, step)[key].double() for other in range(world_size)]
            missing[key] += torch.stack(given).mean(0) - tensor
    shares = {key: value / world_size for key, value in missing.items()}
    check_conserved(shares, reducer.state_dict()["state"]["residuals"], world_size, size)
    reducer.close()


def check_conserved(missing: Tensors, mine: Tensors, world_size: int, size: int) -> None:
    """What the means lack, summed over the ranks' shares of it, is what the nodes have left over, on average."""
    residuals: list[Tensors] = [{} for _ in range(world_size)]
    dist.all_gather_object(residuals, mine)
    n_nodes = world_size // size
    for key, share in missing.items():
        dist.all_reduce(share)
        left = torch.zeros(share.numel(), dtype=torch.float64)
        for other, of_rank in enumerate(residuals):
            start, end = cut_rows(Slot("", share.shape), left.numel(), size)[other % size]
            if end > start:
                left[start:end] += of_rank[key].double() / n_nodes
        assert torch.allclose(share.reshape(-1), left, atol=1e-5), key
        assert left.numel() < 2 or left.abs().max() > 1e-3, "nothing was left out, so nothing was shown"


@on_ranks(4)
def test_ddp_rebuilds_its_buckets_and_no_residual_is_orphaned(rank: int, world_size: int) -> None:
    training = start(rank, TwoLevel("one-bit", 2), optimizer=sgd)
    attachment, named = training.attachment, dict(training.ddp.module.named_parameters())
    missing = {name: torch.zeros(p.shape, dtype=torch.float64) for name, p in named.items()}

    def give(name: str, gradient: torch.Tensor) -> None:
        missing[name] += gradient.double() / world_size

    handles = [p.register_hook(functools.partial(give, name)) for name, p in named.items()]
    for step in [*range(N_STEPS)] * 2:
        training.take_steps([step])
        for name, p in named.items():
            assert p.grad is not None
            missing[name] -= p.grad.double() / world_size  # the same on all ranks
    for handle in handles:
        handle.remove()
    state = attachment.state_dict()["state"]["residuals"]
    check_conserved(missing, state, world_size, 2)
    assert agree(training.flat())
    n = torch.tensor([sum(residual.numel() for residual in state.values())])
    dist.all_reduce(n)
    assert int(n) == 2 * training.flat().numel()  # every element once a node: none is an orphan
    attachment.switch(TwoLevel("gcomp", 2))
    training.take_steps([0])
    attachment.close()


@on_ranks(4)
def test_ranks_spare_the_same_small_tensors_and_a_new_layout_keeps_residuals(rank: int, world_size: int) -> None:
    reducer, given = gradwire.Reducer(TwoLevel("one-bit", 2), timeout_s=100), torch.zeros(100).double()
    shapes = {"norm.b": (50,), "c": (90, 90), "a": (10, 10)}
    for step in range(6):
        tensors = cases.draw({"a": (10, 10)} if step % 2 else shapes, rank, step)
        given += tensors["a"].double().view(-1)
        given -= cases.reduced(reducer, tensors)["a"].double().view(-1)
    check_conserved({"a": given.view(10, 10) / world_size}, reducer.state_dict()["state"]["residuals"], world_size, 2)
    reducer.close()
    tensors = cases.draw(shapes, rank, 0)  # by buckets of one tensor, of which the first has small values alone
    reducer = gradwire.Reducer(TwoLevel("one-bit", 2), names=tensors, bucket_mb=0.0001, timeout_s=100)
    cases.reduced(reducer, tensors)
    assert reducer.stats()["n_spared_values"] == 25
    reducer.close()


@on_ranks(2)
def test_float16_and_a_scaler_that_nobody_told_of_are_as_on_one_level(rank: int, world_size: int) -> None:
    ones = torch.ones(70_000, dtype=torch.float16)  # whose sum is beyond float16
    reducer = gradwire.Reducer(TwoLevel("one-bit", 1), timeout_s=100)
    assert bool((cases.reduced(reducer, {"x": ones})["x"] == 1).all())
    reducer.close()
    ends = []
    for scheme in ("dgc:share=0.5", TwoLevel("dgc:share=0.5", 1)):
        training, scaler = start(rank, scheme, optimizer=sgd), torch.amp.GradScaler("cpu", init_scale=2.0**12)
        for step in range(4):
            training.take_scaled_step(scaler, step, 1.0)
        training.attachment.close()
        ends.append(training.flat())
    assert torch.allclose(*ends, atol=1e-4)


@on_ranks(4)
def test_low_rank_stays_low_rank(rank: int, world_size: int) -> None:
    """A bucket of one matrix still compresses: its rows are a matrix."""
    reducer = gradwire.Reducer(TwoLevel("acp-sgd", 2, rank=1), timeout_s=100)
    for step in range(3):
        reducer.all_reduce({"w": torch.randn(64, 64, generator=torch.Generator().manual_seed(step))}).wait()
    stats = reducer.stats()
    assert stats["n_matrices"] == 1
    assert stats["bytes_sent"] < 3 * 64 * 64 * 4 / 8
    reducer.close()


def break_it(rank: int, world_size: int, how: str) -> None:
    inner = schemes.by_name("embedded-float", bits=7 if how == "mismatch" and rank == 2 else 8)
    reducer = gradwire.Reducer(TwoLevel(inner, 2), bucket_mb=4 / 1024, timeout_s=max(5, patience()))
    reducer.all_reduce(draw(rank, 0)).wait()
    if how == "codec" and rank == 1:
        inner.collective.codec = None  # type: ignore[attr-defined]
    if how == "death" and rank == 1:
        os._exit(7)
    reducer.all_reduce(draw(rank, 1)).wait()
    reducer.close()


@pytest.mark.parametrize("how", cases.FAILURES)
def test_what_one_rank_fails_of_is_raised_on_all(how: str) -> None:
    cases.assert_failure_is_told(how, try_ranks(break_it, 4, how, timeout_s=60))


@on_ranks(4)
def test_a_nan_is_seen_by_all_and_nothing_of_its_step_is_kept(rank: int, world_size: int) -> None:
    reducer = gradwire.Reducer(TwoLevel("one-bit", 2), timeout_s=100)
    reducer.all_reduce(draw(rank, 0)).wait()
    before = copy.deepcopy(reducer.state_dict()["state"]["residuals"])
    tensors = draw(rank, 1)
    if rank == 3:
        tensors["a"][0, 0] = float("nan")
    cases.reduced(reducer, tensors)
    assert not all(tensor.isfinite().all() for tensor in tensors.values())
    after = reducer.state_dict()["state"]["residuals"]
    assert before
    assert_alike([before, after])
    reducer.close()


@on_ranks(4)
def test_groups_that_do_not_fit_are_refused(rank: int, world_size: int) -> None:
    for nodes, words in [(3, "whole nodes of 3"), ([[0, 1], [2]], "once"), ([[0, 1, 2], [3]], "unequally many")]:
        with pytest.raises(gradwire.InvalidArgument, match=words):
            gradwire.Reducer(TwoLevel("plain", nodes), timeout_s=5)
    with pytest.raises(gradwire.InvalidArgument, match='"paper" reads the optimizer'):  # what it is around refuses
        gradwire.Reducer(TwoLevel("gcomp", 2), timeout_s=100)
    with pytest.raises(gradwire.InvalidArgument, match="exempt='nosuch' matches no tensor; there are weight, bias"):
        start(rank, TwoLevel("one-bit", 2, exempt=["nosuch"]), lambda: torch.nn.Linear(4, 4), sgd)
    for name in ("aqgb", "periodic"):
        with pytest.raises(gradwire.Unsupported, match=name):
            TwoLevel(name)
    crossed = gradwire.Reducer(TwoLevel("plain", [[0, 2], [1, 3]]), timeout_s=100)
    tensor = torch.full((5,), float(rank))
    cases.reduced(crossed, {"x": tensor})
    assert tensor.tolist() == [1.5] * 5
    crossed.close()
