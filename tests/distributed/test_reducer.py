"""gradwire.Reducer: named tensors to their means, without DDP."""

import copy
import functools
import os

import pytest
import reducing_cases as cases
import torch
import torch.distributed as dist

import gradwire
from gradwire import schemes
from gradwire.wire.rendezvous import name_group
from ranks import on_ranks

SHAPES = {"a": (40, 30), "b": (30,), "empty": (0, 3), "scalar": (), "c": (8, 5, 6)}
draw = functools.partial(cases.draw, SHAPES)


@on_ranks(2)
def test_plain_gives_the_bits_of_all_reduce(rank: int, world_size: int) -> None:
    # 4 KB: several buckets, and one of another dtype between them.
    reducer = gradwire.Reducer("plain", bucket_mb=4 / 1024, timeout_s=100)
    tensors = draw(rank, 0) | {"half": torch.randn(7).bfloat16(), "transposed": torch.randn(4, 6).t()}
    expected = {name: tensor.clone() / world_size for name, tensor in tensors.items()}
    for tensor in expected.values():
        dist.all_reduce(tensor)
    work = reducer.all_reduce(tensors)
    work.wait()
    assert work.is_completed()
    work.wait()  # does nothing
    for name, tensor in tensors.items():
        assert torch.equal(tensor, expected[name]), name
    assert reducer.step == 1
    assert reducer.stats()["n_buckets"] >= 3
    reducer.close()
    total = gradwire.Reducer("plain", op="sum", timeout_s=100)
    mean = cases.reduced(total, {"x": torch.full((5,), float(rank + 1))})
    assert mean["x"].tolist() == [world_size * (world_size + 1) / 2] * 5
    total.close()
    moved = {}
    for op in (
        "mean",
        "sum",
    ):  # of losses that are divided by the ranks: as far as a mean, whatever a scheme makes of it
        signs = gradwire.Reducer("sign-sgd", op=op, timeout_s=100)
        moved[op] = cases.reduced(signs, {"x": draw(rank, 1)["a"] / (world_size if op == "sum" else 1)})["x"]
        signs.close()
    assert torch.equal(moved["mean"], moved["sum"])


@on_ranks(2)
def test_what_was_not_sent_goes_to_the_next_scheme(rank: int, world_size: int) -> None:
    reducer = gradwire.Reducer("one-bit", names=draw(rank, 0), timeout_s=100)
    cases.reduced(reducer, draw(rank, 0))
    left = reducer.state_dict()["state"]["residuals"]
    for scheme in ("plain", "two-bit"):
        reducer.switch(scheme)
    found = reducer.state_dict()["state"]["residuals"]
    assert all(torch.equal(found[name], kept) for name, kept in left.items())
    assert float(found["b"].abs().sum()) > 1
    reducer.close()


@on_ranks(2, raises=gradwire.RankMismatch, match=r"call switch\(\) and state_dict\(all_ranks=True\) on all")
def test_a_state_that_one_rank_asks_for_alone_is_named(rank: int, world_size: int) -> None:
    reducer = gradwire.Reducer("gcomp:importance=none", names=draw(rank, 0), timeout_s=100)
    if rank == 0:
        reducer.state_dict(all_ranks=True)
    cases.reduced(reducer, draw(rank, 0))


@on_ranks([1, 2, 3, 4])
def test_every_reducing_scheme_takes_named_tensors(rank: int, world_size: int) -> None:
    for name in cases.REDUCING:
        options = cases.OPTIONS.get(name, {})
        cases.reduce_and_resume(rank, functools.partial(schemes.by_name, name, **options), SHAPES)


@on_ranks(3)
def test_error_feedback_belongs_to_the_name(rank: int, world_size: int) -> None:
    reducer = gradwire.Reducer("one-bit", timeout_s=100)
    given = {name: torch.zeros(shape, dtype=torch.float64) for name, shape in SHAPES.items()}
    sent = copy.deepcopy(given)
    for step in range(6):
        tensors = draw(rank, step)
        if step % 2:  # in another order, so in other buckets: what was left out follows the name
            tensors = dict(reversed(tensors.items()))
        for name, tensor in tensors.items():
            given[name] += tensor.double()
        for name, tensor in cases.reduced(reducer, tensors).items():
            sent[name] += tensor.double()
    left = reducer.state_dict()["state"]["residuals"]
    for name in SHAPES:
        mean = torch.stack([given[name], left.get(name, torch.zeros(given[name].shape)).double().view(SHAPES[name])])
        dist.all_reduce(mean)
        mean /= world_size
        assert torch.allclose(mean[0], sent[name] + mean[1], atol=1e-4), name
    reducer.close()


@on_ranks(2)
def test_misuse_is_named_on_all_ranks(rank: int, world_size: int) -> None:
    reducer = gradwire.Reducer("plain", timeout_s=100)
    reducer.all_reduce({"x": torch.ones(3)}).wait()
    # Only rank 1 gives another shape; both are told, and by name.
    with pytest.raises(gradwire.InvalidArgument, match=r"'x' was \(3,\) and is \(4,\)"):
        reducer.all_reduce({"x": torch.ones(3 + rank)}).wait()
    reducer.close()
    for wrong in ({}, {"x": torch.ones(3, dtype=torch.int64)}):
        reducer = gradwire.Reducer("plain", timeout_s=100)
        with pytest.raises(gradwire.InvalidArgument):
            reducer.all_reduce(wrong)
        reducer.close()
    with pytest.raises(gradwire.InvalidArgument, match="op is one of"):
        gradwire.Reducer("plain", op="max")
    with pytest.raises(gradwire.InvalidArgument, match="takes the optimizer's step itself"):
        gradwire.Reducer("aqgb", timeout_s=100)


@pytest.mark.parametrize("life", ["0", "1"])
@on_ranks(2)
def test_a_group_that_cannot_be_built_says_what_a_second_life_needs(rank: int, world_size: int, life: str) -> None:
    """Rank 1 never makes its end of the group: rank 0 says so, and not that an attribute is missing."""
    os.environ["TORCHELASTIC_RESTART_COUNT"] = life
    if rank == 0:
        with pytest.raises(gradwire.PeerLost, match="rank 0 lost rank 1, which") as lost:
            gradwire.Reducer("plain", timeout_s=1)
        assert ("TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1" in str(lost.value)) == (life != "0")
    dist.barrier()


def test_a_restarted_rank_does_not_meet_the_names_of_its_life_before(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "get_rank", lambda: 0)
    monkeypatch.delenv("TORCHELASTIC_RESTART_COUNT", raising=False)
    store, new_store = dist.HashStore(), dist.HashStore()
    first, second = name_group(store, [0, 1], 0), name_group(store, [0, 1], 0)
    assert first != second
    assert name_group(new_store, [0, 1], 0) == first  # as whoever has come with it finds it
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    assert name_group(store, [0, 1], 0) not in (first, second)


@on_ranks(4)
def test_a_group_is_a_list_of_ranks_too(rank: int, world_size: int) -> None:
    mine = [0, 2] if rank % 2 == 0 else [1, 3]
    reducer = gradwire.Reducer("plain", group=mine, timeout_s=100)
    mean = cases.reduced(reducer, {"x": torch.full((3,), float(rank))})
    assert mean["x"].tolist() == [sum(mine) / 2] * 3
    reducer.close()
    for wrong in ([0, 9], [0, 0, rank], [rank - 1, rank + 1]):
        with pytest.raises(gradwire.InvalidArgument, match="group"):
            gradwire.Reducer("plain", group=wrong, timeout_s=5)
