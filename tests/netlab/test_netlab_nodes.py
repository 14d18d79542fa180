"""Several ranks behind one link, and what two levels save of it."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from gradwire.errors import InvalidArgument
from gradwire.ranks.netlab import Netlab
from gradwire.ranks.network import Network, current_network

_RANK = str(Path(__file__).with_name("rank_two_levels.py"))
_N_BYTES = 4 << 20


def sent_by_node_0(lab: Netlab, scheme: str, topology: str) -> float:
    """Bytes out of node 0 for one step / bytes of the gradient; the difference of 3 steps and 1."""
    sent = []
    for steps in (1, 3):
        before = lab.counters()[0]
        assert lab.run([sys.executable, _RANK, scheme, topology, str(steps)], timeout_s=100).status == 0
        sent.append((lab.counters()[0] - before).sent_bytes)
    return (sent[1] - sent[0]) / 2 / _N_BYTES


def test_a_node_sends_what_one_rank_would_and_nothing_of_what_stays_inside() -> None:
    with Netlab(4, "500mbit", ranks_per_node=2) as lab:
        assert len(lab.counters()) == 2
        flat, two_level = (sent_by_node_0(lab, "plain", topology) for topology in ("flat", "two-level"))
        assert two_level == pytest.approx(1.0, rel=0.06)  # 2 (M-1) / M, with headers
        assert flat / two_level == pytest.approx(1.5, rel=0.05)
        assert sent_by_node_0(lab, "plain", "inside") < 0.01
        flat, two_level = (sent_by_node_0(lab, "one-bit", topology) for topology in ("flat", "two-level"))
        assert flat / two_level == pytest.approx(2.0, rel=0.15)


def test_nodes_are_told_to_ranks_and_results() -> None:
    network = Network("netlab", (100_000_000, 100_000_000), 8, 4)
    assert str(network) == "netlab 100000000 nodes=2x4"
    assert current_network(network.to_variables()) == Network("netlab", (100_000_000,), 8, 4)


def test_ranks_that_make_no_whole_nodes_are_refused() -> None:
    with pytest.raises(InvalidArgument, match="4 ranks do not make whole nodes of 3"):
        Netlab(4, "1gbit", ranks_per_node=3)
    with pytest.raises(InvalidArgument, match="3 rates for 2 nodes"):
        Netlab(4, ["1gbit"] * 3, ranks_per_node=2)
