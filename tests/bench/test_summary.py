"""What is made of records: paired differences, ratios, noise that nothing is claimed in, and goals."""

import dataclasses
import math
from typing import Any

import pytest

from gradwire_lab.results.experiment import Column, Experiment, Goal, Table, ms
from gradwire_lab.results.tables import Grid, Summary, Value, answer_of, make_grid, show_value, to_markdown, to_text

SCHEMES = ["ddp", "plain", "gcomp"]
SPEED = Experiment(
    "speed", "s", "?", "train", {"rate": ["1gbit"], "scheme": SCHEMES}, baseline={"scheme": "ddp"}, controls=["plain"]
)
STEP, X_DDP = ms("iteration_s", "ms", spread=True), Column("iteration_s", "x ddp", kind="ratio")
ACCURACY = Experiment(
    "accuracy", "s", "?", "training", {"seed": [0, 1, 2, 3], "scheme": ["plain", "bare", "everything"]}, over=("seed",),
    baseline={"scheme": "plain"},
)  # fmt: skip


def timed(scheme: str, iteration_s: float, spread: float | None = 0.01, **more: Any) -> dict[str, Any]:
    ends = {}
    if spread is not None:
        ends = {"iteration_s_low": iteration_s * (1 - spread), "iteration_s_high": iteration_s * (1 + spread)}
    return {"rate": "1gbit", "scheme": scheme, "iteration_s": iteration_s, "code": "x", "commit": "c", **ends, **more}


def value_of(experiment: Experiment, records: list[dict[str, Any]], column: Column, scheme: str) -> Value:
    summary = Summary(experiment, records)
    return summary.value(next(row for row in summary.rows if row["scheme"] == scheme), column)


def test_ratio_is_to_the_baseline_of_the_same_run() -> None:
    records = [timed("ddp", 2.0), timed("plain", 2.0), timed("gcomp", 1.0)]
    value = value_of(SPEED, records, X_DDP, "gcomp")
    assert (value.middle, value.is_noise) == (0.5, False)
    faster = value_of(SPEED, records, dataclasses.replace(X_DDP, kind="speed-up"), "gcomp")
    assert faster.middle == 2.0
    assert faster.low < 2.0 < faster.high
    assert value_of(SPEED, [timed("gcomp", 1.0)], X_DDP, "gcomp").middle is None


def test_nothing_is_claimed_where_quartiles_overlap() -> None:
    records = [timed("ddp", 1.0, 0.1), timed("gcomp", 0.95, 0.1)]
    assert value_of(SPEED, records, X_DDP, "gcomp").is_noise
    grid = make_grid(SPEED, Table([X_DDP]), records)
    assert [r[1] for r in grid.rows] == ["1.00", "~0.95"]
    assert "within the noise" in grid.caption


def test_nothing_is_claimed_within_what_controls_differ_by() -> None:
    """`plain` sends DDP's very bytes: what it differs by is noise, however narrow the quartiles."""
    for gcomp_s, is_noise in ((0.88, True), (0.5, False)):
        records = [timed("ddp", 1.0), timed("plain", 0.85), timed("gcomp", gcomp_s)]
        assert value_of(SPEED, records, X_DDP, "gcomp").is_noise == is_noise


def trained(seed: int, scheme: str, accuracy: float | None) -> dict[str, Any]:
    return {"seed": seed, "scheme": scheme, "accuracy": accuracy, "commit": "c", "code": "x"}


def test_differences_are_paired_and_their_interval_is_students() -> None:
    bare, better = [90.0, 80.0, 70.0], [92.0, 81.0, 73.0]
    records = [trained(seed, "bare", bare[seed] / 100) for seed in range(3)]
    records += [trained(seed, "everything", better[seed] / 100) for seed in range(3)]
    records += [trained(3, "everything", None)]  # diverged
    column = Column("accuracy", "", 100, ".3f", "difference", "bare", spread=True)
    value = value_of(ACCURACY, records, column, "everything")
    assert value.middle == pytest.approx(2.0)
    assert value.high - value.middle == pytest.approx(4.30 * 1.0 / math.sqrt(3))
    assert value.is_noise, "the interval holds 0"
    mean = value_of(ACCURACY, records, Column("accuracy", "", 100), "everything")
    assert mean.middle == pytest.approx(sum(better) / 3)
    assert show_value(mean, Column("accuracy", form=".1f")) == "82.0, none in 1 run"
    goal = Goal("high", Column("accuracy"), ">=", 0.1, {"scheme": "everything"})
    assert answer_of(ACCURACY, goal, records).verdict == "missed", "one run diverged"
    assert answer_of(ACCURACY, goal, records[:-1]).verdict == "reached"


