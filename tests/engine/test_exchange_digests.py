"""Results and messages are those of the exchanges that the engine replaced, bit for bit and byte for byte."""

from __future__ import annotations

import json

import pytest
from broadcast_cases import train_case
from exchange_cases import reduce_case
from make_digests import BROADCAST_DIGESTS, DIGESTS

from ranks import run_ranks

EXPECTED = json.loads(DIGESTS.read_text())
BROADCASTS = json.loads(BROADCAST_DIGESTS.read_text())


@pytest.mark.parametrize("case", EXPECTED)
def test_results_and_bytes_are_those_of_before(case: str) -> None:
    name, dtype, world_size = case.split(", ")
    results = run_ranks(reduce_case, int(world_size), name, dtype)
    digest, payload = EXPECTED[case]
    assert [found for found, _ in results] == [digest] * int(world_size)
    assert [n_bytes for _, n_bytes in results] == payload


@pytest.mark.parametrize("case", BROADCASTS)
def test_broadcasts_and_their_bytes_are_those_of_before(case: str) -> None:
    name, world_size = case.split("; ")
    results = run_ranks(train_case, int(world_size), name)
    digest, n_bytes = BROADCASTS[case]
    assert results == [(digest, sent) for sent in n_bytes]
