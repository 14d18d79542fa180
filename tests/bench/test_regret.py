"""What auto loses: the figures of a run, from known step times; and a run of ranks."""

import json
import random
import statistics
from pathlib import Path
from typing import Any

import pytest

from gradwire_lab.bench.regret import below_the_bars, make_records, run, steps_until_good
from gradwire_lab.cli.bench import parser_of


def auto_that(schedule: list[tuple[int, str]], *allowed: str, **more: Any) -> dict[str, Any]:
    candidates = [{"spec": spec, "excluded": "", "first_predicted_ms": 1000.0} for spec in ("plain", *allowed)]
    decisions = [{"step": step, "kind": "switch", "scheme": scheme, "why": "so"} for step, scheme in schedule]
    return {"scheme": schedule[-1][1], "schedule": schedule, "spent_s": 0.1, "decisions": decisions,
            "candidates": [*candidates, {"spec": "c", "excluded": "not here"}], "fidelity": "close"} | more  # fmt: skip


def turns_of(steps_s: list[float], every: int = 1) -> list[list[float]]:
    """Turns of ten steps; a fixed scheme takes each third."""
    turns = [steps_s[at : at + 10] for at in range(0, len(steps_s), 10)]
    return [turn if index % every == 0 else [] for index, turn in enumerate(turns)]


def test_auto_is_counted_against_ddp_over_all_steps_and_against_the_best_it_may_use_in_the_second_half() -> None:
    turns_s = {"ddp": [[2.0, 2.0]] * 2, "auto": [[2.0, 2.0], [1.0, 1.0]], "a": [[1.0, 1.0]] * 2,
               "b": [[0.5, 0.5], [3.0, 3.0]], "c": [[0.1, 0.1]] * 2}  # fmt: skip
    found = make_records(turns_s, {"auto": auto_that([(0, "plain"), (2, "a")], "a", "b")})
    assert found["auto"]["x_ddp"] == pytest.approx(8 / 6)
    assert found["auto"]["best"] == "a", "b is slow in its second half, c is not allowed"
    assert found["auto"]["x_best_last_half"] == pytest.approx(1.0)
    assert found["auto"]["x_best"] == pytest.approx(1.0 / 1.5)
    assert found["ddp"]["x_ddp"] == 1.0
    assert found["auto"]["model_error"] == pytest.approx(0.75 / 1.75), "b's: a is right, plain off by half"
    assert json.loads(found["auto"]["decisions"])[-1]["scheme"] == "a"
    assert all(not isinstance(value, dict | list) for value in found["auto"].values()), "the store takes flat records"


def test_auto_between_shards_is_counted_against_fsdp2() -> None:
    auto, name = auto_that([(0, "plain"), (2, "weights=exact")], "weights=exact"), "fsdp2-shards:gradients=auto"
    turns_s = {"fully-shard": [[3.0]] * 4, name: [[3.0], [1.5], [1.5], [1.5]], "weights=exact": [[1.5]] * 4}
    found = make_records(turns_s, {name: auto}, base="fully-shard")[name]
    assert found["x_ddp"] == pytest.approx(12 / 7.5)
    assert (found["best"], found["x_best_last_half"]) == ("weights=exact", 1.0)


def test_a_machine_that_is_slow_for_some_turns_is_slow_for_both() -> None:
    slow = [1.0, 1.0, 1.7, 1.0, 1.6, 1.8, 1.0, 2.0]  # in turns that the fixed scheme does not take, more often
    machine = [factor for factor in slow for _ in range(10)]
    ddp = turns_of([2.0 * factor for factor in machine])
    turns_s = {"ddp": ddp, "auto": turns_of(machine), "a": turns_of(machine, every=3)}
    found = make_records(turns_s, {"auto": auto_that([(0, "a")], "a")})["auto"]
    for name in ("x_best", "x_best_last_half", "x_best_last_half_low", "x_best_last_half_high"):
        assert found[name] == pytest.approx(1.0)
    assert found["x_ddp"] == pytest.approx(2.0)


