"""Max-min fair sharing of links among classes of flows, by progressive filling.

All rates rise together until a link is full; the flows on it keep what they have, and the others rise on. Flows that
are alike form a class and always have the same rate, so the cost depends on the number of classes, not of flows.
Source: Bertsekas and Gallager, Data Networks, section 6.5.2.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from gradwire.errors import InvalidArgument

# Links whose headroom is within this share of their capacity are full: rounding must not make one filling into two.
_FULL = 1e-12


def share_max_min(capacities_bps: Sequence[float], loads: Sequence[Mapping[int, float]]) -> list[float]:
    """The rate in bits a second of a flow of each class.

    Args:
        capacities_bps: of each link.
        loads: for each class, link index -> how many of its flows are on that link (more than 0).
    Raises: InvalidArgument (a class that crosses no link, which nothing would bound).
    Cost: classes x links, times the number of links that fill up.
    """
    if any(not crossed for crossed in loads):
        raise InvalidArgument("a flow that crosses no link has no rate")
    rates_bps = [0.0] * len(loads)
    rising = set(range(len(loads)))
    headroom_bps = list(capacities_bps)
    while rising:
        weights = [0.0] * len(headroom_bps)
        for index in rising:
            for link, n_flows in loads[index].items():
                weights[link] += n_flows
        # Weights are summed anew in every filling: subtracting them would leave rounding errors on links without flows.
        rise_bps = min(
            (headroom / weight for headroom, weight in zip(headroom_bps, weights, strict=True) if weight > 0),
            default=math.inf,
        )
        full = set()
        for link, weight in enumerate(weights):
            if weight > 0:
                headroom_bps[link] -= rise_bps * weight
                if headroom_bps[link] <= _FULL * capacities_bps[link]:
                    headroom_bps[link] = 0.0
                    full.add(link)
        for index in rising:
            rates_bps[index] += rise_bps
        rising = {index for index in rising if not full.intersection(loads[index])}
    return rates_bps
