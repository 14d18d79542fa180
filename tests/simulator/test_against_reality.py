"""The simulator against reality: records become predictions, and sizes its table."""

import json
from pathlib import Path

import pytest

from gradwire.errors import InvalidArgument
from gradwire_lab.bench.measures import Call, reality
from gradwire_lab.simulator.predictions import block_workload, bucket_workload, predict, rate_with_cores
from gradwire_lab.simulator.schemes.registry import MeasuredTable

STEP_MS = 60.0
OPTIONS = {"n_layers": 2, "width": 128, "n_heads": 4, "length": 16, "step_ms": STEP_MS}
WORKLOAD = f"gpt:n_layers=2,width=128,n_heads=4,length=16,step_ms={STEP_MS}"


@pytest.fixture(autouse=True, scope="module")
def _captures_of_their_own(tmp_path_factory: pytest.TempPathFactory) -> object:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield


def gradient_bytes() -> float:
    return 4.0 * bucket_workload("gpt", OPTIONS, 1.0).n_values


def test_buckets_and_blocks_hold_every_value_and_all_of_the_step() -> None:
    for make in (bucket_workload, block_workload):
        workload = make("gpt", OPTIONS, 0.5)
        assert workload.step_s == pytest.approx(0.5)
        assert 4 * workload.n_values == gradient_bytes()
    with pytest.raises(InvalidArgument, match="step_ms"):
        bucket_workload("gpt", OPTIONS | {"step_ms": 0}, 0.0)


def made_record(scheme: str, wire_bytes: float, codec_s: float = 0.0) -> dict[str, object]:
    return {
        "scheme": scheme, "options": "", "ranks": 2, "rate_bps": 1_000_000, "iteration_s": 1.0, "iteration_s_low": 1.0,
        "iteration_s_high": 1.0, "compute_s": 0.06, "codec_s": codec_s, "decode_s": codec_s / 2, "kernel_bytes": None,
        "wire_bytes": wire_bytes, "n_bytes": gradient_bytes(), "compute": "emulate", "commit": "", "date": "",
    }  # fmt: skip


def test_a_ring_is_predicted_by_its_bytes_and_the_rest_by_its_own_record() -> None:
    n_bytes = gradient_bytes()
    sent = {"ddp": (n_bytes,), "gcomp": (n_bytes / 2, 1.0), "broadcast": (n_bytes / 8,), "aqgb": (0.0,)}
    records = [made_record(scheme, *costs) for scheme, costs in sent.items()]
    predicted = {one["scheme"]: one for one in predict(records, {"backend": 0.0, "frames": 0.0}, WORKLOAD)}
    wire_s = 8 * n_bytes / 1e6
    # At 1 Mb/s the wire is everything: from the first bucket's gradient to the end of the last.
    assert wire_s < predicted["ddp"]["predicted_s"] < wire_s + 0.06
    assert wire_s / 2 < predicted["gcomp"]["predicted_s"] < wire_s / 2 + 0.06 + 1.0
    assert wire_s / 8 < predicted["broadcast"]["predicted_s"] < wire_s / 8 + 0.06
    # Its floor is 4 bits of 32; a shared exponent makes it 4 1/32.
    assert wire_s / 8 < predicted["aqgb"]["predicted_s"] < wire_s / 8 * 1.1 + 0.06
    assert predicted["ddp"]["error"] == pytest.approx(predicted["ddp"]["predicted_s"] - 1)
    sizes = [block.n_values for block in bucket_workload("gpt", OPTIONS, STEP_MS / 1e3).blocks]
    for n_mib, pieces in ((0.5, 0), (8, int(8 * max(sizes) / sum(sizes)))):  # of the largest bucket
        far = predict([made_record("ddp", n_mib * (1 << 20))], {"backend": 1.0, "frames": 0.0}, WORKLOAD)[0]
        assert far["latency_s"] == 1 + pieces / 2


def test_ranks_that_share_cores_move_their_bits_no_faster_than_the_cores_do() -> None:
    record = {"scheme": "gcomp", "ranks": 4, "rate_bps": 1e9, "codec_s": 0.05, "kernel_bytes": None, "wire_bytes": 1e6}
    assert rate_with_cores(record) == 1e9, "of an older record nothing is known"
    busy = record | {"cpu_s": 0.25, "n_cores": 2}
    assert rate_with_cores(busy) == pytest.approx(8e6 / 0.2 / 2)
    assert all(rate_with_cores(busy | {"n_cores": n}) == pytest.approx(8e6 / 0.2) for n in (4, 64))
    assert rate_with_cores(busy | {"cpu_s": 0.04}) == 1e9, "all of it is the codec's"
    assert rate_with_cores(busy | {"rate_bps": 1e6}) == 1e6


def test_a_run_measures_the_hops_and_the_schemes_and_compares(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Commands stand in for ranks: which are called, and that every cell has its own scheme's prediction."""
    calls: list[tuple[str, object]] = []
    n_bytes = gradient_bytes()

    def pretend(bench: str, arguments: dict[str, object], call: Call) -> list[dict[str, object]]:
        calls.append((bench, arguments["scheme"]))
        if bench == "allreduce":
            return [{"scheme": scheme, "ranks": 2, "time_s": 2e-3} for scheme in ("plain", "gcomp")]
        return [made_record(scheme, n_bytes) | {"network": "netlab"} for scheme in ("ddp", "plain")]

    monkeypatch.setattr(reality, "run_command", pretend)
    monkeypatch.setattr("gradwire_lab.bench.measures.commands.run_command", pretend)
    cells = [{"ranks": 2, "rate": "1mbit", "scheme": scheme} for scheme in ("ddp", "plain")]
    call = Call("k", cells, {"ranks": 2, "rate": "1mbit"}, {"workload": WORKLOAD}, tmp_path)
    found = reality.measure(call)
    assert calls == [("allreduce", ["plain", "gcomp"]), ("train", ["ddp", "plain"])]
    assert [(cell, record["scheme"]) for cell, record in found] == [(cell, cell["scheme"]) for cell in cells]
    assert all(record["error_size"] == abs(record["error"]) for _, record in found)
    assert found[0][1]["latency_s"] == 1.5e-3  # one piece is whole


def test_sizes_go_into_the_simulators_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    table = tmp_path / "measured.json"
    monkeypatch.setattr(reality, "TABLE", table)
    more = {"gradients": "g", "cpu": "c", "n_cores": 2, "torch": "t"}
    for ranks in (3, 2):
        measured = [({"scheme": "gcomp"}, made_record("gcomp", 8e6, 0.5) | {"ranks": ranks} | more)]
        monkeypatch.setattr(reality, "train", lambda call, measured=measured: measured)
        reality.measure_sizes(Call("k", [], {"workload": "gpt:step_ms=5"}, {}, tmp_path))
    content = json.loads(table.read_text())
    rows = content["workloads"]["gpt"]["schemes"]["gcomp"]
    assert [row["ranks"] for row in rows] == [2, 3]
    assert (rows[0]["sent_bytes"], rows[0]["encode_s"], rows[0]["decode_s"]) == (8e6, 0.25, 0.25)
    assert MeasuredTable.load(table)
