"""bench convergence: one run a seed, trained once, and means and spreads that say what the runs hold."""

from __future__ import annotations

import argparse
import csv
import json
from pathlib import Path
from typing import Any

import pytest

from gradwire import cli
from gradwire.bench import convergence
from gradwire.bench.fidelity_runs import FinishedRun
from gradwire.bench.figures import convergence_numbers as numbers
from gradwire.bench.figures import convergence_plots
from gradwire.errors import InvalidArgument
from gradwire.training import TrainConfig, launching
from gradwire.training.run_files import RunFiles


def make_run(name: str, seed: int, loss: float, accuracy: float, n_steps: int = 12) -> FinishedRun:
    steps = [{"step": step, "loss": loss, "ratio": 0.5} for step in range(n_steps)]
    summary = {"seed": seed, "ranks": 4, "batch_size": 8, "optimizer": "adamw", "learning_rate": 0.1}
    summary |= {"loss_last_10": loss, "accuracy": accuracy, "iteration_s": 0.5, "replicas_equal": True}
    return FinishedRun(name, "resnet", summary, steps)


def test_mean_and_spread_are_over_seeds_and_worse_is_against_the_same_seeds_of_the_first_scheme() -> None:
    runs = {
        "plain": [make_run("plain", seed, loss, 0.9) for seed, loss in ((0, 1.0), (1, 2.0), (2, 3.0))],
        "top-k": [make_run("top-k", seed, loss, 0.8) for seed, loss in ((0, 1.5), (1, 2.5))],
        "sign-sgd": [make_run("sign-sgd", seed, 3.5, 0.95) for seed in (0, 1, 2)],
    }
    plain, top_k, sign = numbers.describe_convergence(runs, "plain")
    assert (plain["loss_last_10"], plain["loss_last_10_sd"], plain["loss_last_10_min"]) == (2.0, 1.0, 1.0)
    assert plain["loss_last_10_worse_by"] == 0.0
    assert (top_k["n_seeds"], top_k["seeds"]) == (2, "0 1")
    assert top_k["loss_last_10_worse_by"] == 0.5, "seed 2, which it has not run, does not count"
    assert top_k["loss_last_10_within"], "2.0 is no worse than plain's worst seed"
    assert not sign["loss_last_10_within"]
    assert top_k["accuracy_worse_by"] == pytest.approx(0.1)
    assert not top_k["accuracy_within"], "of accuracy less is worse"
    assert sign["accuracy_within"]
    assert top_k["held_out_loss"] is None is top_k["held_out_loss_within"]
    assert numbers.describe_convergence({"top-k": runs["top-k"]}, "plain")[0]["loss_last_10_within"] is None
    assert [record["loss_max"] for record in numbers.describe_steps(runs)][:12] == [3.0] * 12
    table = numbers.to_markdown([plain, top_k, sign])
    assert "| top-k | 2 | 2.0000 ± 0.7071 | 0.5000 | yes |" in table
    assert "held out" not in table


def pretend_to_train(config: TrainConfig, n_ranks: int, rate: str = "none", **options: Any) -> dict[str, Any]:
    """A run folder as a real run leaves it, with losses that depend on seed and learning rate."""
    learning_rate = config.workload_options.get("learning_rate", 1e-3)
    summary = {
        "scheme": config.scheme, "scheme_options": config.scheme_options, "workload": config.workload,
        "workload_options": config.workload_options, "ranks": n_ranks, "rate_bps": None, "steps": config.steps,
        "start_step": 0, "seed": config.seed, "deterministic": True, "batch_size": config.batch_size,
        "optimizer": "adamw", "learning_rate": learning_rate, "loss_last_10": config.seed + learning_rate,
        "held_out_loss": 1.0, "iteration_s": 0.1, "replicas_equal": True,
    }  # fmt: skip
    files = RunFiles(config.out, {})
    for step in range(config.steps):
        files.add_step({"step": step, "loss": 2.0 + config.seed - 0.1 * step, "ratio": 1.0})
    files.finish(summary)
    return summary


