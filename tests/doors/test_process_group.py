"""A process group "gradwire" and `gradwire.all_reduce`: what torch.distributed is asked for goes through a scheme."""

import os
import threading
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import _functional_collectives as functional
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import gradwire
from gradwire.core.bucket import local_of
from ranks import bits_of, on_ranks, patience, try_ranks

LOSSY = "gcomp:importance=uniform,bits=7"
N = 40_000  # elements: 64 KiB of 16-bit floats and more


def restart(backend: str, timeout_s: float = 100) -> None:
    """The default group anew, over the store of the old one."""
    store = dist.PrefixStore(backend, dist.distributed_c10d._get_default_store())
    place = {"rank": dist.get_rank(), "world_size": dist.get_world_size()}
    dist.barrier()  # on a busy machine ranks come here half a minute apart, and the new group's limit may be short
    dist.destroy_process_group()
    dist.init_process_group(backend, store=store, timeout=timedelta(seconds=timeout_s), **place)


def values(rank: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(N, generator=torch.Generator().manual_seed(rank)).to(dtype)


def reduced(scheme: str, op: str, tensor: Tensor, group: Any = None) -> Tensor:
    """The oracle: a Reducer's."""
    reducer = gradwire.Reducer(scheme, group, op=op, timeout_s=100)
    result = tensor.clone()
    reducer.all_reduce({"": result}).wait()
    reducer.close()
    return result


def lanes() -> int:
    return sum(thread.name == "gradwire-lane" for thread in threading.enumerate())


@on_ranks([2, 3], timeout_s=60)
def test_large_floats_have_a_reducers_bits_and_all_else_gloos(rank: int, world_size: int) -> list[Tensor]:
    gradwire.register_backend(LOSSY)
    restart("gradwire")
    gloo = dist.new_group(backend="gloo")
    found = []
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        for op, name in ((dist.ReduceOp.SUM, "sum"), (dist.ReduceOp.AVG, "mean")):
            given = values(rank, dtype)
            expected = reduced(LOSSY, name, given)
            others = given.view(200, -1).t().clone().t()  # not in rows
            works = [dist.all_reduce(tensor, op, async_op=True) for tensor in (given, others)]
            assert bits_of(works[1].get_future().wait()[0]) == bits_of(expected)
            works[0].wait()
            assert works[0].is_completed()
            assert bits_of(given) == bits_of(others) == bits_of(expected), (dtype, name)
            found.append(given)
    asked = functional.all_reduce(values(rank), "sum", dist.group.WORLD)
    assert bits_of(asked + 0) == bits_of(found[0])
    plainly = values(rank)
    dist.all_reduce(plainly, group=gloo)
    assert not torch.equal(plainly, found[0])  # 7 bits were sent
    for given, op in (
        (values(rank).double(), dist.ReduceOp.SUM),
        (values(rank).long(), dist.ReduceOp.SUM),
        (values(rank), dist.ReduceOp.MAX),
        (values(rank)[: N // 4], dist.ReduceOp.SUM),
    ):
        mine, theirs = given.clone(), given.clone()
        dist.all_reduce(mine, op)
        dist.all_reduce(theirs, op, group=gloo)
        assert torch.equal(mine, theirs)
    everyones: list[Any] = [None] * world_size
    dist.all_gather_object(everyones, rank)
    assert everyones == list(range(world_size))
    dist.barrier()
    return found


@on_ranks(2, timeout_s=60)
def test_what_is_left_to_gloo_waits_for_no_tensor_that_gloo_frees(rank: int, world_size: int) -> None:
    """Ended in a deadlock within fifty rounds: Gloo's thread and Python's lock."""
    gradwire.register_backend()
    restart("gradwire")
    mine = [torch.full((2,), 10.0 * rank + i) for i in range(2)]
    for _ in range(200):
        for _ in range(2):
            dist.all_reduce(torch.ones(2), async_op=True)  # its tensor is Gloo's alone
        columns, row, both = ([torch.zeros(2) for _ in range(2)] for _ in range(3))
        dist.all_gather(columns, mine[0])
        dist.reduce_scatter(row[0], mine)
        dist.all_to_all_single(both[0], torch.cat([tensor[:1] for tensor in mine]))
        with dist._coalescing_manager():
            for tensor in both[1:]:
                dist.all_reduce(tensor)
        shared = mine[1].clone()
        dist.broadcast(shared, 1)
        (dist.send if rank else dist.recv)(row[1] if rank == 0 else mine[0], 1 - rank)
        dist.barrier()
        assert [column[0].item() for column in columns] == [0, 10]
        assert (row[0][0].item(), shared[0].item()) == (10 + 2 * rank, 11)
        assert both[0].tolist() == [rank, 10 + rank]
        assert rank or row[1][0] == 10


def build() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(160, 300), nn.ReLU(), nn.Linear(300, 160))


def train(model: nn.Module, rank: int, has_hook: bool = False) -> list[Tensor]:
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    attachment = gradwire.attach(model, optimizer, LOSSY, timeout_s=100) if has_hook else None
    for step in range(4):
        optimizer.zero_grad()
        batch = torch.randn(8, 160, generator=torch.Generator().manual_seed(10 * step + rank))
        (model(batch) - batch).square().mean().backward()
        optimizer.step()
    if attachment is not None:
        attachment.close()
    return [local_of(parameter.detach()).clone() for parameter in model.parameters()]


@on_ranks(4, timeout_s=90)
def test_ddp_trains_unchanged_with_the_hooks_bits(rank: int, world_size: int) -> list[Tensor]:
    """DDP divides before it sums, the hook afterwards: by a power of two that is the same."""
    hooked = train(DistributedDataParallel(build(), bucket_cap_mb=0.1), rank, has_hook=True)
    plainly = train(DistributedDataParallel(build(), bucket_cap_mb=0.1), rank)
    gradwire.register_backend(LOSSY)
    restart("gradwire")
    found = train(DistributedDataParallel(build(), bucket_cap_mb=0.1), rank)
    largest = max(range(4), key=lambda i: found[i].numel())
    assert bits_of(found[largest]) == bits_of(hooked[largest]) != bits_of(plainly[largest])
    return found


@on_ranks(4, timeout_s=90)
def test_hsdp_sums_between_nodes_through_the_group(rank: int, world_size: int) -> None:
    def shard() -> list[Tensor]:
        model = build()
        fully_shard(model, mesh=init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard")))
        return train(model, rank)

    expected = shard()
    gradwire.register_backend()  # exact, and a sum of two has one order
    restart("gradwire")
    before = lanes()
    found = shard()
    assert lanes() > before
    for mine, theirs in zip(found, expected, strict=True):
        assert bits_of(mine) == bits_of(theirs)


@on_ranks(3, timeout_s=60)
def test_subgroups_and_their_end(rank: int, world_size: int) -> None:
    gradwire.register_backend(LOSSY)
    pairs = [dist.new_group([0, 1], backend="gradwire"), dist.new_group([2, 0], backend="gradwire")]
    for group, members in zip(pairs, ([0, 1], [2, 0]), strict=True):
        if rank in members:
            mine, given = values(rank), values(rank)
            dist.all_reduce(mine, group=group)
            assert bits_of(mine) == bits_of(reduced(LOSSY, "sum", given, group))
            called = values(rank)
            gradwire.all_reduce(called, group, LOSSY)
            assert bits_of(called) == bits_of(mine)
    everywhere = values(rank)[:100]
    expected = reduced(LOSSY, "mean", everywhere)
    gradwire.all_reduce(everywhere, scheme=LOSSY, op=dist.ReduceOp.AVG)  # over Gloo's own group, of any size
    assert bits_of(everywhere) == bits_of(expected)
    assert lanes() > 1
    group = None
    pairs.clear()
    dist.barrier()
    restart("gloo")
    assert lanes() == 0


def fail_in_ddp(rank: int, world_size: int, fault: str) -> None:
    gradwire.register_backend(LOSSY)
    restart("gradwire", timeout_s=5 * patience())
    ddp = DistributedDataParallel(build())
    for step in range(3):
        loss = ddp(torch.randn(8, 160)).square().mean()
        if (rank, step) == (1, 1):
            if fault == "dies":
                os._exit(9)
            dist.all_reduce(torch.zeros(N))  # the others are in DDP
        loss.backward()


def fail_in_a_call(rank: int, world_size: int, fault: str) -> None:
    gradwire.register_backend(LOSSY)
    restart("gradwire", timeout_s=3 * patience())
    dist.all_reduce(values(rank))
    if fault == "stays away" and rank == 1:
        threading.Event().wait(9 * patience())
        return
    work = dist.all_reduce(torch.zeros(N + 8 * rank), async_op=True)
    with pytest.raises(RuntimeError, match=r"RankMismatch|PeerLost"):
        work.get_future().wait()
    work.wait()


@pytest.mark.parametrize(
    ("case", "fault", "error"),
    [
        (fail_in_ddp, "dies", gradwire.PeerLost),
        (fail_in_ddp, "gives another size", gradwire.RankMismatch),
        (fail_in_a_call, "gives another size", gradwire.RankMismatch),
        (fail_in_a_call, "stays away", gradwire.PeerLost),
    ],
)
def test_errors_have_their_types_on_all_ranks(case: Any, fault: str, error: type[Exception]) -> None:
    for rank, outcome in enumerate(try_ranks(case, 3, fault, timeout_s=60)):
        assert (rank == 1 and fault in ("dies", "stays away")) or type(outcome.error) is error, (rank, outcome)


def test_what_needs_names_or_an_optimizer_is_refused() -> None:
    for scheme in ("one-bit", "acp-sgd", "aqgb", "auto", "one-bit-adam"):
        with pytest.raises(gradwire.Unsupported, match=scheme):
            gradwire.register_backend(scheme)
    with pytest.raises(gradwire.InvalidArgument, match="importance=uniform"):
        gradwire.register_backend("gcomp")
    with pytest.raises(gradwire.InvalidArgument, match="init_process_group"):
        gradwire.all_reduce(torch.zeros(3))
    with pytest.raises(gradwire.InvalidArgument, match="float64"):
        gradwire.all_reduce(torch.zeros(3, dtype=torch.float64))
    with pytest.raises(gradwire.InvalidArgument, match="MAX"):
        gradwire.all_reduce(torch.zeros(3), op=dist.ReduceOp.MAX)
