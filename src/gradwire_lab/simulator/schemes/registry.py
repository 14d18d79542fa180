"""Simulated schemes by name: the papers' broadcasts, uncompressed patterns, and gradwire's registry as measured."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from gradwire import schemes as live
from gradwire.errors import InvalidArgument
from gradwire.registry import describe_choices
from gradwire_lab.simulator.schemes.aqgb import AqgbModel
from gradwire_lab.simulator.schemes.base import SchemeModel
from gradwire_lab.simulator.schemes.broadcast import FixedBroadcast
from gradwire_lab.simulator.schemes.collective import Collective, Cost, ParameterServer
from gradwire_lab.simulator.schemes.measured import MeasuredTable, lane_of
from gradwire_lab.simulator.schemes.slimgc import SlimGc
from gradwire_lab.simulator.simulation import Simulation

MakeScheme = Callable[[Simulation], SchemeModel]

# Workloads whose measurements stand for others'.
_PREFERRED = ("resnet50", "resnet", "gpt")

# name: what it is.
_OWN = {
    "plain": "uncompressed ring all-reduce",
    "broadcast-32": "every gradient to all, uncompressed; -K for K bits a value",
    "broadcast-4": "the same with 4 bits a value",
    "broadcast": "gradwire's scheme of this name: option bits, 4 by default",
    "aqgb": "adaptive quantised gradient broadcast",
    "aqgb-owners": 'the same over an all-reduce (topology="owners")',
    "direct-32": "uncompressed direct all-reduce",
    "parameter-server": "uncompressed, one server",
}


def names(table: MeasuredTable | None = None) -> list[str]:
    """All that can be simulated: own models, then gradwire's schemes that were measured."""
    measured = table or MeasuredTable.load()
    known = {name for workload in measured.workloads() for name in measured.schemes(workload)}
    return [*_OWN, *(name for name in live.names() if name in known and name not in _OWN)]


def by_name(
    name: str,
    options: dict[str, Any] | None = None,
    measured_on: str | None = None,
    with_codec_times: bool = True,
    table: MeasuredTable | None = None,
) -> MakeScheme:
    """What builds the scheme on a simulation.

    Args:
        options: floor, messages_per_block, exchange_s (aqgb); n_servers, rate_bps (parameter-server); threshold_bytes (slimgc).
        measured_on: the workload whose measured sizes and codec times to take; None: ResNet-50's where the scheme was
            measured on it (low rank depends on the shapes), else the small ResNet's or GPT's.
        with_codec_times: False for a codec that takes no time: what the network alone allows.
    Raises: InvalidArgument (an unknown name or option, a scheme that was not measured).
    """
    options = dict(options or {})
    broadcast = re.fullmatch(r"broadcast-(\d+)", name)
    make: Callable[..., SchemeModel]
    if broadcast:
        bits = int(broadcast[1])
        if not 1 <= bits <= 32:
            raise InvalidArgument(f"{name}: expected 1 to 32 bits a value")
        make = FixedBroadcast
        options = {"bits_per_value": float(bits), **options}
    elif name == "broadcast":
        make = FixedBroadcast
        options = {"bits_per_value": float(options.pop("bits", 4)), **options}
    elif name in ("aqgb", "aqgb-owners"):
        make = AqgbModel
        options = {"has_owners": name == "aqgb-owners", **options}
    elif name == "plain":
        make = _make_ring
    elif name == "direct-32":
        make = _make_direct
    elif name == "parameter-server":
        make = ParameterServer
    elif name in live.names():
        measured = table or MeasuredTable.load()
        if measured_on is None:
            measured_on = next((on for on in _PREFERRED if name in measured.schemes(on)), _PREFERRED[0])
        found = measured.fit(name, measured_on)

        def make(simulation: Simulation, **given: Any) -> SchemeModel:
            cost = found.cost(simulation.setting.n_workers, lane_of(name))
            if not with_codec_times:
                cost = Cost(cost.sent_bits_per_value, n_hops=cost.n_hops, lane=cost.lane)
            if name == "slimgc":
                return SlimGc(simulation, cost, **given)
            if given:
                raise TypeError("its sizes are as measured: it takes no options")
            return Collective(simulation, cost)

    else:
        raise InvalidArgument(
            f"no scheme that can be simulated is called {name!r}; {describe_choices(name, names(table))}"
        )

    def build(simulation: Simulation) -> SchemeModel:
        try:
            return make(simulation, **options)
        except TypeError as error:
            raise InvalidArgument(f"scheme {name!r}: {error}") from error

    return build


def _make_ring(simulation: Simulation) -> SchemeModel:
    n_workers = simulation.setting.n_workers
    return Collective(simulation, Cost(64.0 * (n_workers - 1) / n_workers, n_hops=2 * (n_workers - 1)))


def _make_direct(simulation: Simulation) -> SchemeModel:
    n_workers = simulation.setting.n_workers
    return Collective(simulation, Cost(64.0 * (n_workers - 1) / n_workers, n_hops=2), pattern="exchange")
