"""one-bit-adam and top-k-adam against transcriptions that know all ranks, and the freeze in every situation."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from frozen_adam_oracle import BETAS, FREEZE, SCHEMES, STEPS, adamw, attach, loss_of, model, transcribed
from gradwire import InvalidArgument, Unsupported, schemes
from gradwire.core.slot import slot_of
from gradwire.schemes.frozen_adam import FLOOR_SHARE
from logs import log_of
from ranks import on_ranks, run_ranks

both = pytest.mark.parametrize("scheme", SCHEMES)


def train(rank: int, world_size: int, scheme: str, options: dict[str, Any], exempt: str | None) -> list[Tensor]:
    ddp = DistributedDataParallel(model())
    optimizer = adamw(ddp, **options)
    attachment = attach(ddp, optimizer, scheme=scheme, exempt=exempt or (), **SCHEMES[scheme])
    for step in range(STEPS):
        optimizer.zero_grad()
        loss_of(ddp, rank, step).backward()
        optimizer.step()
    assert attachment.stats()["n_frozen"] == 4
    attachment.close()
    return [parameter.detach().clone() for parameter in ddp.parameters()]


@pytest.mark.parametrize(
    ("scheme", "n_ranks", "options", "exempt"),
    [
        ("one-bit-adam", 2, {}, None),
        ("one-bit-adam", 2, {"foreach": True}, None),
        ("top-k-adam", 2, {"foreach": True}, None),
        ("top-k-adam", 3, {}, "0.weight"),
    ],
)
def test_a_training_is_the_transcription(
    scheme: str, n_ranks: int, options: dict[str, Any], exempt: str | None
) -> None:
    ranks = run_ranks(train, n_ranks, scheme, options, exempt)
    expected = transcribed(n_ranks, scheme=scheme, exempt=exempt)
    for *ours_and_theirs, wanted in zip(*ranks, expected, strict=True):
        ours, *others = ours_and_theirs
        assert all(torch.equal(ours, theirs) for theirs in others)
        # A value at the very edge between two codes may fall to the other side; its error is fed back.
        close = torch.isclose(ours.double(), wanted, rtol=1e-4, atol=1e-5)
        assert close.float().mean() > 0.98, (ours.double() - wanted).abs().max()


def train_alone(rank: int, world_size: int, scheme: str) -> tuple[list[Tensor], list[Tensor], int]:
    ddp = DistributedDataParallel(model())
    optimizer = adamw(ddp)
    attachment = attach(ddp, optimizer, scheme=scheme)
    frozen = []
    for step in range(STEPS):
        optimizer.zero_grad()
        loss_of(ddp, rank, step).backward()
        optimizer.step()
        frozen.append(torch.cat([state["exp_avg_sq"].view(-1) for state in optimizer.state.values()]).clone())
    grads = [parameter.grad for parameter in ddp.parameters()]
    assert all(grad is not None for grad in grads)
    attachment.close()
    optimizer.zero_grad()
    loss_of(ddp, rank, 0).backward()
    optimizer.step()
    after = torch.cat([state["exp_avg_sq"].view(-1) for state in optimizer.state.values()])
    return frozen, [after], int(next(iter(optimizer.state.values()))["step"])


@both
def test_the_variance_stays_from_the_freeze_on_and_goes_on_after_close(scheme: str) -> None:
    for frozen, (after,), n_updates in run_ranks(train_alone, 2, scheme):
        assert n_updates == STEPS + 1
        for step in range(1, STEPS):
            assert torch.equal(frozen[step], frozen[step - 1]) == (step >= FREEZE)
        assert not torch.equal(after, frozen[-1])


class Late(nn.Module):
    """Rows that are looked up late, and a layer that begins to train late."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.rows, self.early, self.late = nn.Embedding(40, 8), nn.Linear(8, 8), nn.Linear(8, 1)

    def forward(self, rows: Tensor, uses_late: bool) -> Tensor:
        x = torch.tanh(self.early(self.rows(rows)))
        return (self.late(x) if uses_late else x.mean(-1, keepdim=True) + 0 * self.late(x)).square().mean()


def train_late(rank: int, world_size: int, scheme: str) -> tuple[list[Tensor], dict[str, Any]]:
    ddp = DistributedDataParallel(Late())
    optimizer = torch.optim.AdamW(ddp.parameters(), 1e-3)
    attachment = attach(ddp, optimizer, scheme=scheme)
    generator = torch.Generator().manual_seed(rank)
    for step in range(16):
        if step == 8:  # a restart of the learning rate
            optimizer.param_groups[0]["lr"] = 1e-2
        optimizer.zero_grad()
        rows = torch.randint(0, 10 if step < 10 else 40, (32,), generator=generator)
        ddp(rows, step >= 7).backward()
        optimizer.step()
    state = attachment.state_dict()
    attachment.close()
    return [parameter.detach().clone() for parameter in ddp.parameters()], state["state"]


