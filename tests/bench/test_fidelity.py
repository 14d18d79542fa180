"""bench fidelity: runs are trained once and found again, and the figures say what the records hold."""

from __future__ import annotations

import argparse
import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console

import ranks
from gradwire import cli
from gradwire.bench import fidelity
from gradwire.bench.fidelity_runs import FinishedRun, run_planned
from gradwire.bench.figures import fidelity_numbers as numbers
from gradwire.errors import InvalidArgument
from gradwire.training import TrainConfig, launching, train_rank
from gradwire.workloads.gradients import load_gradients


# Ranks of the tests' own server stand in for the launcher's, which import torch anew for every run.
def train_in_ranks(config: TrainConfig, n_ranks: int, rate: str = "none", **options: Any) -> dict[str, Any]:
    launching.check(config)
    return ranks.run_ranks(_train, n_ranks, config, timeout_s=150)[0]


def _train(rank: int, world_size: int, config: TrainConfig) -> dict[str, Any]:
    return train_rank(config).summary


TINY = [
    "--workload",
    "gpt:n_layers=1,width=32,n_heads=2,length=16",
    "--ranks",
    "2",
    "--steps",
    "10",
    "--batch-size",
    "2",
]


def make_run(name: str, losses: list[float], ratios: list[float] | None = None, sha256: str = "a") -> FinishedRun:
    steps = [
        {"step": step, "loss": loss, "ratio": ratio, "elapsed_s": 2.0 * (step + 1), "iteration_s": 2.0, "cpu_s": 0.5}
        for step, (loss, ratio) in enumerate(zip(losses, ratios or [1.0] * len(losses), strict=True))
    ]
    summary = {"optimizer": "adamw", "ranks": 2, "n_cores": 4, "loss_last_10": losses[-1], "replicas_equal": True}
    return FinishedRun(name, "gpt", {**summary, "parameters_sha256": sha256}, steps)


def test_deviation_is_the_mean_distance_from_the_lossless_ring() -> None:
    runs = {
        numbers.BASELINE: make_run(numbers.BASELINE, [4.0, 3.0, 2.0]),
        numbers.PAPER: make_run(numbers.PAPER, [4.0, 3.0625, 1.9375]),
        numbers.TRUNCATE: make_run(numbers.TRUNCATE, [4.0, 5.0, 1.0]),
    }
    by_name = {record["configuration"]: record for record in numbers.describe_fidelity(runs)}
    assert by_name[numbers.BASELINE]["deviation_mean"] == 0
    assert by_name[numbers.PAPER]["deviation_mean"] == pytest.approx(0.125 / 3)
    assert by_name[numbers.PAPER]["below_truncate"] == pytest.approx(1 - 0.125 / 3)
    assert by_name[numbers.PAPER]["below_periodic"] is None
    assert by_name[numbers.TRUNCATE]["deviation_max"] == 2.0
    assert numbers.describe_fidelity({numbers.PAPER: runs[numbers.PAPER]}) == []


def test_refreshed_table_is_the_one_of_the_gradient_saved_before(tmp_path: Path) -> None:
    folder = tmp_path / "gradients"
    folder.mkdir()
    random = np.random.default_rng(3)
    for step, scale in ((0, 1e-9), (50, 1e-3), (100, 1e-3)):
        gradient = (scale * random.standard_normal(20_000)).astype(np.float32)
        np.savez(folder / f"step-{step:08}.npz", gradient=gradient)
    run = dataclasses.replace(make_run(numbers.BASELINE, [1.0]), folder=tmp_path)
    second, third = numbers.describe_exponents({numbers.BASELINE: run})
    assert (second["step"], third["step"]) == (50, 100)
    assert second["refreshed_bits"] > second["static_bits"], "a table of gradients of another size fits worse"
    # A limited whole-bit code of the same distribution; some header and padding.
    assert third["entropy_bits"] < third["refreshed_bits"] < 1.05 * third["entropy_bits"]
    assert third["refreshed_share"] == third["refreshed_bits"] / 32
    assert numbers.describe_exponents({numbers.BASELINE: make_run(numbers.BASELINE, [1.0])}) == []


