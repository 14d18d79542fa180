"""An oracle: every flow and every link one by one, in exact arithmetic, without classes, groups or simpy."""

from collections.abc import Mapping, Sequence
from fractions import Fraction


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


def finish_times(
    capacities: Mapping[str, Fraction], transfers: Sequence[tuple[Fraction, frozenset[str], Fraction]]
) -> list[Fraction]:
    """When each (start, path, size) is done."""
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
