"""Results and messages are those of the exchanges that the engine replaced, bit for bit and byte for byte."""

import json
from pathlib import Path

import pytest
from make_digests import RUNS, digest_of

EXPECTED = {(path, case): found for path in RUNS for case, found in json.loads(path.read_text()).items()}


@pytest.mark.parametrize(("path", "case"), EXPECTED, ids=[case for _, case in EXPECTED])
def test_results_and_bytes_are_those_of_before(path: Path, case: str) -> None:
    assert digest_of(path, case) == EXPECTED[path, case]
