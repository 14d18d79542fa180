"""Models and clusters that a user brings: what files say is simulated, and what is wrong in them is named by line and field."""

import json
import random
import re
import statistics
import threading
from pathlib import Path

import pytest

from gradwire.errors import InvalidArgument
from gradwire.planning.box import plan_box
from gradwire.telemetry.chrome_trace import ChromeTraceSink
from gradwire.telemetry.recorder import KINDS, BucketRecord, StepRecord
from gradwire_lab.cli import main
from gradwire_lab.simulator.inputs import load_cluster, load_model
from gradwire_lab.simulator.search import SampleGoal, search, simulate
from gradwire_lab.simulator.stage import Failures, Setting, Uniform
from gradwire_lab.simulator.workloads import BlockTimes, WorkloadTimes

MODEL = """{
 "blocks": [
  {"name": "front", "values": 1000000, "forward_s": 0.01, "backward_s": 0.02},
  {"values": 3000000,
   "forward_s": 0.03, "backward_s": 0.06}
 ]
}"""
CLUSTER = """{
 "groups": [
  {"workers": 2, "rate": "400gbit", "uplink": "10gbit"},
  {"workers": 2, "rate": ["1gbit", "2gbit"], "speed": [1, 0.5]}
 ],
 "latency_us": 5,
 "between": {"rtt_ms": 40, "loss": 0.0001, "streams": 4},
 "failures": {"mtbf_hours": 2000, "restart_s": 300, "checkpoint_s": 30}
}"""


def write(folder: Path, text: str, name: str = "given.json") -> Path:
    (folder / name).write_text(text, encoding="utf-8")
    return folder / name


def test_a_model_and_a_cluster_are_what_their_files_say(tmp_path: Path) -> None:
    model = load_model(write(tmp_path, MODEL))
    assert model.blocks == (BlockTimes("front", 10**6, 0.01, 0.02), BlockTimes("block 1", 3 * 10**6, 0.03, 0.06))
    setting = load_cluster(write(tmp_path, CLUSTER), model)
    assert (setting.rates_bps, setting.speeds) == ((4e11, 4e11, 1e9, 2e9), (1, 1, 1, 0.5))
    assert (setting.racks, setting.core_bps) == ((2, 2), (1e10, 3e9))
    assert (setting.latency_s, setting.core_latency_s, setting.failures) == (5e-6, 0.02, Failures(7.2e6, 300, 30))
    assert setting.of_workers(3).racks == (2, 1)
    assert setting.of_workers(1).core_bps is None
    with pytest.raises(InvalidArgument, match="5 workers of 4"):
        setting.of_workers(5)
    even = load_cluster(write(tmp_path, '{"groups": [{"workers": 2, "rate": 1e9}]}'), model)
    assert (even.of_workers(3).rates_bps, even.of_workers(3).racks) == ((1e9,) * 3, (3,))


def test_the_files_on_the_page_are_read(tmp_path: Path) -> None:
    page = (Path(__file__).parents[2] / "docs" / "simulator.md").read_text()
    model, cluster = re.findall(r'^    (\{"(?:blocks|groups).*?\}\]?\})$', page, re.MULTILINE | re.DOTALL)
    setting = load_cluster(write(tmp_path, cluster, "c.json"), load_model(write(tmp_path, model)))
    assert (setting.n_workers, setting.workload.n_values) == (16, 50_000_000)
    assert setting.failures == Failures(7.2e6, 300, 30, 1200)


ONE = WorkloadTimes("mine", (BlockTimes("a", 10_000_000, 0.1, 0.2),), "")
WRONG = [
    (MODEL.replace("3000000", "-3"), "line 4, blocks[1].values: expected a whole number from 1 to 1e+13, got -3"),
    (MODEL.replace("3000000", "1.5"), "line 4, blocks[1].values"),
    (MODEL.replace("3000000", "true"), "line 4, blocks[1].values"),
    (MODEL.replace("0.06", "1e9"), "line 5, blocks[1].backward_s: expected a number from 0 to 100000"),
    (MODEL.replace("0.06", "NaN"), "line 5, blocks[1].backward_s"),
    (MODEL.replace(', "backward_s": 0.06', ""), "line 4, blocks[1].backward_s: is missing"),
    (MODEL.replace('"values": 1', '"value": 1'), "line 3, blocks[0].value: there is no such field; did you mean 'values'?"),
    (MODEL.replace('"blocks"', '"bloks"'), "line 2, bloks: there is no such field; did you mean 'blocks'?"),
    ('{"blocks": []}', "line 1, blocks: expected a list with something in it"),
    ("[1]", "line 1, the whole: expected an object"),
    (MODEL[:120], "line 5: the JSON is cut off here"),
    (MODEL.replace("0.01,", "0.01"), "line 3: the JSON breaks here"),
    (CLUSTER.replace('"10gbit"', '"0gbit"'), "line 3, groups[0].uplink: a rate of 0gbit is outside 10kbit to 10tbit"),
    (CLUSTER.replace('"2gbit"]', '"fast"]'), "line 4, groups[1].rate[1]: 'fast' is no rate"),
    (CLUSTER.replace(', "2gbit"]', "]"), "line 4, groups[1].rate: 1 values for 2 workers"),
    (CLUSTER.replace("[1, 0.5]", "0"), "line 4, groups[1].speed: expected a number from 0.001"),
    (CLUSTER.replace('"rtt_ms": 40, ', ""), "line 7, between.rtt_ms: is missing"),
    (CLUSTER.replace("0.0001", "1"), "line 7, between.loss"),
    (CLUSTER.replace("2000", "0"), "line 8, failures.mtbf_hours"),
    (CLUSTER.replace("latency_us", "latncy_us"), "line 6, latncy_us: there is no such field; did you mean 'latency_us'?"),
    (CLUSTER.replace('"workers": 2, "rate": "4', '"rate": "4'), "line 3, groups[0].workers: is missing"),
]  # fmt: skip


