"""Makes `tests/ranks.py` importable from every folder of tests, and Ctrl-C mean what it means in a terminal."""

import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import hypothesis
import pytest
import torch

import gradwire_lab  # noqa: F401  # registers the schemes that are baselines

sys.path.insert(0, str(Path(__file__).parent))

# Where the tests run in the background of a script, SIGINT is ignored, and processes that a test starts inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)

# Workers share the cores, with each other and with the ranks that they start: threads of their own only get in the way.
if "PYTEST_XDIST_WORKER" in os.environ:
    torch.set_num_threads(1)

# No test asserts how long an example takes: on a busy machine any may take longer than Hypothesis' 200 ms.
hypothesis.settings.register_profile("on any machine", deadline=None)
hypothesis.settings.load_profile("on any machine")


@pytest.fixture(scope="session")
def _warm_server() -> Iterator[dict[str, str]]:
    from warm_interpreters import warm_server

    with warm_server() as variables:
        yield variables


@pytest.fixture
def warm_interpreters(_warm_server: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Processes that the test starts begin with torch imported: see `warm_interpreters.py`."""
    for name, value in _warm_server.items():
        monkeypatch.setenv(name, value)
