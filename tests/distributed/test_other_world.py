"""A state for all ranks, saved at 4 and loaded at 4, 5, 3 and 2: what the steps after it come to, against float64."""

import copy
import functools
import pickle
from typing import Any

import pytest
import reducing_cases as cases
import torch
import torch.distributed as dist

import gradwire
from gradwire import schemes
from gradwire.core import checkpoint
from quantiser_oracles import top_k
from ranks import agree, at_end, on_ranks, run_ranks

SHAPES = {"w": (24, 20), "b": (24,)}
SHARE = 0.1
# What is left out is kept: what was given, and what was left, is what is sent and what is left then.
CONSERVING = ["acp-sgd", "one-bit", "top-k", "two-bit"]
SCHEMES = [*CONSERVING, "dgc", "gcomp", "plain"]
SAVED_AFTER = 3
LATER = range(SAVED_AFTER, SAVED_AFTER + 4)
draw = functools.partial(cases.draw, SHAPES)


def make(name: str) -> gradwire.Reducer:
    options: dict[str, dict[str, Any]] = {"gcomp": {"importance": "none"}, "top-k": {"share": SHARE}}
    made = gradwire.Reducer(schemes.by_name(name, **options.get(name, {})), names=draw(0, 0), timeout_s=100)
    at_end.callback(made.close)
    return made


def take_steps(reducer: gradwire.Reducer, rank: int, steps: range) -> list[dict[str, torch.Tensor]]:
    """The means of each step."""
    return [cases.reduced(reducer, draw(rank, step)) for step in steps]


def flat(tensors: dict[str, torch.Tensor]) -> torch.Tensor:
    """As they lie in a bucket, in float64; zeros for what is not there."""
    return torch.cat([tensors.get(name, torch.zeros(shape)).double().reshape(-1) for name, shape in SHAPES.items()])


def residual_of(state: dict[str, Any]) -> torch.Tensor:
    return flat(state["state"].get("residuals", {}))


def save(rank: int, world_size: int) -> dict[str, Any]:
    """{scheme: (state for all ranks, this rank's own state, means of the later steps of a run that never stops)}."""
    saved = {}
    for name in SCHEMES:
        reducer = make(name)
        take_steps(reducer, rank, range(SAVED_AFTER))
        whole, own = reducer.state_dict(all_ranks=True), copy.deepcopy(reducer.state_dict())
        assert len(whole["ranks"]) == (world_size if rank == 0 else 0)
        saved[name] = whole, own, take_steps(reducer, rank, LATER)
    return saved


@pytest.fixture(scope="module")
def pickled() -> bytes:
    """What each of four ranks gave; as bytes, since a process is started with few file descriptors."""
    return pickle.dumps(run_ranks(save, 4))


@on_ranks([4, 5, 3, 2])
def test_steps_after_a_state_for_all_ranks_are_of_those_in_it(rank: int, world_size: int, pickled: bytes) -> None:
    lives: list[dict[str, Any]] = pickle.loads(pickled)
    given = torch.stack([torch.stack([flat(draw(r, step)) for r in range(world_size)]) for step in LATER])
    for name in SCHEMES:
        reducer = make(name)
        reducer.load_state_dict(lives[0][name][0])
        assert reducer.step == SAVED_AFTER
        before = residual_of(reducer.state_dict())
        tensors = take_steps(reducer, rank, LATER)
        after = residual_of(reducer.state_dict())
        saved_again = reducer.state_dict(all_ranks=True)
        assert len(saved_again["ranks"]) == (world_size if rank == 0 else 0)
        box = [saved_again]
        dist.broadcast_object_list(box)
        second = make(name)
        second.load_state_dict(box[0])
        assert torch.equal(residual_of(second.state_dict()), after), name
        elsewhere = checkpoint.state_for(box[0], second.scheme.per_rank_state, world_size + 1, 0)
        dist.all_reduce(after)
        after /= world_size
        if rank == 0:  # it may go on to another number of ranks again
            again = torch.stack([residual_of(one) for one in saved_again["ranks"]]).mean(0)
            assert torch.allclose(again, after, rtol=0, atol=1e-7), name
            assert torch.allclose(residual_of(elsewhere), after, rtol=2.0**-24, atol=1e-12), name  # rounded to float32
            assert bool(after.any()) == (name not in ("gcomp", "plain")), name
        if world_size == len(lives):
            for found, expected in zip(tensors, lives[rank][name][2], strict=True):
                assert all(torch.equal(found[key], expected[key]) for key in SHAPES), name
            continue
        left = torch.stack([residual_of(life[name][1]) for life in lives]).mean(0)
        assert torch.allclose(before, left, rtol=0, atol=1e-6), name
        means = torch.stack([flat(found) for found in tensors])
        assert agree(means), name
        if name in ("gcomp", "plain"):  # nothing is left out
            assert torch.allclose(means, given.mean(1), atol=1e-6), name
        if name in CONSERVING:
            assert left.abs().max() > 0.1, "nothing was left out, so nothing is shown"
            accounted, owed = means.sum(0) + after, given.mean(1).sum(0)
            assert torch.allclose(accounted, owed + left, atol=1e-4), name
        if name == "top-k":
            expected, _ = top_k(given, left.expand(world_size, -1), round(SHARE * left.numel()))
            assert torch.allclose(means, expected, atol=1e-5)


@on_ranks(2)
def test_the_same_ranks_get_their_own_state_and_others_are_refused(rank: int, world_size: int) -> None:
    reducer = make("one-bit")
    take_steps(reducer, rank, range(1))
    whole = reducer.state_dict(all_ranks=True)
    own = reducer.state_dict()
    if rank:
        with pytest.raises(gradwire.InvalidArgument, match="rank 0's answer"):
            reducer.load_state_dict(whole)
    else:
        reducer.load_state_dict(whole)
        for wrong in ({"version": 1, "ranks": [{}]}, {"version": 1, "ranks": whole["ranks"][::-1]}):
            with pytest.raises(gradwire.CorruptMessage):
                reducer.load_state_dict(wrong)
    after = reducer.state_dict()
    assert torch.equal(residual_of(after), residual_of(own))