def test_the_luckiest_of_few_turns_is_not_the_best() -> None:
    """Five schemes that are as fast as each other and as auto: the luckiest of the second half would be 4 % ahead."""
    rng, n_runs = random.Random(0), 100
    ratios = []
    for _ in range(n_runs):
        turns_s = {spec: turns_of([rng.uniform(0.7, 1.3) for _ in range(200)], 3) for spec in "abcdef"}
        turns_s |= {spec: turns_of([rng.uniform(0.7, 1.3) for _ in range(200)]) for spec in ("ddp", "auto")}
        ratios.append(make_records(turns_s, {"auto": auto_that([(0, "a")], *"abdef")})["auto"]["x_best_last_half"])
    assert 0.97 < statistics.fmean(ratios) < 1


def test_a_phase_has_its_own_steps_and_decisions() -> None:
    turns_s = {"ddp": turns_of([4.0] * 50), "auto": turns_of([4.0] * 10 + [1.0] * 40), "a": turns_of([1.0] * 50, 3)}
    found = make_records(turns_s, {"auto": auto_that([(0, "plain"), (110, "a")], "a")}, first=100)
    assert found["auto"]["good_after"] == 8, "18 of the 20 steps from there on are good"
    assert [decision["step"] for decision in json.loads(found["auto"]["decisions"])] == [110]


def test_the_interval_of_a_ratio_covers_the_truth_as_often_as_it_says() -> None:
    truth, n_runs = 1.25, 200
    covered = 0
    for seed in range(n_runs):
        rng = random.Random(seed)
        minutes = [rng.uniform(0.8, 1.6) for _ in range(60)]  # the machine is slower at times, for both
        ddp = turns_of([truth * minutes[i // 10] * rng.uniform(0.7, 1.3) for i in range(600)])
        auto = turns_of([minutes[i // 10] * rng.uniform(0.7, 1.3) for i in range(600)])
        found = make_records({"ddp": ddp, "auto": auto}, {"auto": auto_that([(0, "plain")])})["auto"]
        assert found["x_ddp_low"] <= found["x_ddp"] <= found["x_ddp_high"] <= found["x_ddp_low"] + 0.1
        covered += found["x_ddp_low"] <= truth <= found["x_ddp_high"]
    assert 0.85 * n_runs <= covered <= 0.99 * n_runs, "a bootstrap of ten stretches is a little too narrow"


@pytest.mark.parametrize(
    ("schedule", "steps"),
    [([(0, "a")], 0), ([(0, "plain"), (30, "a")], 28), ([(0, "plain")], 100), ([(0, "a"), (50, "plain")], 0)],
)
def test_steps_until_it_runs_as_fast_as_the_best(schedule: list[tuple[int, str]], steps: int) -> None:
    assert steps_until_good(schedule, {"plain": 2.0, "a": 1.0}, 0, 100) == steps


def test_a_cell_below_a_bar_is_named() -> None:
    record = {"scheme": "auto", "workload": "gpt", "ranks": 2, "rates": "100mbit", "fidelity": "exact", "x_ddp": 0.98,
              "x_best_last_half": 0.95, "best": "ddp", "ends_with": "plain"}  # fmt: skip
    assert below_the_bars([record, {"scheme": "ddp"}]) == []
    for field in ("x_ddp", "x_best_last_half"):
        (line,) = below_the_bars([record | {field: 0.94}])
        assert line.startswith("gpt, 2 ranks, 100mbit, exact: ")


def run_words(words: str) -> int:
    args = parser_of("regret").parse_args(words.split())
    args.arguments = words.split()
    return run(args)


def test_a_run_writes_a_flat_record_for_each_method(tmp_path: Path) -> None:
    out = tmp_path / "records.json"
    words = f"--workload many-tensors:depth=3 --ranks 2 --steps 20 --json {out}"
    assert run_words(f"{words} --scheme ddp auto:fidelity=exact auto:fidelity=close") == 0
    ddp, exact, close = json.loads(out.read_text())
    assert (ddp["scheme"], exact["fidelity"], close["fidelity"]) == ("ddp", "exact", "close")
    assert {"plain", "gcomp:tolerance=32,least_bits=7"} <= json.loads(exact["fixed_ms"]).keys()
    assert {"bf16", "embedded-float:bits=8"} <= json.loads(close["fixed_ms"]).keys()
    assert exact["loss_deviation"] <= 1e-5
    for record in (exact, close):
        assert {"workload", "ranks", "rate_bps", "fidelity", "x_ddp", "x_best_last_half", "decisions"} <= record.keys()
        assert record["n_steps"] == 20
