"""Whether this machine can have a lab: tests marked `root` are skipped, with the reason, where it cannot."""

from __future__ import annotations

from pathlib import Path

import pytest

from gradwire.errors import Unsupported
from gradwire.ranks.netlab import Netlab
from gradwire.ranks.netlab.stale import end_stale_labs


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """One after another: what one test leaves behind on purpose is what another ends."""
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.xdist_group("netlab"))


@pytest.fixture(scope="session", autouse=True)
def no_leftovers() -> None:
    """An earlier session that was killed must not be found by this one."""
    end_stale_labs()


@pytest.fixture(scope="session")
def _lab_possible() -> str | None:
    try:
        with Netlab(1, "100mbit", require_shaping=True):
            return None
    except Unsupported as error:
        return str(error)


@pytest.fixture(autouse=True)
def _skip_without_lab(request: pytest.FixtureRequest) -> None:
    if request.node.get_closest_marker("root") is not None:
        why = request.getfixturevalue("_lab_possible")
        if why is not None:
            pytest.skip(why)
