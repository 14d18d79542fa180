"""`bench train --then`: links that change in mid-run, for every method at the same step."""

import json
from pathlib import Path

import pytest

from gradwire.errors import GradwireError
from gradwire_lab.bench.driver import change_links
from programs import GRADWIRE, run_well

pytestmark = pytest.mark.usefixtures("warm_interpreters")


@pytest.mark.root
def test_links_change_between_the_phases_and_records_say_so(tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    words = "--scheme ddp plain --workload resnet --ranks 2 --steps 2 --warmup 1 --batch-size 4"
    changes = "--rate 1gbit --then 50mbit 1gbit,50mbit --json"
    said = run_well([*GRADWIRE, "bench", "train", *words.split(), *changes.split(), out])
    assert "change links" not in said, "questions to the launcher are not for people"
    records = json.loads(out.read_text())
    assert [(record["phase"], record["rates"], record["scheme"]) for record in records] == [
        (phase, rates, scheme)
        for phase, rates in enumerate(["1gbit", "50mbit", "1gbit,50mbit"])
        for scheme in ("ddp", "plain")
    ]
    assert all(record["n_steps"] == 2 for record in records)
    by_phase = {record["phase"]: record for record in records if record["scheme"] == "plain"}
    # 4.9 MB at 50 Mb/s take 0.8 s and at 1 Gb/s 0.04 s: the order holds on any machine.
    assert by_phase[0]["iteration_s"] < by_phase[1]["iteration_s"]
    assert by_phase[0]["iteration_s"] < by_phase[2]["iteration_s"]
    assert by_phase[2]["network"] == "netlab 1000000000,50000000"


def test_launcher_that_does_not_answer_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(GradwireError, match="did not change the links"):
        change_links(tmp_path / "log.jsonl", "100mbit", patience_s=0.1)
