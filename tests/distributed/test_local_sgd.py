"""LocalSgd: DiLoCo as it would be written by hand, with any scheme; and states for all ranks that any number can load."""

from __future__ import annotations

import copy
import os
import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from fsdp2_cases import Net, build, make_mesh, shards_of, train
from one_rank_fails import FAILURES, assert_failure_is_told
from torch import nn

import gradwire
from gradwire import schemes
from gradwire.core.bucket import local_of
from gradwire.doors.local_sgd import nesterov
from ranks import agree, on_ranks, patience, run_ranks, try_ranks

EVERY = 4


def make() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(3)
    net = nn.Sequential(nn.Linear(16, 24), nn.ReLU(), nn.Linear(24, 5))
    return net, torch.optim.AdamW(net.parameters(), 2e-3)


def step_inner(net: nn.Module, optimizer: torch.optim.Optimizer, rank: int, steps: range) -> None:
    for step in steps:
        x = torch.randn(8, 16, generator=torch.Generator().manual_seed(1000 * step + rank))
        nn.functional.cross_entropy(net(x), x[:, :5].argmax(1)).backward()
        optimizer.step()
        optimizer.zero_grad()


def by_hand(rank: int, world_size: int, n_outer: int, delay: int) -> list[torch.Tensor]:
    net, optimizer = make()
    anchors = [nn.Parameter(p.detach().clone()) for p in net.parameters()]
    outer = nesterov(anchors)
    for round_ in range(n_outer):
        step_inner(net, optimizer, rank, range(round_ * EVERY, (round_ + 1) * EVERY - delay))
        deltas = [a.detach() - p.detach() for a, p in zip(anchors, net.parameters(), strict=True)]
        before = [a.detach().clone() for a in anchors]
        step_inner(net, optimizer, rank, range((round_ + 1) * EVERY - delay, (round_ + 1) * EVERY))
        for anchor, delta in zip(anchors, deltas, strict=True):
            anchor.grad = delta / world_size
            dist.all_reduce(anchor.grad)
        outer.step()
        with torch.no_grad():
            for p, anchor, old, delta in zip(net.parameters(), anchors, before, deltas, strict=True):
                p.add_(anchor - old + delta) if delay else p.copy_(anchor)
    return [p.detach() for p in net.parameters()]


@on_ranks(2)
def test_plain_is_the_loop_written_by_hand(rank: int, world_size: int) -> None:
    for delay in (0, 3):
        net, optimizer = make()
        loop = gradwire.LocalSgd(net, optimizer, "plain", EVERY, delay=delay, timeout_s=100)
        step_inner(net, optimizer, rank, range(3 * EVERY))
        assert loop.reducer.step == 3
        loop.close()
        step_inner(net, optimizer, rank, range(1))  # no exchange any more
        expected_net, _ = make()
        expected = by_hand(rank, world_size, 3, delay)
        net_again, optimizer_again = make()
        loop = gradwire.LocalSgd(net_again, optimizer_again, "plain", EVERY, delay=delay, timeout_s=100)
        step_inner(net_again, optimizer_again, rank, range(3 * EVERY))
        assert all(torch.equal(a, b) for a, b in zip(net_again.parameters(), expected, strict=True)), delay
        assert not torch.equal(next(expected_net.parameters()), expected[0])
        loop.close()


