"""Simulated schemes by name: the papers' broadcasts, uncompressed patterns, and gradwire's registry as measured.

measured.json, made by `gradwire bench run simulator-sizes`, holds what schemes were measured to send and to compute, each for
a world size. What grows with the number of ranks, and how, is fitted to the bytes measured at several: as a ring's
2 (N-1)/N of something, or as the N-1 copies of an all-gather.
"""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from gradwire import checks
from gradwire import schemes as live
from gradwire.core.optimizers import FAMILIES
from gradwire.errors import CorruptMessage, IncompatibleVersion, InvalidArgument
from gradwire.exchange.ring import Ring
from gradwire.registry import describe_choices, parse_spec
from gradwire.schemes.auto.costs import CodecCost, SharedCores, StepCost, predict_s
from gradwire.schemes.auto.fidelity import NEVER, FidelityRow, row_of, rows_for
from gradwire.schemes.auto.law import MARGIN
from gradwire_lab.simulator.schemes.broadcast import AqgbModel, FixedBroadcast
from gradwire_lab.simulator.schemes.collective import PLAIN, Collective, FullyShard, LocalSteps, ParameterServer, SlimGc
from gradwire_lab.simulator.simulation import SchemeModel, Simulation
from gradwire_lab.simulator.stage import Setting

MakeScheme = Callable[[Simulation], SchemeModel]

TABLE = Path(__file__).with_name("measured.json")
FORMAT = 1

# Whose sums run on while the next bucket is compressed, besides those that `auto` has rows for.
_SUMS = ("plain", "power-sgd-overlap", "power-momentum")

_SHAPES = {"ring": lambda n_ranks: 2 * (n_ranks - 1) / n_ranks, "gather": lambda n_ranks: float(n_ranks - 1)}


@dataclass(frozen=True)
class Measurement:
    """One scheme on one workload at one world size: means over ranks and steps, of a rank in a step."""

    ranks: int
    n_values: int
    sent_bytes: float
    encode_s: float  # whatever is not decoding: importance and tables too
    decode_s: float
    commit: str = ""
    date: str = ""


@dataclass(frozen=True)
class Fit:
    """How measurements of one scheme go on to other world sizes."""

    shape: str  # one of _SHAPES
    sent_bits_per_value: float  # what the shape multiplies
    encode_s_per_value: float
    decode_s_per_value: float
    error: float  # the largest relative error of the bytes, at the measured world sizes

    def codec(self, n_workers: int) -> CodecCost:
        """What a value takes among `n_workers`: encoded once whatever their number, decoded as often as it arrives."""
        return CodecCost(
            self.encode_s_per_value if n_workers > 1 else 0.0,
            self.decode_s_per_value * _SHAPES[self.shape](n_workers),
            self.sent_bits_per_value,
        )

    def shape_of(self, scheme: str) -> str:
        """How `scheme` communicates, as its bytes grow."""
        shape = shape_of(scheme)
        return "gather" if self.shape == "gather" else "sum" if shape == "gather" else shape


def shape_of(scheme: str) -> str:
    """How `scheme` goes about its buckets, one of `costs.SHAPES`; this is how its code is, and no measurement."""
    if scheme in _SUMS or scheme not in live.names():
        return "sum"
    # What sends its messages through a ring of frames encodes, sends and decodes side by side, chunk by chunk.
    if isinstance(getattr(live.by_name(scheme), "collective", None), Ring):
        return "ring"
    return "quantised" if scheme in NEVER else row_of(scheme).shape


def fit(measurements: Sequence[Measurement]) -> Fit:
    """The shape that fits the bytes best, and the codec's times at the smallest world, where cores are least contended.
    Raises: InvalidArgument (nothing measured with more than one rank)."""
    useful = [one for one in measurements if one.ranks > 1]
    if not useful:
        raise InvalidArgument("a scheme's size needs a measurement with at least 2 ranks")
    smallest = min(useful, key=lambda one: one.ranks)

    def fit_as(shape: str) -> Fit:
        factor_of = _SHAPES[shape]
        per_value = [8 * one.sent_bytes / one.n_values / factor_of(one.ranks) for one in useful]
        bits = sum(per_value) / len(per_value)
        error = max(abs(value / bits - 1) for value in per_value) if bits else 0.0
        encode_s, decode_s = smallest.encode_s / smallest.n_values, smallest.decode_s / smallest.n_values
        return Fit(shape, bits, encode_s, decode_s / factor_of(smallest.ranks), error)

    return min(map(fit_as, _SHAPES), key=lambda found: found.error)


def to_text(content: Mapping[str, Any]) -> str:
    """A table's content as its file: JSON, a line a measurement."""
    text = json.dumps(content, indent=1, allow_nan=False)
    return re.sub(r'\{\s*"ranks"[^{}]*\}', lambda found: " ".join(found.group().split()), text) + "\n"


