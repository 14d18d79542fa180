"""Flows on shared links in simulated time, and which links the patterns of communication cross.

Flows that are alike (the same kind of path over links that are alike) form a class and share one rate. A class counts what one
flow of it has carried since the beginning, its *progress*; a flow is done when the progress has grown by its size. So the cost
of an event does not grow with the workers. Workers that are alike (the same rack, the same rate) form a *site*: their up-links
are one `Link`, their down-links another, and every pattern lays the same load on all of them, or on all but one.
"""

import bisect
import heapq
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import simpy
from simpy.events import EventPriority

from gradwire.errors import InvalidArgument

# simpy's priorities end at 1 (normal): rates are shared out when everything else of an instant has happened.
_LAST_OF_INSTANT = EventPriority(2)
# Bits by which a flow may fall short and be done: rounding of progress, far below any message.
_DONE_BITS = 1e-3
# States of which the shares are kept; many sites with workers of their own could make more than memory should hold.
_KEPT_SHARES = 10_000
# Links whose headroom is within this share of their capacity are full: rounding must not make one filling into two.
_FULL = 1e-12


class Use:
    """When something was in use: stretches in order, and how long they are together up to any moment."""

    def __init__(self) -> None:
        self._starts_s: list[float] = []
        self._ends_s: list[float] = []  # one less than starts while it is in use
        self._before_s = [0.0]  # how long it was in use before each stretch
        self._n_users = 0

    def enter(self, now_s: float) -> None:
        self._n_users += 1
        if self._n_users > 1:
            return
        if self._ends_s and self._ends_s[-1] == now_s:  # what ends and begins at the same instant is one stretch
            self._ends_s.pop()
            self._before_s.pop()
        else:
            self._starts_s.append(now_s)

    def leave(self, now_s: float) -> None:
        self._n_users -= 1
        if self._n_users == 0:
            self._ends_s.append(now_s)
            self._before_s.append(self._before_s[-1] + now_s - self._starts_s[-1])

    def seconds(self, until_s: float) -> float:
        """How long it was in use up to a moment, which is not ahead."""
        index = bisect.bisect_right(self._starts_s, until_s) - 1
        if index < 0:
            return 0.0
        end_s = self._ends_s[index] if index < len(self._ends_s) else until_s
        return self._before_s[index] + min(until_s, end_s) - self._starts_s[index]

    def stretches(self, now_s: float) -> list[tuple[float, float]]:
        """(start_s, end_s), the one that still lasts included."""
        both = itertools.zip_longest(self._starts_s, self._ends_s, fillvalue=now_s)
        return [(start_s, end_s) for start_s, end_s in both if end_s > start_s]


@dataclass(eq=False)
class Link:
    """`n_links` links that are alike; what is said of one holds for the busiest of them."""

    name: str
    n_links: int
    capacity_bps: float
    site_use: Use | None = None  # of the site that they are part of
    use: Use = field(default_factory=Use)  # when at least one flow was on them
    carried_bits: float = 0.0  # by all of them together; once the network is finished
    offered_bits: float = 0.0  # what all of them together could have carried so far
    _offered_until_s: float = 0.0

    def offer(self, now_s: float) -> None:
        """Count the capacity up to now; before it changes, and before it is read."""
        self.offered_bits += self.n_links * self.capacity_bps * (now_s - self._offered_until_s)
        self._offered_until_s = now_s


@dataclass(frozen=True)
class Crossing:
    """How the flows of a class lie on the links of one kind."""

    link: Link
    everywhere: float  # on how many of the links each flow is
    # n flows -> how many of them are on the busiest link; None: they lie evenly
    busiest: Callable[[int], float] | None = None

    def on_busiest(self, n_flows: int) -> float:
        return self.busiest(n_flows) if self.busiest else self.everywhere / self.link.n_links * n_flows


