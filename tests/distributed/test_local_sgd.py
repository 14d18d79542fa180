"""LocalSgd: DiLoCo as it would be written by hand, with any scheme."""

import copy
import functools
import os
import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from fsdp2_cases import Sharded, make_mesh, sgd
from reducing_cases import FAILURES, assert_failure_is_told
from torch import nn

import gradwire
from gradwire import schemes
from gradwire.core.bucket import local_of
from gradwire.doors.local_sgd import nesterov
from quantiser_oracles import top_k
from ranks import agree, at_end, on_ranks, patience, try_ranks
from small_training import flat

EVERY = 4
momentum_free = functools.partial(torch.optim.SGD, lr=1.0)


class Local:
    """One rank's net and its optimizer, by themselves until a loop is started; steps have numbers."""

    loop: gradwire.LocalSgd

    def __init__(self, rank: int) -> None:
        torch.manual_seed(3)
        self.rank, self.net = rank, nn.Sequential(nn.Linear(16, 24), nn.ReLU(), nn.Linear(24, 5))
        self.optimizer = torch.optim.AdamW(self.net.parameters(), 2e-3)

    def start(self, scheme: Any = "plain", every: int = EVERY, *outer: Any, **options: Any) -> "Local":
        self.loop = gradwire.LocalSgd(self.net, self.optimizer, scheme, every, *outer, **{"timeout_s": 100, **options})
        at_end.callback(self.loop.close)
        return self

    def loss(self, step: int) -> torch.Tensor:
        x = torch.randn(8, 16, generator=torch.Generator().manual_seed(1000 * step + self.rank))
        return nn.functional.cross_entropy(self.net(x), x[:, :5].argmax(1))

    def take_steps(self, steps: range) -> None:
        for step in steps:
            self.loss(step).backward()
            self.optimizer.step()
            self.optimizer.zero_grad()

    def flat(self) -> torch.Tensor:
        return flat(self.net)


def by_hand(net: nn.Module, train: Any, n_parts: int, every: int, delay: int, turns: int, group: Any = None) -> None:
    """A fragment in turn every `every` steps, by `nesterov` with momenta of its own; what is learnt meanwhile is kept."""
    own = [local_of(p) for p in net.parameters()]
    parts = [own] if n_parts == 1 else [own[:1], own[1:]]  # by their place: 384 values and 149
    anchors = [[nn.Parameter(p.detach().clone()) for p in part] for part in parts]
    outers = [nesterov(part) for part in anchors]
    for turn in range(turns):
        part, ours, outer = parts[turn % n_parts], anchors[turn % n_parts], outers[turn % n_parts]
        train(range(turn * every, (turn + 1) * every - delay))
        deltas = [a.detach() - p.detach() for a, p in zip(ours, part, strict=True)]
        before = [a.detach().clone() for a in ours]
        train(range((turn + 1) * every - delay, (turn + 1) * every))
        for anchor, delta in zip(ours, deltas, strict=True):
            anchor.grad = delta / dist.get_world_size(group)
            dist.all_reduce(anchor.grad, group=group)
        outer.step()
        with torch.no_grad():
            for p, anchor, old, delta in zip(part, ours, before, deltas, strict=True):
                p.add_(anchor - old + delta) if delay else p.copy_(anchor)


