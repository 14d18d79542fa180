"""Plans: tables that follow from what was measured, elsewhere and as JSON."""

import importlib
import json
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import gradwire
from gradwire.errors import InvalidArgument
from gradwire.planning.plan import Plan, describe_rate
from gradwire.schemes.auto.costs import CodecCost, CostProfile, LinkCost, SharedCores, bucket_sizes, codec_speed
from gradwire.telemetry.stopwatch import Stopwatch
from ranks import on_ranks

recommending: Any = importlib.import_module("gradwire.planning.recommend")


def profile(rate_bps: float, n_ranks: int = 2) -> CostProfile:
    return CostProfile(
        SharedCores(n_ranks, 1, 8),
        LinkCost(rate_bps / 8, 1e-4, 1e-4, 1e-5, 1e-4),
        {"plain": CodecCost(), "bf16": CodecCost(1e-10, 1e-10, 16), "terngrad": CodecCost(1e-9, 1e-9, 4)},
        {"plain": "sum", "bf16": "sum", "terngrad": "agreed-sum"},
        (250_000, 1_000_000),
    )


def plan_at(rate_bps: float) -> Plan:
    made = Plan(profile(rate_bps), 0.1, 1.0, {}, "any", False, is_here=False)
    return made.elsewhere(rate_bps=rate_bps)


def test_on_a_slow_network_it_names_what_wins_and_on_a_fast_one_plain() -> None:
    assert plan_at(1e8).best("any").spec == "terngrad"
    assert plan_at(1e8).best("close").spec == "bf16"
    assert plan_at(1e8).best("exact").spec == "plain"
    assert 'fidelity="any"' in plan_at(1e8).sentence()
    fast = plan_at(1e11)
    assert fast.best("any").spec == "plain"
    assert fast.sentence().startswith("Use plain DDP")
    assert "Compression would pay below" in fast.sentence()


def test_what_was_measured_is_believed_before_what_is_predicted() -> None:
    made = Plan(profile(1e8), 0.1, 0.5, {"plain": 0.5, "bf16": 0.30, "terngrad": 0.9}, "any", False)
    assert made.best("any").spec == "bf16"
    assert "measured" in made.sentence()


def test_a_plan_survives_json_and_grows() -> None:
    made = plan_at(1e8)
    again = Plan.from_dict(json.loads(json.dumps(made.as_dict())))
    assert again.forecasts() == made.forecasts()
    more = again.elsewhere(n_ranks=16)
    assert more.profile.machine.n_ranks == 16
    assert more.plain.step_s > made.plain.step_s
    with pytest.raises(InvalidArgument, match="two ranks"):
        made.elsewhere(n_ranks=1)
    # Two buckets, the last ready at the end: both wait for their own 2 hops of 20 ms, and 4 connections carry 3 MiB a trip.
    far = made.elsewhere(2, 1e12, rtt_s=0.04, streams=4)
    assert far.profile.link.rate == 4 * 3 * 2**20 / 0.04
    assert far.plain.step_s == pytest.approx(0.1 + 4e6 / far.profile.link.rate + 2 * (1e-4 + 0.02), rel=1e-9)
    assert far.elsewhere(loss=0.01, rtt_s=0.04).profile.link.rate == pytest.approx(1448 * 150**0.5 / 0.04)
    with pytest.raises(InvalidArgument, match="loss"):
        made.elsewhere(rtt_s=0.04, loss=1.0)
    with pytest.raises(InvalidArgument, match="not a plan"):
        Plan.from_dict({"version": 1})


def test_a_rank_behind_a_slow_link_is_named() -> None:
    pairs = ((0, 1), (0, 2), (1, 2), (0, 3), (1, 3), (2, 3))
    links = tuple((*pair, 1e8 if 2 in pair else 1e9, 1e-4) for pair in pairs)
    assert Plan(profile(1e9, 4), 0.1, 0.2, {}, "any", False, links).slow_ranks() == [2]


def test_rates_read_as_people_say_them() -> None:
    said = {None: "never", float("inf"): "always", 2.5e9: "2.5 Gb/s", 97e6: "97 Mb/s"}
    assert {rate: describe_rate(rate) for rate in said} == said


def test_buckets_are_cut_as_ddp_cuts_them_and_codecs_have_a_speed() -> None:
    parameters = [torch.empty(n) for n in (10, 1_000_000, 300_000)]
    assert bucket_sizes(parameters) == (300_000, 1_000_010)
    assert 0 < codec_speed("embedded-float:bits=8")[0] < 1e-6


@on_ranks(2)
def test_recommend_leaves_the_model_as_it_was_and_says_the_same_on_all_ranks(
    rank: int, world_size: int
) -> tuple[list[str], str]:
    torch.manual_seed(0)
    ddp = DistributedDataParallel(nn.Sequential(nn.Linear(20, 200), nn.BatchNorm1d(200), nn.Linear(200, 5)))
    optimizer = torch.optim.SGD(ddp.parameters(), 0.1)
    before = [tensor.clone() for tensor in ddp.module.state_dict().values()]
    drawn = torch.get_rng_state()
    inputs = torch.randn(8, 20)
    torch.set_rng_state(drawn)
    plan = gradwire.recommend(ddp, optimizer, lambda: ddp(inputs).square().mean().backward(), seconds=0.5)
    assert all(torch.equal(a, b) for a, b in zip(before, ddp.module.state_dict().values(), strict=True))
    assert torch.equal(drawn, torch.get_rng_state())
    gradwire.attach(ddp, optimizer, gradwire.schemes.by_name("auto", profile=plan.profile.as_dict())).close()
    specs = [forecast.spec for forecast in plan.forecasts()]
    assert {"plain", "bf16", "gcomp:tolerance=32,least_bits=7", "embedded-float:bits=8", "terngrad"} <= set(specs)
    assert "plain" in plan.measured_s
    assert plan.sentence().startswith(("Use plain DDP", "Take gradwire.attach"))
    return specs, plan.sentence()


class WatchAhead(Stopwatch):
    """An hour ahead of the other ranks'."""

    @property
    def elapsed_ns(self) -> int:
        return super().elapsed_ns + 3_600_000_000_000


@on_ranks(2)
def test_when_time_is_up_on_one_rank_all_end_their_trials(rank: int, world_size: int) -> None:
    if rank == 1:
        recommending.Stopwatch = WatchAhead
    ddp = DistributedDataParallel(nn.Linear(20, 200))
    optimizer = torch.optim.SGD(ddp.parameters(), 0.1)
    inputs = torch.randn(8, 20)
    recommending._worth_trying = lambda plan: ["bf16", "embedded-float:bits=8", "terngrad"]
    plan = gradwire.recommend(ddp, optimizer, lambda: ddp(inputs).square().mean().backward(), seconds=60)
    assert list(plan.measured_s) == ["plain", "bf16"]
