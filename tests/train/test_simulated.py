"""Ranks that are simulated in one process get the bits of real ones."""

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

import gradwire
from gradwire import schemes
from gradwire_lab import workloads
from gradwire_lab.training.simulated import SimulatedRanks, train
from ranks import on_ranks

SPECS = (
    "embedded-float:bits=4", "embedded-float:bits=5,topology=direct", "truncated-float:bits=8",
    "gcomp:importance=uniform,bits=7", "one-bit:scale_values=64", "one-bit:error_feedback=False", "two-bit", "qsgd",
)  # fmt: skip


def drawn(rank: int, step: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(100 * step + rank)
    return {"matrix": torch.randn(451, 443, generator=generator) * 1e-3, "bias": torch.randn(70, generator=generator)}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@on_ranks([2, 3, 4])
def test_simulated_ranks_get_the_bits_of_real_ones(rank: int, world_size: int, dtype: torch.dtype) -> None:
    for spec in SPECS:
        reducer = gradwire.Reducer(spec, timeout_s=100)
        named = {name: one.to(dtype) for name, one in drawn(0, 0).items()}
        simulated = SimulatedRanks(schemes.by_name(spec), world_size, named)
        for step in range(3):
            tensors = {name: one.to(dtype) for name, one in drawn(rank, step).items()}
            reducer.all_reduce(tensors).wait()
            peers = (drawn(peer, step).values() for peer in range(world_size))
            every = [torch.cat([one.to(dtype).flatten() for one in values]) for values in peers]
            matrix, bias = simulated.mean(every).split([tensors["matrix"].numel(), 70])
            assert torch.equal(tensors["matrix"].flatten(), matrix), (spec, step)
            # Spared, so the backend adds it up, in an order of its own from three ranks on.
            tolerance = 2**-7 * (world_size > 2)
            torch.testing.assert_close(tensors["bias"], bias, rtol=tolerance, atol=tolerance)
        reducer.close()


@pytest.mark.parametrize("spec", ["gcomp", "gcomp:topology=direct,tolerance=8,least_bits=3", "gcomp:rounding=truncate"])
@on_ranks([2, 3, 4])
def test_simulated_ranks_get_the_bits_of_real_ones_by_importance_too(rank: int, world_size: int, spec: str) -> None:
    torch.manual_seed(0)
    ddp = DistributedDataParallel(torch.nn.Linear(400, 300, bias=False))
    weight, optimizer = ddp.module.weight, torch.optim.SGD(ddp.parameters(), lr=0.1, momentum=0.9)
    simulated = SimulatedRanks(schemes.by_name(spec), world_size, {"weight": weight}, [optimizer])
    attachment = gradwire.attach(ddp, optimizer, schemes.by_name(spec))
    for step in range(3):
        seeds = range(100 * step, 100 * step + world_size)
        batches = [torch.randn(8, 400, generator=torch.Generator().manual_seed(seed)) for seed in seeds]
        every = [torch.autograd.grad(ddp.module(one).square().mean(), weight)[0].flatten() for one in batches]
        expected = simulated.mean(every)
        optimizer.zero_grad()
        ddp(batches[rank]).square().mean().backward()
        assert torch.equal(weight.grad.flatten(), expected), step
        optimizer.step()
    attachment.close()


def test_sixty_four_ranks_train_and_lose_little_in_eight_bits() -> None:
    workload = workloads.by_name("gpt", n_layers=1, width=16, n_heads=2, length=16, batch_size=1)
    plain, disturbed, rounded = (
        train(workload, spec, 64, 3, disturb=disturb)
        for spec, disturb in (("plain", 0.0), ("plain", 1e-7), ("embedded-float:bits=8", 0.0))
    )
    assert (plain["ratio"], disturbed["ratio"]) == (1, 1)
    assert 0.25 < rounded["ratio"] < 0.4  # a message of a hundred values has a header
    assert rounded["losses"] != plain["losses"] != disturbed["losses"]
    assert rounded["held_out_loss"] == pytest.approx(plain["held_out_loss"], rel=1e-2)


def test_a_scheme_without_ring_or_owners_is_refused() -> None:
    with pytest.raises(gradwire.Unsupported, match="no ring and no owners"):
        SimulatedRanks(schemes.by_name("top-k"), 4, {})
