"""The scheme gcomp: near-lossless, the same bits on all ranks, tables that follow the gradients, state that resumes."""

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel

import gradwire
from gcomp_gradients import make_gradient
from gradwire import _native, schemes
from gradwire.schemes.gcomp.importance import Promise, QuantisationMetric
from ranks import on_ranks
from small_training import Given, MakeOptimizer, Training, adamw, batch_of, copying, from_one, layers, sgd


@pytest.mark.parametrize(
    ("world_size", "topology", "optimizer"), [(1, "ring", adamw), (2, "ring", adamw), (3, "direct", sgd)]
)
@on_ranks()
def test_ranks_agree_and_the_loss_stays_near_that_of_the_lossless_ring(
    rank: int, world_size: int, topology: str, optimizer: MakeOptimizer
) -> list[Tensor]:
    ends, stats = [], []
    for name, options in (
        ("gcomp", {"importance": "none", "refresh_every": 4}),
        ("gcomp", {"importance": "paper", "refresh_every": 4}),
        ("truncate", {}),
    ):
        training = Training(rank, schemes.by_name(name, topology=topology, **options), optimizer, loss=from_one)
        training.take_steps(range(12))
        stats.append(training.close())
        ends.append(training.flat())
    lossless, near_lossless, truncated = ends
    if world_size == 1:
        assert torch.equal(lossless, near_lossless)
        assert stats[0]["bytes_sent"] == 0
        return ends
    assert (lossless - near_lossless).abs().mean() < 0.1 * (lossless - truncated).abs().mean()
    assert stats[1]["bytes_sent"] < stats[0]["bytes_sent"]
    assert stats[1]["table_refreshes"] == 3  # counted in steps 0, 4, 8, in use from 2, 6, 10
    return ends


@on_ranks(2)
def test_resumed_run_continues_bit_by_bit(rank: int, world_size: int) -> None:
    def start(**options: int) -> Training:
        return Training(rank, schemes.by_name("gcomp", **options), adamw, loss=from_one)

    saved = start(refresh_every=4).after(range(5)).state()  # step 4 was counted: the refresh is under way
    results = []
    for _ in range(2):  # a run that goes on: wrapped anew at this step, as the resumed one has to be
        resumed = start(refresh_every=4).load(saved)
        assert resumed.attachment.step == 5
        resumed.take_steps(range(5, 12))
        stats = resumed.close()
        results.append((resumed.flat(), stats["table_id_wide"], stats["bytes_sent"]))
    assert torch.equal(results[0][0], results[1][0])
    assert results[0][1:] == results[1][1:]
    other = start()
    with pytest.raises(gradwire.InvalidArgument, match="refresh_every: 4 saved, None now"):
        other.load(saved)


@on_ranks(2)
def test_inf_on_one_rank_reaches_all_ranks_and_spoils_no_table(rank: int, world_size: int) -> None:
    training = Training(rank, "gcomp:refresh_every=3")
    for step in range(4):
        training.backward(step, math.inf if rank == 1 and step == 0 else 1.0)
        assert bool(training.gradient().isfinite().all()) == (step > 0)
    assert training.close()["table_refreshes"] == 0  # the counts of step 0 held an Inf: all ranks left them out


@on_ranks(2)
def test_what_is_missing_is_named(rank: int, world_size: int) -> None:
    with pytest.raises(gradwire.InvalidArgument, match="pass HookState\\(scheme, optimizer=optimizer\\)"):
        gradwire.HookState("gcomp")
    ddp = Training(rank).ddp
    with pytest.raises(gradwire.Unsupported, match='importance="uniform"'):
        gradwire.attach(ddp, torch.optim.Adam(ddp.parameters(), differentiable=True), "gcomp")
    state = gradwire.HookState(schemes.by_name("gcomp", importance="uniform", bits=10))
    ddp.register_comm_hook(state, gradwire.ddp_hook)
    ddp(batch_of(rank, 0)).sum().backward()
    with pytest.raises(gradwire.InvalidArgument, match="HookState\\(scheme, module=model\\)"):
        state.state_dict()
    state.close()


@on_ranks(2, raises=gradwire.Unsupported, match="makes the steps, attach that one")
def test_steps_of_another_optimizer_are_noticed(rank: int, world_size: int) -> None:
    training = Training(rank, "gcomp", adamw).after(range(2))
    training.optimizers = [torch.optim.AdamW(training.ddp.parameters(), lr=1e-4)]
    training.take_steps(range(2, 6))


