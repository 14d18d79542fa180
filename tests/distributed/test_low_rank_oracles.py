"""ACP-SGD and Power-SGD against float64 transcriptions of their algorithms, and power-sgd beside PyTorch's own hook."""

from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

from buckets import Driver, flat
from gradwire import schemes
from gradwire.schemes.matrices import draw_factor
from ranks import on_ranks
from small_training import Given

SHAPES = [(24, 18), (7,), (24, 18), (10, 4, 3, 3), (1, 9), (9, 1), (0, 5), (30, 50), (), (24, 18)]
MATRICES = {i: shape for i, shape in enumerate(SHAPES) if len(shape) > 1 and np.prod(shape)}
RANK = 3
SCHEMES = ("acp-sgd", "power-sgd", "power-sgd-overlap")


def drive(scheme: str, bucket_sizes: list[int], **options: Any) -> Driver:
    made = schemes.by_name(scheme, rank=RANK, min_compression_rate=0, **options)
    return Driver(made, [torch.zeros(shape) for shape in SHAPES], bucket_sizes)


def gradients_of(rank: int, step: int) -> list[torch.Tensor]:
    """What the ranks share and what is their own, about alike in size."""
    own, shared = torch.Generator().manual_seed(100 * rank + step + 1), torch.Generator().manual_seed(step // 4)
    return [torch.randn(shape, generator=own) + torch.randn(shape, generator=shared) for shape in SHAPES]


def matrix(tensor: torch.Tensor) -> np.ndarray:
    return tensor.double().numpy().reshape(tensor.shape[0], -1)


class Transcription:
    """All ranks of one matrix in float64, straight from the papers; factors not transposed."""

    def __init__(self, scheme: str, shape: tuple[int, ...], key: str, world_size: int, feedback: bool) -> None:
        n, m = shape[0], int(np.prod(shape[1:]))
        self.r = min(RANK, n, m)
        self.scheme, self.feedback, self.world_size = scheme, feedback, world_size
        self.q = draw_factor(0, key, 0, self.r, m).double().numpy().T
        self.p = np.zeros((n, self.r))
        self.errors = [np.zeros((n, m)) for _ in range(world_size)]
        self.computes_p = True

    def step(self, gradients: list[np.ndarray]) -> np.ndarray:
        corrected = [g + e for g, e in zip(gradients, self.errors, strict=True)]
        if self.scheme != "acp-sgd":
            self.p = np.linalg.qr(sum(x @ self.q for x in corrected) / self.world_size)[0]
            self.q = sum(x.T @ self.p for x in corrected) / self.world_size
            new_errors = [x - self.p @ self.q.T for x in corrected]
        elif self.computes_p:
            self.q = np.linalg.qr(self.q)[0]
            local = [x @ self.q for x in corrected]
            new_errors = [x - p @ self.q.T for x, p in zip(corrected, local, strict=True)]
            self.p = sum(local) / self.world_size
        else:
            self.p = np.linalg.qr(self.p)[0]
            local = [x.T @ self.p for x in corrected]
            new_errors = [x - self.p @ q.T for x, q in zip(corrected, local, strict=True)]
            self.q = sum(local) / self.world_size
        self.computes_p = not self.computes_p
        if self.feedback:
            self.errors = new_errors
        return self.p @ self.q.T


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize(("world_size", "options"), [(2, {}), (3, {"error_feedback": False}), (4, {"buffer_mb": 0})])
@on_ranks(timeout_s=90)
def test_scheme_follows_its_float64_transcription(
    rank: int, world_size: int, scheme: str, options: dict[str, Any]
) -> dict[str, Any]:
    driver = drive(scheme, [2, 3, 1, 4], **options)
    feedback = options.get("error_feedback", True)
    oracles = {i: Transcription(scheme, shape, f"p{i}", world_size, feedback) for i, shape in MATRICES.items()}
    digest = []
    for step in range(12):
        everyone = [gradients_of(other, step) for other in range(world_size)]
        results = driver.reduce(everyone[rank])
        for i, result in enumerate(results):
            if i in oracles:
                expected = oracles[i].step([matrix(gradients[i]) for gradients in everyone])
                assert np.allclose(matrix(result), expected, rtol=1e-3, atol=2e-4), (step, i)
            elif result.numel():
                mean = torch.stack([gradients[i] for gradients in everyone]).mean(0)
                assert torch.allclose(result, mean, atol=1e-6)
        digest.append(flat(results))
    state = driver.scheme.state_dict()
    for i, oracle in oracles.items():
        if feedback:
            assert np.allclose(state["residuals"][f"p{i}"].numpy(), oracle.errors[rank], rtol=1e-3, atol=5e-4), i
    assert len(state["residuals"]) == (len(oracles) if feedback else 0)
    driver.close()
    return {"results": torch.stack(digest), "factors": state["factors"]}


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize(("dtype", "limit"), [(torch.float32, 2e-5), (torch.float16, 50.0)])
@on_ranks(3)
def test_full_rank_gives_the_exact_mean(
    rank: int, world_size: int, scheme: str, dtype: torch.dtype, limit: float
) -> None:
    """In float16 of values whose sum it does not hold, and whose mean, DDP's, it does: factors are summed as float32."""
    driver = Driver(schemes.by_name(scheme, rank=12, min_compression_rate=0), [torch.zeros(12, 12, dtype=dtype)])
    for step in range(6):
        generators = [torch.Generator().manual_seed(9 * step + other) for other in range(world_size)]
        everyone = [torch.randn(12, 12, generator=generator) for generator in generators]
        if dtype == torch.float16:
            everyone = [50_000.0 * gradient.sign() for gradient in everyone]
        (result,) = driver.reduce([everyone[rank].to(dtype)])
        assert torch.allclose(result.float(), torch.stack(everyone).mean(0), atol=limit)
    if scheme == "acp-sgd":  # its error is local; Power-SGD's holds what this rank's gradient differs from the mean
        assert driver.scheme.state_dict()["residuals"]["p0"].abs().max() < limit
    driver.close()


# ---- beside PyTorch's own hook, from one state


ROWS, COLUMNS, N_FACTORS, STEPS = 30, 40, 4, 6


@pytest.mark.parametrize("name", ["power-sgd", "power-sgd-overlap"])
@on_ranks(2)
def test_means_and_errors_are_those_of_powersgd_hook(rank: int, world_size: int, name: str) -> None:
    model = DistributedDataParallel(Given((ROWS, COLUMNS)))
    state = powerSGD_hook.PowerSGDState(dist.group.WORLD, matrix_approximation_rank=N_FACTORS, start_powerSGD_iter=2)
    model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    driver = Driver(schemes.by_name(name, rank=N_FACTORS), [torch.zeros(ROWS, COLUMNS)])
    generator = torch.Generator().manual_seed(rank)
    for step in range(-3, STEPS):
        gradient = torch.randn(ROWS, COLUMNS, generator=generator)
        model.zero_grad()
        model(gradient).backward()
        if step < 0:  # two plain steps, and one with factors of the hook's own
            continue
        if step == 0:
            factors = {"p0": state.q_memory_dict[0].view(COLUMNS, N_FACTORS).T.contiguous()}
            residuals = {"p0": state.error_dict[0].view(ROWS, COLUMNS).clone()}
            driver.scheme.load_state_dict({**driver.scheme.state_dict(), "factors": factors, "residuals": residuals})
            continue
        (ours,) = driver.reduce([gradient])
        theirs = model.module.weight.grad
        assert torch.allclose(ours, theirs, rtol=1e-4, atol=1e-4), (step, float((ours - theirs).abs().max()))
        kept = driver.scheme.state_dict()["residuals"]["p0"]
        error = state.error_dict[0].view(ROWS, COLUMNS)
        assert torch.allclose(kept, error, rtol=1e-4, atol=1e-3), (step, float((kept - error).abs().max()))
        assert float((theirs - gradient).norm()) > 0.1 * float(gradient.norm()), "something was left out"
    driver.close()


@on_ranks(2)
def test_two_steps_on_a_constant_gradient_are_one_step_of_power_sgd(rank: int, world_size: int) -> None:
    """From the same start, in float64."""
    driver = drive("acp-sgd", [10], error_feedback=False)
    everyone = [gradients_of(other, 0) for other in range(world_size)]
    driver.reduce(everyone[rank])
    results = driver.reduce(everyone[rank])
    for i, shape in MATRICES.items():
        oracle = Transcription("power-sgd", shape, f"p{i}", world_size, feedback=False)
        expected = oracle.step([matrix(gradients[i]) for gradients in everyone])
        assert np.allclose(matrix(results[i]), expected, rtol=1e-4, atol=1e-5), i
    driver.close()
