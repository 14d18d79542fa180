"""Errors name ranks by their number among all, and what is refused or fails leaves nothing behind."""

import copy
import os
import re
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import gradwire
from gradwire import schemes
from gradwire.errors import GradwireError
from ranks import on_ranks, try_ranks

HOWS = {
    "options": ("qsgd", "rank 3: "),
    "ahead": ("qsgd", "ranks 3 and 1 disagree on step|ranks 1 and 3 disagree on step"),
    "closes": ("plain", "rank 3 closed its attachment at step 2, rank 1 did not: .* Backend: rank 1 lost rank 3"),
    "dies": ("qsgd", "rank 1 lost rank 3, which .* Look at the output of rank 3"),
}


def name_ranks(rank: int, world_size: int, how: str) -> str:
    store = dist.distributed_c10d._get_default_store()
    if rank not in (1, 3):
        store.wait(["said"], timedelta(seconds=90))  # rank 0 hosts it
        return ""
    scheme = schemes.by_name(HOWS[how][0], **({"levels": 3} if how == "options" and rank == 3 else {}))
    reducer = gradwire.Reducer(scheme, group=[1, 3], timeout_s=20)
    try:
        for step in range(4):
            if rank == 3 and step == 2:
                if how == "dies":
                    os._exit(9)
                if "closes" in how:
                    reducer.close()
                    return ""
                reducer.step += how == "ahead"
            reducer.all_reduce({"w": torch.ones(5000)}).wait()
    except GradwireError as error:
        return str(error)
    finally:
        if rank == 1:
            store.set("said", "")
    return "no error"


@pytest.mark.parametrize("how", HOWS)
def test_in_a_group_of_some_ranks_errors_name_them_as_all_know_them(how: str) -> None:
    said = try_ranks(name_ranks, 4, how)[1].result
    assert re.search(HOWS[how][1], said), said
    assert "rank 0" not in said


@on_ranks(3)
def test_a_rank_that_has_taken_anothers_place_attaches(rank: int, world_size: int) -> None:
    """Rank 0 makes its group anew, with a process in the place of rank 1 that has never attached."""
    store = dist.distributed_c10d._get_default_store()
    dist.barrier()
    dist.destroy_process_group()
    for life, processes in enumerate(((0, 1), (0, 2))):
        if rank in processes:
            place = processes.index(rank)
            of_life = dist.PrefixStore(f"life {life}", store)
            dist.init_process_group("gloo", store=of_life, rank=place, world_size=2, timeout=timedelta(seconds=60))
            ddp = DistributedDataParallel(nn.Linear(3, 2))
            attachment = gradwire.attach(ddp, torch.optim.SGD(ddp.parameters(), 0.1), "one-bit", timeout_s=20)
            ddp(torch.ones(2, 3)).sum().backward()
            assert attachment.step == 1
            attachment.close()
            dist.destroy_process_group()


@on_ranks(2)
def test_a_mesh_that_was_never_joined_leaves_no_descriptor(rank: int, world_size: int) -> None:
    counts = []
    for _ in range(3):
        counts.append(len(os.listdir("/proc/self/fd")))
        reducer = gradwire.Reducer("qsgd", timeout_s=30)
        if rank == 1:
            os.environ["GRADWIRE_SOCKET_IFNAME"] = "nosuch0"
        with pytest.raises(GradwireError):
            reducer.all_reduce({"w": torch.ones(500)}).wait()
        reducer.close()
        dist.barrier()
        os.environ.pop("GRADWIRE_SOCKET_IFNAME", None)
    assert counts[-1] == counts[1]


Poison = Callable[[dict[str, Any]], Any]
# What is wrong with a state -> scheme, its options, what spoils it.
SPOILT: list[tuple[str, dict[str, Any], Poison]] = [
    ("dgc", {"share": 0.05}, lambda s: s["state"]["momenta"].update(weight=torch.zeros(3))),
    ("one-bit-adam", {"freeze_step": 1}, lambda s: s["state"].update(frozen_at="x")),
    ("slimgc", {"threshold_bytes": 0}, lambda s: s["state"]["residuals"].update(weight=torch.zeros(3))),
    ("one-bit", {}, lambda s: s["state"].update(residuals={"weight": torch.zeros(600).to_sparse()})),
    ("one-bit", {}, lambda s: s.update(step=2**70)),
    ("auto", {}, lambda s: s["state"]["law"].update(candidates={"plain": {}})),
    ("auto", {}, lambda s: s["state"].update(law={})),
    ("auto", {}, lambda s: s["state"].update(carried={"nosuch": torch.zeros(3)})),
    ("auto", {}, lambda s: s["state"].update(carried={"weight": torch.zeros(3)})),
    ("LocalSgd", {}, lambda s: s["outer"].update(param_groups=[])),
    ("LocalSgd", {}, lambda s: s["outer"].pop("state")),
    ("LocalSgd", {}, lambda s: s["reducer"]["state"].update(residuals={"weight": torch.zeros(3)})),
]


@on_ranks(2)
def test_a_state_that_is_refused_changes_nothing(rank: int, world_size: int) -> None:
    torch.set_printoptions(threshold=10_000, precision=9)
    for name, options, poison in SPOILT:
        model: nn.Module = nn.Linear(20, 30)
        ddp = DistributedDataParallel(model)  # which makes the ranks equal
        adam = "adam" in name
        optimizer = torch.optim.AdamW(model.parameters()) if adam else torch.optim.SGD(model.parameters(), 0.1)
        loop: Any
        if name == "LocalSgd":
            loop = gradwire.LocalSgd(model, optimizer, "one-bit", 1, gradwire.doors.local_sgd.average, timeout_s=100)
        else:
            loop = gradwire.attach(ddp, optimizer, name, timeout_s=100, **options)
        called = model if name == "LocalSgd" else ddp
        saved: Any = None
        for step in range(5):
            if step == 3:
                saved = copy.deepcopy(loop.state_dict())
            optimizer.zero_grad()
            called(torch.ones(4, 20)).square().mean().backward()
            optimizer.step()
        before = repr(loop.state_dict())
        poison(saved)
        with pytest.raises(GradwireError):
            loop.load_state_dict(saved)
        assert repr(loop.state_dict()) == before, (name, options)
        loop.close()
