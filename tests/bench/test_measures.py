"""Measures that are commands: what is called, and which cell each of its records is of."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gradwire.errors import GradwireError
from gradwire_lab.bench.catalogue import EXPERIMENTS
from gradwire_lab.bench.measures import Call, commands, gradients


def first_call(key: str, folder: Path) -> Call:
    (experiment,) = [one for one in EXPERIMENTS if one.key == key]
    cells = experiment.groups()[0]
    return Call(key, cells, experiment.apart(cells[0]), dict(experiment.fixed), folder)


def pretend(monkeypatch: pytest.MonkeyPatch, make: Any) -> list[dict[str, Any]]:
    asked: list[dict[str, Any]] = []

    def run_command(bench: str, arguments: dict[str, Any], call: Call) -> list[dict[str, Any]]:
        asked.append(arguments)
        return make(arguments)

    monkeypatch.setattr(commands, "run_command", run_command)
    monkeypatch.setattr(commands, "gradient_file", lambda name, folder: folder / f"{name}.npz")
    return asked


@pytest.mark.parametrize("key", ["allreduce-quick", "allreduce-gradient", "homomorphic-allreduce"])
def test_all_reduces_of_any_sizes_find_their_cells(key: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def make(arguments: dict[str, Any]) -> list[dict[str, Any]]:
        sizes = arguments["n_bytes"] if isinstance(arguments["n_bytes"], list) else [arguments["n_bytes"]]
        return [{"n_bytes": size, "spec": spec} for size in sizes for spec in arguments["scheme"]]

    pretend(monkeypatch, make)
    call = first_call(key, tmp_path)
    found = commands.allreduce(call)
    assert sorted(map(repr, (cell for cell, _ in found))) == sorted(map(repr, call.cells))
    assert all(cell["scheme"] == record["spec"] for cell, record in found)
    assert all(cell.get("n_bytes", record["n_bytes"]) == record["n_bytes"] for cell, record in found)


def test_training_in_phases_has_a_record_a_phase(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def make(arguments: dict[str, Any]) -> list[dict[str, Any]]:
        return [
            {"scheme": spec.partition(":")[0], "options": spec.partition(":")[2], "phase": phase}
            for phase in range(1 + len(arguments["then"]))
            for spec in arguments["scheme"]
        ]

    pretend(monkeypatch, make)
    cells = [{"scheme": spec} for spec in ("ddp", "gcomp:importance=uniform,bits=12")]
    call = Call("changes", cells, {}, {"rate": "1gbit", "then": ["100mbit", "500mbit"]}, tmp_path)
    found = commands.train(call)
    assert len(found) == 3 * len(call.cells)
    for cell, record in found:
        assert cell["scheme"] == ":".join(filter(None, [record["scheme"], record["options"]]))


def test_codec_that_is_left_out_has_no_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = pretend(monkeypatch, lambda arguments: [{"codec": spec} for spec in arguments["codec"] if spec != "zipnn"])
    found = commands.codec(first_call("codec", tmp_path))
    assert asked[0]["gradients"] == str(tmp_path / "gpt@400.npz")
    assert "zipnn" not in [cell["codec"] for cell, _ in found]
    assert all(cell["codec"] == record["codec"] for cell, record in found)


def write_steps(folder: Path, steps: list[dict[str, Any]]) -> None:
    (folder / "steps.jsonl").write_text("\n".join(json.dumps(step) for step in steps))


def made_step(number: int, elapsed_s: float, bits: float) -> dict[str, Any]:
    return {"step": number, "elapsed_s": elapsed_s, "iteration_s": 0.5, "loss": 1.0, "bits_per_value": bits,
            "first_bits_per_value": 4.0, "acknowledged_bps": 1e8}  # fmt: skip


def test_steps_of_a_training_become_records_and_windows_of_time(tmp_path: Path) -> None:
    write_steps(tmp_path, [{"step": 0, "loss": 2.0}, made_step(1, 0.5, 4.0), made_step(2, 1.0, 16.0)])
    records = commands.read_steps(tmp_path)
    assert [record["q_ratio"] for record in records] == [0.125, 0.5]
    (window,) = commands.in_windows(records, 5.0)
    assert (window["from_s"], window["n_steps"], window["bits_per_value"]) == (0.0, 2, 10.0)
    assert [one["from_s"] for one in commands.in_windows(records, 0.5)] == [0.5, 1.0]


def test_adaptation_trains_its_scheme_on_links_that_change(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    called: list[list[str]] = []

    def run_process(command: list[str], log: Path) -> None:
        called.append(command)
        out = Path(command[command.index("--out") + 1])
        out.mkdir(parents=True)
        step = made_step(1, 9.0, 8.0)
        del step["acknowledged_bps"]  # as long as nothing was acknowledged
        write_steps(out, [step])

    monkeypatch.setattr(commands, "run_process", run_process)
    ((_, record),) = commands.adaptation(first_call("aqgb-adaptation", tmp_path))
    assert record["acknowledged_bps"] == 0.0
    assert (record["from_s"], record["bits_per_value"]) == (8.0, 8.0)
    (words,) = called
    assert words[words.index("--scheme") + 1] == "aqgb:max_contention=1"
    assert words.count("--at") == 2 * 4
    assert "22:rate:3=100mbit" in words


def test_command_that_fails_says_how_its_output_ended(tmp_path: Path) -> None:
    """With a real process: the benchmark's own message, and all of it in the log."""
    call = Call("bad", [], {}, {}, tmp_path)
    with pytest.raises(GradwireError, match=r"absent\.npz: no such file"):
        commands.run_command("codec", {"gradients": "absent.npz"}, call)
    assert "no such file" in (tmp_path / "logs" / "bad-codec.txt").read_text()


def test_curves_of_a_gradient_are_its_values(tmp_path: Path) -> None:
    """Exponent shares and zeros make 1, by frexp; the ratio's middle is numpy's median; sizes are symmetric for +-x."""
    half = np.random.default_rng(0).normal(size=4_000).astype(np.float32)
    values = np.concatenate([half, -half, np.zeros(2_000, np.float32)])
    parameters = np.full(values.size, 2.0, np.float32)
    np.savez(tmp_path / "one.npz", gradient=values, parameter=parameters)
    cells = [{"gradients": str(tmp_path / "one.npz")}]
    points = [record for _, record in gradients.measure_spread(Call("gcomp-spread", cells, {}, {}, tmp_path))]
    curves = {of: {p["at"]: p["share"] for p in points if p["of"] == of} for of in ("value", "exponent", "ratio")}
    counted = Counter(int(e) + 126 for e in np.frexp(values[values != 0])[1])
    assert curves["exponent"] == {e: n / values.size for e, n in counted.items()}
    assert sum(curves["exponent"].values()) == pytest.approx(0.8)
    assert all(share == curves["value"][-at] for at, share in curves["value"].items() if -at in curves["value"])
    assert sum(curves["value"].values()) == pytest.approx(1.0, abs=1e-3)
    middle = next(at for at, share in curves["ratio"].items() if share == pytest.approx(0.5))
    assert middle == pytest.approx(np.median(np.abs(half)) / 2, rel=1e-6)
