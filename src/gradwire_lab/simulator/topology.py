"""Which links the patterns of communication cross: one switch, or racks of workers under a core.

Workers that are alike (the same rack, the same rate) form a *site*: their up-links are one `Link`, their down-links
another. Every pattern lays the same load on the links of a site, or all but one of them, which is what allows flows to be
counted instead of listed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from gradwire.errors import InvalidArgument
from gradwire_lab.simulator.network import Crossing, FlowClass, Link, SimulatedNetwork, Use


@dataclass(frozen=True)
class Site:
    """Workers that are alike: `n_workers` of them, numbered from `first_worker`, in rack `rack`."""

    first_worker: int
    n_workers: int
    rack: int
    up: Link
    down: Link
    use: Use  # of either way


def _each(n_flows: int) -> float:
    return float(n_flows)


def _times(factor: float) -> Callable[[int], float]:
    return lambda n_flows: factor * n_flows


class Topology:
    """Links of workers, and of racks where there are several, on a network.

    Args:
        rates_bps: of each worker's link, both ways.
        racks: how many workers each has; a number: as many racks, worker i of m is in rack i * racks // m.
        core_bps: of each rack's link to the core, both ways; None for as much as all of its workers together.
        kinds: what else may differ between workers, so that they are not of one site.
        connection_bps: what the connections of two workers in different racks carry at most.
    Raises: InvalidArgument.
    """

    def __init__(
        self,
        network: SimulatedNetwork,
        rates_bps: Sequence[float],
        racks: int | Sequence[int] = 1,
        core_bps: float | Sequence[float] | None = None,
        kinds: Sequence[object] | None = None,
        connection_bps: float = math.inf,
    ) -> None:
        n_workers = len(rates_bps)
        if n_workers < 1:
            raise InvalidArgument("a simulation needs at least 1 worker")
        if isinstance(racks, int):
            if not 1 <= racks <= n_workers:
                raise InvalidArgument(f"{racks} racks for {n_workers} workers: expected 1 to {n_workers}")
            racks = [-(-n_workers * (rack + 1) // racks) - -(-n_workers * rack // racks) for rack in range(racks)]
        if sum(racks) != n_workers or min(racks) < 1:
            raise InvalidArgument(
                f"racks of {', '.join(map(str, racks))} workers: expected {n_workers} in all, 1 or more each"
            )
        self.network, self.n_workers, self._connection_bps = network, n_workers, connection_bps
        rack_of = [rack for rack, size in enumerate(racks) for _ in range(size)]
        self.sites: list[Site] = []
        kinds = kinds if kinds is not None else [None] * n_workers
        alike = [(rack_of[worker], rate, kinds[worker]) for worker, rate in enumerate(rates_bps)]
        first = 0
        for worker in range(1, n_workers + 1):
            if worker < n_workers and alike[worker] == alike[first]:
                continue
            rack, rate_bps, _ = alike[first]
            name = f"workers {first} to {worker - 1}" if worker - first > 1 else f"worker {first}"
            up = network.add_link(f"{name} up", worker - first, rate_bps)
            down = network.add_link(f"{name} down", worker - first, rate_bps)
            self.sites.append(Site(first, worker - first, rack, up, down, Use()))
            for link in (up, down):
                link.uses.append(self.sites[-1].use)
            first = worker
        self.rack_workers = list(racks)
        self._rack_up: list[Link] = []
        self._rack_down: list[Link] = []
        if len(racks) > 1:
            for rack in range(len(racks)):
                total_bps = sum(rate_bps for of_rack, rate_bps, _ in alike if of_rack == rack)
                of_core = core_bps if core_bps is None or isinstance(core_bps, int | float) else core_bps[rack]
                self._rack_up.append(network.add_link(f"rack {rack} up", 1, of_core or total_bps))
                self._rack_down.append(network.add_link(f"rack {rack} down", 1, of_core or total_bps))
        elif core_bps is not None:
            raise InvalidArgument("a rate of the core needs several racks")

    def broadcasts(self, site: Site, is_fan_out: bool = False) -> FlowClass:
        """Reliable broadcasts of a site's workers, at most one of each at a time, to all other workers.

        One copy on the sender's link, one up to the core, one down to every other rack, one on every receiver's link.

        Args:
            is_fan_out: the sender sends a copy to every receiver instead, as point-to-point calls do.
        """
        alike = site.n_workers
        copies = self.n_workers - 1 if is_fan_out else 1

        def on_own_site(n_flows: int) -> float:
            # A worker does not receive its own broadcast: where all send, every link carries one less.
            return float(n_flows - (n_flows >= alike))

        crossings = [Crossing(site.up, lambda n_flows: copies * float(n_flows > 0), copies)]
        for other in self.sites:
            if other is site:
                crossings.append(Crossing(other.down, on_own_site, alike - 1))
            else:
                crossings.append(Crossing(other.down, _each, other.n_workers))
        for rack, (up, down) in enumerate(zip(self._rack_up, self._rack_down, strict=True)):
            if rack == site.rack:
                leaving = self.n_workers - self.rack_workers[rack] if is_fan_out else 1
                crossings.append(Crossing(up, _times(leaving), leaving))
            else:
                entering = self.rack_workers[rack] if is_fan_out else 1
                crossings.append(Crossing(down, _times(entering), entering))
        crossings += self._connections(1, lambda n_flows: float(n_flows > 0))
        return self.network.add_class(f"broadcasts of {site.up.name.removesuffix(' up')}", crossings)

    def even(self, name: str) -> FlowClass:
        """One flow: a bit on every worker's links, both ways, a bit; all at the rate of the slowest.

        Args:
            name: ring: every worker sends to the next, rack by rack, so one stream leaves a rack. inside: rings inside the
                racks. between: every worker's ring with its like in the other racks. exchange: between all pairs.
        """
        peers = max(1, self.n_workers - 1)
        leaving: dict[str, Callable[[int], float]] = {
            "ring": lambda inside: 1.0, "inside": lambda inside: 0.0, "between": float,
            "exchange": lambda inside: inside * (self.n_workers - inside) / peers,
        }  # fmt: skip
        links = [link for site in self.sites for link in (site.up, site.down)]
        crossings = [Crossing(link, _each, link.n_links) for link in links]
        for up, down, inside in zip(self._rack_up, self._rack_down, self.rack_workers, strict=False):
            share = leaving[name](inside)
            crossings += [Crossing(link, _times(share), share) for link in (up, down)]
        connections = {"inside": 0, "exchange": peers}.get(name, 1)
        return self.network.add_class(name, crossings + self._connections(connections))

    def parameter_server(self, direction: str, rate_bps: float) -> FlowClass:
        """One flow is a push, every worker's gradient to the server, or a pull, the sum from it to every worker.

        The server is a host of its own, at the core where there are racks.
        """
        is_push = direction == "push"
        server = self.network.add_link(f"server {'down' if is_push else 'up'}", 1, rate_bps)
        crossings = [Crossing(server, _times(self.n_workers), self.n_workers)]
        for site in self.sites:
            link = site.up if is_push else site.down
            crossings.append(Crossing(link, _each, link.n_links))
        for link, inside in zip(self._rack_up if is_push else self._rack_down, self.rack_workers, strict=False):
            crossings.append(Crossing(link, _times(inside), inside))
        return self.network.add_class(direction, crossings)

    def _connections(self, n: int, busiest: Callable[[int], float] = _each) -> list[Crossing]:
        """What `n` pairs of connections to other racks let through of one flow."""
        if not n or not self._rack_up or self._connection_bps == math.inf:
            return []
        return [Crossing(self.network.add_link("connections", 1, n * self._connection_bps), busiest, 1)]
