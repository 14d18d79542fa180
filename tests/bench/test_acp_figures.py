"""bench acp-figures: rows that bench train takes, numbers that say what its records hold, shapes as in the paper."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import pytest

from gradwire import schemes
from gradwire.bench import acp_figures, acp_shapes, train
from gradwire.bench.acp_figures_table import PLANS
from gradwire.bench.figures import acp_numbers
from gradwire.bench.train_contenders import RIVALS, check_rival_options
from gradwire.errors import InvalidArgument
from gradwire.registry import parse_spec
from gradwire.results.records import RecordLog


def test_every_row_is_a_call_that_bench_train_takes() -> None:
    keys = [row.key for plan in PLANS for row in plan.rows]
    assert len(set(keys)) == len(keys)
    for plan in PLANS:
        for row in plan.rows:
            assert row.key.split("-")[0] == plan.name
            parser = argparse.ArgumentParser()
            train.add_arguments(parser)
            args = parser.parse_args(row.arguments)
            assert args.warmup >= 1
            for spec in args.scheme:
                name, options = parse_spec(spec)
                if name in RIVALS:
                    check_rival_options(name, options)
                else:
                    schemes.by_name(name, **options)


def test_all_rows_together_are_planned_to_take_less_than_three_quarters_of_an_hour() -> None:
    assert sum(row.estimate_s for plan in PLANS for row in plan.rows) < 45 * 60


def test_options_that_a_rival_does_not_take_are_refused() -> None:
    for spec in ("ddp:rank=4", "ddp-bf16:bucket_mb=3", "ddp-powersgd:start=3", "ddp-powersgd:rank=0", "ddp:bucket_mb=-1",
                 "ddp:bucket_mb=big", "ddp-powersgd:start=true"):  # fmt: skip
        with pytest.raises(InvalidArgument):
            check_rival_options(*parse_spec(spec))


def test_compression_rates_and_buffers_are_those_of_the_paper() -> None:
    """Section IV-B: ResNet-50's buffers at rank 4; Table I's ratios, which compress even where it saves nothing."""
    resnet50, bert = acp_shapes.describe_ratios(("resnet50", "bert-base"))
    assert resnet50["parameters"] == 25_557_032
    assert (resnet50["rate_p"], resnet50["rate_q"]) == (
        pytest.approx(0.0064, abs=5e-5),
        pytest.approx(0.0107, abs=5e-5),
    )
    assert resnet50["buffer_p_mb"] == pytest.approx(0.161, abs=1e-3)
    assert resnet50["buffer_q_mb"] == pytest.approx(0.268, abs=1e-3)
    assert bert["power_sgd"] == pytest.approx(16, rel=0.05)
    assert bert["acp_sgd"] == pytest.approx(2 * bert["power_sgd"])
    sixty_four = next(one for one in acp_shapes.describe_traffic(("resnet50",)) if one["world"] == 64)
    assert sixty_four["sign_sgd"] == pytest.approx(sixty_four["s_sgd"], rel=0.02), "an all-gather of 64 ranks' bits"


def record(row: str, scheme: str, iteration_s: float, options: str = "", **more: Any) -> dict[str, Any]:
    times = dict.fromkeys(("iteration_s_low", "iteration_s_high"), iteration_s)
    split = {"compute_s": 0.1, "codec_s": None if scheme == "ddp" else 0.02, "exposed_s": 0.05, "wait_s": 0.01}
    settings = {"workload": "gpt", "rate_bps": 1e9, "ranks": 4, "batch_size": 8, "compute": "real", "n_steps": 5}
    return {"row": row, "bench": "train", "scheme": scheme, "options": options, "iteration_s": iteration_s, **times,
            **split, **settings, "wire_bytes": 5e6, "samples_per_s": 9.0, **more}  # fmt: skip


def test_speed_ups_are_within_a_row_and_over_methods_as_they_come() -> None:
    records = [
        record("iteration-gpt-1gbit", "ddp", 4.0),
        record("iteration-gpt-1gbit", "power-sgd", 3.0, "rank=4"),
        record("iteration-gpt-1gbit", "acp-sgd", 2.0, "rank=4"),
        record("iteration-gpt-none", "ddp", 1.0, rate_bps=None),
        record("buffers-bert-base-r32-inf", "acp-sgd", 1.0, "rank=32,buffer_mb=inf"),
        record("optimisations-gpt", "ddp", 8.0, "bucket_mb=0"),
        record("optimisations-gpt", "ddp", 4.0),
    ]
    ddp, power, acp, unshaped = acp_numbers.describe_plan("iteration", records)
    assert (acp["speed_up_over_ddp"], acp["speed_up_over_power_sgd"]) == (2.0, 1.5)
    assert (power["speed_up_over_ddp"], power["speed_up_over_power_sgd"]) == (pytest.approx(4 / 3), 1.0)
    assert (ddp["codec_ms"], acp["codec_ms"]) == (None, 20.0)
    assert (unshaped["network"], unshaped["speed_up_over_power_sgd"]) == ("unshaped", None)
    buffers = acp_numbers.describe_plan("buffers", records)[0]
    assert (buffers["rank"], buffers["buffer_mb"]) == ("32", "inf")
    assert [one["speed_up_over_ddp"] for one in acp_numbers.describe_plan("optimisations", records)] == [0.5, 1.0]
    assert acp_numbers.describe_plan("world", records) == []
    table = acp_numbers.to_markdown("a title", [ddp, power, acp])
    assert "| gpt | 1000 Mb/s | acp-sgd | rank=4 | 2000 |" in table


def test_tables_and_plots_are_made_of_finished_rows_without_measuring(tmp_path: Path) -> None:
    log = RecordLog(tmp_path / "results.jsonl")
    for plan in PLANS:
        row = plan.rows[0]
        more = {"rank": 4, "buffer_mb": 25}
        made = [
            record(
                row.key,
                scheme,
                1.0 + index,
                "" if scheme == "ddp" else f"rank={4 + index},buffer_mb={25 * index}",
                **more,
            )
            for index, scheme in enumerate(("ddp", "acp-sgd", "power-sgd", "acp-sgd"))
        ]
        log.append([{**one, "attempt": row.key} for one in made])
        log.append([{"row": row.key, "attempt": row.key, "status": "done", "call": f"train {' '.join(row.arguments)}"}])
    parser = argparse.ArgumentParser()
    acp_figures.add_arguments(parser)
    assert acp_figures.run(parser.parse_args(["--out", str(tmp_path), "--no-run"])) == 0
    figures = {one["figure"] for one in json.loads((tmp_path / "acp_figures.json").read_text())}
    assert figures == {"table1_ratios", "table2_traffic_mb", "fig05_tensor_sizes", *(plan.name for plan in PLANS)}
    for name in ("fig05_tensor_sizes", "table3_fig08_iteration", "fig13_bandwidth", "fig10_buffer_size", "fig12_world_size",
                 "fig11a_batch_size", "fig11b_rank", "fig09_optimisations", "fig02_03_methods"):  # fmt: skip
        assert (tmp_path / f"{name}.svg").stat().st_size > 0, name
    with pytest.raises(InvalidArgument):
        acp_figures.run(parser.parse_args(["--out", str(tmp_path), "--only", "nothing"]))