class FlowClass:
    """Flows that always have the same rate."""

    def __init__(self, crossings: Sequence[Crossing]) -> None:
        self.crossings = tuple(crossings)
        self._uses = [use for one in crossings for use in (one.link.use, one.link.site_use) if use is not None]
        self.n_flows = 0
        self.rate_bps = 0.0
        self.carried_bits = 0.0
        self._progress_bits = 0.0
        self._until_s = 0.0
        self._waiting: list[tuple[float, int, Flow]] = []

    def advance(self, now_s: float) -> None:
        elapsed_s = now_s - self._until_s
        self._until_s = now_s
        if not self.n_flows or elapsed_s <= 0:
            return
        moved_bits = self.rate_bps * elapsed_s
        self._progress_bits += moved_bits
        self.carried_bits += moved_bits * self.n_flows

    def add(self, flow: "Flow", number: int, now_s: float) -> None:
        """Let `flow` begin; the class has been advanced to now."""
        if self.n_flows == 0:
            # Progress starts over where nobody counts on it: it would lose digits over a long run.
            self._progress_bits = 0.0
            for use in self._uses:
                use.enter(now_s)
        self.n_flows += flow.weight
        flow.ends_at_bits = self._progress_bits + flow.bits
        heapq.heappush(self._waiting, (flow.ends_at_bits, number, flow))

    def remove(self, flow: "Flow", now_s: float) -> float:
        """Let `flow` end, done or not; the class has been advanced to now. Returns the bits that it had left."""
        flow.is_over = True
        self.n_flows -= flow.weight
        if self.n_flows == 0:
            self._waiting.clear()
            for use in self._uses:
                use.leave(now_s)
        return max(0.0, flow.ends_at_bits - self._progress_bits)

    def take_done(self, now_s: float) -> "list[Flow]":
        self.advance(now_s)
        # What this instant cannot tell apart is done: the next double after `now` may carry more bits than are left.
        until_bits = self._progress_bits + max(_DONE_BITS, self.rate_bps * now_s * 4e-16)
        done, waiting = [], self._waiting
        while waiting and (waiting[0][0] <= until_bits or waiting[0][2].is_over):
            flow = heapq.heappop(waiting)[2]
            if not flow.is_over:
                self.remove(flow, now_s)
                done.append(flow)
        return done

    def go_on(self, rate_bps: float, now_s: float) -> float:
        """Carry on at another rate; returns the seconds until the first flow will be done."""
        self.advance(now_s)
        self.rate_bps, waiting = rate_bps, self._waiting
        while waiting and waiting[0][2].is_over:
            heapq.heappop(waiting)
        return (waiting[0][0] - self._progress_bits) / rate_bps if waiting else math.inf


class Flow(simpy.Event):
    """`weight` equal transfers of `bits` each that begin and end together; succeeds when they have arrived."""

    def __init__(self, environment: simpy.Environment, flow_class: FlowClass, bits: float, weight: int) -> None:
        super().__init__(environment)
        self.flow_class, self.bits, self.weight = flow_class, bits, weight
        self.started_s = environment.now
        self.ends_at_bits = 0.0
        self.is_over = False

    def end(self) -> None:
        """Let whoever waits for it go on, at once."""
        event: Any = self
        callbacks, event.callbacks = event.callbacks, None
        event._ok, event._value = True, None
        for callback in callbacks:
            callback(self)


