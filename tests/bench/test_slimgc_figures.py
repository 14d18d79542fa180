"""SlimGC's figures: what overlap could gain at most, what hides behind what, settling, and the report's threshold table."""

from pathlib import Path
from typing import Any

import pytest
from torch import nn

from gradwire.errors import InvalidArgument
from gradwire.registry import parse_spec
from gradwire.schemes import by_name
from gradwire.schemes.aqgb.overlap import without
from gradwire.schemes.slimgc.threshold import NEVER
from gradwire_lab import workloads
from gradwire_lab.bench.measures.commands import add_bounds
from gradwire_lab.bench.train_methods import Timeline
from gradwire_lab.report import LoggedRun, _threshold_table

SHARED = {"row": "gpt2-1gbit", "workload": "gpt2", "rate_bps": 1e9, "ranks": 4, "compute": "emulate", "samples_per_s": 1.0,
          "wire_ratio": 0.1, "exposed_s": 0.5, "options": "", "wire_bytes": 1e8, "compute_s": 0.6, "codec_s": 0.2}  # fmt: skip


def bounds(records: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """By spec: the record with what it is told beside."""
    whole = {}
    for spec, record in records.items():
        scheme, _, options = spec.partition(":")
        whole[spec] = SHARED | {"scheme": scheme, "options": options} | record
    return add_bounds(whole)


def test_speed_up_is_told_beside_what_overlap_could_gain_at_most() -> None:
    everything = "slimgc:codec=one-bit,backup=true"
    found = bounds({"one-bit": {"iteration_s": 1.5}, everything: {"iteration_s": 1.0}})[everything]
    assert found["speed_up"] == pytest.approx(1.5)
    assert found["bound_share"] == pytest.approx(1.5 / (1.5 / 0.8)), "the longest of C + K = 0.8 s and X = 0.8 s"


def test_overlap_and_exposed_codec_time_are_told_against_the_codec_on_the_training_thread() -> None:
    everything = "slimgc:codec=one-bit,backup=true,warmup_steps=4"
    found = bounds({
        "ddp": {"iteration_s": 3.0, "codec_s": 0.0, "overlap_s": None, "exposed_codec_s": None},
        "one-bit": {"iteration_s": 1.4, "overlap_s": 0.2, "exposed_codec_s": 0.1},
        "ddp-one-bit": {"iteration_s": 1.5, "compute_s": 0.8, "overlap_s": 0.1, "exposed_codec_s": 0.2},
        everything: {"iteration_s": 0.9, "overlap_s": 0.45, "exposed_codec_s": 0.05},
    })  # fmt: skip
    assert found[everything]["overlap_x"] == pytest.approx(4.5)
    assert found[everything]["exposed_codec_x"] == pytest.approx(0.25)
    assert found["ddp"]["overlap_x"] is None
    assert found["ddp-one-bit"]["computed_s"] == 0.6, "its codec between two gradients is no computation"


def test_hidden_communication_and_exposed_codec_work_follow_from_intervals() -> None:
    timeline = Timeline()
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
    [("plain", 0), ("slimgc", 12), ("slimgc:warmup_steps=4", 6), ("slimgc:warmup_steps=4,backup=true", 8),
     ("slimgc:threshold_bytes=0", 0), ("slimgc:threshold_bytes=0,backup=true", 4), ("aqgb", 7), ("dgc:warmup_steps=9", 9),
     ("top-k:warmup_steps=9", 9), ("acp-sgd", 0), ("acp-sgd:start_step=9", 9), ("power-sgd:start_step=9", 9)],
)  # fmt: skip
def test_a_scheme_says_how_many_steps_it_takes_to_settle(spec: str, n_steps: int) -> None:
    name, options = parse_spec(spec)
    assert by_name(name, **options).settling_steps == n_steps


@pytest.mark.parametrize(("scaling", "factor"), [("none", 1.0), ("linear", 4.0), ("square-root", 2.0)])
def test_the_learning_rate_follows_the_batch_as_asked(scaling: str, factor: float) -> None:
    own = workloads.by_name("resnet", rate_scaling=scaling)
    four = workloads.by_name("resnet", rate_scaling=scaling, batch_size=4 * own.batch_size)
    rates = [workload.build_optimizer(nn.Linear(1, 1)).param_groups[0]["lr"] for workload in (own, four)]
    assert rates[1] == pytest.approx(factor * rates[0])
    assert four.describe()["learning_rate"] == rates[1]
    with pytest.raises(InvalidArgument):
        workloads.by_name("resnet", rate_scaling="cubic")


def run_with(stats: object) -> LoggedRun:
    return LoggedRun(Path("r"), "slimgc", [], {}, {"stats": stats})


def test_the_report_shows_the_threshold_table_of_a_run() -> None:
    row = {"size_bytes": 4000, "raw_s": 2e-3, "compressed_s": 5e-4, "codec_s": 5e-4, "total_compressed_s": 1e-3,
           "benefit": 2.0}  # fmt: skip
    small = {**row, "size_bytes": 40, "benefit": 0.5}
    table = _threshold_table(run_with({"threshold_table": [small, row], "threshold_bytes": 1000}))
    assert [line[-1] for line in table.rows] == ["raw", "compressed"]
    assert "1,000 bytes" in table.caption
    never = _threshold_table(run_with({"threshold_table": [row], "threshold_bytes": NEVER}))
    assert "never" in never.caption
    for stats in (None, {}, {"threshold_table": []}, {"threshold_table": [3], "threshold_bytes": 5},
                  {"threshold_table": [row]}):  # fmt: skip
        assert _threshold_table(run_with(stats)) is None
