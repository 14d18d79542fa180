"""What gradwire says it has sent is what the kernel has sent, for every scheme; and what two levels save of it."""

import json
from typing import Any

import pytest
from lab_watch import lines_of, rank_command
from rank_truth import HEADER_BYTES

from gradwire import schemes
from gradwire_lab.ranks.netlab import Netlab
from gradwire_lab.ranks.network import Network, current_network

N_RANKS = 3
# Gloo puts headers of its own before every message: 1.2 to 2.4 KB a step with these buckets, whatever is sent.
BACKEND_BYTES_A_STEP = 3_000
_N_BYTES = 4 << 20
_ONE_BIT = 1 / 32  # c: a bit for each float32; what scales add is less than the margin


def measure(names: list[str]) -> list[dict[str, Any]]:
    with Netlab(N_RANKS, "1gbit") as lab:
        lines = lines_of(lab, rank_command("rank_truth.py", *names), 120)
    found = [json.loads(line) for line in lines if line.startswith("{")]
    assert len(found) == N_RANKS * len(names)
    return found


@pytest.mark.root
def test_counted_bytes_are_the_kernels_for_every_scheme() -> None:
    names = schemes.names()
    for _ in range(3):
        too_many = {}
        for one in measure(names):
            more = one["kernel"] - HEADER_BYTES * one["packets"] - one["counted"]
            allowed = 0.05 * one["counted"] + BACKEND_BYTES_A_STEP * one["steps"]
            assert more >= -allowed, one
            if more > allowed:
                too_many[one["scheme"]] = one
        names = list(too_many)  # on a busy machine TCP sends some segments twice: measured again
        if not names:
            return
    raise AssertionError(too_many)


@pytest.mark.usefixtures("warm_interpreters")
@pytest.mark.parametrize("size", [2, 4])
def test_a_node_sends_what_one_rank_would_and_nothing_of_what_stays_inside(size: int) -> None:
    """Two nodes of `size` ranks, against docs/doors.md's table."""
    cases = ["plain:flat", "plain:two-level", "plain:inside", "one-bit:flat", "one-bit:two-level"]
    with Netlab(2 * size, "500mbit", ranks_per_node=size) as lab:
        before = lab.counters()
        assert len(before) == 2
        told = [json.loads(line) for line in lines_of(lab, rank_command("rank_two_levels.py", *cases))]
        of_all = (lab.counters()[0] - before[0]).sent_bytes / _N_BYTES
    # Bytes out of node 0 for one step / bytes of the gradient: without headers, and with them.
    sent, framed = ({one["case"]: one[kind] for one in told} for kind in ("sent", "framed"))
    assert 9 * sum(framed.values()) == pytest.approx(of_all, rel=0.05)  # ranks and lab count the same link
    n = 2 * size
    assert sent["plain:two-level"] == pytest.approx(1.0, rel=0.03)  # 2 (M-1) / M
    assert sent["plain:flat"] == pytest.approx(2 * (n - 1) / n, rel=0.03)
    assert sent["plain:inside"] < 0.001
    assert sent["one-bit:two-level"] == pytest.approx(_ONE_BIT, rel=0.03)
    assert sent["one-bit:flat"] == pytest.approx(size * _ONE_BIT, rel=0.03)  # 2 L (N-L) / N c


def test_nodes_are_told_to_ranks_and_results() -> None:
    network = Network("netlab", (100_000_000, 100_000_000), 8, 4)
    assert str(network) == "netlab 100000000 nodes=2x4"
    assert current_network(network.to_variables()) == Network("netlab", (100_000_000,), 8, 4)