def test_mean_and_spread_are_over_seeds_and_a_difference_over_the_seeds_that_both_have() -> None:
    records = [trained(seed, "plain", value) for seed, value in enumerate((1.0, 2.0, 3.0))]
    records += [trained(seed, "bare", value) for seed, value in enumerate((1.5, 2.5))]
    difference = value_of(ACCURACY, records, Column("accuracy", kind="difference"), "bare")
    assert difference.middle == 0.5, "seed 2 does not count"
    plain = value_of(ACCURACY, records, Column("accuracy"), "plain")
    assert (plain.middle, plain.low, plain.high) == (2.0, 1.0, 3.0)


def test_goals_are_reached_missed_or_undecided() -> None:
    records = [timed("ddp", 1.0), timed("plain", 1.0), timed("gcomp", 0.5)]
    goal = Goal("half", X_DDP, "<=", 0.6, {"scheme": "gcomp"})
    for bound, verdict in ((0.6, "reached"), (0.4, "missed"), (0.502, "undecided")):
        assert answer_of(SPEED, dataclasses.replace(goal, bound=bound), records).verdict == verdict
    assert answer_of(SPEED, dataclasses.replace(goal, where={"scheme": "absent"}), records).here == "not measured"


def test_each_phase_of_a_run_is_held_to_a_goal_and_not_their_mean() -> None:
    records = [timed(scheme, s, phase=phase) for scheme, times in (("ddp", (1, 1)), ("gcomp", (0.2, 0.9)))
               for phase, s in enumerate(times)]  # fmt: skip
    goal = Goal("half", X_DDP, "<=", 0.6, {"scheme": "gcomp"}, by=("phase",))
    answer = answer_of(SPEED, goal, records)
    assert (answer.verdict, answer.here) == ("missed, 1 of 2 reached", "0.20 to 0.90 (2 cells)")


def test_axes_that_are_neither_rows_nor_columns_name_rows_too() -> None:
    experiment = dataclasses.replace(SPEED, axes={"rate": {"fast": "1gbit", "slow": "100mbit"}, "scheme": SCHEMES})
    records = [timed("ddp", 1.0, rate=rate, n_bytes=1) for rate in ("1gbit", "100mbit")]
    grid = make_grid(experiment, Table([STEP]), records)
    assert list(grid.headings) == ["rate", "scheme", "ms"]
    assert [row[:2] for row in grid.rows] == [["fast", "ddp"], ["slow", "ddp"]]
    wide = make_grid(experiment, Table([STEP], across="rate"), records)
    assert (wide.title, wide.headings) == ("ms", ["scheme", "fast", "slow"])
    two = Table([STEP, Column("n_bytes", "bytes")], across="rate")
    headings = ["scheme", "fast: ms", "fast: bytes", "slow: ms", "slow: bytes"]
    assert make_grid(experiment, two, records).headings == headings
    narrow = make_grid(experiment, two, records, most_columns=4)
    assert (narrow.headings, narrow.caption) == (["scheme", "fast", "slow"], "Also measured: bytes.")
    assert list(make_grid(experiment, Table([STEP], where={"rate": "1gbit"}), records).headings) == ["scheme", "ms"]


def test_an_answer_says_how_far_the_cells_of_a_goal_reach() -> None:
    records = [timed("ddp", 1.0), timed("plain", 0.5), timed("gcomp", 0.25)]
    goal = Goal("half", X_DDP, "<=", 0.4, {"scheme": ["plain", "gcomp"]}, paper="0.3")
    answer = answer_of(SPEED, goal, records)
    assert (answer.here, answer.goal, answer.verdict) == ("0.25 to ~0.50 (2 cells)", "<= 0.4", "missed, 1 of 2 reached")
    assert answer_of(SPEED, goal, []).here == "not measured"
    claim = Goal("as fast", X_DDP, "", 0, {"scheme": "gcomp"}, (), "0.3")
    assert (answer_of(SPEED, claim, records).here, answer_of(SPEED, claim, records).verdict) == ("0.25", "")


LONG = "homomorphic:mode=exact,aggregator=switch,integer_bits=64"
GRID = Grid("a title", ["scheme", *(f"column {n}" for n in range(9))], [[LONG, *["1.0"] * 9], ["ddp", *["12,345"] * 9]])


def test_text_fits_80_columns_and_never_cuts_a_name() -> None:
    text = to_text(GRID)
    assert max(map(len, text.splitlines())) <= 80
    assert LONG in text.splitlines()
    assert "--wide also shows: column" in text
    assert "column 0" in text
    wide = to_text(GRID, None)
    assert "column 8" in wide.splitlines()[1]
    assert "--wide" not in wide


def test_markdown_has_every_column_and_no_stray_bar() -> None:
    lines = to_markdown(Grid("", ["method", "error"], [["qsgd|qsgd", "1.0"]])).splitlines()
    assert lines == ["| method | error |", "| --- | ---: |", "| qsgd\\|qsgd | 1.0 |"]