@dataclass(frozen=True)
class MeasuredTable:
    """The measurements of one file, by workload and scheme."""

    content: dict[str, Any]

    @classmethod
    def load(cls, path: Path = TABLE) -> "MeasuredTable":
        """Raises: InvalidArgument (cannot be read), CorruptMessage (is no such table), IncompatibleVersion."""
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
        except OSError as error:
            raise InvalidArgument(f"cannot read the measured sizes in {path}: {error.strerror}") from error
        except ValueError as error:
            raise CorruptMessage(f"{path} is not a table of measured sizes: {error}") from error
        if not isinstance(content, dict) or not isinstance(content.get("workloads"), dict):
            raise CorruptMessage(f"{path} is not a table of measured sizes: it names no workloads")
        if content.get("format") != FORMAT:
            raise IncompatibleVersion(f"{path}: format {content.get('format')}, this gradwire reads {FORMAT}")
        return cls(content)

    def schemes(self, workload: str) -> Mapping[str, Any]:
        """The schemes that were measured on `workload`, with their measurements."""
        return self.content["workloads"].get(workload, {}).get("schemes", {})

    def fit(self, scheme: str, workload: str) -> Fit:
        """Raises: InvalidArgument (not measured; the message says how to)."""
        measured = self.schemes(workload)
        if scheme not in measured:
            raise InvalidArgument(
                f"scheme {scheme!r} was not measured on {workload!r}; there are: {', '.join(sorted(measured))}. "
                "`gradwire bench run simulator-sizes` measures what is missing"
            )
        try:
            return fit([Measurement(**row) for row in measured[scheme]])
        except TypeError as error:
            raise CorruptMessage(f"the measured sizes of {scheme!r} are not whole: {error}") from error


# Workloads whose measurements stand for others'.
_PREFERRED = ("resnet50", "resnet", "gpt")
_PERIOD = 8  # the live scheme's default

# docs/simulator.md says what they are; broadcast-K has K bits a value.
_OWN = ("plain", "broadcast-32", "broadcast-4", "broadcast", "auto", "aqgb", "aqgb-owners", "direct-32", "parameter-server",
        "local-sgd", "fully-shard")  # fmt: skip


def names() -> list[str]:
    """All that can be simulated: own models, then gradwire's schemes that were measured."""
    table = MeasuredTable.load()
    known = {name for workload in table.content["workloads"] for name in table.schemes(workload)}
    return [*_OWN, *(name for name in live.names() if name in known and name not in _OWN)]


def by_name(
    name: str, options: dict[str, Any] | None = None, measured_on: str | None = None, with_codec_times: bool = True
) -> MakeScheme:
    """What builds the scheme on a simulation.

    Args:
        options: collective (plain: direct, tree, two-level), bits (broadcast: 4), fidelity and optimizer (auto), floor (aqgb),
            every (periodic), threshold_bytes (slimgc), and what `LocalSteps` and `FullyShard` take.
        measured_on: the workload whose sizes and codec times to take; None: ResNet-50's, else the small ResNet's or GPT's.
        with_codec_times: False for a codec that takes no time: what the network alone allows.
    Raises: InvalidArgument (an unknown name or option, a scheme that was not measured).
    """
    options, table = dict(options or {}), MeasuredTable.load()
    broadcast = re.fullmatch(r"broadcast(?:-(\d+))?", name)

    def fit_of(scheme: str) -> Fit:
        found_on = (on for on in _PREFERRED if scheme in table.schemes(on))
        return table.fit(scheme, measured_on or next(found_on, _PREFERRED[0]))

    make: Callable[..., SchemeModel]
    if broadcast:
        bits = int(broadcast[1]) if broadcast[1] else options.pop("bits", 4)
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
            measured = {scheme for on in _PREFERRED for scheme in table.schemes(on)}
            rows = rows_for(fidelity, [checks.choice("optimizer", optimizer, FAMILIES)])
            schemes = {row: parse_spec(row.scheme)[0] for row in rows}
            fits = {row: fit_of(scheme) for row, scheme in schemes.items() if scheme in measured}
            return Collective(simulation, *_choose(simulation.setting, fits, with_codec_times))

    elif name in live.names():
        found = fit_of(name)

        def make(simulation: Simulation, **given: Any) -> SchemeModel:
            codec, shape = found.codec(simulation.setting.n_workers), found.shape_of(name)
            given = {"every": _PERIOD, **given} if name == "periodic" else given  # measured where every step sends
            if not with_codec_times:
                codec = CodecCost(bits=codec.bits)
            if name == "slimgc":
                return SlimGc(simulation, codec, **given)
            if given.keys() - {"collective", "every" if name == "periodic" else ""}:
                raise TypeError("its sizes are as measured: it takes no options but collective")
            return Collective(simulation, shape, codec, **given)

    else:
        raise InvalidArgument(f"no scheme that can be simulated is called {name!r}; {describe_choices(name, names())}")

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
    """Shape and codec of the row that the cost model predicts to be the fastest, or plain if none wins enough."""
    blocks, machine = setting.workload.blocks, SharedCores(setting.n_workers, 1, 2)
    ready_s, buckets = sum(one.forward_s for one in blocks), []
    for one in reversed(blocks):
        ready_s += one.backward_s
        buckets.append((one.n_values, ready_s))
    step, found = StepCost(setting.workload.step_s, tuple(buckets)), {}
    for row, fit in fits.items():
        codec = replace(fit.codec(setting.n_workers), bits=row.bits) if with_codec_times else CodecCost(bits=row.bits)
        doubt = 1.0 if row.scheme == "plain" else 1000 / (1000 - MARGIN)
        found[row.shape, codec] = doubt * predict_s(row.shape, codec, step, setting.link, machine)
    return min(found, key=lambda one: found[one])


_PLAIN: dict[str, Callable[..., SchemeModel]] = {
    "plain": lambda simulation, collective="ring": Collective(simulation, collective=collective),
    "direct-32": lambda simulation: Collective(simulation, collective="direct"),
    "parameter-server": ParameterServer,
    "local-sgd": LocalSteps,
    "fully-shard": FullyShard,
}
