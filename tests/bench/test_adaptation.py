"""The adaptation bench reads what training writes."""

from __future__ import annotations

import json

from gradwire_lab.bench.measures.commands import in_windows, read_steps


def write(folder, steps):
    (folder / "steps.jsonl").write_text("\n".join(json.dumps(step) for step in steps))


def step(number, bits):
    return {"step": number, "elapsed_s": number / 2, "iteration_s": 0.5, "loss": 1.0, "bits_per_value": bits,
            "first_bits_per_value": 4.0, "acknowledged_bps": 1e8}  # fmt: skip


def test_steps_become_records_and_windows_of_time(tmp_path):
    write(tmp_path, [{"step": 0, "loss": 2.0}, step(1, 4.0), step(2, 16.0)])
    records = read_steps(tmp_path)
    assert [record["q_ratio"] for record in records] == [0.125, 0.5]
    (window,) = in_windows(records, 5.0)
    assert (window["from_s"], window["n_steps"], window["bits_per_value"]) == (0.0, 2, 10.0)
    assert [one["from_s"] for one in in_windows(records, 0.5)] == [0.5, 1.0]
