"""The catalogue: every experiment is one that its measure takes, every figure of the papers has its place."""

import argparse
import re
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from gradwire import schemes
from gradwire.errors import InvalidArgument
from gradwire.registry import parse_spec
from gradwire_lab import workloads
from gradwire_lab.bench import allreduce
from gradwire_lab.bench.catalogue import EXPERIMENTS, SNIPPETS, SYSTEMS, book, papers
from gradwire_lab.bench.measures import Call, by_name, commands
from gradwire_lab.bench.measures.float_methods import Method
from gradwire_lab.bench.measures.trainings import configure
from gradwire_lab.bench.regret import base_of
from gradwire_lab.bench.train_methods import BASELINES, SHARDED, check_baseline_options
from gradwire_lab.cli.bench import parser_of
from gradwire_lab.cli.bench.experiments import choose
from gradwire_lab.results.experiment import Experiment, Plot, Table
from gradwire_lab.simulator.schemes import registry
from gradwire_lab.simulator.workloads import by_name as simulated_workload

ROOT = Path(__file__).parents[2]
STATES = {"as in the paper", "differs", "not measured", "cannot be here"}
# What is reckoned or simulated is so for the paper's own models and networks.
IN_THE_PAPERS_SETTING = {"shapes", "simulate", "simulate-rates", "stragglers", "sketch-formulas", "sketch-recovery",
                         "decoders"}  # fmt: skip
_IDS = [experiment.key for experiment in EXPERIMENTS]


def check_method(spec: str) -> None:
    name, options = parse_spec(spec)
    if name in BASELINES:
        check_baseline_options(name, options)
    elif name not in (*allreduce.BY_NAME_ONLY, *SHARDED):
        options.pop("bucket_mb", None)
        schemes.by_name(name, **options)


def parse(bench: str, words: list[str]) -> argparse.Namespace:
    parser = parser_of(bench)
    parser.exit_on_error = False
    return parser.parse_args(words)


def check_train(call: Call, bench: str = "train") -> None:
    args = parse(bench, commands.to_words(call.arguments("scheme")))
    assert parse_spec(args.workload)[0] in workloads.names()
    for spec in args.scheme:
        check_method(spec)
    assert base_of(args.scheme) == args.scheme[0] if bench == "regret" else args.warmup >= 1


def check_allreduce(call: Call) -> None:
    axes = [axis for axis in ("n_bytes", "scheme") if axis in call.cells[0] and axis not in call.shared]
    for spec in parse("allreduce", commands.to_words(call.arguments(*axes))).scheme:
        check_method(spec)


def check_simulated(call: Call) -> None:
    for cell in call.cells:
        registry.by_name(cell["scheme"], {})
        simulated_workload(str(cell.get("workload", "resnet50-4blocks")))


# By measure: raises if it would not take the call.
_CHECKS: dict[str, Any] = {
    "train": check_train, "overlap": check_train, "reality": check_train,
    "regret": lambda call: check_train(call, "regret"), "simulator-sizes": check_train, "allreduce": check_allreduce,
    "codec": lambda call: parse("codec", commands.to_words(call.arguments("codec"))),
    "training": lambda call: [configure(call, cell, str(cell["scheme"])) for cell in call.cells],
    "simulate": check_simulated, "simulate-rates": check_simulated,
    "float-training": lambda call: [Method(cell["method"]) for cell in call.cells],
}  # fmt: skip


@pytest.mark.parametrize("experiment", EXPERIMENTS, ids=_IDS)
def test_every_run_is_one_that_its_measure_takes(experiment: Experiment, tmp_path: Path) -> None:
    assert callable(by_name(experiment.measure))
    for cells in experiment.groups():
        call = Call(experiment.key, cells, experiment.apart(cells[0]), dict(experiment.fixed), tmp_path)
        _CHECKS.get(experiment.measure, lambda call: None)(call)


@pytest.mark.parametrize("experiment", EXPERIMENTS, ids=_IDS)
def test_what_is_shown_is_of_axes_that_there_are(experiment: Experiment) -> None:
    assert experiment.system in SYSTEMS
    assert re.fullmatch(r"[a-z0-9-]+", experiment.key)
    assert experiment.question[-1] in ".?"
    assert experiment.seconds > 0
    assert set(experiment.together) <= set(experiment.axes) | {"scheme"}
    assert set(experiment.over) <= set(experiment.axes)
    assert any(isinstance(one, Table) for one in experiment.show)
    cells = experiment.cells()
    assert len({repr(cell) for cell in cells}) == len(cells)
    for axis, value in experiment.baseline.items():
        assert value in experiment.values(axis)
    for control in experiment.controls:
        assert control in experiment.values("scheme")
    for shown in (*experiment.show, *experiment.goals):
        for name, wanted in shown.where.items():
            if name in experiment.axes and not callable(wanted):
                values = wanted if isinstance(wanted, list | tuple) else [wanted]
                assert set(values) <= set(experiment.values(name)), f"{experiment.key}: {name} is never {wanted}"
        columns = (
            shown.columns if isinstance(shown, Table) else [shown.y] if isinstance(shown, Plot) else [shown.column]
        )
        for column in columns:
            if column.against is not None:
                assert column.against in experiment.values(next(iter(experiment.baseline), "scheme"))
            assert column.kind == "value" or column.against or experiment.baseline


def test_keys_are_unique() -> None:
    assert len(set(_IDS)) == len(_IDS)
    assert {key for key, _ in SNIPPETS.values()} <= set(_IDS)