def test_runs_are_trained_once_by_scheme_workload_and_seed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[tuple[str, dict[str, Any], int]] = []

    def counting(config: TrainConfig, *args: Any, **options: Any) -> dict[str, Any]:
        started.append((config.scheme, config.workload_options, config.seed))
        return pretend_to_train(config, *args, **options)

    monkeypatch.setattr(launching, "run_ranks", counting)
    command = ["bench", "convergence", "--workload", "gpt:n_layers=1", "--steps", "12", "--batch-size", "2",
               "--scheme", "ddp", "sign-sgd:ties=positive,workload.learning_rate=1e-4", "--seeds", "0", "7",
               "--out", str(tmp_path)]  # fmt: skip
    assert cli.main([*command, "--no-train"]) == 1
    assert cli.main(command) == 0
    layers = {"n_layers": 1}
    expected = [("ddp", layers), ("sign-sgd", {**layers, "learning_rate": 1e-4})]
    assert started == [(*one, seed) for seed in (0, 7) for one in expected]
    records = json.loads((tmp_path / "convergence.json").read_text())
    assert [record["loss_last_10"] for record in records] == pytest.approx([3.501, 3.5001])
    assert all(isinstance(value, str | int | float | bool | None) for record in records for value in record.values())
    for name in ("convergence_losses.svg", "convergence_ends.png", "convergence.md", "convergence.csv"):
        assert (tmp_path / name).stat().st_size > 0, name
    with (tmp_path / "steps.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 24
    assert (float(rows[0]["loss_min"]), float(rows[0]["loss_max"])) == (2.0, 9.0)
    assert cli.main(command) == 0
    assert len(started) == 4, "a finished run was trained again"
    assert cli.main([*command, "--seeds", "0", "7", "8"]) == 0
    assert [seed for _, _, seed in started[4:]] == [8, 8]


def test_wrong_names_are_refused_before_anything_is_trained(tmp_path: Path) -> None:
    for words in (["--scheme", "pwr-sgd"], ["--workload", "gtp"], ["--scheme", "acp-sgd:rank=0"], ["--ranks", "0"],
                  ["--scheme", "plain", "acp-sgd:workload.speed=3"]):  # fmt: skip
        parser = argparse.ArgumentParser()
        convergence.add_arguments(parser)
        with pytest.raises(InvalidArgument):
            convergence.run(parser.parse_args([*words, "--out", str(tmp_path / "runs")]))
    assert not any(tmp_path.iterdir())


def make_timed_run(name: str, seed: int, step_s: float, losses: list[float]) -> FinishedRun:
    steps = [
        {"step": step, "loss": loss, "ratio": 1.0, "iteration_s": step_s, "elapsed_s": (step + 1) * step_s}
        for step, loss in enumerate(losses)
    ]
    return FinishedRun(name, "gpt at 1gbit", {"seed": seed, "ranks": 2, "optimizer": "adamw"}, steps)


def test_time_to_a_loss_is_the_yardsticks_last_fifth_of_the_same_seed(tmp_path: Path) -> None:
    falling = [3.0 - 0.04 * step for step in range(50)]
    stuck = [3.0] * 50
    runs = {
        "ddp": [make_timed_run("ddp", seed, 0.2, falling) for seed in (0, 1)],
        "aqgb": [make_timed_run("aqgb", 0, 0.1, falling), make_timed_run("aqgb", 1, 0.1, stuck)],
        "top-k": [make_timed_run("top-k", 0, 0.1, stuck)],
    }
    ddp, aqgb, top_k = numbers.describe_times(runs, "ddp")
    assert ddp["target_loss"] == pytest.approx(3.0 - 0.04 * 40)
    assert (ddp["steps_to_loss"], ddp["seconds_to_loss"]) == (50, pytest.approx(10.0))
    assert (aqgb["n_reached"], aqgb["seconds_to_loss"], aqgb["iteration_s"]) == (1, pytest.approx(5.0), 0.1)
    assert aqgb["speed_up"] == pytest.approx(2.0), "over the seed that both reach it with"
    assert (top_k["n_reached"], top_k["seconds_to_loss"], top_k["speed_up"]) == (0, None, None)
    assert "| top-k | 0.1 |" in numbers.times_to_markdown([ddp, aqgb, top_k])
    convergence_plots.plot_losses_over_time({"gpt at 1gbit": runs}, tmp_path)
    assert (tmp_path / "convergence_times.svg").stat().st_size > 0


def test_each_rate_has_runs_of_its_own_and_buckets_are_ddps() -> None:
    parser = argparse.ArgumentParser()
    convergence.add_arguments(parser)
    words = ["--workload", "gpt", "--scheme", "aqgb:bucket_mb=0.5", "--seeds", "0", "--out", "runs"]
    (alone,) = convergence.plan(parser.parse_args([*words, "--rate", "1gbit"]))
    assert (alone.workload, alone.rate, alone.config.bucket_cap_mb) == ("gpt", "1gbit", 0.5)
    assert alone.config.scheme_options == {}
    slow, fast = convergence.plan(parser.parse_args([*words, "--rate", "100mbit", "1gbit"]))
    assert (slow.workload, slow.rate) == ("gpt at 100mbit", "100mbit")
    assert slow.config.out == Path("runs/100mbit/gpt/aqgb-bucket_mb-0.5/seed-0") != fast.config.out