@on_ranks(2)
def test_fragments_are_exchanged_in_turn(rank: int, world_size: int) -> None:
    """By hand: every second step one half of the parameters by their place, with what is learnt meanwhile kept."""
    for delay in (0, 1):
        net, optimizer = make()
        parts = [list(net.parameters())[:1], list(net.parameters())[1:]]  # 384 values and 149
        anchors = [[p.detach().clone() for p in part] for part in parts]
        outers = [nesterov([nn.Parameter(a) for a in part]) for part in anchors]  # each with its own momenta
        for turn in range(2 * 3):
            part, outer = parts[turn % 2], outers[turn % 2]
            step_inner(net, optimizer, rank, range(2 * turn, 2 * turn + 2 - delay))
            own = outer.param_groups[0]["params"]
            before = [a.detach().clone() for a in own]
            deltas = [a.detach() - p.detach() for a, p in zip(own, part, strict=True)]
            step_inner(net, optimizer, rank, range(2 * turn + 2 - delay, 2 * turn + 2))
            for anchor, delta in zip(own, deltas, strict=True):
                anchor.grad = delta / world_size
                dist.all_reduce(anchor.grad)
            outer.step()
            with torch.no_grad():
                for p, anchor, old, delta in zip(part, own, before, deltas, strict=True):
                    p.add_(anchor - old + delta) if delay else p.copy_(anchor)
        ours, optimizer = make()
        loop = gradwire.LocalSgd(ours, optimizer, "plain", EVERY, delay=delay, fragments=2, timeout_s=100)
        step_inner(ours, optimizer, rank, range(3 * EVERY))
        assert loop.reducer.step == 6
        assert all(torch.equal(a, b) for a, b in zip(ours.parameters(), net.parameters(), strict=True)), delay
        step_inner(ours, optimizer, rank, range(1))
        assert not agree(torch.cat([p.detach().flatten() for p in ours.parameters()]))
        loop.take_shared()
        assert agree(torch.cat([p.detach().flatten() for p in ours.parameters()]))
        loop.close()
    ours, optimizer = make()  # more parts than tensors: nothing is left out, nothing comes twice
    loop = gradwire.LocalSgd(ours, optimizer, "plain", 12, fragments=12, timeout_s=100)
    step_inner(ours, optimizer, rank, range(12))
    assert loop.reducer.step == len({tuple(loop._fragment(i)) for i in range(12)} - {()})
    assert sorted(name for i in range(12) for name in loop._fragment(i)) == sorted(dict(ours.named_parameters()))
    loop.close()


@on_ranks(2)
def test_it_resumes_in_mid_interval_bit_for_bit(rank: int, world_size: int) -> None:
    """In mid-interval, with every kind of state; replicas are equal after each outer step."""
    for name in ("plain", "two-bit", "one-bit", "acp-sgd", "top-k", "top-k:share=0.01,code=chunks,warmup_steps=0"):
        nets, n_fragments = [], 1 + name.endswith("k")
        saved: Any = None
        for is_resumed in (False, True):
            net, optimizer = make()
            momentum_free = lambda anchors: torch.optim.SGD(anchors, 1.0)  # noqa: E731
            loop = gradwire.LocalSgd(net, optimizer, name, EVERY, momentum_free, fragments=n_fragments, timeout_s=100)
            cut = EVERY + 2
            if is_resumed:
                net.load_state_dict(saved[0])
                optimizer.load_state_dict(saved[1])
                loop.load_state_dict(saved[2])
            else:
                step_inner(net, optimizer, rank, range(cut))
                saved = copy.deepcopy((net.state_dict(), optimizer.state_dict(), loop.state_dict()))
            step_inner(net, optimizer, rank, range(cut, 3 * EVERY))
            loop.close()
            nets.append(torch.cat([p.detach().flatten() for p in net.parameters()]))
        assert torch.equal(*nets), name
        assert n_fragments > 1 or agree(nets[0]), name  # of fragments only the last one's are equal now


@on_ranks(4)
def test_shards_of_fsdp2_are_exchanged_between_nodes(rank: int, world_size: int) -> None:
    """Over FSDP2 the same as unsharded DiLoCo whose workers see both of a node's batches, to rounding."""
    mesh = make_mesh()
    net, optimizer = build(mesh["shard"])
    loop = gradwire.LocalSgd(net, optimizer, "plain", 2, group=mesh.get_group("replicate"), timeout_s=100)
    train(net, optimizer, rank, range(4))
    loop.close()
    assert all(agree(own, mesh.get_group("replicate")) for own in shards_of(net))
    reference, optimizer = build(mesh["shard"])  # by hand, on the shards
    anchors = [nn.Parameter(local_of(p.detach()).clone()) for p in reference.parameters()]
    outer = nesterov(anchors)
    for first in (0, 2):
        train(reference, optimizer, rank, range(first, first + 2))
        for anchor, p in zip(anchors, reference.parameters(), strict=True):
            anchor.grad = (anchor.detach() - local_of(p.detach())) / 2
            dist.all_reduce(anchor.grad, group=mesh.get_group("replicate"))
        outer.step()
        with torch.no_grad():
            for anchor, p in zip(anchors, reference.parameters(), strict=True):
                local_of(p).copy_(anchor)
    assert all(torch.equal(a, b) for a, b in zip(shards_of(net), shards_of(reference), strict=True))


