"""Several ranks behind one link, and what two levels save of it."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from gradwire.errors import InvalidArgument
from gradwire.ranks.netlab import Netlab
from gradwire.ranks.network import Network, current_network
from ranks import patience

_RANK = str(Path(__file__).with_name("rank_two_levels.py"))
_N_BYTES = 16 << 20


@pytest.mark.parametrize("size", [2, 4])
def test_a_node_sends_what_one_rank_would_and_nothing_of_what_stays_inside(size: int) -> None:
    """Two nodes of `size` ranks; the shares are those of docs/doors.md, with 3 % for headers and acknowledgements."""
    n_ranks = 2 * size
    shares = {
        "plain:flat": 2 * (n_ranks - 1) / n_ranks,
        "plain:two-level": 2 * (2 - 1) / 2,
        "one-bit:flat": 2 * size * (n_ranks - size) / n_ranks / 32,
        "one-bit:two-level": 2 * (2 - 1) / 2 / 32,
        "sign-sgd:flat": (n_ranks - 1) / 32,
        "sign-sgd:two-level": (2 - 1) / 32,
    }
    sent: dict[str, float] = {}  # bytes out of node 0 for one step / bytes of the gradient

    def on_line(rank: int, line: str) -> None:
        told = json.loads(line)
        sent[told["case"]] = told["sent"]

    with Netlab(n_ranks, "500mbit", ranks_per_node=size) as lab:
        before = lab.counters()
        assert len(before) == 2
        command = [sys.executable, _RANK, *shares, "plain:inside"]
        lab.run(command, on_line=on_line, timeout_s=100 * patience()).raise_if_failed()
        of_all = (lab.counters()[0] - before[0]).sent_bytes / _N_BYTES
    assert 3 * sum(sent.values()) == pytest.approx(of_all, rel=0.03)  # ranks and lab count the same link
    assert sent.pop("plain:inside") < 0.002
    small = 65536 / _N_BYTES  # headers of short messages, votes, barriers
    assert sent == {case: pytest.approx(share, rel=0.03, abs=small) for case, share in shares.items()}


def test_nodes_are_told_to_ranks_and_results() -> None:
    network = Network("netlab", (100_000_000, 100_000_000), 8, 4)
    assert str(network) == "netlab 100000000 nodes=2x4"
    assert current_network(network.to_variables()) == Network("netlab", (100_000_000,), 8, 4)


def test_ranks_that_make_no_whole_nodes_are_refused() -> None:
    with pytest.raises(InvalidArgument, match="4 ranks do not make whole nodes of 3"):
        Netlab(4, "1gbit", ranks_per_node=3)
    with pytest.raises(InvalidArgument, match="3 rates for 2 nodes"):
        Netlab(4, ["1gbit"] * 3, ranks_per_node=2)
