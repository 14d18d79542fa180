"""`gradwire bench simulator`: cells are kept and not measured again, and records become predictions."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from gradwire.bench.simulator import Cell, Measuring, summarise
from gradwire.bench.simulator_blocks import block_workload, bucket_workload
from gradwire.bench.simulator_predictions import predict, rate_with_cores
from gradwire.cli import main
from gradwire.errors import InvalidArgument

CELLS = [Cell("a", "train", ("--ranks", "2")), Cell("b", "train", ("--ranks", "4"))]
STEP_MS = 60.0
WORKLOAD = f"gpt:n_layers=2,width=128,n_heads=4,length=16,step_ms={STEP_MS}"


@pytest.fixture(autouse=True, scope="module")
def _captures_of_their_own(tmp_path_factory: pytest.TempPathFactory) -> object:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield


def test_finished_cells_are_not_measured_again_and_failed_ones_are(tmp_path: Path) -> None:
    calls: list[str] = []
    fails = {"4"}

    def call(command: Sequence[str], log: Path) -> int:
        ranks = command[command.index("--ranks") + 1]
        calls.append(ranks)
        if ranks in fails:
            return 1
        Path(command[command.index("--json") + 1]).write_text(json.dumps([{"ranks": ranks}]), encoding="utf-8")
        return 0

    first = Measuring(tmp_path, lambda _: None, call=call)
    assert first.run(CELLS) == {"a": [{"ranks": "2"}]}
    assert first.failed == ["b"]
    fails.clear()
    second = Measuring(tmp_path, lambda _: None, call=call)
    assert second.run(CELLS) == {"a": [{"ranks": "2"}], "b": [{"ranks": "4"}]}
    assert calls == ["2", "4", "4"]
    changed = [Cell("a", "train", ("--ranks", "3"))]
    assert Measuring(tmp_path, lambda _: None, call=call).run(changed) == {"a": [{"ranks": "3"}]}
    assert Measuring(tmp_path, lambda _: None, fresh=True, call=call).run(CELLS[:1]) == {"a": [{"ranks": "2"}]}
    assert calls == ["2", "4", "4", "3", "2"]


def test_buckets_and_blocks_hold_every_value_and_all_of_the_step() -> None:
    options = {"n_layers": 2, "width": 128, "n_heads": 4, "length": 16, "step_ms": STEP_MS}
    for make in (bucket_workload, block_workload):
        workload = make("gpt", options, 0.5)
        assert workload.step_s == pytest.approx(0.5)
        assert workload.n_values == bucket_workload("gpt", options, 1.0).n_values
    with pytest.raises(InvalidArgument, match="step_ms"):
        bucket_workload("gpt", options | {"step_ms": 0}, 0.0)


def test_a_ring_is_predicted_by_its_bytes_and_the_rest_by_its_own_record() -> None:
    n_values = bucket_workload(
        "gpt", {"n_layers": 2, "width": 128, "n_heads": 4, "length": 16, "step_ms": STEP_MS}, 1.0
    ).n_values

    def record(scheme: str, wire_bytes: float, codec_s: float = 0.0) -> dict[str, object]:
        return {
            "scheme": scheme, "options": "", "ranks": 2, "rate_bps": 1_000_000, "iteration_s": 1.0, "iteration_s_low": 1.0,
            "iteration_s_high": 1.0, "compute_s": 0.06, "codec_s": codec_s, "decode_s": codec_s / 2, "kernel_bytes": None,
            "wire_bytes": wire_bytes, "n_bytes": 4 * n_values, "compute": "emulate", "commit": "", "date": "",
        }  # fmt: skip

    n_bytes = 4.0 * n_values
    records = [
        record("ddp", n_bytes),
        record("gcomp", n_bytes / 2, 1.0),
        record("broadcast", n_bytes / 8),
        record("aqgb", 0.0),
    ]
    predicted = {one["scheme"]: one for one in predict(records, {"backend": 0.0, "frames": 0.0}, WORKLOAD)}
    wire_s = 8 * n_bytes / 1e6
    # At 1 Mb/s the wire is everything: from the first bucket's gradient to the end of the last.
    assert wire_s < predicted["ddp"]["predicted_s"] < wire_s + 0.06
    assert wire_s / 2 < predicted["gcomp"]["predicted_s"] < wire_s / 2 + 0.06 + 1.0
    assert wire_s / 8 < predicted["broadcast"]["predicted_s"] < wire_s / 8 + 0.06
    # Its floor is 4 bits of 32; a shared exponent makes it 4 1/32.
    assert wire_s / 8 < predicted["aqgb"]["predicted_s"] < wire_s / 8 * 1.1 + 0.06
    assert predicted["ddp"]["error"] == pytest.approx(predicted["ddp"]["predicted_s"] - 1)
    assert summarise(list(predicted.values()))[0].startswith("all: median error")


def test_ranks_that_share_cores_move_their_bits_no_faster_than_the_cores_do() -> None:
    record = {"scheme": "gcomp", "ranks": 4, "rate_bps": 1e9, "codec_s": 0.05, "kernel_bytes": None, "wire_bytes": 1e6}
    assert rate_with_cores(record) == 1e9, "of an older record nothing is known"
    busy = record | {"cpu_s": 0.25, "n_cores": 2}
    assert rate_with_cores(busy) == pytest.approx(8e6 / 0.2 / 2)
    assert rate_with_cores(busy, n_cores=4) == rate_with_cores(busy, n_cores=64) == pytest.approx(8e6 / 0.2)
    assert rate_with_cores(busy | {"cpu_s": 0.04}) == 1e9, "all of it is the codec's"
    assert rate_with_cores(busy | {"rate_bps": 1e6}) == 1e6


def test_one_rank_is_no_comparison(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "simulator", "--quick", "--ranks", "1", "--out", str(tmp_path)]) == 1
    assert "at least 2 ranks" in capsys.readouterr().err