def mean_over(tensor: torch.Tensor, group: dist.ProcessGroup) -> None:
    dist.all_reduce(tensor, group=group)
    tensor.div_(group.size())


@on_ranks(4)
def test_sharded_local_sgd_is_that_of_whole_models(rank: int, world_size: int) -> None:
    """Two nodes whose models are sharded end where two nodes with whole models do, to rounding."""
    mesh = make_mesh()
    inside, between = mesh.get_group("shard"), mesh.get_group("replicate")
    net, _ = build(mesh["shard"])
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    loop = gradwire.LocalSgd(net, optimizer, "plain", 2, group=between, timeout_s=100)
    train(net, optimizer, rank, range(6))
    loop.close()

    torch.manual_seed(1)
    whole = Net()
    optimizer = torch.optim.SGD(whole.parameters(), 0.1)
    anchors = [nn.Parameter(p.detach().clone()) for p in whole.parameters()]
    outer = nesterov(anchors)
    handles = [p.register_post_accumulate_grad_hook(lambda p: mean_over(p.grad, inside)) for p in whole.parameters()]
    for first in (0, 2, 4):
        train(whole, optimizer, rank, range(first, first + 2))
        for anchor, p in zip(anchors, whole.parameters(), strict=True):
            anchor.grad = anchor.detach() - p.detach()
            mean_over(anchor.grad, between)
        outer.step()
        with torch.no_grad():
            for anchor, p in zip(anchors, whole.parameters(), strict=True):
                p.copy_(anchor)
    for handle in handles:
        handle.remove()
    for sharded, p in zip(net.parameters(), whole.parameters(), strict=True):
        torch.testing.assert_close(sharded.full_tensor(), p, rtol=1e-5, atol=1e-5)  # type: ignore[attr-defined]


@on_ranks(2)
def test_misuse_is_named_and_feedback_meets_no_momentum(rank: int, world_size: int) -> None:
    net, optimizer = make()
    for every, delay, fragments in ((0, 0, 1), (3, 3, 1), (3, -1, 1), (3, 0, 4), (3, 0, 0), (6, 3, 2)):
        with pytest.raises(gradwire.InvalidArgument, match="delay from 0 to every // fragments - 1"):
            gradwire.LocalSgd(net, optimizer, "plain", every, delay=delay, fragments=fragments)
    with pytest.raises(gradwire.Unsupported, match="aqgb"):
        gradwire.LocalSgd(net, optimizer, "aqgb", 3)
    with pytest.warns(UserWarning, match=r"momentum of 0\.9 do not go together.*is used without"):
        loop = gradwire.LocalSgd(net, optimizer, "two-bit", 3, delay=1, timeout_s=100)
    assert not loop.reducer.scheme.error_feedback  # type: ignore[attr-defined]
    step_inner(net, optimizer, rank, range(2))
    with pytest.raises(gradwire.InvalidArgument, match="exchange is under way: save in the first 1 steps"):
        loop.state_dict()
    with pytest.raises(gradwire.CorruptMessage, match="not the state of a LocalSgd"):
        loop.load_state_dict({"anchors": {}})
    step_inner(net, optimizer, rank, range(1))
    loop.close()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        gradwire.LocalSgd(net, optimizer, "embedded-float", 3, timeout_s=100).close()


