"""sign-sgd and top-k: against their definitions in torch; these, the quantisers and low rank train under DDP."""

from typing import Any

import pytest
import torch

import gradwire
from buckets import by_bucket, drive, flat, gradients_of
from gradwire import schemes
from quantiser_oracles import top_k
from ranks import on_ranks
from small_training import Training, copying, small_layers

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
LOW_RANK = {"rank": 1, "min_compression_rate": 1}
# Options of a scheme, the learning rate of its training, the steps of it, and the share of the loss that is left then at most.
TRAINED: dict[str, tuple[dict[str, Any], float, int, float]] = {
    "top-k": ({"share": 0.05}, 0.3, 100, 0.8),
    "sign-sgd": ({}, 1e-3, 100, 0.8),
    "one-bit": ({}, 0.3, 100, 0.8),
    "two-bit": ({}, 0.3, 100, 0.8),
    "qsgd": ({"block": 128}, 0.1, 100, 0.8),
    "terngrad": ({}, 0.1, 100, 0.8),
    "thc": ({}, 0.3, 100, 0.8),
    "dgc": ({"share": 0.05}, 0.03, 100, 0.8),
    "acp-sgd": (LOW_RANK, 0.3, 300, 0.7),
    "power-sgd": (LOW_RANK, 0.3, 300, 0.7),
    "power-sgd-overlap": (LOW_RANK, 0.3, 300, 0.7),
}


# ---- against their definitions


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
@on_ranks()
def test_sign_sgd_is_the_majority_of_signs_in_units_of_the_loss_scale(rank: int, world_size: int) -> None:
    for dtype in DTYPES:
        for ties in ("zero", "positive"):
            driver = drive("sign-sgd", {"ties": ties}, dtype)
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


@pytest.mark.parametrize(("world_size", "feedback"), [(2, True), (3, False), (4, True)])
@on_ranks()
def test_top_k_follows_its_float64_transcription(rank: int, world_size: int, feedback: bool) -> None:
    """Six steps in float64, all ranks at once: choose, take the mean, keep the rest."""
    share, n_steps = 0.05, 6
    driver = drive("top-k", {"share": share, "error_feedback": feedback})
    results = []
    for step in range(n_steps):
        driver.loss_scale = 2.0**step
        results.append(driver.reduce([one * driver.loss_scale for one in gradients_of(rank, step)]))
    every = [[by_bucket(gradients_of(other, step)) for other in range(world_size)] for step in range(n_steps)]
    kept = []
    for index in range(2):
        given = torch.stack([torch.stack([ranks[index] for ranks in of_step]) for of_step in every])
        n = given.shape[-1]
        means, left = top_k(given, torch.zeros(world_size, n), max(1, round(share * n)), float(feedback))
        for step, expected in enumerate(means):
            found = by_bucket(results[step])[index].double() / 2.0**step
            assert torch.allclose(found, expected, atol=1e-5), (step, index)
        kept.append(left[rank])
    if feedback:
        assert torch.allclose(driver.state().double(), torch.cat(kept), atol=1e-5)
    driver.close()


@pytest.mark.parametrize("scheme", ["top-k", "sign-sgd"])
@on_ranks(3, raises=gradwire.CorruptMessage, match="message of rank 0 for bucket 0 of step 1 was altered")
def test_altered_message_is_a_corrupt_message_on_every_rank(rank: int, world_size: int, scheme: str) -> None:
    """Rank 1 receives one bit of rank 0's payload turned."""
    driver = drive(scheme, TRAINED[scheme][0])
    driver.reduce(gradients_of(rank, 0))
    gather = driver.communicator.all_gather

    def gather_altered(tensor: torch.Tensor) -> torch.Tensor:
        messages = gather(tensor)
        messages[0, -1] ^= 1 << 9
        return messages

    if rank == 1:
        driver.communicator.all_gather = gather_altered
    driver.reduce(gradients_of(rank, 1))
    driver.reduce(gradients_of(rank, 2))


# ---- under DDP


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
@on_ranks(timeout_s=170)
def test_parameters_are_identical_on_all_ranks_and_the_loss_falls(
    rank: int, world_size: int
) -> dict[str, torch.Tensor]:
    parameters = {}
    for scheme, (options, rate, n_steps, left) in TRAINED.items():
        made, ddp = schemes.by_name(scheme, **options), {"bucket_cap_mb": 0.005}
        training = Training(rank, made, lambda p, rate=rate: torch.optim.SGD(p, lr=rate), small_layers, copying, ddp)
        losses = training.take_steps(range(n_steps))
        stats = training.close()
        assert sum(losses[-20:]) < left * sum(losses[:20]), scheme
        assert stats["n_fallbacks"] == 0, scheme
        if world_size > 1:
            assert 0 < stats["ratio"] < 0.5, scheme
        parameters[scheme] = training.flat()
    return parameters
