"""power-momentum: its float64 transcription, the momentum that is conserved, and what its state is good for."""

import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import gradwire
from buckets import mean_over_ranks
from gradwire.errors import Unsupported
from gradwire.schemes import Ahead, by_name
from ranks import on_ranks, run_ranks
from small_training import Training, from_one, muon_and_adamw

RANK, OPTIONS = 2, "rank=2,min_compression_rate=0"
# By optimizer: what makes it, the decay of its momentum, and its momentum as a mean of gradients.
MEANS: dict[str, tuple[Callable[[Any], Any], float, Callable[[dict[str, Any]], Tensor]]] = {
    "adamw": (lambda p: torch.optim.AdamW(p, lr=1e-2, betas=(0.8, 0.99)), 0.8, lambda state: state["exp_avg"]),
    "sgd": (lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9), 0.9, lambda state: 0.1 * state["momentum_buffer"]),
    "maximize": (lambda p: torch.optim.Adam(p, lr=1e-3, maximize=True), 0.9, lambda state: -state["exp_avg"]),
    "muon": (muon_and_adamw, 0.95, lambda state: state["momentum_buffer"]),
}  # fmt: skip


def model() -> nn.Module:
    torch.manual_seed(2)
    return nn.Sequential(nn.Linear(20, 24), nn.Tanh(), nn.Linear(24, 16), nn.Tanh(), nn.Linear(16, 3))


def begin(rank: int, optimizer: str = "adamw", factor_dtype: str = "float32") -> Training:
    spec = f"power-momentum:{OPTIONS},factor_dtype={factor_dtype}"
    return Training(rank, spec, MEANS[optimizer][0], model, from_one, {"bucket_cap_mb": 0.002}, timeout_s=100)


def over_ranks(values: np.ndarray) -> np.ndarray:
    return mean_over_ranks(torch.from_numpy(values.copy())).numpy()


@pytest.mark.parametrize("optimizer", MEANS)
@on_ranks(2)
def test_a_gradient_is_the_momentum_and_a_change_of_it_in_low_rank(rank: int, world_size: int, optimizer: str) -> None:
    """D <- M - m + b E; P <- orthogonal(mean(D Q)); Q <- mean(D^T P); E <- D - P Q^T; gradient <- m + P Q^T."""
    _, b, momentum_in = MEANS[optimizer]
    training = begin(rank, optimizer)
    named = {name: p for name, p in training.ddp.module.named_parameters() if p.dim() == 2}
    place = {p: one for one in training.optimizers for group in one.param_groups for p in group["params"]}
    left, factor, true = {}, {}, {name: np.zeros(p.shape) for name, p in named.items()}
    for step in range(8):
        inner = training.ddp.module
        mine = torch.autograd.grad(from_one(inner, rank, step), list(inner.parameters()))
        own = {name: g.double().numpy() for (name, _), g in zip(inner.named_parameters(), mine, strict=True)}
        before = {
            name: momentum_in(place[p].state[p]).double().numpy().copy() if step else np.zeros(p.shape)
            for name, p in named.items()
        }
        training.take_steps([step])
        for name, p in inner.named_parameters():
            assert p.grad is not None
            found = p.grad.double().numpy()
            if name not in named:
                assert np.allclose(found, over_ranks(own[name]), atol=1e-6)
                continue
            true[name] = b * true[name] + (1 - b) * over_ranks(own[name])
            if step == 0:  # from a factor that was drawn: here only that nothing is lost
                assert np.linalg.matrix_rank(found, tol=1e-5) <= RANK
                left[name] = b * (own[name] - found)
                continue
            d = own[name] - before[name] + left[name]
            left_factor = np.linalg.qr(over_ranks(d @ factor[name]))[0]
            factor[name] = over_ranks(d.T @ left_factor)
            sent = left_factor @ factor[name].T
            assert np.allclose(found, before[name] + sent, atol=2e-5), (optimizer, name, step)
            left[name] = b * (d - sent)
        if step == 0:
            drawn = training.attachment.state_dict()["state"]["factors"]
            factor = {name: drawn[name].double().numpy().T for name in named}
    residuals = training.attachment.state_dict()["state"]["residuals"]
    for name, p in named.items():
        assert np.allclose(residuals[name].numpy(), left[name], atol=2e-5), (optimizer, name)
        # The mean of the ranks' own momenta is that of all gradients: nothing of them is lost.
        momentum = momentum_in(place[p].state[p]).double().numpy()
        assert np.allclose(momentum + (1 - b) / b * over_ranks(left[name]), true[name], atol=2e-5), (optimizer, name)
    assert training.close()["n_matrices"] == 3


def save(rank: int, world_size: int) -> list[Any]:
    training = begin(rank, factor_dtype="bfloat16").after(range(5))
    state, whole = training.state(), training.state(all_ranks=True)
    training.take_steps(range(5, 8))
    for _ in range(2):  # a run that was stopped goes on with the same bits
        yielded = begin(rank, factor_dtype="bfloat16").load(state).after(range(5, 8)).flat()
    return [whole, yielded]


def go_on(rank: int, world_size: int, pickled: bytes) -> None:
    lives = pickle.loads(pickled)
    assert torch.equal(lives[0][1], lives[1][1])
    training = begin(rank, factor_dtype="bfloat16").load(lives[0][0])
    mine, theirs = training.attachment.state_dict()["state"], [one["state"] for one in lives[0][0][-1]["ranks"]]
    for name, factor in mine["factors"].items():
        assert torch.equal(factor, theirs[0]["factors"][name])
        old = torch.stack([one["residuals"][name] for one in theirs]).mean(0).double().numpy()
        assert np.allclose(over_ranks(mine["residuals"][name].double().numpy()), old, atol=1e-7)
    training.take_steps(range(5, 8))


def test_three_ranks_go_on_from_the_state_of_two() -> None:
    run_ranks(go_on, 3, pickle.dumps(run_ranks(save, 2)))


@on_ranks(2)
def test_a_loss_scale_changes_nothing_and_a_step_that_is_not_finite_is_dropped(rank: int, world_size: int) -> None:
    ends = []
    for scaler in (None, torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=2)):
        spec = f"power-momentum:{OPTIONS}"
        training = Training(rank, spec, MEANS["adamw"][0], model, from_one, timeout_s=100, scaler=scaler)
        for step in range(7):
            if scaler is None:
                training.take_steps([step])
                continue
            if step == 3:
                training.take_scaled_step(scaler, step, torch.inf if rank else 1.0)
            training.take_scaled_step(scaler, step)
        ends.append(training.flat())
        assert training.close()["n_steps_not_finite"] == (scaler is not None)
    assert torch.allclose(*ends, atol=1e-6)


@on_ranks(1)
def test_what_has_no_momentum_is_refused_by_name(rank: int, world_size: int) -> None:
    with pytest.raises(Unsupported, match=r"power-momentum compresses .* and was given SGD: give"):
        Training(rank, "power-momentum", lambda p: torch.optim.SGD(p, lr=0.1))
    with pytest.raises(Unsupported, match="was given no optimizer"):
        gradwire.Reducer("power-momentum")
    with pytest.raises(Unsupported, match="find_unused_parameters"):
        Training(rank, "power-momentum", MEANS["adamw"][0], ddp={"find_unused_parameters": True})
    with pytest.raises(Unsupported, match="'power-momentum' exchanges the optimizer's momenta"):
        Ahead(by_name("power-momentum"))
