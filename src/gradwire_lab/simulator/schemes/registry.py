"""Simulated schemes by name: the papers' broadcasts, uncompressed patterns, and gradwire's registry as measured."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from gradwire import checks
from gradwire import schemes as live
from gradwire.core.optimizers import FAMILIES
from gradwire.errors import InvalidArgument
from gradwire.registry import describe_choices, parse_spec
from gradwire.schemes.auto.costs import CodecCost, SharedCores, StepCost, predict_s
from gradwire.schemes.auto.fidelity import FidelityRow, rows_for
from gradwire_lab.simulator.schemes.aqgb import AqgbModel
from gradwire_lab.simulator.schemes.broadcast import FixedBroadcast
from gradwire_lab.simulator.schemes.collective import PLAIN, Collective, FullyShard, LocalSteps, ParameterServer, SlimGc
from gradwire_lab.simulator.schemes.measured import Fit, MeasuredTable
from gradwire_lab.simulator.simulation import SchemeModel, Simulation
from gradwire_lab.simulator.stage import Setting

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
    "auto": "of a fidelity's schemes that were measured the one that the cost model finds fastest: fidelity, optimizer",
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
        options: floor (aqgb), threshold_bytes (slimgc), and what `_OWN` says.
        measured_on: the workload whose measured sizes and codec times to take; None: ResNet-50's where the scheme was
            measured on it (low rank depends on the shapes), else the small ResNet's or GPT's.
        with_codec_times: False for a codec that takes no time: what the network alone allows.
    Raises: InvalidArgument (an unknown name or option, a scheme that was not measured).
    """
    options = dict(options or {})
    table = table or MeasuredTable.load()
    broadcast = re.fullmatch(r"broadcast-(\d+)", name)

    def fit_of(scheme: str) -> Fit:
        return table.fit(
            scheme, measured_on or next((on for on in _PREFERRED if scheme in table.schemes(on)), _PREFERRED[0])
        )

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
    elif name == "auto":

        def make(simulation: Simulation, fidelity: str = "exact", optimizer: str = "adam") -> SchemeModel:
            rows = {
                row: parse_spec(row.scheme)[0]
                for row in rows_for(fidelity, [checks.choice("optimizer", optimizer, FAMILIES)])
            }
            fits = {
                row: fit_of(scheme)
                for row, scheme in rows.items()
                if any(scheme in table.schemes(on) for on in _PREFERRED)
            }
            return Collective(simulation, *_choose(simulation.setting, fits, with_codec_times))

    elif name in live.names():
        found = fit_of(name)

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


def _choose(setting: Setting, fits: Mapping[FidelityRow, Fit], with_codec_times: bool) -> tuple[str, CodecCost]:
    """Shape and codec of the row that the cost model predicts to be the fastest: what `auto` tries first."""
    blocks, machine = setting.workload.blocks, SharedCores(setting.n_workers, 1, 2)
    ready_s = itertools.accumulate(
        (one.backward_s for one in reversed(blocks)), initial=sum(one.forward_s for one in blocks)
    )
    step = StepCost(
        setting.workload.step_s, tuple(zip((one.n_values for one in reversed(blocks)), [*ready_s][1:], strict=True))
    )
    found = {}
    for row, fit in fits.items():
        codec = replace(fit.codec(setting.n_workers), bits=row.bits) if with_codec_times else CodecCost(bits=row.bits)
        found[row.shape, codec] = predict_s(row.shape, codec, step, setting.link, machine)
    return min(found, key=lambda one: found[one])


_PLAIN: dict[str, Callable[..., SchemeModel]] = {
    "plain": lambda simulation, collective="ring": Collective(simulation, collective=collective),
    "direct-32": lambda simulation: Collective(simulation, collective="direct"),
    "parameter-server": ParameterServer,
    "local-sgd": LocalSteps,
    "fully-shard": FullyShard,
}