class SimulatedNetwork:
    """Links, classes of flows, and the flows under way."""

    def __init__(self, environment: simpy.Environment) -> None:
        self.environment = environment
        self.links: list[Link] = []
        self.classes: list[FlowClass] = []
        self.n_settlings = 0
        self._numbers = itertools.count()
        self._is_settling = False
        # Shares by how many flows each class has: the same few states come again in every round.
        self._shares: dict[tuple[int, ...], list[tuple[FlowClass, float]]] = {}

    def add_link(self, name: str, n_links: int, capacity_bps: float, site_use: Use | None = None) -> Link:
        """`n_links` new links that are alike. Raises: InvalidArgument (no capacity)."""
        link = Link(name, n_links, _checked_capacity(capacity_bps), site_use)
        self.links.append(link)
        return link

    def add_class(self, crossings: Sequence[Crossing]) -> FlowClass:
        flow_class = FlowClass(crossings)
        self.classes.append(flow_class)
        return flow_class

    def start(self, flow_class: FlowClass, bits: float, weight: int = 1, after_s: float = 0.0) -> Flow:
        """Begin `weight` transfers of `bits` each, now or so many seconds later."""
        flow = Flow(self.environment, flow_class, bits, weight)
        if after_s:
            self._call_at(after_s, lambda: self._begin(flow))
        else:
            self._begin(flow)
        return flow

    def _begin(self, flow: Flow) -> None:
        flow.started_s = now_s = self.environment.now
        if flow.bits <= _DONE_BITS:
            flow.is_over = True
            flow.succeed()
            return
        flow.flow_class.advance(now_s)
        flow.flow_class.add(flow, next(self._numbers), now_s)
        self._settle_later()

    def stop(self, flow: Flow) -> float:
        """End `flow` before it is done; returns the bits that each of its transfers had left, 0 if it was done."""
        if flow.is_over:
            return 0.0
        now_s = self.environment.now
        flow.flow_class.advance(now_s)
        left_bits = flow.flow_class.remove(flow, now_s)
        self._settle_later()
        return left_bits

    def set_capacity(self, link: Link, capacity_bps: float) -> None:
        """Change the capacity of each of these links. Raises: InvalidArgument."""
        link.offer(self.environment.now)
        link.capacity_bps = _checked_capacity(capacity_bps)
        self._shares.clear()
        self._settle_later()

    def finish(self) -> None:
        """Count everything up to now; once, when the simulation is over."""
        for flow_class in self.classes:
            flow_class.advance(self.environment.now)
            for crossing in flow_class.crossings:
                crossing.link.carried_bits += crossing.everywhere * flow_class.carried_bits
        for link in self.links:
            link.offer(self.environment.now)

    def _settle_later(self) -> None:
        if self._is_settling:
            return
        self._is_settling = True
        if self.environment.peek() > self.environment.now:  # nothing else happens in this instant
            self._settle()
        else:
            self._call_at(0.0, self._settle)

    def _call_at(self, delay_s: float, function: Callable[[], None]) -> None:
        event = simpy.Event(self.environment)
        event._ok, event._value, event.callbacks = True, None, [lambda _: function()]
        self.environment.schedule(event, _LAST_OF_INSTANT, delay_s)

    def _settle(self) -> None:
        """Share the links out anew among the flows under way, and wake up when the first of them is done."""
        self._is_settling = False
        self.n_settlings += 1
        now_s, next_s, number = self.environment.now, math.inf, self.n_settlings
        for flow_class, rate_bps in self._share_out():
            next_s = min(next_s, flow_class.go_on(rate_bps, now_s))
        if next_s < math.inf:
            self._call_at(max(0.0, next_s), lambda: self._wake(number))

    def _share_out(self) -> list[tuple[FlowClass, float]]:
        """(class, rate of each of its flows), for the classes that have any."""
        state = tuple([flow_class.n_flows for flow_class in self.classes])
        if (shares := self._shares.get(state)) is None:
            active = [flow_class for flow_class in self.classes if flow_class.n_flows]
            indices = {link: index for index, link in enumerate(self.links)}
            loads = []
            for one in active:
                counts = [(indices[crossing.link], crossing.on_busiest(one.n_flows)) for crossing in one.crossings]
                loads.append({index: count for index, count in counts if count > 0})
            rates_bps = share_max_min([link.capacity_bps for link in self.links], loads)
            if len(self._shares) >= _KEPT_SHARES:
                self._shares.clear()
            shares = self._shares[state] = list(zip(active, rates_bps, strict=True))
        return shares

    def _wake(self, number: int) -> None:
        if number != self.n_settlings:  # the rates have changed since
            return
        now_s = self.environment.now
        self._is_settling = True  # what these ends begin is settled with them
        for flow in [flow for one in self.classes if one.n_flows for flow in one.take_done(now_s)]:
            flow.end()
        self._is_settling = False
        self._settle_later()


def _checked_capacity(capacity_bps: Any) -> float:
    if not 0 < capacity_bps < float("inf"):
        raise InvalidArgument(f"a link of {capacity_bps} bits a second: expected a rate above 0 and finite")
    return float(capacity_bps)


