"""Whether this machine can have a lab: tests marked `root` are skipped, with the reason, where it cannot."""

import contextlib
import fcntl
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from lab_watch import why_no_lab

from gradwire_lab.ranks.netlab.stale import end_stale_labs


@contextlib.contextmanager
def _alone() -> Iterator[None]:
    """With several processes of tests, one at a time: what a test leaves behind on purpose is what another ends."""
    with (Path(tempfile.gettempdir()) / "gradwire-netlab-tests.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


@pytest.fixture(scope="session", autouse=True)
def no_leftovers() -> None:
    """An earlier session that was killed must not be found by this one."""
    with _alone():
        end_stale_labs()


@pytest.fixture(autouse=True)
def _one_at_a_time(request: pytest.FixtureRequest, no_leftovers: None) -> Iterator[None]:
    with _alone():
        if request.node.get_closest_marker("root") is not None and (why := why_no_lab("100mbit")):
            pytest.skip(why)
        yield