@on_ranks(2)
def test_plain_is_the_loop_written_by_hand(rank: int, world_size: int) -> None:
    """Whole or in two fragments, which are exchanged in turn."""
    for n_fragments, delay in ((1, 0), (1, 3), (2, 0), (2, 1)):
        expected, local = Local(rank), Local(rank).start(delay=delay, fragments=n_fragments)
        by_hand(expected.net, expected.take_steps, n_fragments, EVERY // n_fragments, delay, 3 * n_fragments)
        local.take_steps(range(3 * EVERY))
        assert local.loop.reducer.step == 3 * n_fragments
        assert torch.equal(local.flat(), expected.flat()), delay
        assert not torch.equal(Local(rank).net[0].weight, local.net[0].weight)
        if n_fragments > 1:
            local.take_steps(range(1))
            assert not agree(local.flat())
            local.loop.take_shared()
            assert agree(local.flat())
        local.loop.close()
        local.take_steps(range(2 * EVERY))  # no exchange any more
        assert not agree(local.flat())
    local = Local(rank).start("plain", 12, fragments=12)  # more parts than tensors: nothing is left out or comes twice
    local.take_steps(range(12))
    loop = local.loop
    assert loop.reducer.step == len({tuple(loop._fragment(i)) for i in range(12)} - {()})
    assert sorted(name for i in range(12) for name in loop._fragment(i)) == sorted(dict(local.net.named_parameters()))


@on_ranks(2)
def test_it_resumes_in_mid_interval_bit_for_bit(rank: int, world_size: int) -> None:
    """In mid-interval, with every kind of state; replicas are equal after each outer step."""
    for name in ("plain", "two-bit", "one-bit", "acp-sgd", "top-k", "top-k:share=0.01,code=chunks,warmup_steps=0"):
        n_fragments, cut = 1 + name.endswith("k"), EVERY + 2
        first, again = (Local(rank).start(name, EVERY, momentum_free, fragments=n_fragments) for _ in range(2))
        first.take_steps(range(cut))
        for one, other in ((first.net, again.net), (first.optimizer, again.optimizer), (first.loop, again.loop)):
            other.load_state_dict(copy.deepcopy(one.state_dict()))  # type: ignore[arg-type]
        for local in (first, again):
            local.take_steps(range(cut, 3 * EVERY))
        assert torch.equal(first.flat(), again.flat()), name
        assert n_fragments > 1 or agree(first.flat()), name  # of fragments only the last one's are equal now


@on_ranks(4)
def test_shards_of_fsdp2_are_exchanged_between_nodes(rank: int, world_size: int) -> None:
    """As written by hand, on the shards; and as nodes with whole models, whose ranks take their mean, to rounding."""
    mesh = make_mesh()
    inside, between = mesh.get_group("shard"), mesh.get_group("replicate")
    ours, by_shards, whole = (Sharded(rank, one, optimizer=sgd) for one in (mesh["shard"], mesh["shard"], None))
    loop = gradwire.LocalSgd(ours.net, ours.optimizer, "plain", 2, group=between, timeout_s=100)
    ours.take_steps(range(6))
    loop.close()
    by_hand(by_shards.net, by_shards.take_steps, 1, 2, 0, 3, between)
    assert ours.has_bits_of(by_shards)
    assert all(agree(mine, between) for mine in ours.shards())
    for p in whole.net.parameters():
        p.register_post_accumulate_grad_hook(lambda p: mean_over(p.grad, inside))
    by_hand(whole.net, whole.take_steps, 1, 2, 0, 3, between)
    for sharded, p in zip(ours.net.parameters(), whole.net.parameters(), strict=True):
        torch.testing.assert_close(sharded.full_tensor(), p, rtol=1e-5, atol=1e-5)


def mean_over(tensor: torch.Tensor, group: dist.ProcessGroup) -> None:
    dist.all_reduce(tensor, group=group)
    tensor.div_(group.size())


@on_ranks(2)
def test_misuse_is_named_and_feedback_meets_no_momentum(rank: int, world_size: int) -> None:
    local = Local(rank)
    wrong = ((0, 0, 1), (3, 3, 1), (3, -1, 1), (3, 0, 4), (3, 0, 0), (6, 3, 2), (2.5, 0, 1), (3, 0.5, 1), (3, 0, 1.0))
    for every, delay, fragments in wrong:
        with pytest.raises(gradwire.InvalidArgument, match=r"delay from 0 to every // fragments - 1|whole number"):
            local.start("plain", every, delay=delay, fragments=fragments)
    for decay in (-0.1, 1.1, float("nan")):  # which are no shares
        with pytest.raises(gradwire.InvalidArgument, match="feedback_decay"):
            local.start("top-k", feedback_decay=decay)
    with pytest.raises(gradwire.Unsupported, match="weight is complex"):
        gradwire.LocalSgd(nn.Linear(2, 2, dtype=torch.complex64), local.optimizer, "plain", 3)
    with pytest.raises(gradwire.Unsupported, match="aqgb"):
        local.start("aqgb", 3)
    with pytest.warns(UserWarning, match=r"momentum of 0\.9 do not go together.*is used without"):
        loop = local.start("two-bit", 3, delay=1).loop
    assert not loop.reducer.scheme.error_feedback  # type: ignore[attr-defined]
    local.take_steps(range(2))
    with pytest.raises(gradwire.InvalidArgument, match="exchange is under way: save in the first 1 steps"):
        loop.state_dict()
    with pytest.raises(gradwire.CorruptMessage, match="not the state of a LocalSgd"):
        loop.load_state_dict({"anchors": {}})
    local.take_steps(range(1))
    loop.close()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        local.start("embedded-float", 3).loop.close()
    with torch.no_grad():
        local.net[0].weight.add_(rank)
    local.start(every=1)
    with pytest.raises(gradwire.InvalidArgument, match=r"ranks \[1\] have other parameters than rank 0"):
        local.take_steps(range(1))


@on_ranks(2)
@pytest.mark.parametrize("case", ["skips", "unfrozen"])
def test_ranks_stay_equal_where_steps_are_skipped_or_parameters_unfrozen(rank: int, world_size: int, case: str) -> None:
    local = Local(rank)
    net, optimizer = local.net, local.optimizer
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8)
    net[0].requires_grad_(case != "unfrozen")
    loop = local.start(delay=2 * (case == "unfrozen")).loop
    for step in range(3 * EVERY):
        if step == EVERY + 3:  # under way
            net[0].requires_grad_(True)
        if case == "skips" and rank and step in (0, 3, 4):
            scaler.scale(sum(p.sum() for p in net.parameters()) * torch.inf).backward()
        else:
            scaler.scale(local.loss(step)).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    assert loop.reducer.step == 3
    anchored = dict(zip(dict(net.named_parameters()), loop._anchors.values(), strict=True))
    loop.close()
    for name, mine in (anchored if case == "unfrozen" else dict(net.named_parameters())).items():
        assert agree(mine.detach()), (case, name)