def test_loss_is_reached_with_the_tenth_step_in_a_row_below_it() -> None:
    losses = np.array([3.0] * 5 + [1.0] * 9 + [2.0] + [1.0] * 12)
    assert numbers.first_below(losses, 1.5) == 24
    assert numbers.first_below(losses, 0.5) is None
    assert numbers.first_below(losses, 3.0) == 9


def test_cpu_load_and_time_to_loss_come_from_the_steps() -> None:
    losses = [float(loss) for loss in np.linspace(4, 1, 40)]
    record = numbers.describe_times({numbers.BASELINE: make_run(numbers.BASELINE, losses)})[0]
    assert record["cores_per_rank"] == pytest.approx(0.25)
    assert record["machine_load"] == pytest.approx(0.125)
    assert record["seconds_to_loss"] == 2.0 * record["steps_to_loss"]


def test_finished_runs_are_not_trained_again_and_others_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[str] = []

    def counting(config: TrainConfig, *args: Any, **options: Any) -> dict[str, Any]:
        started.append(config.scheme)
        return train_in_ranks(config, *args, **options)

    monkeypatch.setattr(launching, "run_ranks", counting)
    command = [
        "bench",
        "fidelity",
        *TINY,
        "--out",
        str(tmp_path),
        "--scheme",
        "truncate:bits=18",
        "--dump-gradients",
        "4",
    ]
    assert cli.main(command) == 0
    assert started == ["gcomp", "truncate"]
    records = json.loads((tmp_path / "fidelity.json").read_text())
    baseline, truncate = (record for record in records if record["figure"] == "fidelity")
    assert baseline["deviation_mean"] == 0 < truncate["deviation_mean"]
    assert truncate["ratio_mean"] < baseline["ratio_mean"] < 1.1
    assert all(isinstance(value, str | int | float | bool | None) for record in records for value in record.values())
    for name in (
        "fig18_loss_deviation.svg",
        "fig09_volume_over_training.png",
        "fidelity.md",
        "fidelity.csv",
        "steps.csv",
    ):
        assert (tmp_path / name).stat().st_size > 0, name
    gradients = [
        load_gradients(path)
        for path in sorted((tmp_path / "gpt-n_layers-1-width-32-n_heads-2-length-16").glob("*/gradients/*.npz"))
    ]
    assert [file.state is not None for file in gradients] == [False, True, True]  # nothing before the first step
    assert gradients[2].state is not None
    assert gradients[2].state.hyper["step"] == 9

    planned = fidelity.plan(_parse(command[2:]))
    run_planned(planned, Console())
    assert started == ["gcomp", "truncate"], "a finished run was trained again"
    (tmp_path / "gpt-n_layers-1-width-32-n_heads-2-length-16" / "truncate-bits-18" / "summary.json").unlink()
    run_planned(planned, Console())
    assert started[2:] == ["truncate"], "a run that was cut off is run again, and that one alone"
    run_planned(fidelity.plan(_parse([*command[2:], "--seed", "1"])), Console())
    assert started[3:] == ["gcomp", "truncate"], "a run of another seed is another run"


def test_parameters_are_equal_on_all_ranks_in_every_world_and_topology(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launching, "run_ranks", train_in_ranks)
    out = ["--out", str(tmp_path), "--json", str(tmp_path / "hashes.json")]
    assert cli.main(["bench", "fidelity", "--hashes", *TINY, *out]) == 0
    records = json.loads((tmp_path / "hashes.json").read_text())
    assert [(record["topology"], record["ranks"]) for record in records] == [
        ("ring", 1), ("ring", 2), ("direct", 1), ("direct", 2)
    ]  # fmt: skip
    assert all(record["replicas_equal"] for record in records)
    assert records[0]["parameters_sha256"] == records[2]["parameters_sha256"], "one rank has nobody to add to"


def test_wrong_names_are_refused_before_anything_is_trained(tmp_path: Path) -> None:
    for words in (["--scheme", "gcmp"], ["--workload", "gtp"], ["--scheme", "gcomp:importance=all"]):
        with pytest.raises(InvalidArgument):
            fidelity.run(_parse([*words, "--out", str(tmp_path)]))
    assert cli.main(["bench", "fidelity", "--no-train", "--out", str(tmp_path)]) == 1
    assert not any(tmp_path.iterdir())


def _parse(words: list[str]) -> Any:
    parser = argparse.ArgumentParser()
    fidelity.add_arguments(parser)
    return parser.parse_args(words)
