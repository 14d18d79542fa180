"""one-bit-adam against a transcription that knows all ranks, and the freeze in every situation."""

import itertools
import math
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gradwire import InvalidArgument, Unsupported, schemes
from gradwire.core.bucket import slot_of
from gradwire.schemes.frozen_adam import FLOOR_SHARE
from logs import log_of
from quantiser_oracles import decoded
from ranks import on_ranks, run_ranks
from small_training import MakeOptimizer, Training
from small_training import adamw as adamw_by_default

LR, BETAS, EPS, DECAY, FREEZE, STEPS = 0.01, (0.9, 0.99), 1e-8, 0.1, 4, 10
Q = 64  # values to a scale, if nothing is said
adamw = partial(torch.optim.AdamW, lr=LR, betas=BETAS, eps=EPS, weight_decay=DECAY)


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(20, 33), nn.Tanh(), nn.Linear(33, 5))


def loss_of(module: nn.Module, rank: int, step: int) -> Tensor:
    generator = torch.Generator().manual_seed(1_000 * rank + step)
    x, y = (torch.randn(16, n, generator=generator).to(next(module.parameters()).dtype) for n in (20, 5))
    return (module(x) - y).square().mean()


def start(rank: int, optimizer: MakeOptimizer = adamw, told: dict[str, Any] | None = None, **options: Any) -> Training:
    """The training that is transcribed, or another, by `options`; `told`: options of the scheme."""
    made = schemes.by_name("one-bit-adam", **{"freeze_step": FREEZE, **(told or {})})
    return Training(rank, made, optimizer, **{"model": model, "loss": loss_of, **options})


def check(ours: list[Tensor], expected: list[Tensor]) -> list[Tensor]:
    """Returns a rank's parameters, which are those of a transcription."""
    for mine, wanted in zip(ours, expected, strict=True):
        # A value at the very edge between two codes may fall to the other side; its error is fed back.
        close = torch.isclose(mine.double(), wanted, rtol=1e-4, atol=1e-5)
        assert close.float().mean() > 0.98, (mine.double() - wanted).abs().max()
    return ours