@on_ranks(2)
def test_a_fading_residual_is_top_k_written_by_hand(rank: int, world_size: int) -> None:
    """Against top-k with a fading residual written by hand, in float64, and against no residual at all."""
    n, share, n_outer, fading = 200, 0.05, 12, 0.5

    def given(step: int, of_rank: int) -> torch.Tensor:
        return torch.randn(n, generator=torch.Generator().manual_seed(1000 * step + of_rank))

    def train(decay: float, error_feedback: bool) -> tuple[torch.Tensor, torch.Tensor]:
        parameter = nn.Parameter(torch.zeros(n))
        optimizer = torch.optim.SGD([parameter], lr=1.0)
        net = nn.ParameterList([parameter])
        scheme = schemes.by_name("top-k", share=share, error_feedback=error_feedback)
        loop = gradwire.LocalSgd(net, optimizer, scheme, 1, momentum_free, feedback_decay=decay, timeout_s=100)
        for step in range(n_outer):
            parameter.grad = given(step, rank)
            optimizer.step()
        (residual,) = loop.reducer.state_dict()["state"].get("residuals", {"": torch.zeros(n)}).values()
        loop.close()
        return parameter.detach(), residual

    every = torch.stack([torch.stack([given(step, one) for one in range(world_size)]) for step in range(n_outer)])
    means, left = top_k(every, torch.zeros(world_size, n), round(share * n), fading)
    expected = -means.sum(0)
    parameter, residual = train(fading, True)
    assert torch.allclose(parameter.double(), expected, atol=1e-5)
    assert torch.allclose(residual.double(), left[rank], atol=1e-5)
    whole_residual, none_left, without = train(1.0, True)[0], train(0.0, True)[0], train(1.0, False)[0]
    assert torch.equal(none_left, without)
    assert not torch.allclose(whole_residual.double(), expected, atol=1e-2), "decay changed nothing"


@on_ranks(2)
def test_a_state_is_a_snapshot_and_knows_what_was_unfrozen(rank: int, world_size: int) -> None:
    local = Local(rank)
    local.net[0].requires_grad_(False)
    local.start().take_steps(range(EVERY))
    local.net[0].requires_grad_(True)
    local.take_steps(range(EVERY, 3 * EVERY))
    saved = copy.deepcopy([one.state_dict() for one in (local.net, local.optimizer)])
    state = local.loop.state_dict()
    local.take_steps(range(3 * EVERY, 4 * EVERY))
    local.loop.close()
    for is_frozen in (False, True):
        other = Local(rank)
        other.net[0].requires_grad_(not is_frozen)
        other.start()
        for one, given in zip((other.net, other.optimizer), copy.deepcopy(saved), strict=True):
            one.load_state_dict(given)
        other.loop.load_state_dict(state)
        other.net[0].requires_grad_(True)
        other.take_steps(range(3 * EVERY, 4 * EVERY))
        other.loop.close()
        assert torch.equal(other.flat(), local.flat()), is_frozen


def break_it(rank: int, world_size: int, how: str) -> None:
    scheme = schemes.by_name("embedded-float", bits=7 if how == "mismatch" and rank == 1 else 8)
    local = Local(rank).start(scheme, timeout_s=max(5, patience()))
    local.take_steps(range(EVERY))
    if rank == 1 and how == "death":
        os._exit(7)
    if rank == 1 and how == "codec":
        scheme.collective.codec = None  # type: ignore[attr-defined]
    local.take_steps(range(EVERY))


@pytest.mark.parametrize("how", FAILURES)
def test_what_one_rank_fails_of_is_raised_on_all(how: str) -> None:
    assert_failure_is_told(how, try_ranks(break_it, 3, how, timeout_s=60), "rank 1")


@on_ranks(2)
def test_a_loss_that_is_not_finite_is_seen_by_all(rank: int, world_size: int) -> None:
    """One rank's loss was NaN: every rank sees it, as behind DDP, and none has other parameters than the others."""
    local = Local(rank).start("two-bit")
    first = local.net[0].weight.detach()
    local.take_steps(range(EVERY - 1))
    if rank == 1:
        first.fill_(float("nan"))
    local.take_steps(range(1))
    assert not bool(torch.isfinite(first).all())
    assert agree(first.isnan())