@on_ranks(2)
@pytest.mark.parametrize("case", ["skips", "unfrozen"])
def test_ranks_stay_equal_where_steps_are_skipped_and_parameters_unfrozen(
    rank: int, world_size: int, case: str
) -> None:
    net, optimizer = make()
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8)
    net[0].requires_grad_(case != "unfrozen")
    loop = gradwire.LocalSgd(net, optimizer, "plain", EVERY, delay=2 * (case == "unfrozen"), timeout_s=100)
    for step in range(3 * EVERY):
        if step == EVERY + 3:  # under way
            net[0].requires_grad_(True)
        if case == "skips" and rank and step in (0, 3, 4):
            scaler.scale(sum(p.sum() for p in net.parameters()) * torch.inf).backward()
        else:
            x = torch.randn(8, 16, generator=torch.Generator().manual_seed(1000 * step + rank))
            scaler.scale(nn.functional.cross_entropy(net(x), x[:, :5].argmax(1))).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    assert loop.reducer.step == 3
    anchored = dict(zip(dict(net.named_parameters()), loop._anchors.values(), strict=True))
    loop.close()
    for name, mine in (anchored if case == "unfrozen" else dict(net.named_parameters())).items():
        assert agree(mine.detach()), (case, name)


@on_ranks(2)
def test_unequal_starts_are_refused(rank: int, world_size: int) -> None:
    net, optimizer = make()
    with torch.no_grad():
        next(net.parameters()).add_(rank)
    gradwire.LocalSgd(net, optimizer, "plain", EVERY, timeout_s=100)
    with pytest.raises(gradwire.InvalidArgument, match=r"ranks \[1\] have other parameters than rank 0"):
        step_inner(net, optimizer, rank, range(1))


SHAPES = {"w": (24, 20), "b": (24,)}
ELASTIC = ["one-bit", "two-bit", "acp-sgd", "dgc", "gcomp", "top-k"]


