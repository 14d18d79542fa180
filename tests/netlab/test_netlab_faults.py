"""What happens to a network in mid-run: errors on every rank and never a hang; rates that hold for every method at once."""

import json
import queue
import time
from pathlib import Path

import pytest
from lab_watch import CLI, rank_command

from gradwire.errors import GradwireError
from gradwire_lab.bench.driver import change_links
from gradwire_lab.ranks.netlab import Netlab
from programs import GRADWIRE, run, run_well
from ranks import patience


@pytest.mark.root
@pytest.mark.usefixtures("warm_interpreters")
@pytest.mark.parametrize("scheme", ["all-reduce", "gcomp", "one-bit"])
def test_a_short_failure_of_a_link_is_ridden_out_and_a_lasting_one_is_an_error_on_all_ranks(scheme: str) -> None:
    """torch's own all-reduce, and exchanges, which name the peer."""
    turns: queue.Queue[int] = queue.Queue()
    errors: dict[int, str] = {}

    def on_line(rank: int, line: str) -> None:
        if line.startswith("turn"):
            turns.put(int(line.split()[1]))
        else:
            errors[rank] = line

    with Netlab(2, "200mbit") as lab:
        lab.start(rank_command("rank_exchange.py", scheme), grace_s=30, on_line=on_line)
        before = max(turns.get(timeout=90 * patience()) for _ in range(2))
        lab.link_down(1)
        time.sleep(0.3)
        while not turns.empty():
            before = max(before, turns.get())
        lab.link_up(1)
        assert max(turns.get(timeout=30 * patience()) for _ in range(4)) > before
        lab.link_down(1)
        result = lab.wait(90 * patience())
    assert not result.timed_out
    assert result.exit_codes == (3, 3)
    assert result.ended_by_us == ()
    if scheme != "all-reduce":
        assert errors[0].startswith("PeerLost rank 0 lost rank 1")
        assert errors[1].startswith("PeerLost rank 1 lost rank 0")


@pytest.mark.root
def test_events_on_the_command_line_happen_and_the_failed_rank_is_named() -> None:
    events = "--at 0.2:rate:0=10mbit --at 0.3:down:1 --at 0.4:up:1 --at 0.5:kill:1"
    done = run([*CLI, *f"run --ranks 2 --rate 100mbit --grace 0 {events} -- sleep 60".split()], 60)
    assert done.returncode == 137
    assert "rank 0's link is now at 10mbit" in done.stderr
    assert "rank 1 was killed by SIGKILL (the first to fail; then rank 0 had to be ended)" in done.stderr


@pytest.mark.root
@pytest.mark.usefixtures("warm_interpreters")
def test_a_rate_check_through_gloo_measures_a_rate(tmp_path: Path) -> None:
    file = tmp_path / "rates.json"
    words = f"check --ranks 2 --rates 50mbit --seconds 0.3 --repeats 3 --tolerance 0.15 --json {file}"
    run_well([*CLI, *words.split()], 90)
    assert '"set_bps": 50000000' in file.read_text()


@pytest.mark.root
@pytest.mark.usefixtures("warm_interpreters")
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
