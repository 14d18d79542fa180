"""`auto` between FSDP2's shards: what it keeps, takes, follows and refuses, by step times that a test gives."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from fsdp2_cases import Sharded
from test_shards import mesh_of

import gradwire
from gradwire.schemes.auto.law import PLAIN
from gradwire.schemes.auto.shards import ShardsAuto
from gradwire.telemetry.stopwatch import Lap
from ranks import assert_alike, on_ranks

EXACT, GCOMP = "gradients=plain,weights=exact", "gradients=gcomp,weights=exact"
CLOSE = "gradients=embedded-float:bits=8,weights=close"
# Milliseconds: a step's, of them waiting.
OURS_WINS = {PLAIN: (100, 80), EXACT: (70, 40), GCOMP: (50, 25), CLOSE: (30, 5)}
THEIRS_WINS = {PLAIN: (22, 5), EXACT: (40, 2), GCOMP: (45, 2), CLOSE: (50, 2)}


def times(of: Callable[[int], dict[str, tuple[int, int]]], rank: int) -> Any:
    """Tells `auto` these times of its steps, a little longer on each rank."""
    real = ShardsAuto.end_watched_step

    def end(auto: ShardsAuto, step: int, lap: Lap) -> None:
        took_ms, waited_ms = of(step).get(auto._active, (40, 10))
        real(auto, step, Lap(1_000_000 * took_ms + 1000 * rank, 1_000_000 * waited_ms))

    return mock.patch.object(ShardsAuto, "end_watched_step", end)


def run(
    rank: int, of: Callable[[int], dict[str, tuple[int, int]]], n_steps: int = 30, case: str = "", **options: Any
) -> tuple[dict[str, Any], Sharded]:
    with times(of, rank):
        ours = Sharded(rank, mesh_of(2), case, "auto", **options).take_steps(range(n_steps))
        stats = ours.state.stats()
        ours.state.close()
    return stats, ours


@on_ranks(2)
def test_where_nothing_is_won_fsdp2_is_left_alone(rank: int, world_size: int) -> None:
    """No bits differ, whatever was tried; and what hides its communication is not even tried."""
    stats, ours = run(rank, lambda step: THEIRS_WINS, weights="exact", fidelity=["plain"])
    assert stats["auto"]["scheme"] == PLAIN
    assert [one["kind"] for one in stats["auto"]["decisions"]][:2] == ["try", "reject"]
    assert ours.has_bits_of(Sharded(rank, mesh_of(2)).take_steps(range(30)))
    stats, _ = run(rank, lambda step: {PLAIN: (100, 1)}, 8)
    assert [one["kind"] for one in stats["auto"]["decisions"]] == ["stay"]
    assert stats["weights_bytes_sent"] == stats["weights_original_bytes"] > 0
    assert stats["gradients_bytes_sent"] == stats["gradients_original_bytes"] > 0


@pytest.mark.parametrize(("fidelity", "best"), [("exact", GCOMP), ("close", CLOSE)])
@on_ranks(2)
def test_the_fastest_pair_of_its_level_is_taken(rank: int, world_size: int, fidelity: str, best: str) -> None:
    stats, _ = run(rank, lambda step: OURS_WINS, 60, "mixed32", fidelity=fidelity)
    assert stats["auto"]["scheme"] == best
    assert stats["scheme"] == "auto"
    assert stats["gradients_bytes_sent"] < 0.9 * stats["gradients_original_bytes"]
    assert_alike(gather(stats["auto"]["schedule"]))


def gather(value: Any) -> list[Any]:
    """Every rank's."""
    everyones: list[Any] = [None, None]
    torch.distributed.all_gather_object(everyones, value)
    return everyones


@on_ranks(2)
def test_it_keeps_every_bit_while_it_changes_and_follows_the_network(rank: int, world_size: int) -> None:
    """Slow, then fast: back to FSDP2's own; all the while plain gradients and exact weights are FSDP2's bits."""
    stats, ours = run(
        rank, lambda step: OURS_WINS if step < 40 else THEIRS_WINS, 160, weights="exact", fidelity=["plain"]
    )
    order = [name for _, name in stats["auto"]["schedule"]]
    assert order[0] == order[-1] == PLAIN, stats["auto"]["decisions"]
    assert any(one["kind"] == "switch" and one["scheme"] == EXACT for one in stats["auto"]["decisions"])
    assert ours.has_bits_of(Sharded(rank, mesh_of(2)).take_steps(range(160)))


@on_ranks(2)
def test_a_resumed_run_goes_on_with_what_was_best(rank: int, world_size: int) -> None:
    with times(lambda step: OURS_WINS, rank):
        ours = Sharded(rank, mesh_of(2), "", "auto").take_steps(range(40))
        saved, before = ours.state.state_dict(), ours.state.stats()["auto"]["scheme"]
        ours.state.close()
        ours.attach("auto")
        ours.state.load_state_dict(saved)
        stats = ours.take_steps(range(40, 42)).state.stats()["auto"]
        ours.state.switch("plain")
        assert ours.take_steps(range(42, 44)).state.stats()["scheme"] == "plain"
        ours.state.close()
    assert before == stats["scheme"] == GCOMP
    assert stats["schedule"][-1] == (40, GCOMP)


@on_ranks(2)
def test_wrong_arguments_are_refused_at_attach(rank: int, world_size: int) -> None:
    ours = Sharded(rank, mesh_of(2))
    for options, words in [
        ({"fidelity": "precise"}, "no fidelity is called"),
        ({"fidelity": ["one-bit"]}, "keeps error feedback"),
        ({"fidelity": [3]}, "NAME:option=value"),
        ({"budget": 2}, "share of the time"),
    ]:
        with pytest.raises((gradwire.InvalidArgument, gradwire.Unsupported), match=words):
            ours.attach("auto", **options)
