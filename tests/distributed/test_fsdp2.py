"""FSDP2 inside a node and gradwire between nodes: with `plain` the bits of native HSDP, whatever its policies."""

import contextlib
import copy
import os
import re
import signal
import time
from typing import Any
from unittest.mock import Mock

import pytest
import reducing_cases as cases
import torch
import torch.distributed as dist
from fsdp2_cases import Sharded, batch_of, make_mesh, sgd
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard

import gradwire
from gradwire import schemes
from gradwire.core.bucket import Slot, local_of
from gradwire.schemes.gcomp.importance import QuantisationMetric
from ranks import agree, on_ranks, patience, try_ranks
from small_training import flat

CASES = [
    "", "clip", "noreshard", "mixed32", "offload", "bf16", "micro sync", "micro all-reduce", "compile", "ordinary", "reentrant",
]  # fmt: skip


def between(mesh: DeviceMesh) -> dict[str, Any]:
    """Options of `attach`: between the nodes, in small buckets."""
    return {"group": mesh.get_group("replicate"), "bucket_mb": 0.01}


def start(rank: int, mesh: DeviceMesh, scheme: Any = "plain", case: str = "", **options: Any) -> Sharded:
    return Sharded(rank, mesh["shard"], case, scheme, **{**between(mesh), **options})


@on_ranks(4)
def test_plain_between_nodes_gives_the_bits_of_native_hsdp(rank: int, world_size: int) -> None:
    mesh = make_mesh()
    for case in CASES:
        native = Sharded(rank, mesh, case).take_steps(range(5))
        ours = start(rank, mesh, case=case, bucket_dtype=torch.bfloat16 if "bf16" in case else None)
        assert ours.take_steps(range(5)).state.step == 5, case
        assert ours.has_bits_of(native), case


@on_ranks(4)
def test_accumulation_without_no_sync_costs_a_step_each_and_is_right(rank: int, world_size: int) -> None:
    """Every backward pass then is a step of the scheme, and sends what is new: the sum of both means, as under native HSDP."""
    mesh = make_mesh()
    native = Sharded(rank, mesh, optimizer=sgd).take_steps(range(5), 2)
    ours = start(rank, mesh, optimizer=sgd).take_steps(range(5), 2)
    assert ours.state.step == 10
    torch.testing.assert_close(ours.shards(), native.shards(), rtol=1e-5, atol=1e-6)


@on_ranks(4)
def test_float16_reductions_differ_from_native_hsdp_by_their_rounding(rank: int, world_size: int) -> None:
    """torch divides float16 in two steps around its sums, gradwire before them: equal to the dtype's rounding."""
    mesh = make_mesh()
    native = Sharded(rank, mesh, "fp16", optimizer=sgd)
    begin = native.shards()
    native.take_steps(range(5))
    ours = start(rank, mesh, case="fp16", optimizer=sgd, bucket_dtype=torch.float16).take_steps(range(5))
    for mine, theirs, before in zip(ours.shards(), native.shards(), begin, strict=True):
        moved = float((theirs - before).abs().max()) if theirs.numel() else 0.0
        torch.testing.assert_close(mine, theirs, rtol=0, atol=4 * 2.0**-11 * moved + 1e-7)


@on_ranks(4)
def test_a_native_hsdp_model_is_taken_over_as_it_is(rank: int, world_size: int) -> None:
    """A native HSDP model gets the `attach` line only; after `close` it all-reduces by itself again."""
    mesh = make_mesh()
    for case in ("clip", "micro sync", "micro all-reduce", "noreshard", "unfrozen"):
        native, ours = Sharded(rank, mesh, case), Sharded(rank, mesh, case)
        for one in (native, ours):
            one.net.blocks[0].requires_grad_(case != "unfrozen")
            if one is ours:
                one.attach(bucket_mb=0.01, timeout_s=100)
            one.take_steps(range(2))
            one.net.blocks[0].requires_grad_(True)
            one.take_steps(range(2, 5))
            if one is ours:
                assert one.state.step == 5
                assert one.state.stats()["bytes_sent"] > 0
                one.state.close()
            one.take_steps(range(5, 7))
        assert "Replicate" in str(next(ours.net.parameters()).placements)
        assert ours.has_bits_of(native), case


@on_ranks(4)
def test_every_reducing_scheme_serves_shards_resumes_and_shows_a_nan_to_all(rank: int, world_size: int) -> None:
    mesh = make_mesh()
    x, y = batch_of(rank, 0)
    for name in cases.STATEFUL:
        options = {} if name == "gcomp" else cases.OPTIONS.get(name, {})  # gcomp reads the optimizer here
        options = schemes.as_published(name, options)  # compressed from the first step on, beside AdamW too
        first, again = (start(rank, mesh, schemes.by_name(name, **options)) for _ in range(2))
        first.take_steps(range(3))
        for one, other in ((first.net, again.net), (first.optimizer, again.optimizer), (first.state, again.state)):
            other.load_state_dict(copy.deepcopy(one.state_dict()))
        for one in (first, again):
            one.take_steps(range(3, 5))
        assert all(agree(shard, mesh.get_group("replicate")) for shard in first.shards()), name
        assert again.has_bits_of(first), name
        loss = nn.functional.cross_entropy(first.net(x).flatten(0, 1), y.flatten())
        (loss * (float("nan") if rank == 2 else 1.0)).backward()
        assert not any(local_of(p.grad).isfinite().all() for p in first.net.head.parameters()), name


