"""update="owner": the same bits as the step on every rank, with a share of the optimizer's state on each."""

import copy
import logging
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import gradwire
from gradwire.errors import InvalidArgument, RankMismatch, Unsupported
from gradwire.schemes.slimgc import SlimGC
from gradwire.schemes.slimgc.threshold import NEVER
from ranks import agree, on_ranks
from small_training import MakeOptimizer, Training, batch_of

OPTIMIZERS: dict[str, MakeOptimizer] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=1e-3),
    "nesterov": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True),
    "adam": lambda p: torch.optim.Adam(p, lr=1e-2, weight_decay=1e-3),
    "adamw": lambda p: torch.optim.AdamW(p, lr=1e-2),
    "amsgrad": lambda p: torch.optim.Adam(p, lr=1e-2, amsgrad=True),
}
OPTIONS: dict[str, Any] = {"codec": "one-bit", "pull": "raw", "group_elements": 200}


class Model(nn.Module):
    """Sizes that no number of ranks divides, and a single value that lies with one rank alone."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(20, 31), nn.Tanh(), nn.Linear(31, 29), nn.Tanh(), nn.Linear(29, 3))
        self.gain = nn.Parameter(torch.tensor(1.0))

    def forward(self, inputs: Tensor) -> Tensor:
        out: Tensor = self.layers(inputs) * self.gain
        return out


def model() -> Model:
    torch.manual_seed(1)
    return Model()


def loss_of(module: nn.Module, rank: int, step: int) -> Tensor:
    return (module(batch_of(rank, step)) - 1).square().mean()


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.01)


def start(rank: int, scheme: SlimGC, optimizer: MakeOptimizer = adamw, **ddp: Any) -> Training:
    return Training(rank, scheme, optimizer, model, loss_of, {"bucket_cap_mb": 0.003, **ddp}, timeout_s=100)


def whole_state(optimizer: torch.optim.Optimizer, ddp: nn.Module) -> list[Tensor]:
    found = []
    for parameter in ddp.parameters():
        state = optimizer.state[parameter]
        found += [torch.as_tensor(state[key]).clone() for key in sorted(state) if state[key] is not None]
    return found


def train(
    rank: int, name: str, case: str, update: str, threshold_bytes: int | None
) -> tuple[list[Tensor], dict[str, Any]]:
    clips: dict[str, Any] = {"max_grad_value": 0.01} if case == "clipping" and update == "owner" else {}
    scheme = SlimGC(**OPTIONS, **clips, update=update, threshold_bytes=threshold_bytes, warmup_steps=4, drift_every=0)
    training = start(rank, scheme, OPTIMIZERS[name], gradient_as_bucket_view=case == "view")
    ddp, optimizer, attachment = training.ddp, training.optimizer, training.attachment
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=20) if case == "schedule" else None
    seen: list[Tensor] = []
    for step in range(8):
        optimizer.zero_grad()
        if case == "accumulation":
            with ddp.no_sync():
                loss_of(ddp, rank, 100 + step).backward()
        loss = loss_of(ddp, rank, step)
        (loss * torch.inf if case == "non-finite" and (rank, step) == (1, 6) else loss).backward()
        if case == "clipping" and update == "worker":
            torch.nn.utils.clip_grad_value_(ddp.parameters(), 0.01)
        optimizer.step()
        if scheduler is not None:
            scheduler.step()
        seen += [loss.detach(), *(p.detach().clone() for p in ddp.parameters())]
    stats = attachment.stats()
    attachment.switch("plain")  # which gives the optimizer its whole state back
    seen += whole_state(optimizer, ddp)
    training.take_steps([8])
    seen += [p.detach().clone() for p in ddp.parameters()]
    attachment.close()
    return seen, stats


@pytest.mark.parametrize("world_size", [1, 2, 3])
@on_ranks()
def test_the_step_at_the_owner_has_the_bits_of_the_step_on_every_rank(rank: int, world_size: int) -> None:
    # Measured times decide the table: without clocks in it, two runs can be compared.
    SlimGC._send_alone = lambda self, step, values, mode: lambda: (1e-3, 1e-4) if mode else (4e-6 * values.numel(), 0.0)  # type: ignore[method-assign]
    cases: list[tuple[str, str, int | None]] = [(name, "plain", 0) for name in OPTIMIZERS]
    cases += [("adamw", case, 300) for case in ("schedule", "accumulation", "clipping", "view", "non-finite")]
    cases += [("adam", "plain", None), ("momentum", "plain", NEVER)]
    for name, case, threshold_bytes in cases:
        expected, _ = train(rank, name, case, "worker", threshold_bytes)
        found, stats = train(rank, name, case, "owner", threshold_bytes)
        assert len(found) == len(expected)
        for index, (a, b) in enumerate(zip(found, expected, strict=True)):
            finite = ~b.isnan()
            assert torch.equal(a.isnan(), ~finite), (name, case, index)
            assert torch.equal(a[finite].view(torch.int32), b[finite].view(torch.int32)), (name, case, index)
        assert bool(found[-2].isnan().any()) == (case == "non-finite" and world_size > 1)
        if world_size > 1 and name.startswith("adam") and threshold_bytes == 0:
            n_values = sum(p.numel() for p in Model().parameters())
            assert 0.9 * 8 * n_values / world_size < stats["sharded_state_bytes"] < 1.1 * 8 * n_values / world_size + 80
        if threshold_bytes == NEVER or world_size == 1:
            assert stats["sharded_state_bytes"] == 0


def check_resumption(rank: int, world_size: int) -> None:
    """Saved on every rank and loaded into a new model, whose buckets lie otherwise at first, a run goes on bit by bit."""

    def begin() -> Training:
        return start(rank, SlimGC("raw", pull="raw", update="owner", threshold_bytes=300))

    whole = begin()
    whole.take_steps(range(4))
    saved = whole.state()
    whole.take_steps(range(4, 7))
    expected = whole.flat()
    good = whole.attachment.state_dict()
    name = next(iter(good["state"]["stepping"]["shards"]))
    entry = good["state"]["stepping"]["shards"][name]
    for bad in ({**entry, "edges": entry["edges"][:-1]}, {**entry, "edges": [0, 0, 1]}, {"edges": [0]}, 3):
        broken = copy.deepcopy(good)
        broken["state"]["stepping"]["shards"][name] = bad
        with pytest.raises(InvalidArgument):
            whole.attachment.load_state_dict(broken)
    whole.take_steps([7])
    assert whole.flat().isfinite().all(), "a state that does not fit changes nothing"
    whole.close()
    resumed = begin().load(saved)
    resumed.take_steps(range(4, 7))
    # Raw messages: with two ranks the sums do not depend on how DDP's first bucket cuts them.
    assert torch.equal(resumed.flat(), expected)
    assert agree(resumed.flat())
    resumed.close()


def check_refusals(rank: int, world_size: int) -> None:
    kinds: list[tuple[Any, dict[str, Any]]]
    kinds = [(torch.optim.Adagrad, {}), (torch.optim.LBFGS, {}), (torch.optim.SGD, {"fused": True})]
    owner: dict[str, Any] = {"codec": "one-bit", "pull": "raw", "update": "owner", "threshold_bytes": 0}
    for kind, options in kinds:
        with pytest.raises(Unsupported, match=r"Adagrad|LBFGS|fused"):
            start(rank, SlimGC(**owner), lambda p, kind=kind, options=options: kind(p, lr=0.1, **options))
    ddp = DistributedDataParallel(nn.Linear(4, 4).bfloat16())
    with pytest.raises(Unsupported, match="float32"):
        gradwire.attach(ddp, torch.optim.SGD(ddp.parameters(), lr=0.1), SlimGC(**owner), timeout_s=100)
    training = start(rank, SlimGC(**owner))
    training.backward(0)
    torch.nn.utils.clip_grad_norm_(training.ddp.parameters(), 1e-3)
    with pytest.raises(Unsupported, match="max_grad_value"):
        training.optimizer.step()
    training.close()


@on_ranks(2)
def test_shards_are_resumable_and_what_cannot_be_served_is_refused(rank: int, world_size: int) -> None:
    check_resumption(rank, world_size)
    check_refusals(rank, world_size)


@on_ranks(2, raises=RankMismatch)
def test_ranks_with_different_shards_get_an_error_before_their_gradients_meet(rank: int, world_size: int) -> None:
    training = start(rank, SlimGC("one-bit", pull="raw", update="owner", threshold_bytes=0))
    training.take_steps(range(2))
    state = training.attachment.state_dict()
    shards = state["state"]["stepping"]["shards"]
    if rank == 1:
        shards.pop(next(iter(shards)))
    training.attachment.load_state_dict(state)
    training.take_steps([2])


def test_the_optimizers_state_dict_says_where_the_rest_of_it_is(caplog: pytest.LogCaptureFixture) -> None:
    from gradwire.stepping.owner_step import OwnerStep

    stepper = OwnerStep.__new__(OwnerStep)
    stepper._has_told = False
    stepper.state = type("Sharded", (), {"is_sharded": True})()
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            stepper._tell_where_the_state_is(torch.optim.SGD([torch.zeros(1)]), {})
    assert len(caplog.records) == 1
    assert "attachment.state_dict()" in caplog.text