@pytest.mark.parametrize(("text", "expected"), WRONG, ids=[expected for _, expected in WRONG])
def test_what_is_wrong_is_named_by_line_and_field(text: str, expected: str, tmp_path: Path) -> None:
    path = write(tmp_path, text)
    with pytest.raises(InvalidArgument) as caught:
        load_cluster(path, ONE) if "groups" in text else load_model(path)
    assert str(caught.value).startswith(f"{path}, {expected}")
    assert "\n" not in str(caught.value)


def write_trace_of(path: Path, rank: int = 0) -> None:
    """Five steps of 0.5 s, of which 0.2 s are waited for; gradients at 0.15 and 0.28 s, but in the first, of one bucket."""
    sink, lock = ChromeTraceSink(path, rank, 2), threading.Lock()
    for step in range(5):
        began_ns, records = 10**9 + step * 500_000_000, []
        ready = [(0, 4_000_000, 0.15), (1, 12_000_000, 0.28)] if step else [(0, 16_000_000, 0.28)]
        for bucket, n_bytes, at_s in ready:
            started_ns = began_ns + round(1e9 * at_s)
            records.append(BucketRecord(step, bucket, n_bytes, lock, started_ns=started_ns, ended_ns=started_ns + 9))
        busy = dict.fromkeys(KINDS, 0)
        times_ns = (200_000_000, 500_000_000, began_ns + 500_000_000)
        sink.write_step(StepRecord(step, len(ready), 16_000_000, 16e6, 1, 1, 1, 0, busy, *times_ns), records)
    sink.close()


def test_a_runs_trace_and_a_plan_become_a_model(tmp_path: Path) -> None:
    write_trace_of(tmp_path / "trace.json")
    model = load_model(tmp_path / "trace.json")
    assert [block.n_values for block in model.blocks] == [3_000_000, 1_000_000]
    assert model.step_s == pytest.approx(0.3)
    # A third of 0.3 s is the forward pass, and the 20 ms behind the last gradient come before the next one.
    assert [block.backward_s for block in model.blocks] == pytest.approx([0.13, 0.05])
    plan = plan_box(8, 30e6, 0.12, bus_rate=1e10)
    model = load_model(write(tmp_path, json.dumps(plan.as_dict())))
    assert (model.n_values, model.step_s) == (30_000_000, pytest.approx(0.12))
    # The simulator's step is then what the plan itself says of plain DDP.
    rate = 8 * plan.profile.link.rate
    box = Setting(model, 8, rate, latency_s=plan.profile.link.backend_hop_s, jitter=Uniform(0.0))
    made = simulate(model, box, rounds=4)
    assert made["round_s"] == pytest.approx(plan.plain.step_s, rel=1e-6)


def test_files_that_chance_has_changed_are_read_or_refused_in_one_line(tmp_path: Path) -> None:
    write_trace_of(tmp_path / "trace.json")
    plan = json.dumps(plan_box(8, 30e6, 0.12, bus_rate=1e10).as_dict())
    texts, chance = [MODEL, CLUSTER, plan, (tmp_path / "trace.json").read_text()], random.Random(3)
    values = ["null", "-1", "0", "1e400", "NaN", '"x"', "[]", "{}", "true", "99999999999999999999", "0.5", ""]
    refused = []
    for number in range(800):
        text = texts[number % 4]
        if number % 3:
            token = chance.choice([*re.finditer(r'-?\d+(\.\d+)?|"[^"]*"|true|null', text)])
            text = text[: token.start()] + chance.choice(values) + text[token.end() :]
        else:
            at = chance.randrange(len(text))
            text = text[:at] + chance.choice(["", "[", "}", ",", text[at + 9 :]])
        path = write(tmp_path, text)
        try:
            load_cluster(path, ONE) if number % 4 == 1 else load_model(path)
        except InvalidArgument as error:
            refused.append(str(error))
    assert len(refused) > 400
    assert all(str(tmp_path / "given.json") in message and "\n" not in message for message in refused)


