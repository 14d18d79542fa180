"""Rates, networks and events as people and variables write them."""

import math
from collections.abc import Callable

import pytest

from gradwire.errors import InvalidArgument
from gradwire_lab.ranks.netlab import Netlab, format_rate, parse_rate
from gradwire_lab.ranks.netlab.lab import Event, parse_event
from gradwire_lab.ranks.network import Network, current_network


@pytest.mark.parametrize(
    ("rate", "rate_bps"),
    [("1gbit", 10**9), ("100mbit", 10**8), ("2.5gbit", 2_500_000_000), (" 500 Kbit ", 500_000), ("1000000", 10**6),
     ("10000bit", 10_000), (5e8, 5 * 10**8), (10**9, 10**9), ("none", None), ("NONE", None), (None, None)],
)  # fmt: skip
def test_a_rate_is_read_in_bits_per_second(rate: str | float | None, rate_bps: int | None) -> None:
    assert parse_rate(rate) == rate_bps


@pytest.mark.parametrize(
    "rate",
    ["", "fast", "1gbps", "1 GB/s", "-1gbit", "0", 0, -5, "1e9", "1gbit/s", math.nan, math.inf, True, "33gbit", "1kbit",
     "1..5gbit", b"1gbit", [1]],
)  # fmt: skip
def test_what_is_no_rate_is_refused_with_an_example(rate: object) -> None:
    with pytest.raises(InvalidArgument, match=r"100mbit|10kbit to 32gbit"):
        parse_rate(rate)  # type: ignore[arg-type]


@pytest.mark.parametrize("rate", ["1gbit", "2.5gbit", "100mbit", "333kbit", "12345.678kbit", "none"])
def test_a_formatted_rate_reads_back(rate: str) -> None:
    assert parse_rate(format_rate(parse_rate(rate))) == parse_rate(rate)


@pytest.mark.parametrize(
    ("call", "match"),
    [
        *((lambda n=n: Netlab(n, "1gbit"), "from 1 to 250") for n in (0, 251, -1, 2.0, True)),
        (lambda: Netlab(3, ["1gbit", "100mbit"]), "2 rates for 3 ranks"),
        (lambda: Netlab(2, ["1gbit", "slow"]), "no rate"),
        (lambda: Netlab(2, mtu=100), "mtu"),
        (lambda: Netlab(2, queue_ms=math.nan), "queue_ms"),
        (lambda: Netlab(4, "1gbit", ranks_per_node=3), "4 ranks do not make whole nodes of 3"),
        (lambda: Netlab(4, ["1gbit"] * 3, ranks_per_node=2), "3 rates for 2 nodes"),
        (lambda: Netlab(1).signal_switch(), "switch=True"),
        (lambda: Netlab(1).switch_counters(), "switch=True"),
        *(
            (lambda t=text: current_network({"GRADWIRE_NETWORK": t}), "GRADWIRE_NETWORK")
            for text in ("netlab fast", "netlab 1,,2")
        ),
        *(
            (lambda text=text: parse_event(text, 3), "event")
            for text in ("", "10", "10:explode:1", "x:down:1", "10:down:3", "10:down:1=5mbit", "10:rate:1")
        ),
        (lambda: parse_event("10:rate:1=quick", 3), "no rate"),  # before the run
    ],
)
def test_labs_networks_and_events_that_cannot_be_are_refused(call: Callable[[], object], match: str) -> None:
    with pytest.raises(InvalidArgument, match=match):
        call()


@pytest.mark.parametrize(
    "network",
    [Network("netlab", (10**9,), 4), Network("netlab", (10**9, 10**8, 10**9), 3), Network("netlab", (10**9, None), 2),
     Network("netlab", (None,), 2), Network("loopback", (), 2)],
)  # fmt: skip
def test_a_network_told_to_a_rank_reads_back(network: Network) -> None:
    assert current_network(network.to_variables()) == network


def test_a_network_has_the_rate_of_most_links_and_none_where_we_did_not_start_the_process() -> None:
    assert Network("netlab", (10**9, 10**8, 10**9), 3).rate_bps == 10**9
    assert Network("netlab", (10**9,) * 3, 3).to_variables()["GRADWIRE_NETWORK"] == "netlab 1000000000"
    network = current_network({})
    assert network == Network("unspecified")
    assert not network.shaped
    assert network.rate_bps is None


def test_events_are_read_with_their_time_rank_and_rate() -> None:
    assert parse_event("10:rate:2=100mbit", 3) == Event(10.0, "rate", 2, "100mbit")
    assert parse_event("0.5:down:0", 3) == Event(0.5, "down", 0)
