"""Simulated schemes by name: the papers' broadcasts, uncompressed patterns, and gradwire's registry as measured."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from gradwire import schemes as live
from gradwire.errors import InvalidArgument
from gradwire.registry import describe_choices
from gradwire.schemes.auto.costs import CodecCost
from gradwire_lab.simulator.schemes.aqgb import AqgbModel
from gradwire_lab.simulator.schemes.base import PLAIN, SchemeModel
from gradwire_lab.simulator.schemes.broadcast import FixedBroadcast
from gradwire_lab.simulator.schemes.collective import Collective, FullyShard, LocalSteps, ParameterServer
from gradwire_lab.simulator.schemes.measured import MeasuredTable
from gradwire_lab.simulator.schemes.slimgc import SlimGc
from gradwire_lab.simulator.simulation import Simulation

MakeScheme = Callable[[Simulation], SchemeModel]

# Workloads whose measurements stand for others'.
_PREFERRED = ("resnet50", "resnet", "gpt")
_PERIOD = 8  # the live scheme's default

# name: what it is.
_OWN = {
    "plain": "uncompressed ring all-reduce, or collective: direct, tree, two-level",
    "broadcast-32": "every gradient to all, uncompressed; -K for K bits a value",
    "broadcast-4": "the same with 4 bits a value",
    "broadcast": "gradwire's scheme of this name: option bits, 4 by default",
    "aqgb": "adaptive quantised gradient broadcast",
    "aqgb-owners": 'the same over an all-reduce (topology="owners")',
    "direct-32": "uncompressed direct all-reduce",
    "parameter-server": "uncompressed, one server",
    "local-sgd": "workers step alone, and exchange parts of the model in turn: every, fragments, delay, bits, collective",
    "fully-shard": "FSDP2: weights gathered for either pass, gradients scattered: weights and gradients in bits, reshard",
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
    table = table or MeasuredTable.load()
    broadcast = re.fullmatch(r"broadcast-(\d+)", name)
    make: Callable[..., SchemeModel]
    if broadcast or name == "broadcast":
        bits = int(broadcast[1]) if broadcast else options.pop("bits", 4)
        if not 1 <= bits <= 32:
            raise InvalidArgument(f"{name}: expected 1 to 32 bits a value")
        make = FixedBroadcast
        options = {"bits_per_value": float(bits), "codec": _code(table, with_codec_times and bits < 32), **options}
    elif name in ("aqgb", "aqgb-owners"):
        make = AqgbModel
        options = {"has_owners": name == "aqgb-owners", "codec": _code(table, with_codec_times), **options}
    elif name in _PLAIN:
        make = _PLAIN[name]
    elif name in live.names():
        if measured_on is None:
            measured_on = next((on for on in _PREFERRED if name in table.schemes(on)), _PREFERRED[0])
        found = table.fit(name, measured_on)

        def make(simulation: Simulation, **given: Any) -> SchemeModel:
            codec, shape = found.codec(simulation.setting.n_workers), found.shape_of(name)
            if name == "periodic":  # measured over steps of which each eighth sends
                codec = CodecCost(*(_PERIOD * one for one in (codec.encode_s, codec.decode_s, codec.bits)))
                given = {"every": _PERIOD, **given}
            if not with_codec_times:
                codec = CodecCost(bits=codec.bits)
            if name == "slimgc":
                return SlimGc(simulation, codec, **given)
            if given.keys() - {"collective", "every" if name == "periodic" else ""}:
                raise TypeError("its sizes are as measured: it takes no options but collective")
            return Collective(simulation, shape, codec, **given)

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


def _code(table: MeasuredTable, is_paid: bool) -> CodecCost:
    """What the code of the broadcasts takes, as it was measured in a ring."""
    found = table.fit("embedded-float", _PREFERRED[0])
    return CodecCost(found.encode_s_per_value, found.decode_s_per_value) if is_paid else PLAIN


def _make_plain(simulation: Simulation, collective: str = "ring") -> SchemeModel:
    return Collective(simulation, collective=collective)


def _make_direct(simulation: Simulation) -> SchemeModel:
    return Collective(simulation, collective="direct")


_PLAIN: dict[str, Callable[..., SchemeModel]] = {
    "plain": _make_plain,
    "direct-32": _make_direct,
    "parameter-server": ParameterServer,
    "local-sgd": LocalSteps,
    "fully-shard": FullyShard,
}
