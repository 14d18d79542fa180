"""Links are shared max-min fairly: held against an oracle that fills every link flow by flow, in exact arithmetic."""

import random
from collections.abc import Mapping, Sequence
from fractions import Fraction

import pytest
import simpy

from gradwire.errors import InvalidArgument
from gradwire_lab.simulator.network import SimulatedNetwork, Topology, share_max_min


def fair_rates(capacities: Mapping[str, Fraction], paths: Sequence[frozenset[str]]) -> list[Fraction]:
    """Max-min fair rates: the link that can give its flows least decides theirs; without them, on with the others."""
    rates = [Fraction(0)] * len(paths)
    left = dict(capacities)
    undecided = set(range(len(paths)))
    while undecided:
        shares = {}
        for link, capacity in left.items():
            users = [flow for flow in undecided if link in paths[flow]]
            if users:
                shares[link] = capacity / len(users)
        tightest = min(shares, key=lambda link: shares[link])
        share = shares[tightest]
        for flow in [flow for flow in undecided if tightest in paths[flow]]:
            rates[flow] = share
            undecided.remove(flow)
            for link in paths[flow]:
                left[link] -= share
    return rates


def broadcast_path(sender: int, racks: Sequence[int]) -> frozenset[str]:
    """One copy on the sender's link, one to the core, one to every other rack, one on every receiver's link."""
    links = {f"up {sender}"} | {f"down {worker}" for worker in range(len(racks)) if worker != sender}
    if len(set(racks)) > 1:
        links.add(f"rack up {racks[sender]}")
        links |= {f"rack down {rack}" for rack in set(racks) if rack != racks[sender]}
    return frozenset(links)


def finish_times(capacities: Mapping[str, Fraction], transfers: Sequence[tuple]) -> list[Fraction]:
    left = [size for _, _, size in transfers]
    ends: list[Fraction | None] = [None] * len(transfers)
    now = Fraction(0)
    while any(end is None for end in ends):
        active = [i for i, (start, _, _) in enumerate(transfers) if start <= now and ends[i] is None]
        rates = fair_rates(capacities, [transfers[i][1] for i in active])
        starts = [start for start, _, _ in transfers if start > now]
        steps = [left[i] / rate for i, rate in zip(active, rates, strict=True)] + [start - now for start in starts]
        step = min(steps)
        now += step
        for i, rate in zip(active, rates, strict=True):
            left[i] -= rate * step
            if left[i] == 0:
                ends[i] = now
    return [end for end in ends if end is not None]


@pytest.mark.parametrize("seed", range(40))
def test_rates_are_those_of_progressive_filling(seed: int) -> None:
    chance = random.Random(seed)
    capacities = [chance.randint(1, 20) for _ in range(chance.randint(1, 6))]
    links = range(len(capacities))
    paths = [frozenset(chance.sample(links, chance.randint(1, len(capacities)))) for _ in range(chance.randint(1, 8))]
    counts = [chance.randint(1, 3) for _ in paths]  # of flows that are alike
    single = [frozenset(map(str, path)) for path, n in zip(paths, counts, strict=True) for _ in range(n)]
    exact = fair_rates({str(i): Fraction(c) for i, c in enumerate(capacities)}, single)
    found = share_max_min(capacities, [dict.fromkeys(path, n) for path, n in zip(paths, counts, strict=True)])
    of_each = [rate for rate, n in zip(found, counts, strict=True) for _ in range(n)]
    assert of_each == pytest.approx([float(rate) for rate in exact], rel=1e-12)


def test_a_flow_without_a_link_is_refused() -> None:
    with pytest.raises(InvalidArgument, match="no link"):
        share_max_min([1.0], [{}])


@pytest.mark.parametrize("seed", range(25))
def test_broadcasts_end_when_they_would_one_by_one(seed: int) -> None:
    """Random senders, sizes, moments, rates and racks; classes and progress against single flows on single links."""
    chance = random.Random(seed)
    n_workers = chance.randint(2, 7)
    n_racks = chance.choice([1, 1, 2, min(3, n_workers)])
    slow = chance.random() < 0.5
    rates = [chance.choice([4, 10]) if slow else 10 for _ in range(n_workers)]
    core = chance.choice([5, 15])
    environment = simpy.Environment()
    network = SimulatedNetwork(environment)
    topology = Topology(network, rates, n_racks, core if n_racks > 1 else None)
    classes = [flows for site in topology.sites for flows in [topology.broadcasts(site)] * site.n_workers]
    racks = [worker * n_racks // n_workers for worker in range(n_workers)]
    transfers, found = [], {}

    def send(number: int, worker: int, at_s: Fraction, bits: int):  # type: ignore[no-untyped-def]
        yield environment.timeout(float(at_s))
        yield network.start(classes[worker], bits)
        found[number] = environment.now

    for number, worker in enumerate(chance.sample(range(n_workers), chance.randint(1, n_workers))):
        at_s, bits = Fraction(chance.randint(0, 8), 4), chance.randint(1, 60)
        transfers.append((at_s, broadcast_path(worker, racks), Fraction(bits)))
        environment.process(send(number, worker, at_s, bits))
    environment.run()
    capacities = {f"{way} {worker}": Fraction(rate) for worker, rate in enumerate(rates) for way in ("up", "down")}
    if n_racks > 1:
        capacities |= {f"rack {way} {rack}": Fraction(core) for rack in range(n_racks) for way in ("up", "down")}
    exact = finish_times(capacities, transfers)
    assert [found[number] for number in range(len(transfers))] == pytest.approx([float(end) for end in exact], rel=1e-9)


def test_a_stopped_flow_tells_what_it_had_left_and_frees_its_share() -> None:
    environment = simpy.Environment()
    network = SimulatedNetwork(environment)
    topology = Topology(network, [10.0] * 3)
    flows = topology.broadcasts(topology.sites[0])
    first, second = network.start(flows, 100.0), network.start(flows, 100.0)
    environment.run(until=4.0)  # both are on the third worker's link: 5 bits a second each
    assert network.stop(first) == pytest.approx(80.0)
    environment.run(second)
    assert environment.now == pytest.approx(12.0)
    assert network.stop(second) == 0.0


def test_a_change_of_capacity_counts_from_its_moment_on() -> None:
    environment = simpy.Environment()
    network = SimulatedNetwork(environment)
    topology = Topology(network, [10.0, 10.0])
    flow = network.start(topology.broadcasts(topology.sites[0]), 100.0)
    environment.run(until=4.0)
    network.set_capacity(topology.sites[0].up, 2.0)
    environment.run(flow)
    assert environment.now == pytest.approx(34.0)