@both
def test_zeros_in_the_variance_and_parameters_that_train_late(scheme: str) -> None:
    """Rows without a gradient before the freeze divide by the floor, and a late layer has a freeze of its own."""
    (ours, state), (theirs, _) = run_ranks(train_late, 2, scheme)
    for one, other in zip(ours, theirs, strict=True):
        assert torch.equal(one, other)
        assert bool(one.isfinite().all())
    start = [parameter.detach() for parameter in Late().parameters()]
    moved = max(float((one - first).abs().max()) for one, first in zip(ours, start, strict=True))
    assert moved < 10, "a step divided by epsilon alone is some thousand"
    assert state["frozen_at"]["rows.weight"] == FREEZE
    assert state["idle_until"]["late.weight"] == 7
    assert state["frozen_at"]["late.weight"] == 7 + FREEZE


def resume(rank: int, world_size: int, scheme: str, at: int) -> list[bool]:
    """Through, and saved and loaded into new objects after `at` steps: bit for bit the same.

    DDP does not rebuild its buckets where it looks for unused parameters, so both cut them alike.
    """
    found = []
    for is_cut in (False, True):
        ddp = DistributedDataParallel(model(), find_unused_parameters=True)
        optimizer = adamw(ddp)
        attachment = attach(ddp, optimizer, scheme=scheme)
        for step in range(STEPS):
            if is_cut and step == at:
                saved = copy.deepcopy([ddp.module.state_dict(), optimizer.state_dict(), attachment.state_dict()])
                attachment.close()
                ddp = DistributedDataParallel(model(), find_unused_parameters=True)
                optimizer = adamw(ddp)
                attachment = attach(ddp, optimizer, scheme=scheme)
                ddp.module.load_state_dict(saved[0])
                optimizer.load_state_dict(saved[1])
                attachment.load_state_dict(saved[2])
            optimizer.zero_grad()
            loss_of(ddp, rank, step).backward()
            optimizer.step()
        attachment.close()
        found.append([parameter.detach().clone() for parameter in ddp.parameters()])
    return [torch.equal(one, other) for one, other in zip(*found, strict=True)]


@pytest.mark.parametrize("at", [FREEZE - 1, FREEZE, FREEZE + 3])
@both
def test_resume_before_in_and_after_the_freeze(scheme: str, at: int) -> None:
    for equal in run_ranks(resume, 2, scheme, at):
        assert all(equal)


def overflow(rank: int, world_size: int, scheme: str) -> tuple[list[Tensor], int]:
    """A GradScaler, Inf on one rank in the step of the freeze and in a later one."""
    ddp = DistributedDataParallel(model())
    optimizer = adamw(ddp)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    attachment = attach(ddp, optimizer, scaler, scheme)
    for step in range(STEPS):
        optimizer.zero_grad()
        loss = loss_of(ddp, rank, step)
        scaler.scale(loss * (math.inf if rank == 1 and step in (FREEZE, FREEZE + 2) else 1.0)).backward()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(ddp.parameters(), 100.0)
        scaler.step(optimizer)
        scaler.update()
    attachment.close()
    return [parameter.detach().clone() for parameter in ddp.parameters()], int(
        next(iter(optimizer.state.values()))["step"]
    )


@both
def test_overflow_in_the_step_of_the_freeze(scheme: str) -> None:
    (ours, n_updates), (theirs, _) = run_ranks(overflow, 2, scheme)
    assert n_updates == STEPS - 2
    for one, other in zip(ours, theirs, strict=True):
        assert torch.equal(one, other)
        assert bool(one.isfinite().all())


@both
@on_ranks(2)
def test_what_is_refused_and_how(rank: int, world_size: int, scheme: str) -> None:
    ddp = DistributedDataParallel(model())
    instead = scheme.removesuffix("-adam")
    with pytest.raises(Unsupported, match=rf"{scheme}.* SGD.*give attach\(\) the AdamW, or take {instead}"):
        attach(ddp, torch.optim.SGD(ddp.parameters(), 0.1), scheme=scheme)
    with pytest.raises(Unsupported, match=f"{scheme}.*use AdamW"):
        attach(ddp, torch.optim.Adam(ddp.parameters(), weight_decay=0.1), scheme=scheme)
    for option in ("maximize", "fused"):
        with pytest.raises(Unsupported, match=f"{option}=True"):
            attach(ddp, adamw(ddp, **{option: True}), scheme=scheme)
    with pytest.raises(
        InvalidArgument, match=r"exempt='head\*' matches no tensor; there are 0.weight, 0.bias, 2.weight"
    ):
        attach(ddp, adamw(ddp), scheme=scheme, exempt="head*")
    with pytest.raises(InvalidArgument, match="leave nothing"):
        attach(ddp, adamw(ddp), scheme=scheme, only="*.bias", exempt="*.bias")
    optimizer = adamw(ddp)
    attachment = attach(ddp, optimizer, scheme=scheme, freeze_step=1)
    for step in range(2):
        optimizer.zero_grad()
        loss_of(ddp, rank, step).backward()
        if step == 0:
            optimizer.step()
    with pytest.raises(Unsupported, match=f"{scheme}.*closure"):
        optimizer.step(lambda: 0.0)
    optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(3))], "maximize": True})
    with pytest.raises(Unsupported, match="maximize"):
        optimizer.step()
    state = attachment.state_dict()
    state["state"] = {**state["state"], "frozen_at": {"nowhere": 3}}
    with pytest.raises(InvalidArgument, match="nowhere"):
        attachment.load_state_dict(state)
    attachment.close()


