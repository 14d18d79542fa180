"""Broadcast through owners: the sum that the format's words give, the same on every rank, and what is left out kept."""

from typing import Any

import numpy as np
import pytest
import torch
from test_exchange_digests import InTwoStages
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import gradwire
from gradwire.codecs.embedded_float import EmbeddedFloat
from gradwire.schemes.aqgb.scheme import Broadcast
from ranks import run_ranks

N_IN, N_OUT = 301, 7


def quantised(values: Tensor, bits: int) -> Tensor:
    EmbeddedFloat().quantise(values, bits, out := torch.empty_like(values))
    return out


def mean_by_owners(gradients: list[Tensor], bits: int) -> Tensor:
    """Each part: what its owner holds of all ranks, its own exactly, added in rank order and sent with as many bits."""
    n, world = gradients[0].numel(), len(gradients)
    found = torch.empty(n)
    for owner in range(world):
        part = slice(n * owner // world, n * (owner + 1) // world)
        total = torch.zeros(part.stop - part.start)
        for rank, gradient in enumerate(gradients):
            own = gradient[part].clone()
            total += (own if rank == owner else quantised(own, bits)).float()
        found[part] = quantised(total, bits) * np.float32(1 / world)
    return found.to(gradients[0].dtype)


def take_steps(rank: int, world_size: int, make: type, bits: int, dtype: torch.dtype) -> list[tuple[Tensor, ...]]:
    """Of each step: this rank's gradient, the mean that was taken, and the residual before and after."""
    torch.manual_seed(3)
    ddp = DistributedDataParallel(nn.Linear(N_IN, N_OUT).to(dtype), bucket_cap_mb=0.01)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=1.0)
    feeds_back = dtype == torch.float32 and bits < 32
    scheme = make(bits, 1, topology="owners", error_feedback=feeds_back)
    attachment = gradwire.attach(ddp, optimizer, scheme, timeout_s=100)

    def flat(values: Any) -> Tensor:
        return torch.cat([value.detach().reshape(-1).clone() for value in values])

    found, residual = [], torch.zeros(N_OUT * (N_IN + 1), dtype=dtype)
    for step in range(4):
        batch = torch.randn(3, N_IN, generator=torch.Generator().manual_seed(10 * rank + step)).to(dtype)
        optimizer.zero_grad()
        (ddp(batch).exp().mean() * 1e-2).backward()
        gradient, before = flat(p.grad for p in ddp.parameters()), flat(ddp.parameters())
        with torch.no_grad():
            for parameter in ddp.parameters():
                parameter.zero_()  # so that the step shows the mean's own bits
        optimizer.step()
        attachment.flush()
        mean = -flat(ddp.parameters())
        with torch.no_grad():
            torch.nn.utils.vector_to_parameters(before - mean, ddp.parameters())
        kept = residual
        if feeds_back:
            residual = flat(attachment.state_dict()["state"]["residuals"].values())
        found.append((gradient, mean, kept, residual))
    attachment.close()
    return found


CASES = [
    (Broadcast, 4, torch.float32, 3), (Broadcast, 9, torch.bfloat16, 2), (Broadcast, 32, torch.float32, 3),
    (InTwoStages, 3, torch.float32, 2), (InTwoStages, 4, torch.float32, 4), (InTwoStages, 27, torch.float32, 3),
]  # fmt: skip


@pytest.mark.parametrize(("make", "bits", "dtype", "world_size"), CASES)
def test_all_ranks_get_the_owners_sums_and_keep_what_is_left_out(
    make: type, bits: int, dtype: torch.dtype, world_size: int
) -> None:
    for of_ranks in zip(*run_ranks(take_steps, world_size, make, bits, dtype), strict=True):
        gradients, means, before, after = zip(*of_ranks, strict=True)
        assert all(torch.equal(mean, means[0]) for mean in means)
        sent = [g + r for g, r in zip(gradients, before, strict=True)]
        exact = torch.stack(sent).double().mean(0)
        error = float((means[0].double() - exact).norm() / exact.norm())
        if make is Broadcast:
            assert torch.equal(means[0], mean_by_owners(sent, bits))
        else:
            assert error < 3 * 2.0 ** -(bits + 3) + 1e-7  # as near as all bits make it, not the first
        if dtype == torch.float32 and bits < 32:
            kept = torch.stack(after).double().mean(0)
            assert float((means[0].double() + kept - exact).abs().max()) < 2e-6 * float(exact.abs().max())