@on_ranks(2)
def test_importance_of_shards_is_that_of_the_whole(rank: int, world_size: int) -> None:
    found = []  # of whole parameters, and of shards
    for is_sharded in (False, True):
        torch.manual_seed(0)
        net: nn.Module = nn.Linear(33, 50)
        if is_sharded:
            fully_shard(net, mesh=init_device_mesh("cpu", (world_size,)))
        optimizer = torch.optim.AdamW(net.parameters(), 1e-2)
        for step in range(3):
            net(torch.randn(8, 33, generator=torch.Generator().manual_seed(step))).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        slots = [Slot("", local_of(parameter).shape, parameter) for parameter in net.parameters()]
        found.append([torch.zeros(slot.shape, dtype=torch.uint8) for slot in slots])
        for slot, importance in zip(slots, found[-1], strict=True):
            QuantisationMetric(optimizer, 2).write_importance([slot], [0], importance.view(-1))
    for whole, shard in zip(*found, strict=True):
        assert shard.max() > 0
        assert torch.equal(shard, whole.chunk(world_size)[rank])


@on_ranks(4)
def test_muon_beside_adamw_is_as_near_native_hsdp_as_another_order_of_summation(rank: int, world_size: int) -> None:
    """GComp reads Muon's momentum, of a shard."""
    losses = []
    for scheme in (None, "gcomp"):
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(33, 50), nn.ReLU(), nn.Linear(50, 33))
        fully_shard(net, mesh=make_mesh())
        matrices = [parameter for parameter in net.parameters() if parameter.ndim == 2]
        rest = [parameter for parameter in net.parameters() if parameter.ndim != 2]
        optimizers = [torch.optim.Muon(matrices, 0.02), torch.optim.AdamW(rest, 1e-3)]
        state = scheme and gradwire.attach(net, optimizers, scheme, timeout_s=20)
        for step in range(6):
            x = torch.randn(8, 33, generator=torch.Generator().manual_seed(10 * step + rank))
            loss = (net(x) - x).square().mean()
            loss.backward()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
        losses.append(loss.detach())
        if state:
            assert 0.2 < state.stats()["ratio"] < 0.9
            state.close()
    torch.testing.assert_close(losses[1], losses[0], rtol=1e-3, atol=0)


@on_ranks(4)
def test_the_backward_pass_waits_for_no_mean(rank: int, world_size: int) -> None:
    ours = start(rank, make_mesh())
    state, events = ours.state, []
    reduce = state.scheme.reduce

    def slowly(bucket: Any) -> torch.futures.Future:
        if bucket.index == 0:
            state.communicator.submit(time.sleep, 0.5)
        done = reduce(bucket)
        done.add_done_callback(lambda _: events.append("mean"))
        return done

    state.scheme.reduce = slowly
    ours.net.blocks[0].register_full_backward_pre_hook(lambda *_: events.append("first layer"))
    ours.take_steps([0])
    assert events.index("first layer") < events.index("mean")


def break_it(rank: int, world_size: int, how: str) -> None:
    bits = 7 if how == "mismatch" and rank >= 2 else 8
    timeout_s = 100 if how == "death" else max(5, patience())
    ours = start(rank, make_mesh(), schemes.by_name("embedded-float", bits=bits), timeout_s=timeout_s)
    if how == "codec" and rank == 1:
        ours.state.scheme.collective.codec = None
    ours.take_steps(range(2))
    if how == "death" and rank == 3:  # in the middle of a backward pass
        ours.net.blocks[1].register_full_backward_pre_hook(lambda *_: os.kill(os.getpid(), signal.SIGKILL))
    ours.take_steps(range(2, 5)).state.close()


@pytest.mark.parametrize("how", cases.FAILURES)
def test_what_one_rank_fails_of_is_named_on_all(how: str) -> None:
    outcomes = try_ranks(break_it, 4, how, timeout_s=60)
    error, _ = cases.FAILURES[how]
    if how == "death":
        assert outcomes.pop(3).exit_code == -signal.SIGKILL
    if how == "codec":  # is said to the other node, where it is waited for
        outcomes = outcomes[1::2]
        assert re.search("rank [01] raised", str(outcomes[1].error))
    for rank, outcome in enumerate(outcomes):
        # Inside the node the shards are torch's to gather, and so is the error of the rank beside the dead one.
        is_torchs = how == "death" and rank == 2 and isinstance(outcome.error, RuntimeError)
        assert isinstance(outcome.error, error) or is_torchs, (rank, outcome)