@pytest.mark.parametrize("wrong", [{"freeze_step": 0}, {"freeze_step": -1}, {"freeze_step": 1.5}, {"exempt": 7},
                                   {"only": [""]}, {"correction": "none"}])  # fmt: skip
@both
def test_wrong_options(scheme: str, wrong: dict[str, Any]) -> None:
    with pytest.raises(InvalidArgument):
        schemes.by_name(scheme, **wrong)


@pytest.mark.parametrize(
    ("scheme", "wrong"),
    [
        ("one-bit-adam", {"codec": "thc"}),
        ("one-bit-adam", {"pull": "push"}),
        ("one-bit-adam", {"chunk_elements": 0}),
        ("top-k-adam", {"share": 0.0}),
        ("top-k-adam", {"share": 1.1}),
    ],
)
def test_wrong_options_of_one(scheme: str, wrong: dict[str, Any]) -> None:
    with pytest.raises(InvalidArgument):
        schemes.by_name(scheme, **wrong)


def outgrow(rank: int, world_size: int, scheme: str, factor: float) -> list[str]:
    """Gradients that are `factor` times as large from the freeze on."""
    texts = log_of("gradwire.schemes.frozen_adam")
    ddp = DistributedDataParallel(model())
    optimizer = adamw(ddp)
    attachment = attach(ddp, optimizer, scheme=scheme)
    for step in range(STEPS):
        optimizer.zero_grad()
        (loss_of(ddp, rank, step) * (factor if step >= FREEZE else 1)).backward()
        optimizer.step()
    attachment.close()
    return texts


@both
def test_gradients_that_outgrow_the_variance_are_told_once(scheme: str) -> None:
    for texts in run_ranks(outgrow, 2, scheme, 1_000.0):
        assert len(texts) == 1
        assert f"frozen after {FREEZE} updates: it was frozen too early" in texts[0]
        assert "freeze_step=" in texts[0]
    assert run_ranks(outgrow, 2, scheme, 1.0) == [[], []]


def end_early(rank: int, world_size: int, freeze_step: int) -> list[str]:
    texts = log_of("gradwire.schemes.plain_steps")
    ddp = DistributedDataParallel(model())
    optimizer = adamw(ddp)
    attachment = attach(ddp, optimizer, freeze_step=freeze_step)
    for step in range(2):
        loss_of(ddp, rank, step).backward()
        optimizer.step()
    attachment.close()
    return texts


def test_a_run_that_ends_before_the_freeze_is_told() -> None:
    ((only_the_freeze,),) = run_ranks(end_early, 1, 1)
    assert "nothing" not in only_the_freeze, "one rank has nothing to compress, and that is no fault of freeze_step"
    (texts,) = run_ranks(end_early, 1, 99)
    assert "steps before 99 are reduced plainly" in texts[0]
    assert "nothing was compressed" in texts[1]
    assert "lower freeze_step" in texts[1]


def train_channels_last(rank: int, world_size: int, scheme: str) -> bool:
    """A bucket holds channels_last weights in the order of memory, and so must the moments that it is joined with."""
    torch.manual_seed(0)
    net = nn.Conv2d(3, 8, 3).to(memory_format=torch.channels_last)
    ddp = DistributedDataParallel(net)
    optimizer = adamw(net)
    attachment = attach(ddp, optimizer, scheme=scheme)
    generator = torch.Generator().manual_seed(rank)
    for _ in range(STEPS):
        x = torch.randn(4, 3, 6, 6, generator=generator).to(memory_format=torch.channels_last)
        optimizer.zero_grad()
        ddp(x).square().mean().backward()
        optimizer.step()
    first, second = (optimizer.state[net.weight][key] for key in ("exp_avg", "exp_avg_sq"))
    assert not first.is_contiguous()
    adam = attachment.scheme._freezing.adam
    momentum, beta1 = adam.momentum(slot_of(net.weight))
    assert beta1 == BETAS[0]
    assert torch.equal(momentum, first.permute(0, 2, 3, 1).reshape(-1))
    root = second.clamp(min=FLOOR_SHARE * float(second.max())).sqrt()
    assert torch.equal(adam.root(slot_of(net.weight)), root.permute(0, 2, 3, 1).reshape(-1))
    attachment.close()
    return len(adam.frozen_at) == 2


@both
def test_moments_lie_as_their_bucket_does(scheme: str) -> None:
    assert run_ranks(train_channels_last, 2, scheme) == [True, True]