@on_ranks(2, raises=gradwire.Unsupported, match="8 times as large")
def test_gradients_that_were_scaled_are_noticed(rank: int, world_size: int) -> None:
    training = Training(rank, "gcomp").after(range(2))
    training.backward(2)
    for parameter in training.ddp.parameters():
        parameter.grad.mul_(8.0)
    training.optimizer.step()


@on_ranks(2)
def test_honest_training_is_not_taken_for_a_mistake(rank: int, world_size: int) -> None:
    """Clipping, accumulation, a checkpoint loaded, a GradScaler, skipped steps, weight decay by hand."""
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    training = Training(rank, "gcomp", adamw, scaler=scaler)
    ddp, optimizer = training.ddp, training.optimizer
    saved = {name: value.clone() for name, value in ddp.module.state_dict().items()}
    for step in range(12):
        optimizer.zero_grad()
        for part in range(1 + step % 3):
            scaler.scale(ddp(batch_of(rank, 10 * step + part)).square().mean()).backward()
        if step % 4 == 1:
            continue
        scaler.unscale_(optimizer)
        if step % 2:
            torch.nn.utils.clip_grad_norm_(ddp.parameters(), 1e-3)
        else:
            for parameter in ddp.parameters():
                parameter.grad.add_(parameter.detach(), alpha=1e-2)
        scaler.step(optimizer)
        scaler.update()
        if step == 6:
            ddp.module.load_state_dict(saved)
    training.close()
    optimizer.step()  # the hooks are gone


@on_ranks(2)
def test_table_is_refreshed_by_need_and_not_without(rank: int, world_size: int) -> None:
    """Gradients of one kind need one new table; when they become a million times smaller, another."""
    training = Training(rank, schemes.by_name("gcomp", importance="none"))
    for n_refreshes, scale in enumerate((1.0, 1e-6), start=1):
        for step in range(20):
            training.backward(step % 4, scale)
        assert training.stats()["table_refreshes"] == n_refreshes


# What may become of an optimizer's group, its states and its first parameter.
DIVERGED: dict[str, Callable[[dict[str, Any], dict[Tensor, Any], nn.Parameter], Any]] = {
    "learning rate": lambda group, states, first: group.update(lr=2 * group["lr"]),
    "betas": lambda group, states, first: group.update(betas=(0.9, 0.5)),
    "eps": lambda group, states, first: group.update(eps=1e-2),
    "step": lambda group, states, first: states[first]["step"].add_(100),
    "parameter": lambda group, states, first: first.data.mul_(4),
    "anew": lambda group, states, first: states.clear(),
    "state": lambda group, states, first: states[first]["exp_avg_sq"].mul_(4),
}


@pytest.mark.parametrize("how", DIVERGED)
@on_ranks(3, raises=gradwire.RankMismatch, match="hyper-parameters")
def test_optimizer_that_diverged_on_one_rank_raises_on_all(rank: int, world_size: int, how: str) -> None:
    training = Training(rank, "gcomp", adamw).after(range(2))
    if rank == 1:
        optimizer = training.optimizer
        DIVERGED[how](optimizer.param_groups[0], optimizer.state, next(training.ddp.parameters()))
    training.take_steps(range(2, 4))


@on_ranks(2)
def test_fused_steps_of_16_bits_round_otherwise_on_ranks_and_levels_are_sent(rank: int, world_size: int) -> Any:
    """Under DDP alone, too, torch's momenta differ then in their last bits, by where they lie; here by more, and for sure."""
    fused = partial(torch.optim.SGD, lr=0.1, momentum=0.9, fused=True)
    training = Training(rank, "gcomp", fused, lambda: layers().bfloat16(), copying).after(range(2))
    if rank == 1:
        training.optimizer.state[next(iter(training.ddp.parameters()))]["momentum_buffer"].mul_(4)
    training.take_steps(range(2, 3))
    return [parameter.grad for parameter in training.ddp.parameters() if parameter.grad is not None]


def mean_of(rank: int, scheme: schemes.Scheme, gradient: Tensor, rate: float) -> Tensor:
    """What stands in `.grad` after a backward pass of this gradient."""
    model = partial(Given, (gradient.numel(),), gradient.dtype)
    training = Training(rank, scheme, partial(torch.optim.SGD, lr=rate), model, lambda module, *_: module(gradient))
    training.backward(0)
    return training.gradient()


