"""AQGB's table 2: which trainings it asks for, on which network, and what is made of them."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import pytest

from gradwire.bench import aqgb_accuracy, paired_trainings
from gradwire.bench.figures import paired_trainings as figures
from gradwire.bench.paired_trainings import FULL, Case
from gradwire.errors import InvalidArgument
from gradwire.registry import parse_spec
from gradwire.schemes import by_name


def arguments(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    aqgb_accuracy.add_arguments(parser)
    return parser.parse_args(list(words))


def test_every_scheme_is_trained_with_every_fold_and_seed() -> None:
    cases = aqgb_accuracy.plan(arguments("--scheme", "qsgd"))
    digits = [case for case in cases if case.workload.startswith("resnet")]
    assert len({case.key for case in digits}) == len(digits) == 5 * 10 * 5
    assert len(cases) - len(digits) == 3 * 5
    for name in (FULL, "AQGB", "qsgd"):
        assert {(case.workload, case.seed) for case in cases if case.name == name} == {
            (case.workload, case.seed) for case in cases
        }, "without its partner a difference is not paired"


def test_every_spec_is_one_that_its_scheme_takes() -> None:
    for case in aqgb_accuracy.plan(arguments("--seeds", "1", "--gpt-seeds", "1")):
        name, options = parse_spec(case.scheme)
        assert name == "plain" or options.pop("bucket_mb") == 0.05
        by_name(name, **options)


def test_trainings_of_another_rate_are_not_taken_for_finished(tmp_path: Path) -> None:
    lines = [{"key": "old", "steps": 5, "ranks": 2}, {"key": "fast", "steps": 5, "ranks": 2, "rate": "1gbit"}]
    (tmp_path / "cases.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    common = ("--steps", "5", "--ranks", "2")
    assert set(paired_trainings.finished(tmp_path, arguments(*common, "--rate", "1gbit"))) == {"fast"}
    assert set(paired_trainings.finished(tmp_path, arguments(*common, "--rate", "none"))) == {"old"}
    assert not paired_trainings.finished(tmp_path, arguments(*common))


def test_two_rates_at_once_are_refused() -> None:
    with pytest.raises(InvalidArgument, match="one network"):
        paired_trainings.check_arguments(arguments("--rate", "1gbit", "2gbit"))


def test_the_table_says_how_far_from_full_precision_each_scheme_is() -> None:
    cases, results = [], {}
    for seed, (full, aqgb) in enumerate([(0.9, 0.89), (0.8, 0.81), (0.95, 0.93)]):
        for name, accuracy in ((FULL, full), ("AQGB", aqgb)):
            case = Case(aqgb_accuracy.PART, "", name, name, "resnet", seed)
            cases.append(case)
            results[case.key] = {"accuracy": accuracy, "loss": 0.1, "ratio": 0.5, "iteration_s": 0.02, "rate": "1gbit"}
    full_record, record = figures.summarize(cases, results, aqgb_accuracy.PART, {"to_full": FULL})
    assert full_record["to_full"] == 0.0
    assert record["to_full"] == pytest.approx(-2 / 3)
    assert record["to_full_low"] < record["to_full"] < 0 < record["to_full_high"]
    assert (record["ratio"], record["iteration_s"], record["rate"]) == (0.5, pytest.approx(0.02), "1gbit")
    assert "| AQGB | 3 |" in figures.to_markdown([full_record, record], {"to_full": "against full precision"})
