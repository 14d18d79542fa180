"""Probes of the link: a faster one is believed at once, a slower one when three have said so."""

from __future__ import annotations

import pytest

from gradwire.schemes.auto.votes import LinkProbes


def rate_of(transfer_us: int) -> float:
    return 1e6 / transfer_us


@pytest.mark.parametrize(
    ("transfers_us", "found"),
    [
        ([1000], [None]),
        ([900], [None]),
        ([500], [2000]),
        ([2000, 2000, 2000], [None, None, 500]),
        ([2000, 2000, 1000], [None, None, None]),  # other traffic, which has ended
        ([2000, 500], [None, 2000]),
        ([4000, 4000, 2000], [None, None, 500]),  # the fastest counts
    ],
)
def test_the_fastest_of_three_counts_and_a_faster_one_at_once(
    transfers_us: list[int], found: list[float | None]
) -> None:
    probes = LinkProbes()
    answers = [probes.found(us, 1000, rate_of) for us in transfers_us]
    assert [answer and rate_of(answer) for answer in answers] == found


def test_a_slower_link_is_looked_at_again_and_an_urgent_one_three_times() -> None:
    probes = LinkProbes()
    assert not probes.take()
    probes.ask(is_urgent=False)
    assert [probes.take() for _ in range(3)] == [True, False, False]
    probes.found(2000, 1000, rate_of)
    assert [probes.take() for _ in range(3)] == [True, False, False]
    probes.ask(is_urgent=True)
    assert [probes.take() for _ in range(4)] == [True, True, True, False]
    probes.ask(is_urgent=True)
    probes.forget()
    assert not probes.take()
