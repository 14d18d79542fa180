"""SlimGC's figures: which trainings they ask for, what is made of them, and what overlap could gain at most."""

from __future__ import annotations

import argparse
import math

import pytest

from gradwire.bench import slimgc_accuracy, slimgc_speed
from gradwire.bench.figures import slimgc_accuracy as figures
from gradwire.bench.paired_trainings import FULL, Case
from gradwire.bench.slimgc_accuracy import configurations, plan
from gradwire.bench.specs import parse_spec
from gradwire.control.threshold import NEVER
from gradwire.schemes import by_name
from gradwire.telemetry.report.inputs import Run
from gradwire.telemetry.report.thresholds import make_threshold_table


def arguments(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    slimgc_accuracy.add_arguments(parser)
    return parser.parse_args(list(words))


def test_figure_9_trains_every_strategy_on_every_fold_and_seed_once() -> None:
    cases = plan(arguments("--part", "strategies"))
    digits = {case.key for case in cases if case.workload.startswith("resnet")}
    assert len(digits) == 5 * 10 * 7  # full precision is shared by both codecs
    assert len({case.key for case in cases} - digits) == 3 * 7
    assert cases[0].seed == 0
    assert [case.seed for case in cases] == sorted(case.seed for case in cases)


def test_every_configuration_is_one_that_the_scheme_takes() -> None:
    for part in slimgc_accuracy.PARTS:
        found = configurations(part, 15_000)
        assert found
        for _, _, spec in found:
            name, options = parse_spec(spec)
            by_name(name, **options)
    for spec in slimgc_speed.specs(["1 bit", "2 bit"], has_rivals=True)[1:]:
        name, options = parse_spec(spec)
        by_name(name, **options)


def test_differences_are_paired_and_their_interval_is_students() -> None:
    cases, results = [], {}
    bare, better = [90.0, 80.0, 70.0], [92.0, 81.0, 73.0]
    for seed in range(3):
        for name, values in (("bare", bare), ("everything", better), (FULL, [93.0, 83.0, 73.0])):
            case = Case("strategies", "1-bit", name, name, "resnet", seed)
            cases.append(case)
            results[case.key] = {"accuracy": values[seed] / 100, "loss": 0.1}
    diverged = Case("strategies", "1-bit", "everything", "everything", "resnet", 3)
    results[diverged.key] = {"accuracy": 0.1, "loss": None}
    records = figures.summarize([*cases, diverged], results)
    found = next(record for record in records if record["configuration"] == "everything")
    assert found["n"] == 3
    assert found["n_diverged"] == 1
    assert found["gain"] == pytest.approx(2.0)
    assert found["gain_high"] - found["gain"] == pytest.approx(4.30 * 1.0 / math.sqrt(3))
    assert found["to_full"] == pytest.approx(-1.0)
    assert "+2.000" in figures.to_markdown(records)


def test_speed_up_is_told_beside_what_overlap_could_gain_at_most() -> None:
    shared = {"row": "gpt2-1gbit", "workload": "gpt2", "rate_bps": 1e9, "ranks": 4, "compute": "emulate", "samples_per_s": 1.0,
              "wire_ratio": 0.1, "exposed_s": 0.5, "options": ""}  # fmt: skip
    records = [
        {**shared, "scheme": "one-bit", "iteration_s": 1.5, "compute_s": 0.6, "codec_s": 0.2, "wire_bytes": 1e8},
        {**shared, "scheme": "slimgc", "options": "codec=one-bit,backup=true", "iteration_s": 1.0, "compute_s": 0.6,
         "codec_s": 0.2, "wire_bytes": 1e8},
    ]  # fmt: skip
    found = slimgc_speed.summarize(records)[1]
    assert found["speed_up"] == pytest.approx(1.5)
    assert found["bound"] == pytest.approx((0.6 + 0.2 + 0.8) / 0.8)
    assert found["attainable"] == pytest.approx(1.5 / 0.8)
    assert found["hidden_s"] == pytest.approx(0.6)
    assert "80%" in slimgc_speed.to_markdown([found])


def run_with(stats: object) -> Run:
    from pathlib import Path

    return Run(Path("r"), "slimgc", "slimgc", "gpt", 2, {}, {}, {"stats": stats}, {})


def test_the_report_shows_the_threshold_table_of_a_run() -> None:
    row = {
        "size_bytes": 4000,
        "raw_s": 2e-3,
        "compressed_s": 5e-4,
        "codec_s": 5e-4,
        "total_compressed_s": 1e-3,
        "benefit": 2.0,
    }
    small = {**row, "size_bytes": 40, "benefit": 0.5}
    table = make_threshold_table(run_with({"threshold_table": [small, row], "threshold_bytes": 1000}))
    assert table is not None
    assert [line[-1] for line in table.rows] == ["raw", "compressed"]
    assert "1,000 bytes" in table.caption
    never = make_threshold_table(run_with({"threshold_table": [row], "threshold_bytes": NEVER}))
    assert never is not None
    assert "never" in never.caption
    for stats in (
        None,
        {},
        {"threshold_table": []},
        {"threshold_table": [3], "threshold_bytes": 5},
        {"threshold_table": [row]},
    ):
        assert make_threshold_table(run_with(stats)) is None
