"""A lab with an aggregating switch: a host of its own, a link of its own, found by every rank."""

import json
import signal

import pytest
from lab_watch import lines_of, rank_command, wait_until

from gradwire_lab.ranks.launch import start_ranks
from gradwire_lab.ranks.netlab import Netlab
from gradwire_lab.ranks.netlab.lab import switch_rate_bps
from ranks import patience

pytestmark = pytest.mark.usefixtures("warm_interpreters")


@pytest.mark.parametrize(
    ("rates_bps", "expected_bps"),
    [([200_000_000] * 4, 800_000_000), ([100_000_000, 300_000_000], 400_000_000), ([100_000_000, None], None),
     ([20_000_000_000] * 4, None)],
)  # fmt: skip
def test_the_switch_has_the_rate_of_all_ranks_together(rates_bps: list[int | None], expected_bps: int | None) -> None:
    assert switch_rate_bps(rates_bps) == expected_bps


@pytest.mark.root
def test_ranks_in_a_lab_sum_through_the_switch_and_its_link_counts_what_all_send() -> None:
    n_values = 300_000
    with Netlab(3, "100mbit", switch=True, require_shaping=True) as lab:
        told = [json.loads(line) for line in lines_of(lab, rank_command("rank_switch_sum.py", n_values))]
        ranks, switch = lab.counters(), lab.switch_counters()
        assert len(ranks) == 3
    assert sorted(one["rank"] for one in told) == [0, 1, 2]
    assert all(one["is_exact"] for one in told)
    assert {one["address"] for one in told} == {"10.77.0.4:4790"}
    # Each rank sends every value once, and the switch each sum to everyone: headers, and a little again.
    for counters in ranks:
        assert 4 * n_values < counters.sent_bytes < 1.6 * 4 * n_values
    assert 3 * 4 * n_values < switch.received_bytes < 1.6 * 3 * 4 * n_values
    counters_at_the_end = json.loads(lab.switch_lines[-1])
    assert counters_at_the_end["switch"] == "emulation"
    assert counters_at_the_end["n_jobs"] == 0


@pytest.mark.root
def test_a_switch_that_is_killed_in_mid_run_raises_peer_lost_in_every_rank() -> None:
    lines: list[str] = []
    with Netlab(2, "20mbit", switch=True, require_shaping=True) as lab:
        command = rank_command("rank_switch_sum.py", 20_000_000)  # 32 s at this rate
        lab.start(command, on_line=lambda rank, line: lines.append(line))

        def is_in_mid_run() -> bool:
            return sum("joined" in line for line in lines) == 2 and lab.switch_counters().received_bytes > 1_000_000

        wait_until(is_in_mid_run, "both ranks send", timeout_s=60)
        lab.signal_switch(signal.SIGKILL)
        lab.wait(100 * patience())
    assert sorted(json.loads(line)["rank"] for line in lines if "PeerLost" in line) == [0, 1]


def test_without_a_lab_the_switch_is_on_loopback() -> None:
    lines: list[str] = []
    command = rank_command("rank_switch_sum.py", 100_000)
    with start_ranks(command, 2, None, switch=True, on_line=lambda rank, line: lines.append(line)) as launch:
        launch.wait(100 * patience()).raise_if_failed()
    told = [json.loads(line) for line in lines]
    assert all(one["is_exact"] and one["address"].startswith("127.0.0.1:") for one in told)
    assert len(told) == 2