def hours(experiments: list[Experiment]) -> float:
    return sum(experiment.seconds * len(experiment.groups()) for experiment in experiments) / 3600


def test_quick_set_is_estimated_at_under_half_an_hour() -> None:
    quick = [experiment for experiment in EXPERIMENTS if experiment.quick]
    assert len(quick) >= 7
    assert hours(quick) < 0.5


def test_what_is_claimed_can_be_measured_again_within_a_day() -> None:
    """The first list in six hours, the long runs in sixteen; more is not claimed, as it would not be kept true."""
    first, long = ([one for one in EXPERIMENTS if one.is_long == is_long] for is_long in (False, True))
    assert (len(first) <= 70, len(long) <= 12) == (True, True)
    assert hours(first) <= 6
    assert hours(long) <= 16
    for experiment in long:
        assert experiment.seconds <= 150 * 60, "a run is the piece that can be resumed"
        assert not experiment.quick


def figures(paper: str, numbers: Iterable[int], *others: str) -> set[tuple[str, str]]:
    return {(paper, name) for name in (*(f"Fig. {n}" for n in numbers), *others)}


def test_every_figure_and_table_of_the_papers_has_its_place() -> None:
    covered = {tuple(ref) for experiment in EXPERIMENTS for ref in experiment.of}
    wanted = figures("GComp", {*range(1, 21)} - {13}, "Fig. 13a", "Fig. 13b", "Table 1", "Table 2")
    wanted |= figures("ACP-SGD", {*range(1, 14)} - {11}, "Fig. 11a", "Fig. 11b", "Table I", "Table II", "Table III")
    wanted |= figures("AQGB", range(1, 15), "Table 1", "Table 2")
    wanted |= figures("SlimGC", range(1, 15), "Table 1", "Table 2", "Table 3")
    wanted |= figures("Homomorphic", range(1, 9), "Table 1")
    assert covered | papers.LEFT_OUT.keys() == wanted
    assert not covered & papers.LEFT_OUT.keys()
    assert {place.state for place in papers.LEFT_OUT.values()} <= STATES


def test_what_the_papers_say_stands_beside_an_experiment_that_gives_it() -> None:
    by_key = {experiment.key: experiment for experiment in EXPERIMENTS}
    assert papers.DIFFERS.keys() | papers.CLAIMS.keys() <= by_key.keys()
    for experiment in EXPERIMENTS:
        for ref in experiment.of:
            assert experiment.differs or experiment.measure in IN_THE_PAPERS_SETTING, f"{experiment.key}: {ref}"


def test_pages_are_short_and_their_pictures_few_and_readable() -> None:
    pages = book(ROOT)
    texts = [pages.page(system) for system in SYSTEMS if system != "coverage"] + [pages.coverage()]
    assert all(text.count("\n") <= 150 for text in texts)
    assert sum(text.count("\n") for text in texts) <= 1600
    tables = [line for text in texts for line in text.splitlines() if line.startswith("|")]
    assert max(line.replace("\\|", "").count("|") for line in tables) <= 7 + 1
    pictures = dict(pages.pictures())
    assert len(pictures) <= 25
    assert all(1 <= len(series) <= 7 for _, _, series in pictures.values())
    notes = {path.stem: path.read_text() for path in (ROOT / "results" / "notes").glob("*.md")}
    assert notes.keys() <= {experiment.key for experiment in EXPERIMENTS} | SYSTEMS.keys() | {"overview"}
    assert all(text.count("\n") <= 3 for name, text in notes.items() if name != "overview"), "a sentence or two"


def test_each_cell_of_a_run_differs_in_what_is_measured_together_alone() -> None:
    experiment = Experiment("k", "s", "?", "train", {"rate": ["1", "2"], "scheme": {"A": "a", "B": "b"}, "seed": [0]})
    assert experiment.groups() == [
        [{"rate": rate, "scheme": scheme, "seed": 0} for scheme in ("a", "b")] for rate in ("1", "2")
    ]
    assert experiment.label("scheme", "b") == "B"
    assert experiment.label("rate", "2") == "2"


def test_options_that_a_baseline_does_not_take_are_refused() -> None:
    for spec in ("ddp:rank=4", "ddp-bf16:bucket_mb=3", "ddp-powersgd:start=3", "ddp-powersgd:rank=0", "ddp:bucket_mb=-1",
                 "ddp:bucket_mb=big", "ddp-powersgd:start=true"):  # fmt: skip
        with pytest.raises(InvalidArgument):
            check_baseline_options(*parse_spec(spec))


def test_pages_in_the_checkout_are_what_the_results_say() -> None:
    """What CI runs of `gradwire bench render --check`."""
    assert not book(ROOT).stale(), "gradwire bench render makes them anew"


@pytest.mark.parametrize(
    ("keys", "named"),
    [("one", "one"), ("one-", "one-more"), ("on", "one one-more"), ("other one", "one other"), ("all", "one other"),
     ("long", "one-more"), ("all long", "one one-more other"), ("", "one one-more other")],
)  # fmt: skip
def test_a_key_names_its_experiment_and_the_beginning_of_keys_all_of_them(keys: str, named: str) -> None:
    experiments = [replace(EXPERIMENTS[0], key=key, is_long=key == "one-more") for key in ("one", "one-more", "other")]
    assert {experiment.key for experiment in choose(experiments, keys.split())} == set(named.split())