def draw(rank: int, step: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(100 * step + rank)
    return {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}


def live(rank: int, world_size: int, saved: dict[str, Any] | None) -> Any:
    """One life: load, two steps, save. Returns what rank 0 saves, and this rank's residuals as loaded."""
    out: dict[str, Any] = {}
    for name in ELASTIC:
        options = {"importance": "none"} if name == "gcomp" else {}
        reducer = gradwire.Reducer(schemes.by_name(name, **options), names=draw(0, 0), timeout_s=100)
        loaded = None
        if saved is not None:
            reducer.load_state_dict(saved[name][0])
            loaded = copy.deepcopy(reducer.state_dict()["state"].get("residuals", {}))
        for step in range(2):
            reducer.all_reduce(draw(rank, step)).wait()
        own = copy.deepcopy(reducer.state_dict())
        whole = reducer.state_dict(all_ranks=True)
        if rank == 0:  # the same ranks get what a file a rank would give them
            assert len(whole["ranks"]) == world_size
        out[name] = (whole, own["state"].get("residuals", {}), loaded)
        reducer.close()
    return out


def test_one_state_serves_any_number_of_ranks() -> None:
    saved = None
    kept: dict[str, dict[str, torch.Tensor]] = {}
    for world_size in (3, 2, 4):
        lives = run_ranks(live, world_size, saved)
        for name in ELASTIC:
            for key in SHAPES:
                if saved is not None and key in kept[name]:
                    mean = torch.stack([life[name][2][key].double() for life in lives]).mean(0)
                    assert torch.allclose(mean, kept[name][key], atol=1e-7), (name, key, world_size)
            residuals = [life[name][1] for life in lives]
            kept[name] = {
                key: torch.stack([r[key].double() for r in residuals]).mean(0) for key in SHAPES if key in residuals[0]
            }
        saved = lives[0]
        assert all(not life[name][0]["ranks"] for life in lives[1:] for name in ELASTIC)


@on_ranks(2)
def test_the_same_ranks_get_their_own_state_and_others_are_refused(rank: int, world_size: int) -> None:
    reducer = gradwire.Reducer("one-bit", names=draw(0, 0), timeout_s=100)
    reducer.all_reduce(draw(rank, 0)).wait()
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
    assert all(
        torch.equal(after["state"]["residuals"][k], own["state"]["residuals"][k]) for k in own["state"]["residuals"]
    )
    reducer.close()


DECAY = 0.5


@on_ranks(2)
def test_a_fading_residual_is_top_k_written_by_hand(rank: int, world_size: int) -> None:
    """Against top-k with a fading residual written by hand, in float64, and against no residual at all."""
    n, share, n_outer = 200, 0.05, 12

    def given(step: int, of_rank: int) -> torch.Tensor:
        return torch.randn(n, generator=torch.Generator().manual_seed(1000 * step + of_rank))

    def train(decay: float, error_feedback: bool) -> tuple[torch.Tensor, torch.Tensor]:
        parameter = nn.Parameter(torch.zeros(n))
        optimizer = torch.optim.SGD([parameter], lr=1.0)
        net = nn.ParameterList([parameter])
        loop = gradwire.LocalSgd(
            net, optimizer, schemes.by_name("top-k", share=share, error_feedback=error_feedback), 1,
            outer=lambda anchors: torch.optim.SGD(anchors, lr=1.0), feedback_decay=decay, timeout_s=100,
        )  # fmt: skip
        for step in range(n_outer):
            parameter.grad = given(step, rank)
            optimizer.step()
        (residual,) = loop.reducer.state_dict()["state"].get("residuals", {"": torch.zeros(n)}).values()
        loop.close()
        return parameter.detach(), residual

    expected, left = torch.zeros(n, dtype=torch.float64), torch.zeros(world_size, n, dtype=torch.float64)
    for step in range(n_outer):
        mean = torch.zeros(n, dtype=torch.float64)
        for of_rank in range(world_size):
            whole = given(step, of_rank).double() + left[of_rank]
            sent = torch.zeros_like(whole)
            largest = whole.abs().topk(round(share * n)).indices
            sent[largest] = whole[largest]
            left[of_rank] = DECAY * (whole - sent)
            mean += sent / world_size
        expected -= mean
    parameter, residual = train(DECAY, True)
    assert torch.allclose(parameter.double(), expected, atol=1e-5)
    assert torch.allclose(residual.double(), left[rank], atol=1e-5)
    whole_residual, none_left, without = train(1.0, True)[0], train(0.0, True)[0], train(1.0, False)[0]
    assert torch.equal(none_left, without)
    assert not torch.allclose(whole_residual.double(), expected, atol=1e-2), "decay changed nothing"


@pytest.mark.parametrize("wrong", [-0.1, 1.1, float("nan")])
def test_a_decay_that_is_no_share_is_refused(wrong: float) -> None:
    net, optimizer = make()
    with pytest.raises(gradwire.InvalidArgument, match="feedback_decay"):
        gradwire.LocalSgd(net, optimizer, "top-k", EVERY, feedback_decay=wrong)


def break_it(rank: int, world_size: int, how: str) -> None:
    net, optimizer = make()
    scheme = schemes.by_name("embedded-float", bits=7 if how == "mismatch" and rank == 1 else 8)
    loop = gradwire.LocalSgd(net, optimizer, scheme, EVERY, timeout_s=max(5, patience()))
    step_inner(net, optimizer, rank, range(EVERY))
    if rank == 1 and how == "death":
        os._exit(7)
    if rank == 1 and how == "codec":
        scheme.collective.codec = None  # type: ignore[attr-defined]
    step_inner(net, optimizer, rank, range(EVERY))
    loop.close()


@pytest.mark.parametrize("how", FAILURES)
def test_what_one_rank_fails_of_is_raised_on_all(how: str) -> None:
    assert_failure_is_told(how, try_ranks(break_it, 3, how, timeout_s=60), "rank 1")


@on_ranks(2)
def test_a_loss_that_is_not_finite_is_seen_by_all(rank: int, world_size: int) -> None:
    """One rank's loss was NaN: every rank sees it, as behind DDP, and none has other parameters than the others."""
    net, optimizer = make()
    loop = gradwire.LocalSgd(net, optimizer, "two-bit", EVERY, timeout_s=100)
    step_inner(net, optimizer, rank, range(EVERY - 1))
    if rank == 1:
        with torch.no_grad():
            next(net.parameters()).fill_(float("nan"))
    step_inner(net, optimizer, rank, range(1))
    first = next(net.parameters()).detach()
    assert not bool(torch.isfinite(first).all())
    assert agree(first.isnan())
    loop.close()
