"""power-sgd and PyTorch's powerSGD_hook from one state: the same means and the same errors, step by step."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

from buckets import Driver
from gradwire import schemes
from ranks import on_ranks

ROWS, COLUMNS, RANK, STEPS = 30, 40, 4, 6


class Weight(nn.Module):
    """A matrix whose gradient is given."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(ROWS, COLUMNS))

    def forward(self, gradient: torch.Tensor) -> torch.Tensor:
        return (self.weight * gradient).sum()


@pytest.mark.parametrize("name", ["power-sgd", "power-sgd-overlap"])
@on_ranks(2)
def test_means_and_errors_are_those_of_powersgd_hook(rank: int, world_size: int, name: str) -> None:
    model = DistributedDataParallel(Weight())
    state = powerSGD_hook.PowerSGDState(dist.group.WORLD, matrix_approximation_rank=RANK, start_powerSGD_iter=2)
    model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    driver = Driver(schemes.by_name(name, rank=RANK), [torch.zeros(ROWS, COLUMNS)])
    generator = torch.Generator().manual_seed(rank)
    for step in range(-3, STEPS):
        gradient = torch.randn(ROWS, COLUMNS, generator=generator)
        model.zero_grad()
        model(gradient).backward()
        if step < 0:  # two plain steps, and one with factors of the hook's own
            continue
        if step == 0:
            factors = {"p0": state.q_memory_dict[0].view(COLUMNS, RANK).T.contiguous()}
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