class OneBit:
    """Momenta of two ranks, one tensor a message, pushed and pulled by hand; the ranks' parts meet in the bucket's middle."""

    def __init__(self, starts: list[int], total: int) -> None:
        self.starts, self.residuals = starts, torch.zeros(2, total, dtype=torch.float64)
        self.parts = [slice(0, total // 2), slice(total // 2, total)]

    def __call__(self, m: Tensor, gradients: list[Tensor]) -> Tensor:
        own = [BETAS[0] * m + (1 - BETAS[0]) * gradient for gradient in gradients]
        means = []
        for owner, part in enumerate(self.parts):
            pushed = self.sent(1 - owner, part, own[1 - owner][part])
            means.append(self.sent(owner, part, own[owner][part] + pushed) / 2)
        return torch.cat(means)

    def sent(self, rank: int, part: slice, values: Tensor) -> Tensor:
        """By a rank, group by group: sign times mean magnitude, the mean rounded to bfloat16."""
        term = values + self.residuals[rank, part]
        cuts = [start - part.start for start in self.starts if part.start < start < part.stop]
        sent = torch.from_numpy(decoded("one-bit", {"scale_values": Q}, term.numpy(), 0, cuts))
        self.residuals[rank, part] = term - sent
        return sent


def transcribed(rates: Callable[[int, str], tuple[float, float]] = lambda step, name: (LR, DECAY)) -> list[Tensor]:
    """The parameters after the training of two ranks, in float64; `rates`: a parameter's learning rate and weight decay."""
    module = model().double()
    parameters = dict([*module.named_parameters()][::-1])  # as DDP's one bucket holds them
    sizes = [parameter.numel() for parameter in parameters.values()]
    m, v = torch.zeros(2, sum(sizes), dtype=torch.float64)
    exchange = OneBit(list(itertools.accumulate(sizes)), sum(sizes))
    for step in range(STEPS):
        gradients = []
        for rank in range(2):
            of_rank = torch.autograd.grad(loss_of(module, rank, step), list(parameters.values()))
            gradients.append(torch.cat([gradient.reshape(-1) for gradient in of_rank]))
        if step < FREEZE:
            mean = torch.stack(gradients).mean(0)
            m, v = BETAS[0] * m + (1 - BETAS[0]) * mean, BETAS[1] * v + (1 - BETAS[1]) * mean.square()
            root = v.sqrt()
        else:
            largest = torch.cat([one.max().expand(one.shape) for one in v.split(sizes)])
            root = torch.where(v == 0, largest, v.maximum(FLOOR_SHARE * largest)).sqrt()
            m = exchange(m, gradients)
        corrected = root / (1 - BETAS[1] ** min(step + 1, FREEZE)) ** 0.5 + EPS
        update = m / (1 - BETAS[0] ** (step + 1)) / corrected
        for (name, parameter), part in zip(parameters.items(), update.split(sizes), strict=True):
            rate, decay = rates(step, name)
            parameter.detach().view(-1).mul_(1 - rate * decay).sub_(rate * part)
    return [parameter.detach() for parameter in module.parameters()]


def variance_of(training: Training) -> Tensor:
    return torch.cat([state["exp_avg_sq"].view(-1) for state in training.optimizer.state.values()]).clone()


def ended(training: Training) -> list[Tensor]:
    training.close()
    return [parameter.detach().clone() for parameter in training.ddp.parameters()]


@pytest.mark.parametrize("adam", [{}, {"foreach": True}])
@on_ranks(2)
def test_a_training_is_the_transcription(rank: int, world_size: int, adam: dict[str, Any]) -> list[Tensor]:
    training = start(rank, partial(adamw, **adam)).after(range(STEPS))
    assert training.stats()["n_frozen"] == 4
    return check(ended(training), transcribed())


@on_ranks(2)
def test_the_variance_stays_from_the_freeze_on_and_goes_on_after_close(rank: int, world_size: int) -> None:
    training, seen = start(rank), []
    for step in range(STEPS):
        training.take_steps([step])
        seen.append(variance_of(training))
    for step in range(1, STEPS):
        assert torch.equal(seen[step], seen[step - 1]) == (step >= FREEZE)
    assert all(parameter.grad is not None for parameter in training.ddp.parameters())
    training.close()
    training.take_steps([0])
    assert {int(state["step"]) for state in training.optimizer.state.values()} == {STEPS + 1}
    assert not torch.equal(variance_of(training), seen[-1])


class Late(nn.Module):
    """Rows that are looked up late, and a layer that begins to train late."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.rows, self.early, self.late = nn.Embedding(40, 8), nn.Linear(8, 8), nn.Linear(8, 1)

    def forward(self, rows: Tensor, uses_late: bool) -> Tensor:
        x = torch.tanh(self.early(self.rows(rows)))
        return (self.late(x) if uses_late else x.mean(-1, keepdim=True) + 0 * self.late(x)).square().mean()


def looked_up(module: nn.Module, rank: int, step: int) -> Tensor:
    rows = torch.randint(0, 10 if step < 10 else 40, (32,), generator=torch.Generator().manual_seed(99 * rank + step))
    return module(rows, step >= 7)


@on_ranks(2)
def test_zeros_in_the_variance_and_parameters_that_train_late(rank: int, world_size: int) -> Tensor:
    """Rows without a gradient before the freeze divide by the floor, and a late layer has a freeze of its own."""
    training = start(rank, adamw_by_default, model=Late, loss=looked_up)
    begin = training.flat()
    training.take_steps(range(8))
    training.optimizer.param_groups[0]["lr"] = 1e-2  # a restart of the learning rate
    training.take_steps(range(8, 16))
    state = training.attachment.state_dict()["state"]
    assert bool(training.flat().isfinite().all())
    assert float((training.flat() - begin).abs().max()) < 10, "a step divided by epsilon alone is some thousand"
    assert state["frozen_at"]["rows.weight"] == FREEZE
    assert state["idle_until"]["late.weight"] == 7
    assert state["frozen_at"]["late.weight"] == 7 + FREEZE
    return training.flat()


@pytest.mark.parametrize("at", [FREEZE - 1, FREEZE, FREEZE + 3])
@on_ranks(2)
def test_resume_before_in_and_after_the_freeze(rank: int, world_size: int, at: int) -> None:
    # Where DDP does not rebuild its buckets, so that both cut them alike.
    ddp = {"bucket_cap_mb": 25, "find_unused_parameters": True}
    through = start(rank, ddp=ddp).after(range(STEPS))
    saved = start(rank, ddp=ddp).after(range(at)).state()
    resumed = start(rank, ddp=ddp).load(saved).after(range(at, STEPS))
    assert torch.equal(through.flat(), resumed.flat())


@on_ranks(2)
def test_overflow_in_the_step_of_the_freeze(rank: int, world_size: int) -> Tensor:
    """A GradScaler, Inf on one rank in the step of the freeze and in a later one."""
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    training = start(rank, scaler=scaler)
    for step in range(STEPS):
        is_bad = rank == 1 and step in (FREEZE, FREEZE + 2)
        training.take_scaled_step(scaler, step, math.inf if is_bad else 1.0, max_norm=100.0)
    assert {int(state["step"]) for state in training.optimizer.state.values()} == {STEPS - 2}
    assert bool(training.flat().isfinite().all())
    return training.flat()


@on_ranks(2)
def test_what_is_refused_and_how(rank: int, world_size: int) -> None:
    refused: list[tuple[MakeOptimizer, dict[str, str], str]] = [
        (partial(torch.optim.SGD, lr=0.1), {}, r"one-bit-adam.* SGD.*give attach\(\) the AdamW, or take one-bit"),
        (partial(torch.optim.Adam, weight_decay=0.1), {}, r"one-bit-adam.*use AdamW"),
        (partial(adamw, maximize=True), {}, "maximize=True"),
        (partial(adamw, fused=True), {}, "fused=True"),
        (adamw, {"exempt": "head*"}, r"exempt='head\*' matches no tensor; there are 0.weight, 0.bias, 2.weight"),
        (adamw, {"only": "*.bias", "exempt": "*.bias"}, "leave nothing"),
    ]
    for optimizer, options, words in refused:
        with pytest.raises(InvalidArgument if options else Unsupported, match=words):
            start(rank, optimizer, options)
    training = start(rank, told={"freeze_step": 1})
    optimizer, attachment = training.optimizer, training.attachment
    training.take_steps([0])
    training.backward(1)
    with pytest.raises(Unsupported, match=r"one-bit-adam.*closure"):
        optimizer.step(lambda: 0.0)
    optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(3))], "maximize": True})
    with pytest.raises(Unsupported, match="maximize"):
        optimizer.step()
    state = attachment.state_dict()
    state["state"] = {**state["state"], "frozen_at": {"nowhere": 3}}
    with pytest.raises(InvalidArgument, match="nowhere"):
        attachment.load_state_dict(state)


@pytest.mark.parametrize("factor", [1_000.0, 1.0])
@on_ranks(2)
def test_gradients_that_outgrow_the_variance_are_told_once(rank: int, world_size: int, factor: float) -> None:
    texts, training = log_of("gradwire.schemes.frozen_adam"), start(rank)
    training.take_steps(range(FREEZE))
    training.take_steps(range(FREEZE, STEPS), factor)
    training.close()
    assert len(texts) == (factor != 1)
    for text in texts:
        assert f"frozen after {FREEZE} updates: it was frozen too early" in text
        assert "freeze_step=" in text


@pytest.mark.parametrize("freeze_step", [1, 99])
@on_ranks(1)
def test_a_run_that_ends_before_the_freeze_is_told(rank: int, world_size: int, freeze_step: int) -> None:
    texts = log_of("gradwire.schemes.plain_steps")
    training = start(rank, told={"freeze_step": freeze_step}).after(range(2))
    training.close()
    assert f"steps before {freeze_step} are reduced plainly" in texts[0]
    # With 1, one rank has nothing to compress, and that is no fault of freeze_step.
    ended = [] if freeze_step == 1 else [("nothing was compressed", "lower freeze_step")]
    assert len(texts) == 1 + len(ended)
    assert all(word in text for words, text in zip(ended, texts[1:], strict=True) for word in words)


@on_ranks(2)
def test_moments_lie_as_their_bucket_does(rank: int, world_size: int) -> None:
    """A bucket holds channels_last weights in the order of memory, and so must the moments that it is joined with."""
    generator = torch.Generator().manual_seed(rank)

    def convolution() -> nn.Module:
        torch.manual_seed(0)
        return nn.Conv2d(3, 8, 3).to(memory_format=torch.channels_last)

    def loss(module: nn.Module, rank: int, step: int) -> Tensor:
        images = torch.randn(4, 3, 6, 6, generator=generator).to(memory_format=torch.channels_last)
        return module(images).square().mean()

    training = start(rank, model=convolution, loss=loss).after(range(STEPS))
    weight = training.ddp.module.weight
    first = training.optimizer.state[weight]["exp_avg"]
    assert not first.is_contiguous()
    adam = training.attachment.scheme.adam
    momentum, beta1 = adam.momentum(slot_of(weight))
    assert beta1 == BETAS[0]
    assert torch.equal(momentum, first.permute(0, 2, 3, 1).reshape(-1))
    assert len(adam.frozen_at) == 2


CHANGE = FREEZE + 2


@on_ranks(2)
def test_a_restart_of_the_learning_rate_is_the_transcription(rank: int, world_size: int) -> list[Tensor]:
    """A schedule that falls, and starts again after the freeze."""
    training, rates = start(rank), []
    schedule = torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(training.optimizer, CHANGE)
    for step in range(STEPS):
        rates.append(float(training.optimizer.param_groups[0]["lr"]))
        training.take_steps([step])
        schedule.step()
    assert rates[CHANGE] == LR > rates[CHANGE - 1]
    return check(ended(training), transcribed(lambda step, name: (rates[step], DECAY)))


@pytest.mark.parametrize("change", [{"lr": 0.0}, {"lr": 0.03}, {"weight_decay": 5.0}])
@on_ranks(2)
def test_groups_cut_anew_after_the_freeze_rule_from_the_next_step_on(
    rank: int, world_size: int, change: dict[str, Any]
) -> list[Tensor]:
    """The first layer goes into a group of its own."""

    def rates(step: int, name: str) -> tuple[float, float]:
        if step < CHANGE or name.startswith("2."):
            return LR, DECAY
        return change.get("lr", LR), change.get("weight_decay", DECAY)

    training = start(rank).after(range(CHANGE))
    group = training.optimizer.param_groups[0]
    parameters, group["params"] = group["params"], group["params"][2:]
    training.optimizer.add_param_group({"params": parameters[:2], **change})
    training.take_steps(range(CHANGE, STEPS))
    return check(ended(training), transcribed(rates))


def save(rank: int, world_size: int) -> tuple[Any, Any]:
    """A rank's own state, and that for all ranks."""
    training = start(rank).after(range(CHANGE))
    return training.state(), training.state(all_ranks=True)


def go_on(rank: int, world_size: int, own: Any, whole: Any) -> tuple[dict[str, Any], list[Tensor]]:
    """Load another number's checkpoint; the state that it becomes, and the parameters in the end."""
    training = start(rank)
    with pytest.raises(InvalidArgument, match=r"written by 2 ranks.*state_dict\(all_ranks=True\)"):
        training.attachment.load_state_dict(own[-1], strict=False)
    loaded = training.load(whole).state()[-1]["state"]
    before = variance_of(training)
    training.take_steps(range(CHANGE, STEPS))
    assert torch.equal(before, variance_of(training)), "the variance stays frozen"
    assert training.stats()["n_frozen"] == len(training.optimizer.state)
    return loaded, ended(training)


@pytest.mark.parametrize("world_size", [1, 3])
def test_a_checkpoint_of_another_number_of_ranks_keeps_the_freeze_and_what_was_not_sent(world_size: int) -> None:
    saved = run_ranks(save, 2)
    written = [own[-1]["state"] for own, _ in saved]
    assert written[0]["frozen_at"] == dict.fromkeys(["0.weight", "0.bias", "2.weight", "2.bias"], FREEZE)
    ranks = run_ranks(go_on, world_size, *saved[0])
    for loaded, ours in ranks:
        assert loaded["frozen_at"] == written[0]["frozen_at"]
        assert all(torch.equal(one, other) for one, other in zip(ours, ranks[0][1], strict=True))
        moved = [float((one - start).norm()) for one, start in zip(ours, saved[0][0][0].values(), strict=True)]
        assert all(0 < one < 10 for one in moved)
    for name, own in written[0]["residuals"].items():
        mean = (own + written[1]["residuals"][name]) / 2
        kept = torch.stack([loaded["residuals"][name] for loaded, _ in ranks]).mean(0)
        assert torch.allclose(kept, mean, rtol=1e-5, atol=1e-8), "the mean over the ranks is what counts"
        assert mean.any()