@on_ranks(4)
def test_what_this_door_cannot_serve_is_refused_by_name(rank: int, world_size: int) -> None:
    mesh = make_mesh()
    ours = Sharded(rank, mesh["shard"])
    for options, words in [
        ({}, "which ranks hold the same shard"),
        ({"group": mesh.get_group("shard")}, "hold other shards"),
        ({"group": list(range(4))}, "hold other shards"),
        ({"group": mesh.get_group("replicate"), "op": "max"}, "op is one of"),
    ]:
        with pytest.raises(gradwire.InvalidArgument, match=words):
            ours.attach(**options)
    for name in sorted(name for name in schemes.names() if schemes.owns_step(name)):
        with pytest.raises(gradwire.Unsupported, match=name):
            ours.attach(name, **between(mesh))
    ours.attach(**between(mesh))
    with pytest.raises(gradwire.Unsupported, match="close\\(\\) the attachment"):
        ours.attach(**between(mesh))
    ours.state.close()
    ours.attach(**between(mesh))
    ours.state.close()
    ours.net.spare.weight.register_post_accumulate_grad_hook(lambda _: None)
    with pytest.raises(gradwire.Unsupported, match=r"spare\.weight has a post-accumulate hook"):
        ours.attach(**between(mesh))
    dist.barrier()  # rank 0 holds the store, and waits for the ranks of its own group only


@on_ranks(2)
def test_a_bare_module_needs_no_ddp(rank: int, world_size: int) -> None:
    """A module that nothing else reduces: replicas stay equal, and a parameter used on one rank only is stepped on all."""
    torch.manual_seed(1)
    net = nn.ModuleDict({"body": nn.Linear(9, 9), "extra": nn.Linear(9, 9)})
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    hooked = nn.Sequential(net["body"], net["extra"])
    state = gradwire.attach(hooked, optimizer, "plain", timeout_s=100)
    x = torch.randn(4, 9, generator=torch.Generator().manual_seed(rank))
    (net["body"](x) if rank else hooked(x)).square().mean().backward()
    gradients = torch.cat([p.grad.flatten() for p in net.parameters() if p.grad is not None])
    assert gradients.numel() == sum(p.numel() for p in net.parameters())
    assert agree(gradients)
    assert net["extra"].weight.grad.abs().sum() > 0  # type: ignore[union-attr,operator]
    # A pass that was given up before anything was sent does no harm.
    optimizer.zero_grad()
    handle = net["extra"].register_full_backward_pre_hook(Mock(side_effect=ZeroDivisionError))  # type: ignore[operator]
    with pytest.raises(ZeroDivisionError):
        hooked(x).square().mean().backward()
    handle.remove()
    optimizer.zero_grad()
    hooked(x).square().mean().backward()
    assert state.step == 2
    hooked.requires_grad_(False)
    net["body"].requires_grad_(True)
    state.close()
    state = gradwire.attach(hooked, optimizer, "plain", timeout_s=100)
    for is_frozen in (True, False):  # unfrozen later: as if it had been trained all along
        net["extra"].requires_grad_(not is_frozen)
        optimizer.zero_grad()
        hooked(x).square().mean().backward()
        optimizer.step()
    state.close()
    assert agree(flat(net))
    torch.manual_seed(rank)
    other = nn.Linear(3, 3)
    with pytest.raises(gradwire.InvalidArgument, match=r"ranks \[1\] have other parameters than rank 0"):
        gradwire.attach(other, torch.optim.SGD(other.parameters(), 0.1), "plain", timeout_s=100)


class Heads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.trunk, self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 1), nn.Linear(4, 1)
        self.trunk.weight = nn.Parameter(self.trunk.weight.detach().t())  # whose memory is column by column

    def forward(self, x: torch.Tensor, head: str) -> torch.Tensor:
        return getattr(self, head)(self.trunk(x))


@on_ranks(2)
def test_what_a_pass_does_not_use_keeps_what_earlier_ones_added_up(rank: int, world_size: int) -> None:
    ddp, net, x = nn.parallel.DistributedDataParallel(Heads(), find_unused_parameters=True), Heads(), torch.ones(2, 4)
    ours = gradwire.attach(net, torch.optim.SGD(net.parameters(), 0.1), "plain", timeout_s=100)
    for heads, without in (("ab", "a"), ("ab", ""), ("ba", "b")):
        for wrapped, door in ((ddp, ddp), (net, ours)):
            wrapped.zero_grad()
            for head in heads:
                with door.no_sync() if head in without else contextlib.nullcontext():
                    wrapped((rank + 1.0) * x, head).sum().backward()
        for theirs, mine in zip(ddp.parameters(), net.parameters(), strict=True):
            torch.testing.assert_close(mine.grad, theirs.grad)
    place = next(b.places["trunk.weight"] for b, _ in ours._homes if "trunk.weight" in b.places)
    assert place.stride() == net.trunk.weight.stride(), "as schemes read parameters and moments"
    ours.close()
