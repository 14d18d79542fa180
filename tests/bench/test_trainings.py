"""Trainings as measures: trained once and found again, and what is told of them follows from their records."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ranks
from gradwire.errors import InvalidArgument
from gradwire_lab.bench.measures import Call, trainings
from gradwire_lab.bench.measures.trainings import FinishedRun
from gradwire_lab.training import TrainConfig, train_rank
from gradwire_lab.workloads.gradients import load_gradients

pytestmark = pytest.mark.usefixtures("warm_interpreters")

TINY = {"workload": "gpt:n_layers=1,width=32,n_heads=2,length=16", "ranks": 2, "steps": 10, "batch_size": 2}
BASELINE = "gcomp:importance=none"


def make_run(losses: list[float], step_s: float = 2.0, **summary: Any) -> FinishedRun:
    times = {"iteration_s": step_s, "cpu_s": step_s / 4}
    steps = [
        {"step": step, "loss": loss, "ratio": 0.5, "elapsed_s": step_s * (step + 1), **times}
        for step, loss in enumerate(losses)
    ]
    return FinishedRun({"ranks": 2, "n_cores": 4, "loss_last_10": losses[-1], **summary}, steps)


def call(cells: list[dict[str, Any]], folder: Path, **fixed: Any) -> Call:
    return Call("k", cells, {}, {**TINY, **fixed}, folder)


# Ranks of the tests' own server stand in for the launcher's, which import torch anew for every run.
def train_in_ranks(configs: Sequence[TrainConfig], n_ranks: int, rate: str) -> None:
    for config in configs:
        ranks.run_ranks(_train, n_ranks, config, timeout_s=150)


def _train(rank: int, world_size: int, config: TrainConfig) -> None:
    train_rank(config)


def test_deviation_is_the_mean_distance_from_the_baselines_loss() -> None:
    baseline = make_run([4.0, 3.0, 2.0])
    assert trainings.describe_run(baseline, baseline)["deviation_mean"] == 0
    record = trainings.describe_run(make_run([4.0, 3.0625, 1.9375]), baseline)
    assert record["deviation_mean"] == pytest.approx(0.125 / 3)
    assert trainings.describe_run(make_run([4.0, 5.0, 1.0]), baseline)["deviation_max"] == 2.0
    assert "deviation_mean" not in trainings.describe_run(baseline, None)


def test_refreshed_table_is_the_one_of_the_gradient_saved_before(tmp_path: Path) -> None:
    folder = tmp_path / "gradients"
    folder.mkdir()
    random = np.random.default_rng(3)

    def bits(*scales: float) -> dict[str, Any]:
        for step, scale in enumerate(scales):
            gradient = (scale * random.standard_normal(20_000)).astype(np.float32)
            np.savez(folder / f"step-{50 * step:08}.npz", gradient=gradient)
        return trainings.exponent_bits(make_run([1.0])._replace(folder=tmp_path))

    other = bits(1e-9, 1e-3)
    assert other["refreshed_bits"] > other["static_bits"], "a table of gradients of another size fits worse"
    alike = bits(1e-3, 1e-3)
    # A limited whole-bit code of the same distribution; some header and padding.
    assert alike["entropy_bits"] < alike["refreshed_bits"] < 1.05 * alike["entropy_bits"]
    for path in folder.iterdir():
        path.unlink()
    assert bits() == {}


def test_loss_is_reached_with_the_tenth_step_in_a_row_below_it() -> None:
    losses = np.array([3.0] * 5 + [1.0] * 9 + [2.0] + [1.0] * 12)
    assert trainings.first_below(losses, 1.5) == 24
    assert trainings.first_below(losses, 0.5) is None
    assert trainings.first_below(losses, 3.0) == 9


def test_load_and_time_to_the_baselines_loss_come_from_the_steps() -> None:
    falling = [3.0 - 0.04 * step for step in range(50)]
    ddp, half, stuck = make_run(falling, 0.2), make_run(falling, 0.1), make_run([3.0] * 50, 0.1)
    record = trainings.describe_run(ddp, ddp)
    assert record["target_loss"] == pytest.approx(3.0 - 0.04 * 40)
    assert (record["steps_to_loss"], record["seconds_to_loss"]) == (50, pytest.approx(10.0))
    assert (record["cores_per_rank"], record["machine_load"]) == (pytest.approx(0.25), pytest.approx(0.125))
    assert trainings.describe_run(half, ddp)["seconds_to_loss"] == pytest.approx(5.0)
    assert trainings.describe_run(stuck, ddp)["seconds_to_loss"] is None
    assert record["iteration_s_low"] <= record["iteration_s"] <= record["iteration_s_high"]


def test_finished_trainings_are_not_done_again_and_others_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[str] = []

    def counting(configs: Sequence[TrainConfig], *where: Any) -> None:
        started.extend(config.scheme for config in configs)
        train_in_ranks(configs, *where)

    monkeypatch.setattr(trainings, "run_in_ranks", counting)
    asked = call([{"scheme": BASELINE}, {"scheme": "truncate:bits=18"}], tmp_path, baseline=BASELINE, dump_every=4)
    (_, baseline), (_, truncate) = trainings.measure(asked)
    assert started == ["gcomp", "truncate"]
    assert baseline["deviation_mean"] == 0 < truncate["deviation_mean"]
    assert truncate["ratio_mean"] < baseline["ratio_mean"] < 1.1
    assert baseline["static_bits"] > baseline["entropy_bits"]
    assert all(isinstance(value, str | int | float | bool | None) for value in (baseline | truncate).values())
    gradients = [load_gradients(path) for path in sorted(tmp_path.glob("trainings/*/*/gradients/*.npz"))]
    assert [file.state is not None for file in gradients] == [False, True, True]  # nothing before the first step

    trainings.measure(asked)
    assert started == ["gcomp", "truncate"], "a finished training was done again"
    (summary,) = tmp_path.glob("trainings/*/*truncate*/summary.json")
    summary.unlink()
    trainings.measure(asked)
    assert started[2:] == ["truncate"], "one that was cut off is done again, and that one alone"
    trainings.measure(call([{"scheme": "truncate:bits=18", "seed": 1}], tmp_path, baseline=BASELINE))
    assert started[3:] == ["truncate", "gcomp"], "another seed is another training, of the baseline too"
    monkeypatch.setattr(trainings, "source_hash", lambda module: "other")
    trainings.measure(call([{"scheme": "truncate:bits=18"}], tmp_path))
    assert started[5:] == ["truncate"], "with other code it is another training"


def test_one_set_of_real_ranks_trains_every_scheme(tmp_path: Path) -> None:
    cells = [{"scheme": scheme} for scheme in ("ddp", "one-bit")]
    (_, ddp), (_, one_bit) = trainings.measure(call(cells, tmp_path, steps=3, baseline="ddp"))
    assert ddp["deviation_mean"] == 0 < one_bit["deviation_mean"]
    assert one_bit["ratio_mean"] < 0.1


@pytest.mark.parametrize(
    ("scheme", "fixed"),
    [("gcmp", {}), ("plain", {"workload": "gtp"}), ("gcomp:importance=all", {}), ("acp-sgd:rank=0", {}),
     ("acp-sgd:workload.speed=3", {})],
)  # fmt: skip
def test_wrong_names_are_refused_before_anything_is_trained(tmp_path: Path, scheme: str, fixed: dict[str, str]) -> None:
    with pytest.raises(InvalidArgument):
        trainings.measure(call([{"scheme": "plain"}, {"scheme": scheme}], tmp_path, **fixed))
    assert not any(tmp_path.iterdir())


def test_a_spec_speaks_of_workload_and_buckets_too(tmp_path: Path) -> None:
    cell = {"scheme": "aqgb:bucket_mb=0.5,workload.learning_rate=0.25", "seed": 3, "fold": 2}
    config = trainings.configure(call([cell], tmp_path, workload="resnet:folds=5"), cell, cell["scheme"])
    assert (config.bucket_cap_mb, config.scheme_options, config.seed) == (0.5, {}, 3)
    assert config.workload_options == {"folds": 5, "fold": 2, "learning_rate": 0.25}


def test_a_name_is_the_same_method_beside_every_optimizer(tmp_path: Path) -> None:
    said = {"warmup_steps": 0, "exempt": "none"}
    for spec, options in {
        "one-bit": said | {"scale_values": "message"},
        "acp-sgd:rank=2": {"start_step": 0, "rank": 2},
        "acp-sgd:start_step=100": {"start_step": 100},
        "top-k": said,
        "two-bit:scale_values=512": said | {"scale_values": 512, "levels": 3},
        "qsgd": {"exempt": "none"},
    }.items():
        assert trainings.configure(call([], tmp_path), {}, spec).scheme_options == options


def test_rates_and_ranks_have_folders_of_their_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    placed: list[Path] = []
    monkeypatch.setattr(trainings, "source_hash", lambda module: "of-the-code")
    monkeypatch.setattr(trainings, "run_in_ranks", lambda configs, *where: placed.extend(c.out for c in configs))
    for n_ranks, rate in ((2, "none"), (2, "1gbit"), (3, "1gbit")):
        config = trainings.configure(call([], tmp_path), {}, "plain")
        with pytest.raises(AssertionError, match="without a word"):
            trainings.train_all({"one": config}, n_ranks, rate, tmp_path)
    assert len(set(placed)) == 3
    assert all("of-the-code" in str(path) for path in placed)
