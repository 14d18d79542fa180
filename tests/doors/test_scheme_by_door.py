"""Which scheme works behind which door: the table of docs/schemes.md, and every cell of it tried."""

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import gradwire
from gradwire import schemes
from gradwire.core.bucket import local_of
from ranks import agree, run_ranks

# Door: what a user calls.
DOORS = {
    "ddp": "`attach(ddp, ...)`",
    "fsdp2": "`attach(hsdp, ...)`, `group=`",
    "two-level": "`TwoLevel(scheme)`",
    "local-sgd": "`LocalSgd(...)`",
    "reducer": "`Reducer(...)`",
}
_OWNS_STEP = "steps parameters itself, inside DDP's model"
_READS_OPTIMIZER = 'with `importance="none"`'
_UNDER_ADAM = "under Adam and AdamW"
_EXCHANGES_MOMENTA = "exchanges the momenta of DDP's Adam"
_UNDER_MOMENTUM = "under Adam, Muon and SGD with momentum"
_READS_MOMENTA = "reads the momentum of the model's optimizer"
_WATCHES_DDP = "times the steps of a DDP model"
_DIFFERS = "its replicas differ by design"


def refusal(scheme: str, door: str) -> str | None:
    """Why a scheme, with its options as they are, is refused behind a door; None: it works."""
    if scheme == "power-momentum":
        return _UNDER_MOMENTUM if door in ("ddp", "fsdp2") else _READS_MOMENTA
    if schemes.needs_momenta(scheme):
        return _UNDER_ADAM if door == "ddp" else _EXCHANGES_MOMENTA
    if door == "ddp":
        return None
    if schemes.owns_step(scheme):
        return _OWNS_STEP
    if scheme == "auto":
        return _WATCHES_DDP
    if scheme == "periodic" and door in ("two-level", "local-sgd"):
        return _DIFFERS
    if scheme == "gcomp" and door in ("local-sgd", "reducer"):
        return _READS_OPTIMIZER
    return None


def markdown() -> str:
    rows = [f"| scheme | {' | '.join(DOORS.values())} |", f"|---|{'---|' * len(DOORS)}"]
    for scheme in schemes.names():
        cells = [refusal(scheme, door) or "yes" for door in DOORS]
        if set(cells) == {"yes"}:
            continue
        if len(set(cells[1:])) == 1 and cells[1] == _OWNS_STEP:
            cells = [cells[0], f"no: {_OWNS_STEP}", "no", "no", "no"]
        rows.append(f"| `{scheme}` | {' | '.join(cells)} |")
    rows.append(f"| all others | {' | '.join(['yes'] * len(DOORS))} |")
    return "\n".join(rows)


def test_the_docs_show_the_table() -> None:
    assert markdown() in (Path(__file__).parents[2] / "docs" / "schemes.md").read_text()


def make(scheme: str) -> schemes.Scheme:
    return schemes.by_name(scheme, **({"aggregator": "process-group"} if scheme == "homomorphic" else {}))


def use(scheme: str, door: str, rank: int) -> None:
    """Two steps of a small model; "fsdp2" is FSDP2 on two nodes of two, "bare" the same door without FSDP2."""
    torch.manual_seed(0)
    model: Any = nn.Sequential(nn.Linear(8, 12), nn.ReLU(), nn.Linear(12, 3))
    options: dict[str, Any] = {}
    if door in ("ddp", "two-level"):
        model = DistributedDataParallel(model)
    elif door == "fsdp2":
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
        fully_shard(model, mesh=mesh["shard"])
        options["group"] = mesh.get_group("replicate")
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    made = schemes.TwoLevel(make(scheme), 2) if door == "two-level" else make(scheme)
    state: Any
    if door == "local-sgd":
        state = gradwire.LocalSgd(model, optimizer, made, every=1, timeout_s=100)
    elif door == "reducer":
        state = gradwire.Reducer(made, timeout_s=100)
    else:
        state = gradwire.attach(model, optimizer, made, timeout_s=100, **options)
    for step in range(2):
        optimizer.zero_grad()
        x = torch.randn(4, 8, generator=torch.Generator().manual_seed(2 * step + rank))
        model(x).square().mean().backward()
        if door == "reducer":
            state.all_reduce({name: p.grad for name, p in model.named_parameters()}).wait()
        optimizer.step()
    shards = [local_of(p.detach()) for p in model.parameters()]
    assert all(bool(shard.isfinite().all()) for shard in shards)
    if door == "fsdp2":
        assert sum(shard.numel() for shard in shards) < 8 * 12 + 12 + 12 * 3 + 3, "no parameter is sharded"
        # Who holds the same shard holds the same values, but where a scheme lets them drift.
        assert scheme == "periodic" or all(agree(shard, mesh.get_group("replicate")) for shard in shards), scheme
    state.close()


def try_all(rank: int, world_size: int, door: str) -> None:
    warnings.simplefilter("ignore")
    for scheme in schemes.names():
        if refusal(scheme, "fsdp2" if door == "bare" else door) is None:
            use(scheme, door, rank)
        else:
            with pytest.raises((gradwire.Unsupported, gradwire.InvalidArgument), match=rf"{scheme}|importance="):
                use(scheme, door, rank)


@pytest.mark.parametrize("door", [*DOORS, "bare"])
def test_every_scheme_works_behind_a_door_or_is_refused_by_name(door: str) -> None:
    run_ranks(try_all, 4 if door == "fsdp2" else 2, door)