def share_max_min(capacities_bps: Sequence[float], loads: Sequence[Mapping[int, float]]) -> list[float]:
    """The max-min fair rate of a flow of each class; `loads`: link index -> how many of its flows are there (more than 0).

    All rates rise together until a link is full; the flows on it keep what they have, and the others rise on (Bertsekas and
    Gallager, Data Networks, section 6.5.2). Cost: classes x links, times the number of links that fill up.
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


@dataclass(frozen=True)
class Site:
    """Workers that are alike: `n_workers` of them, numbered from `first_worker`, in rack `rack`."""

    first_worker: int
    n_workers: int
    rack: int
    up: Link
    down: Link
    use: Use  # of either way


class Topology:
    """Links of workers, and of racks where there are several, on a network.

    Args:
        racks: how many workers each has; a number: as many racks, worker i of m is in rack i * racks // m.
        core_bps: of each rack's link to the core; None for as much as all of its workers together.
        kinds: what else may differ between workers, so that they are not of one site.
        connection_bps: what the connections of two workers in different racks carry at most.
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
        if isinstance(racks, int):
            if not 1 <= racks <= n_workers:
                raise InvalidArgument(f"{racks} racks for {n_workers} workers: expected 1 to {n_workers}")
            racks = [-(-n_workers * (rack + 1) // racks) - -(-n_workers * rack // racks) for rack in range(racks)]
        if sum(racks) != n_workers or min(racks) < 1:
            raise InvalidArgument(
                f"racks of {', '.join(map(str, racks))} workers: expected {n_workers} in all, 1 or more each"
            )
        self.network, self.n_workers, self._connection_bps = network, n_workers, connection_bps
        self.rack_workers = list(racks)
        self.sites: list[Site] = []
        rack_of = [rack for rack, size in enumerate(racks) for _ in range(size)]
        kinds_of = list(zip(rack_of, rates_bps, kinds if kinds is not None else rack_of, strict=True))
        for (rack, rate_bps, _), alike in itertools.groupby(range(n_workers), kinds_of.__getitem__):
            first, *others = alike
            name = f"workers {first} to {others[-1]}" if others else f"worker {first}"
            use, n_links = Use(), 1 + len(others)
            up, down = (network.add_link(f"{name} {way}", n_links, rate_bps, use) for way in ("up", "down"))
            self.sites.append(Site(first, n_links, rack, up, down, use))
        self._racks: list[tuple[Link, Link]] = []  # up and down; none where there is no core
        if len(racks) > 1:
            for rack in range(len(racks)):
                total_bps = sum(rate_bps for of_rack, rate_bps, _ in kinds_of if of_rack == rack)
                of_core = core_bps if core_bps is None or isinstance(core_bps, int | float) else core_bps[rack]
                up, down = (network.add_link(f"rack {rack} {way}", 1, of_core or total_bps) for way in ("up", "down"))
                self._racks.append((up, down))
        elif core_bps is not None:
            raise InvalidArgument("a rate of the core needs several racks")

    def broadcasts(self, site: Site, is_fan_out: bool = False) -> FlowClass:
        """Reliable broadcasts of a site's workers, at most one of each at a time, to all other workers. One copy on the
        sender's link, one up to the core, one down to every other rack, one on every receiver's link; with `is_fan_out`
        the sender sends a copy to every receiver, as point-to-point calls do."""
        alike = site.n_workers
        copies = self.n_workers - 1 if is_fan_out else 1

        def on_own_site(n_flows: int) -> float:
            # A worker does not receive its own broadcast: where all send, every link carries one less.
            return float(n_flows - (n_flows >= alike))

        crossings = [Crossing(site.up, copies, lambda n_flows: copies * min(1, n_flows))]
        for other in self.sites:
            is_own = other is site
            crossings.append(Crossing(other.down, other.n_workers - is_own, on_own_site if is_own else None))
        for rack, (up, down) in enumerate(self._racks):
            inside, is_own = self.rack_workers[rack], rack == site.rack
            reached = self.n_workers - inside if is_own else inside
            crossings.append(Crossing(up if is_own else down, reached if is_fan_out else 1))
        return self.network.add_class(crossings + self._connections(1, lambda n_flows: min(1, n_flows)))

    def even(self, name: str) -> FlowClass:
        """One flow: a bit on every worker's links, both ways, a bit; all at the rate of the slowest. `ring`: every
        worker sends to the next, rack by rack, so one stream leaves a rack. `inside`: rings inside the racks.
        `between`: every worker's ring with its like in the other racks. `exchange`: between all pairs."""
        peers = max(1, self.n_workers - 1)
        leaving: dict[str, Callable[[int], float]] = {
            "ring": lambda inside: 1.0, "inside": lambda inside: 0.0, "between": float,
            "exchange": lambda inside: inside * (self.n_workers - inside) / peers,
        }  # fmt: skip
        crossings = [Crossing(link, link.n_links) for site in self.sites for link in (site.up, site.down)]
        for ways, inside in zip(self._racks, self.rack_workers, strict=False):
            crossings += [Crossing(link, leaving[name](inside)) for link in ways]
        connections = {"inside": 0, "exchange": peers}.get(name, 1)
        return self.network.add_class(crossings + self._connections(connections))

    def parameter_server(self, direction: str, rate_bps: float) -> FlowClass:
        """One flow is a push, every worker's gradient to the server, or a pull, the sum from it to every worker. The
        server is a host of its own, at the core where there are racks."""
        is_push = direction == "push"
        server = self.network.add_link(f"server {'down' if is_push else 'up'}", 1, rate_bps)
        crossings = [Crossing(server, self.n_workers)]
        crossings += [Crossing(site.up if is_push else site.down, site.n_workers) for site in self.sites]
        for (up, down), inside in zip(self._racks, self.rack_workers, strict=False):
            crossings.append(Crossing(up if is_push else down, inside))
        return self.network.add_class(crossings)

    def _connections(self, n: int, busiest: Callable[[int], float] | None = None) -> list[Crossing]:
        """What `n` pairs of connections to other racks let through of one flow."""
        if not n or not self._racks or self._connection_bps == math.inf:
            return []
        return [Crossing(self.network.add_link("connections", 1, n * self._connection_bps), 1, busiest)]
