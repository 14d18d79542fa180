"""Levels that the receiver derives: what happens where ranks would derive others; and what float16 needs."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import gradwire
from gcomp_gradients import make_gradient
from gradwire import schemes
from ranks import on_ranks
from small_training import Training, adamw, batch_of, layers


@pytest.mark.parametrize("how", ["learning rate", "betas", "eps", "step", "parameter", "anew", "state"])
@on_ranks(3, raises=gradwire.RankMismatch, match="hyper-parameters")
def test_optimizer_that_diverged_on_one_rank_raises_on_all(rank: int, world_size: int, how: str) -> None:
    training = Training(rank, "gcomp", adamw)
    training.take_steps(range(2))
    if rank == 1:
        optimizer = training.optimizer
        group, first = optimizer.param_groups[0], next(iter(training.ddp.parameters()))
        if how == "learning rate":
            group["lr"] *= 2
        elif how == "betas":
            group["betas"] = (0.9, 0.5)
        elif how == "eps":
            group["eps"] = 1e-2
        elif how == "step":
            optimizer.state[first]["step"] += 100
        elif how == "parameter":
            first.data.mul_(4)
        elif how == "anew":
            optimizer.state.clear()
        else:
            optimizer.state[first]["exp_avg_sq"].mul_(4)
    training.take_steps(range(2, 4))


@on_ranks(2)
def test_fused_steps_of_16_bits_round_otherwise_on_ranks_and_levels_are_sent(
    rank: int, world_size: int
) -> list[torch.Tensor]:
    """Under DDP alone, too, torch's momenta differ then in their last bits, by where they lie; here by more, and for sure."""
    training = Training(
        rank,
        "gcomp",
        lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9, fused=True),
        lambda: layers().bfloat16(),
        lambda module, rank, step: module(batch_of(rank, step).bfloat16()).square().mean(),
    )
    training.take_steps(range(2))
    if rank == 1:
        training.optimizer.state[next(iter(training.ddp.parameters()))]["momentum_buffer"].mul_(4)
    training.take_steps(range(2, 3))
    return [parameter.grad for parameter in training.ddp.parameters() if parameter.grad is not None]


class Constant(nn.Module):
    """Its gradient is what `forward` is told, in float16."""

    def __init__(self, n: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(n, dtype=torch.float16))

    def forward(self, gradient: torch.Tensor) -> torch.Tensor:
        return (self.weight * gradient).sum()


@on_ranks(4)
def test_mean_of_large_float16_values_does_not_overflow_in_any_scheme_through_a_codec(
    rank: int, world_size: int
) -> None:
    for name, options in (
        ("gcomp", {}),
        ("gcomp", {"topology": "direct"}),
        ("gcomp", {"format": 1}),
        ("gcomp", {"importance": "none"}),
        ("gcomp", {"importance": "uniform", "bits": 10}),
        ("truncate", {"bits": 2}),
        ("zstd", {}),
        ("zlib", {}),
        ("embedded-float", {"bits": 16}),
        ("truncated-float", {"bits": 16}),
    ):
        ddp = DistributedDataParallel(Constant(500))
        optimizer = torch.optim.SGD(ddp.parameters(), lr=1.0)
        attachment = gradwire.attach(ddp, optimizer, schemes.by_name(name, **options))
        ddp(torch.full((500,), 30_000.0, dtype=torch.float16)).backward()
        (parameter,) = ddp.parameters()
        # Four hops that truncate 2 of 10 bits may take 4 x 3 x 16 away.
        assert (parameter.grad - 30_000).abs().max() <= (192 if name == "truncate" else 16), (name, options)
        attachment.close()


class Given(nn.Module):
    """As `Constant`, for any dtype and any bits, which a backward pass by multiplication would change."""

    def __init__(self, n: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(-1, 1, n).to(dtype))

    def forward(self, gradient: torch.Tensor) -> torch.Tensor:
        return _Give.apply(self.weight, gradient)


class _Give(torch.autograd.Function):
    @staticmethod
    def forward(ctx, weight: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        ctx.save_for_backward(gradient)
        return weight.sum()

    @staticmethod
    def backward(ctx, _: torch.Tensor) -> tuple[torch.Tensor, None]:  # type: ignore[override]
        return ctx.saved_tensors[0], None


@on_ranks(3)
def test_special_values_of_every_dtype_arrive_alike_on_all_ranks(rank: int, world_size: int) -> list[torch.Tensor]:
    """Through every hop: NaN, Inf, -0, subnormals and the largest finite value, against the ordered sum by torch."""
    results = []
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        ddp = DistributedDataParallel(Given(3000, dtype))
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
        gradients = [make_gradient("special", 3000, dtype, seed) for seed in range(world_size)]
        exact = torch.stack([gradient.double() for gradient in gradients]).mean(0)
        for options in ({"importance": "none"}, {"importance": "none", "topology": "direct"}, {}, {"bits": 4}):
            attachment = gradwire.attach(ddp, optimizer, schemes.by_name("gcomp", **options))
            optimizer.zero_grad(set_to_none=True)
            ddp(gradients[rank]).backward()
            (parameter,) = ddp.parameters()
            mean = parameter.grad.double()
            nonfinite = ~exact.isfinite()
            assert bool((~mean[nonfinite].isfinite()).all()), (dtype, options)
            small = exact.abs() < 0.2 * torch.finfo(dtype).max  # sums of the largest values may overflow
            # The last place of each term may go; subnormals of float32 and bfloat16 are zeros.
            size = torch.stack([gradient.double().abs() for gradient in gradients]).sum(0)
            last_place = 2.0**-4 if options.get("bits") == 4 or options == {} else torch.finfo(dtype).eps
            tolerance = 4 * last_place * size + 4 * torch.finfo(dtype).tiny
            close = (mean - exact).abs() <= tolerance
            assert bool(close[small & ~nonfinite].all()), (dtype, options)
            results.append(parameter.grad.clone())
            attachment.close()
    return results


@on_ranks(2)
def test_cap_beside_the_papers_rule_sends_fewer_bytes(rank: int, world_size: int) -> None:
    n_bytes = []
    for options in ({"bits": 6}, {}):
        training = Training(rank, schemes.by_name("gcomp", **options), adamw)
        training.take_steps(range(3))
        n_bytes.append(training.close()["bytes_sent"])
    assert n_bytes[0] < 0.7 * n_bytes[1]
