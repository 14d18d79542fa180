"""sign-sgd, top-k and random-k: against their definitions in torch; these and the quantisers under DDP."""

from __future__ import annotations

import copy
import io
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import gradwire
from buckets import Driver
from gradwire import schemes
from gradwire_lab.schemes.random_k import draw_indices
from ranks import on_ranks, run_ranks

SHAPES = [(24, 18), (7,), (30, 11), (0, 5), (), (50,)]
LAYOUT = [2, 4]
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
OPTIONS: dict[str, dict[str, Any]] = {
    "top-k": {"share": 0.05},
    "random-k": {"share": 0.05},
    "sign-sgd": {},
    "one-bit": {},
    "two-bit": {},
    "qsgd": {"block": 128},
    "terngrad": {},
    "thc": {},
    "dgc": {"share": 0.05},
}
# Their drawing depends on the step's number.
STOCHASTIC = ("random-k", "qsgd", "terngrad", "thc", "dgc")
LEARNING_RATES = {"sign-sgd": 1e-3, "qsgd": 0.1, "terngrad": 0.1, "dgc": 0.03}


def gradients_of(rank: int, step: int, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(100 * rank + step)
    return [torch.randn(shape, generator=generator).to(dtype) for shape in SHAPES]


def flat(tensors: list[torch.Tensor]) -> torch.Tensor:
    return torch.cat([tensor.reshape(-1) for tensor in tensors])


def buckets_of(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    return [flat(tensors[:2]), flat(tensors[2:])]


# ---- against their definitions


@pytest.mark.parametrize("world_size", [1, 2, 3])
@on_ranks()
def test_sign_sgd_is_the_majority_of_signs_in_units_of_the_loss_scale(rank: int, world_size: int) -> None:
    for dtype in DTYPES:
        for ties in ("zero", "positive"):
            driver = Driver(
                schemes.by_name("sign-sgd", ties=ties), [torch.zeros(shape, dtype=dtype) for shape in SHAPES], LAYOUT
            )
            everyone = [gradients_of(other, 1, dtype) for other in range(world_size)]
            for tensors in everyone:
                tensors[0][::3] = 0
            expected = torch.stack([torch.where(flat(tensors).float() < 0, -1.0, 1.0) for tensors in everyone]).sum(0)
            expected = torch.where(expected == 0, float(ties == "positive"), expected.sign())
            for scale in (1.0, 1024.0):
                driver.loss_scale = scale
                result = flat(driver.reduce(everyone[rank]))
                assert result.dtype == dtype
                assert torch.equal(result.float(), scale * expected)
            driver.close()


@pytest.mark.parametrize("scheme", ["top-k", "random-k"])
@pytest.mark.parametrize(("world_size", "feedback"), [(2, True), (3, False), (4, True)])
@on_ranks()
def test_sparse_scheme_follows_its_float64_transcription(
    rank: int, world_size: int, scheme: str, feedback: bool
) -> None:
    """Six steps in float64, all ranks at once: choose, take the mean, keep the rest."""
    share = 0.05
    driver = Driver(
        schemes.by_name(scheme, share=share, error_feedback=feedback), [torch.zeros(shape) for shape in SHAPES], LAYOUT
    )
    sizes = [bucket.numel() for bucket in buckets_of(gradients_of(0, 0))]
    errors = [[torch.zeros(size, dtype=torch.float64) for size in sizes] for _ in range(world_size)]
    for step in range(6):
        driver.loss_scale = 2.0**step
        everyone = [gradients_of(other, step) for other in range(world_size)]
        results = driver.reduce([gradient * driver.loss_scale for gradient in everyone[rank]])
        for index, size in enumerate(sizes):
            k = max(1, round(share * size))
            expected = torch.zeros(size, dtype=torch.float64)
            for other in range(world_size):
                corrected = buckets_of(everyone[other])[index].double() + errors[other][index]
                chosen = corrected.abs().topk(k).indices if scheme == "top-k" else draw_indices(0, step, index, size, k)
                expected[chosen] += corrected[chosen] / world_size
                if feedback:
                    errors[other][index] = corrected.index_fill(0, chosen, 0)
            if scheme == "random-k" and not feedback:
                expected *= size / k
            result = buckets_of(results)[index].double() / driver.loss_scale
            assert torch.allclose(result, expected, atol=1e-5), (step, index)
    if feedback:
        state = driver.scheme.state_dict()["residuals"]
        kept = torch.cat([state[f"p{i}"].view(-1) for i in range(len(SHAPES))])
        assert torch.allclose(kept.double(), torch.cat(errors[rank]), atol=1e-5)
    driver.close()


def conserve(rank: int, world_size: int, scheme: str, dtype: torch.dtype) -> list[tuple[torch.Tensor, ...]]:
    driver = Driver(
        schemes.by_name(scheme, **OPTIONS[scheme]), [torch.zeros(shape, dtype=dtype) for shape in SHAPES], [len(SHAPES)]
    )
    history = []
    old = torch.zeros(flat(gradients_of(0, 0)).numel())
    for step in range(4):
        gradients = gradients_of(rank, step, dtype)
        if step == 2:
            driver.bucket_sizes = LAYOUT  # as DDP rebuilds them
            gradients[0].zero_()  # unused: what was left out of it stays, bit by bit, across the rebuild
        result = driver.reduce(gradients)
        state = driver.scheme.state_dict()["residuals"]
        new = torch.cat([state[f"p{i}"].view(-1).float() for i in range(len(SHAPES))])
        if step == 2:
            assert torch.equal(new[: 24 * 18], old[: 24 * 18])
            assert not result[0].any()
        history.append((flat(result).float(), new, flat(gradients).float(), old))
        old = new
    driver.close()
    return history


@pytest.mark.parametrize("scheme", ["top-k", "random-k", "one-bit", "two-bit", "thc"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_results_and_residuals_conserve_the_gradients_across_a_rebuild(scheme: str, dtype: torch.dtype) -> None:
    histories = run_ranks(conserve, 3, scheme, dtype)
    for step in range(4):
        result = histories[0][step][0]
        for history in histories[1:]:
            assert torch.equal(history[step][0], result)
        new, gradient, old = (torch.stack([history[step][i] for history in histories]).mean(0) for i in (1, 2, 3))
        assert torch.allclose(result + new, gradient + old, atol=1e-5 if dtype == torch.float32 else 0.02)


def alter(rank: int, world_size: int, scheme: str) -> str:
    """What this rank raises when rank 1 receives one bit of rank 0's payload turned."""
    driver = Driver(schemes.by_name(scheme, **OPTIONS[scheme]), [torch.zeros(shape) for shape in SHAPES], LAYOUT)
    driver.reduce(gradients_of(rank, 0))
    gather = driver.communicator.all_gather

    def gather_altered(tensor: torch.Tensor) -> torch.Tensor:
        messages = gather(tensor)
        messages[0, -1] ^= 1 << 9
        return messages

    if rank == 1:
        driver.communicator.all_gather = gather_altered
    try:
        driver.reduce(gradients_of(rank, 1))
        driver.reduce(gradients_of(rank, 2))
    except gradwire.CorruptMessage as error:
        return str(error)
    return ""


@pytest.mark.parametrize("scheme", ["top-k", "sign-sgd"])
def test_altered_message_is_a_corrupt_message_on_every_rank(scheme: str) -> None:
    for message in run_ranks(alter, 3, scheme):
        assert "message of rank 0 for bucket 0 of step 1 was altered" in message


# ---- under DDP


def build(dtype: torch.dtype = torch.float32, **options: Any) -> tuple[DistributedDataParallel, torch.optim.Optimizer]:
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(20, 40), nn.Tanh(), nn.Linear(40, 40), nn.Tanh(), nn.Linear(40, 3))
    ddp = DistributedDataParallel(model.to(dtype), bucket_cap_mb=0.005, **options)
    return ddp, torch.optim.SGD(ddp.parameters(), lr=0.05)


def batch_of(rank: int, step: int) -> torch.Tensor:
    return torch.randn(8, 20, generator=torch.Generator().manual_seed(1_000 * rank + step))


def run_steps(
    ddp: nn.Module, optimizer: torch.optim.Optimizer, rank: int, steps: range, factor: float = 1.0
) -> list[float]:
    losses = []
    for step in steps:
        optimizer.zero_grad()
        inputs = batch_of(rank, step).to(next(ddp.parameters()).dtype)
        loss = (ddp(inputs) - inputs[:, :3]).square().mean() * factor
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def parameters_of(ddp: nn.Module) -> torch.Tensor:
    return torch.cat([parameter.detach().reshape(-1) for parameter in ddp.parameters()]).clone()


def train_all(rank: int, world_size: int) -> dict[str, tuple[torch.Tensor, list[float], dict]]:
    return {scheme: train(rank, scheme) for scheme in OPTIONS}


def train(rank: int, scheme: str) -> tuple[torch.Tensor, list[float], dict]:
    ddp, optimizer = build()
    optimizer.param_groups[0]["lr"] = LEARNING_RATES.get(scheme, 0.3)
    attachment = gradwire.attach(ddp, optimizer, schemes.by_name(scheme, **OPTIONS[scheme]))
    losses = run_steps(ddp, optimizer, rank, range(100))
    stats = attachment.stats()
    attachment.close()
    return parameters_of(ddp), losses, stats


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_parameters_are_identical_on_all_ranks_and_the_loss_falls(world_size: int) -> None:
    outcomes = run_ranks(train_all, world_size, timeout_s=170)
    for scheme in OPTIONS:
        for parameters, losses, stats in (outcome[scheme] for outcome in outcomes):
            assert torch.equal(parameters, outcomes[0][scheme][0]), scheme
            assert sum(losses[-20:]) < 0.8 * sum(losses[:20]), scheme
            assert stats["n_fallbacks"] == 0, scheme
            if world_size > 1:
                assert 0 < stats["ratio"] < 0.5, scheme


def overflow(rank: int, scheme: str) -> None:
    runs = []
    for meets_inf in (True, False):
        ddp, optimizer = build()
        attachment = gradwire.attach(ddp, optimizer, schemes.by_name(scheme, **OPTIONS[scheme]))
        run_steps(ddp, optimizer, rank, range(3))
        if meets_inf:
            before = copy.deepcopy(attachment.state_dict()["state"])
            kept = parameters_of(ddp)
            run_steps(ddp, optimizer, rank, range(99, 100), float("inf") if rank == 1 else 1.0)
            assert not parameters_of(ddp).isfinite().all()
            torch.nn.utils.vector_to_parameters(kept, ddp.parameters())
            after = attachment.state_dict()["state"]
            for kind in ("residuals", "momenta"):
                for name, kept_value in before.get(kind, {}).items():
                    assert torch.equal(kept_value, after[kind][name])
            assert attachment.stats()["n_steps_not_finite"] == 1
            assert attachment.stats()["n_fallbacks"] == 0
        elif scheme in STOCHASTIC:  # the same number of steps on both sides
            attachment.step += 1
        run_steps(ddp, optimizer, rank, range(3, 6))
        runs.append(parameters_of(ddp))
        attachment.close()
    assert torch.equal(runs[0], runs[1]), scheme


@on_ranks(3)
def test_step_with_inf_on_one_rank_is_as_if_it_had_not_been(rank: int, world_size: int) -> None:
    for scheme in OPTIONS:
        overflow(rank, scheme)


def resume(rank: int, scheme: str) -> None:
    ddp, optimizer = build()
    attachment = gradwire.attach(ddp, optimizer, schemes.by_name(scheme, **OPTIONS[scheme]))
    run_steps(ddp, optimizer, rank, range(3))
    model_state = {name: value.clone() for name, value in ddp.module.state_dict().items()}
    saved = io.BytesIO()
    torch.save(attachment.state_dict(), saved)
    attachment.close()
    results = []
    for _ in range(2):
        ddp, optimizer = build()
        ddp.module.load_state_dict(model_state)
        attachment = gradwire.attach(ddp, optimizer, schemes.by_name(scheme, **OPTIONS[scheme]))
        saved.seek(0)
        attachment.load_state_dict(torch.load(saved, weights_only=True))
        saved = io.BytesIO()
        torch.save(attachment.state_dict(), saved)
        run_steps(ddp, optimizer, rank, range(3, 7))
        results.append(parameters_of(ddp))
        attachment.close()
    assert torch.equal(results[0], results[1]), scheme


@on_ranks(2)
def test_resumed_run_continues_bit_by_bit(rank: int, world_size: int) -> None:
    for scheme in OPTIONS:
        resume(rank, scheme)


def other_dtypes(rank: int, world_size: int) -> torch.Tensor:
    results = []
    for scheme, options in OPTIONS.items():
        for dtype in DTYPES[1:]:
            ddp, optimizer = build(dtype, gradient_as_bucket_view=True)
            optimizer.param_groups[0]["lr"] = 1e-3
            attachment = gradwire.attach(ddp, optimizer, schemes.by_name(scheme, **options))
            run_steps(ddp, optimizer, rank, range(4))
            assert attachment.stats()["n_fallbacks"] == 0
            attachment.close()
            results.append(parameters_of(ddp).float())
    return torch.cat(results)


def test_low_precision_gradients_give_the_same_parameters_on_all_ranks() -> None:
    first, second = run_ranks(other_dtypes, 2)
    assert torch.equal(first, second)
    assert first.isfinite().all()


@pytest.mark.parametrize(
    ("scheme", "options", "match"),
    [
        ("top-k", {"share": 0.0}, "share"),
        ("top-k", {"share": 1.1}, "share"),
        ("top-k", {"share": float("nan")}, "share"),
        ("random-k", {"share": -1}, "share"),
        ("random-k", {"seed": 0.5}, "seed"),
        ("sign-sgd", {"ties": "random"}, "zero, positive"),
        ("sign-sgd", {"error_feedback": True}, "error_feedback"),
    ],
)
def test_options_out_of_range_are_refused(scheme: str, options: dict[str, Any], match: str) -> None:
    with pytest.raises(gradwire.InvalidArgument, match=match):
        schemes.by_name(scheme, **options)