@on_ranks(4)
def test_mean_of_large_float16_values_does_not_overflow_in_any_scheme_with_a_codec(rank: int, world_size: int) -> None:
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
        gradient = torch.full((500,), 30_000.0, dtype=torch.float16)
        mean = mean_of(rank, schemes.by_name(name, **options), gradient, 1.0)
        # Four hops that truncate 2 of 10 bits may take 4 x 3 x 16 away.
        assert (mean - 30_000).abs().max() <= (192 if name == "truncate" else 16), (name, options)


@on_ranks(3)
def test_special_values_of_every_dtype_arrive_alike_on_all_ranks(rank: int, world_size: int) -> list[torch.Tensor]:
    """Through every hop: NaN, Inf, -0, subnormals and the largest finite value, against the ordered sum by torch."""
    results = []
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        gradients = [make_gradient("special", 3000, dtype, seed) for seed in range(world_size)]
        exact = torch.stack([gradient.double() for gradient in gradients]).mean(0)
        for options in ({"importance": "none"}, {"importance": "none", "topology": "direct"}, {}, {"bits": 4}):
            results.append(mean_of(rank, schemes.by_name("gcomp", **options), gradients[rank], 0.1))
            mean = results[-1].double()
            nonfinite = ~exact.isfinite()
            assert bool((~mean[nonfinite].isfinite()).all()), (dtype, options)
            small = exact.abs() < 0.2 * torch.finfo(dtype).max  # sums of the largest values may overflow
            # The last place of each term may go; subnormals of float32 and bfloat16 are zeros.
            size = torch.stack([gradient.double().abs() for gradient in gradients]).sum(0)
            last_place = 2.0**-4 if options.get("bits") == 4 or options == {} else torch.finfo(dtype).eps
            tolerance = 4 * last_place * size + 4 * torch.finfo(dtype).tiny
            close = (mean - exact).abs() <= tolerance
            assert bool(close[small & ~nonfinite].all()), (dtype, options)
    return results


class Odd(torch.nn.Module):
    """Half the sum of squares of oddly laid out parameters: the gradient of each is the parameter itself."""

    def __init__(self) -> None:
        super().__init__()
        values = torch.randn(4, 6, 5, 7)
        self.plain = torch.nn.Parameter(values.clone())
        self.channels_last = torch.nn.Parameter(values.contiguous(memory_format=torch.channels_last) + 1)
        self.transposed = torch.nn.Parameter(torch.randn(30, 20).t())
        self.sliced = torch.nn.Parameter(torch.randn(20, 30)[:, ::3])
        self.expanded = torch.nn.Parameter(torch.randn(3, 1, 1))
        self.empty = torch.nn.Parameter(torch.randn(0, 3))

    def forward(self) -> Tensor:
        return torch.stack([0.5 * parameter.square().sum() for parameter in self.parameters()]).sum()


@pytest.mark.parametrize("gradient_as_bucket_view", [False, True])
@on_ranks(1)
def test_every_byte_belongs_to_the_gradient_at_its_place(
    rank: int, world_size: int, gradient_as_bucket_view: bool
) -> None:
    torch.manual_seed(0)
    model = Odd()
    ddp = DistributedDataParallel(model, gradient_as_bucket_view=gradient_as_bucket_view, bucket_cap_mb=0.002)
    metric = QuantisationMetric(torch.optim.SGD(model.parameters(), lr=1.0), 1, Promise(format=1))
    checked = []

    def check(state, bucket):  # type: ignore[no-untyped-def]  # DDP reads annotations, and does not take strings
        parameters, flat = bucket.parameters(), bucket.buffer()
        sizes = [parameter.numel() for parameter in parameters]
        found, expected = torch.empty((2, flat.numel()), dtype=torch.uint8)
        metric.write_importance(parameters, [sum(sizes[:i]) for i in range(len(sizes))], found)
        _native.importance(flat, None, None, 0.0, 1.0, 0.0, expected)  # SGD at rate 1: S = |parameter| = |gradient|
        assert torch.equal(found, expected)
        checked.append(flat.numel())
        return allreduce_hook(None, bucket)

    ddp.register_comm_hook(None, check)
    for _ in range(3):  # DDP rebuilds its buckets after the first step
        ddp().backward()
        model.zero_grad()
    assert sum(checked) == 3 * sum(parameter.numel() for parameter in model.parameters())