def test_a_cut_trace_names_line_and_field(tmp_path: Path) -> None:
    write_trace_of(tmp_path / "trace.json")
    text = (tmp_path / "trace.json").read_text()
    n_line = text[: len(text) // 2].count("\n") + 1
    for change, expected in (
        (text[: len(text) // 2], f"line {n_line}: the JSON is cut off here"),
        (text.replace('"exposed_s":0.2', '"exposed":0.2', 1), "line 6, traceEvents[4].args.exposed_s: is missing"),
        (text.replace('"original_bytes":16000000', '"original_bytes":-1', 2), "args.original_bytes: expected a whole number"),
        (text.replace('"cat":"step"', '"cat":"stop"'), "traceEvents: no step of the trace has its computation and its buckets"),
    ):  # fmt: skip
        with pytest.raises(InvalidArgument) as caught:
            load_model(write(tmp_path, change))
        assert expected in str(caught.value)


@pytest.mark.parametrize(("every_s", "n_workers"), [(600.0, 10), (None, 100), (3000.0, 100)])
def test_failures_lose_what_they_lose_when_they_come_at_random(every_s: float | None, n_workers: int) -> None:
    failures = Failures(4e5, 200.0, 40.0, every_s)
    chance, rate = random.Random(1), n_workers / failures.mtbf_s
    every_s = every_s or (2 * 40.0 / rate) ** 0.5
    took_s, next_s, n_stretches = 0.0, chance.expovariate(rate), 4000
    for _ in range(n_stretches):
        needed_s = every_s + 40.0
        while next_s < needed_s:  # it fails, and restarts, perhaps several times, before the stretch begins anew
            took_s, next_s, needed_s = took_s + next_s, chance.expovariate(rate), every_s + 40.0 + 200.0
        took_s, next_s = took_s + needed_s, next_s - needed_s
    assert failures.lost_share(n_workers) == pytest.approx(1 - n_stretches * every_s / took_s, abs=0.01)
    assert Failures(1.0, 200.0, 40.0, 600.0).lost_share(100) == 1.0


def test_a_search_ranks_what_is_within_the_budget_by_time() -> None:
    schemes = ["plain", "local-sgd:every=10", "one-bit"]
    found = search(ONE, Setting(ONE, 4, 1e9), schemes, [4, 8, 64], SampleGoal(3.6e6, 10, budget_hours=60))
    assert len(found) == 9
    within = [one for one in found if one["in_budget"]]
    assert 0 < len(within) < 9
    assert found[: len(within)] == within
    for some in (within, found[len(within) :]):
        assert [one["hours"] for one in some] == sorted(one["hours"] for one in some)
    plain = next(one for one in found if (one["scheme"], one["workers"]) == ("plain", 4))
    # 0.3 s and a ring of 48 Mb a 32 Mb... 1.5 x 320 Mb at 1 Gb/s; 90,000 steps.
    assert plain["hours"] == pytest.approx(90_000 * (0.3 + 0.48) / 3600, rel=0.05)
    assert plain["level"] == "exact"
    local = next(one for one in found if (one["options"], one["workers"]) == ("every=10", 4))
    assert local["round_s"] == pytest.approx(statistics.fmean([0.3] * 10) + 0.048, rel=0.05)


def test_auto_is_plain_where_the_link_is_fast_and_the_best_of_its_level_where_it_is_not() -> None:
    def round_s(scheme: str, rate: float) -> float:
        return float(simulate(ONE, Setting(ONE, 4, rate, jitter=Uniform(0.0)), scheme, rounds=5)["round_s"])

    assert round_s("auto:fidelity=any", 1e12) == round_s("plain", 1e12)
    schemes = ("thc", "plain", "auto", "auto:fidelity=close", "auto:fidelity=any")
    thc, *falling = (round_s(scheme, 1e8) for scheme in schemes)
    assert falling == sorted(set(falling), reverse=True)
    assert thc > falling[-1]


def test_the_command_takes_files_and_a_budget(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model, cluster = write(tmp_path, MODEL, "m.json"), write(tmp_path, CLUSTER, "c.json")
    out, plot = tmp_path / "out.json", tmp_path / "a.svg"
    given = f"simulate --model {model} --cluster {cluster} --scheme plain plain:collective=tree".split()
    more = f"fully-shard --workers 2 4 --samples 1e6 --batch 8 --budget 3 --json {out} --plot {plot}"
    assert main([*given, *more.split()]) == 0
    assert "worker hours" in capsys.readouterr().out
    records = json.loads(out.read_text())
    assert len(records) == 6
    assert all(0 < record["lost_share"] < 0.1 and record["effective_round_s"] > record["round_s"] for record in records)
    assert plot.is_file()
    for wrong in (["--rate", "1gbit"], ["--workload", "bert-base"], ["--budget", "3"], ["--samples", "-1"]):
        assert main([*given, *wrong]) == 1
        assert capsys.readouterr().err.count("\n") == 1
