"""SlimGC's figures: which trainings they ask for, what is made of them, and what overlap could gain at most."""

from __future__ import annotations

import argparse
import math

import pytest
from torch import nn

from gradwire import workloads
from gradwire.bench import slimgc_accuracy, slimgc_speed
from gradwire.bench.figures import slimgc_accuracy as figures
from gradwire.bench.overlap import Timeline, without
from gradwire.bench.paired_trainings import FULL, Case
from gradwire.bench.slimgc_accuracy import configurations, plan
from gradwire.bench.train_contenders import RIVALS, check_rival_options
from gradwire.control.threshold import NEVER
from gradwire.errors import InvalidArgument
from gradwire.registry import parse_spec
from gradwire.report.inputs import Run
from gradwire.report.thresholds import make_threshold_table
from gradwire.schemes import by_name
from gradwire.workloads.optimizers import scale_learning_rate


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
    for spec in slimgc_speed.specs(["1 bit", "2 bit"], has_rivals=True):
        name, options = parse_spec(spec)
        if name in RIVALS:
            check_rival_options(name, options)
        else:
            by_name(name, **options)


def test_rows_can_leave_out_what_takes_raw_steps() -> None:
    all_of_them = slimgc_speed.specs(["1 bit"], has_rivals=False)
    without_raw = slimgc_speed.specs(["1 bit"], has_rivals=False, has_plain=False, has_table=False)
    assert without_raw == [spec for spec in all_of_them if spec != "ddp" and "warmup_steps" not in spec]
    assert "slimgc:codec=one-bit,backup=true,threshold_bytes=0" in without_raw


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


def speed_arguments(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    slimgc_speed.add_arguments(parser)
    return parser.parse_args(list(words))


def test_one_row_a_workload_and_rate_can_be_chosen_and_says_how_long_it_takes() -> None:
    rows = slimgc_speed.make_rows(speed_arguments())
    assert len(rows) == 4 * 3
    chosen = slimgc_speed.make_rows(speed_arguments("--only", "vgg16-1"))
    assert [row.key for row in chosen] == ["vgg16-100mbit", "vgg16-1gbit"]
    assert chosen[0].estimate_s > chosen[1].estimate_s > 0
    shorter = slimgc_speed.make_rows(speed_arguments("--only", "vgg16-100mbit", "--steps", "3", "--no-rivals"))
    assert shorter[0].estimate_s < chosen[0].estimate_s
    with pytest.raises(InvalidArgument, match="no row"):
        slimgc_speed.make_rows(speed_arguments("--only", "alexnet"))


def test_overlap_and_exposed_codec_time_are_told_against_the_codec_on_the_training_thread() -> None:
    shared = {"row": "gpt2-1gbit", "workload": "gpt2", "rate_bps": 1e9, "ranks": 4, "compute": "emulate",
              "samples_per_s": 1.0, "wire_ratio": 0.1, "exposed_s": 0.5, "options": "", "wire_bytes": 1e8,
              "compute_s": 0.6, "codec_s": 0.2}  # fmt: skip
    records = [
        {**shared, "scheme": "ddp", "iteration_s": 3.0, "codec_s": 0.0, "overlap_s": None, "exposed_codec_s": None},
        {**shared, "scheme": "one-bit", "iteration_s": 1.4, "overlap_s": 0.2, "exposed_codec_s": 0.1},
        {**shared, "scheme": "ddp-one-bit", "iteration_s": 1.5, "compute_s": 0.8, "overlap_s": 0.1, "exposed_codec_s": 0.2},
        {**shared, "scheme": "slimgc", "options": "codec=one-bit,backup=true,warmup_steps=4", "iteration_s": 0.9,
         "overlap_s": 0.45, "exposed_codec_s": 0.05},
    ]  # fmt: skip
    found = {record["scheme"]: record for record in slimgc_speed.summarize(records)}
    everything = found["slimgc codec=one-bit backup=true"]
    assert everything["overlap_x"] == pytest.approx(4.5)
    assert everything["exposed_codec_x"] == pytest.approx(0.25)
    assert found["ddp"]["overlap_x"] is None
    assert found["ddp-one-bit"]["compute_s"] == 0.6, "its codec between two gradients is no computation"
    assert "overlap 4.50x (goal 3.5), exposed codec 0.25x (goal 0.4)" in slimgc_speed.to_markdown(list(found.values()))


def test_hidden_communication_and_exposed_codec_work_follow_from_intervals() -> None:
    timeline = Timeline(training_thread=1)
    timeline.note_step(0.0, 10.0, 14.0)
    timeline.note_step(20.0, 30.0, 31.0)
    timeline.extend_last(33.0)
    timeline.communicating += [(5.0, 12.0), (6.0, 7.0), (31.0, 40.0)]
    timeline.training_codec += [(4.0, 6.0)]
    timeline.other_codec += [(8.0, 9.0), (13.0, 21.0), (32.0, 34.0)]
    first = timeline.measure(0.0, 20.0)
    assert first == {"overlap_s": 4.0, "exposed_codec_s": 2.0 + 1.0}
    both = timeline.measure(0.0, 50.0)
    assert both == {"overlap_s": 4.0, "exposed_codec_s": 2.0 + 1.0 + 1.0}
    assert without([(0.0, 4.0), (6.0, 8.0)], [(1.0, 2.0), (3.0, 7.0)]) == [(0.0, 1.0), (2.0, 3.0), (7.0, 8.0)]


@pytest.mark.parametrize(
    ("spec", "n_steps"),
    [
        ("plain", 0),
        ("slimgc", 12),
        ("slimgc:warmup_steps=4", 6),
        ("slimgc:warmup_steps=4,backup=true", 8),
        ("slimgc:threshold_bytes=0", 0),
        ("slimgc:threshold_bytes=0,backup=true", 4),
        ("aqgb", 7),
        ("dgc:warmup_steps=9", 9),
    ],
)
def test_a_scheme_says_how_many_steps_it_takes_to_settle(spec: str, n_steps: int) -> None:
    name, options = parse_spec(spec)
    assert by_name(name, **options).settling_steps == n_steps


@pytest.mark.parametrize(("scaling", "factor"), [("none", 1.0), ("linear", 4.0), ("square-root", 2.0)])
def test_the_learning_rate_follows_the_batch_as_asked(scaling: str, factor: float) -> None:
    assert scale_learning_rate(0.1, scaling, 4.0) == pytest.approx(0.1 * factor)
    own = workloads.by_name("resnet", rate_scaling=scaling)
    four = workloads.by_name("resnet", rate_scaling=scaling, batch_size=4 * own.batch_size)
    rates = [workload.build_optimizer(nn.Linear(1, 1)).param_groups[0]["lr"] for workload in (own, four)]
    assert rates[1] == pytest.approx(factor * rates[0])
    assert four.describe()["learning_rate"] == rates[1]
    with pytest.raises(InvalidArgument):
        workloads.by_name("resnet", rate_scaling="cubic")


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
