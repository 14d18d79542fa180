"""`bench allreduce` with the emulated switch: results within the bound of fixed point, bytes counted."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from gradwire_lab.bench.driver import needs_switch
from gradwire_lab.cli import main

pytestmark = pytest.mark.usefixtures("warm_interpreters")


def test_a_switch_is_started_for_those_who_sum_in_it_alone() -> None:
    assert needs_switch(["ddp", "dense-switch"])
    assert needs_switch(["homomorphic:mode=exact,aggregator=switch"])
    assert not needs_switch(["ddp", "homomorphic", "homomorphic:aggregator=process-group"])


def test_dense_and_sparse_all_reduce_through_the_switch_are_verified_and_counted(tmp_path: Path) -> None:
    out = tmp_path / "records.json"
    schemes = ["ddp", "dense-switch", "homomorphic:mode=exact,aggregator=switch"]
    words = ["--ranks", "2", "--n-bytes", "1000000", "--density", "0.01", "--rounds", "3", "--budget", "0.1"]
    assert main(["bench", "allreduce", *words, "--scheme", *schemes, "--json", str(out)]) == 0
    by_scheme = {record["scheme"]: record for record in json.loads(out.read_text())}
    dense, sparse = by_scheme["dense-switch"], by_scheme["homomorphic"]
    assert dense["verified"] == "equal on all ranks"
    assert dense["relative_error"] < 1e-6
    n_packets = -(-250_000 // 256) + 1  # the values, and the exponent
    assert n_packets * 1064 <= dense["wire_bytes"] < 1.5 * n_packets * 1064
    assert sparse["wire_bytes"] < 0.1 * dense["wire_bytes"]
