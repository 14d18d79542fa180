"""Links with a distance: how they are written, what a round trip takes and how much is lost, as set and as changed."""

import argparse
import contextlib
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
from lab_watch import why_no_lab

from gradwire.errors import InvalidArgument, Unsupported
from gradwire_lab.ranks.netlab import Netlab
from gradwire_lab.ranks.netlab.check import measure_rate
from gradwire_lab.ranks.netlab.lab import parse_event
from gradwire_lab.ranks.netlab.rate import LabLink, parse_link, with_way
from gradwire_lab.ranks.network import current_network
from programs import run_well
from ranks import patience


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("1gbit", LabLink(10**9, 10**9)),
        ("none/delay=20ms", LabLink(None, None, 0.02)),
        ("100mbit/down=20mbit/jitter=300us/loss=0.05%", LabLink(10**8, 2 * 10**7, 0.0, 3e-4, 5e-4)),
        ("10mbit/sites=2x2/site-delay=0.1s", LabLink(10**7, 10**7, site=1, site_delay_s=0.1)),
    ],
)
def test_a_link_is_what_it_says(text: str, expected: LabLink) -> None:
    assert parse_link(text, 3, 4) == expected
    assert expected.is_distant == ("/" in text)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("100mbit/dealy=20ms", "is nothing that a link has"),
        ("100mbit/delay=20", "write 20ms"),
        ("100mbit/delay=11s", "up to 10 s"),
        ("100mbit/loss=100%", "below 100%"),
        ("100mbit/loss=0.1", "write 0.05%"),
        ("100mbit/sites=3x2/site-delay=1ms", "which make 4 ranks"),
        ("1/delay=1ms", "outside 10kbit to 32gbit"),
    ],
)
def test_what_is_no_link_is_said(text: str, says: str) -> None:
    with pytest.raises(InvalidArgument, match=re.escape(says)):
        parse_link(text, 0, 4)


def test_options_and_events_become_links() -> None:
    given = argparse.Namespace(delay="20ms", loss="1%", site_delay=None)
    assert with_way(given, "1gbit,none") == "1gbit/delay=20ms/loss=1%,none/delay=20ms/loss=1%"
    assert parse_event("3:loss:1=2%", 2).rate == "2%"
    with pytest.raises(InvalidArgument, match="no share"):
        parse_event("3:loss:1=2", 2)


# Sends datagrams to rank 1 and back for as long as standard input says; prints the median in ms and how many came back.
ECHO = """
import socket, statistics, sys, time
own = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
own.settimeout(1.0)
took = []
for number in range(int(sys.argv[2])):
    started = time.perf_counter()
    own.sendto(number.to_bytes(4, "little"), (sys.argv[1], 7777))
    try:
        while int.from_bytes(own.recv(64), "little") != number:
            pass
    except TimeoutError:
        continue
    took.append(time.perf_counter() - started)
print(1e3 * statistics.median(took) if took else -1, len(took))
"""
ANSWER = """
import socket
own = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
own.bind(("", 7777))
while True:
    packet, sender = own.recvfrom(64)
    own.sendto(packet, sender)
"""


@pytest.fixture
def distance() -> None:
    """Skips where there are no TUN devices."""
    if why := why_no_lab("none/delay=1ms"):
        pytest.skip(why)


def echo(lab: Netlab, host: int, n: int = 15) -> tuple[float, int]:
    """Milliseconds there and back from rank 0, and how many of `n` came back."""
    path = lab.namespace_paths[0]
    command = ["nsenter", f"--net={path}", sys.executable, "-c", ECHO, f"10.77.0.{host + 1}", str(n)]
    median, came = run_well(command, 60).split()
    return float(median), int(came)


@pytest.mark.root
def test_round_trips_are_as_set_and_as_changed(distance: None) -> None:
    rates = "100mbit/delay=5ms/sites=3x1/site-delay=10ms"
    with Netlab(3, rates, require_shaping=True) as lab, contextlib.ExitStack() as stack:
        assert str(current_network(lab.network.to_variables())) == str(lab.network)
        assert lab.network.way == "delay=5ms/sites=3x1/site-delay=10ms"
        for path in lab.namespace_paths[1:]:
            answer = stack.enter_context(subprocess.Popen(["nsenter", f"--net={path}", sys.executable, "-c", ANSWER]))
            stack.callback(answer.kill)
        time.sleep(0.3 * patience())
        slack = 10.0 * patience()
        assert 30 <= echo(lab, 1)[0] <= 31 + slack
        lab.set_line(1, delay="25ms", jitter="0ms")
        assert 50 <= echo(lab, 1)[0] <= 51 + slack, "half of what rank 1's line has, each way"
        assert 30 <= echo(lab, 2)[0] <= 31 + slack
        lab.set_line(2, loss="90%")
        assert echo(lab, 2, 12)[1] < 10
        before = lab.counters()[1]
        lab.link_down(1)
        assert echo(lab, 1, 2)[1] == 0
        lab.link_up(1)
        assert echo(lab, 1, 5)[1] == 5
        passed = lab.counters()[1] - before
        assert (passed.sent_packets, passed.received_packets) == (5, 5)
        assert passed.received_drops == 2


@pytest.mark.root
def test_a_lab_without_distance_says_so() -> None:
    with Netlab(2, "1gbit", require_shaping=True) as lab, pytest.raises(Unsupported, match="have no distance"):
        lab.set_line(0, delay="1ms")
    with pytest.raises(InvalidArgument, match="one rack"):
        Netlab(2, "1gbit/delay=1ms", switch=True)


@pytest.mark.root
def test_the_check_measures_the_way(distance: None) -> None:
    found = measure_rate(2, "50mbit/delay=10ms/loss=2%", 0.2, 1)
    assert found.has_way_of(parse_link("none/delay=10ms/loss=2%"), 0.05 + 0.3 * (patience() - 1))
    assert not found.has_way_of(parse_link("none/delay=20ms/loss=2%"), 0.05)
    assert not found.has_way_of(parse_link("none/delay=10ms/loss=9%"), 0.05)
    assert found.payload_bps < 50e6


@pytest.mark.root
def test_the_relay_ends_with_its_lab(distance: None) -> None:
    with Netlab(2, "none/delay=1ms", require_shaping=True) as lab:
        assert lab._fabric is not None
        (relay,) = Path(f"/proc/{lab._fabric.pid}/task/{lab._fabric.pid}/children").read_text().split()
    assert not Path(f"/proc/{relay}").exists()
