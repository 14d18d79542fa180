"""The schemes that `auto` may use: one table, by how faithful they are and under which families of optimizers.

A row is here because of a measurement, not because of an adjective: "unbiased" is not "close". What was measured stands in
docs/auto.md; a row that is added needs a run of 200 steps beside DDP with the same seeds and data (experiment `lossy-auto`).
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from gradwire.core.optimizers import FAMILIES
from gradwire.errors import InvalidArgument
from gradwire.registry import describe_choices, parse_spec

# What a row of a level has to keep. exact: an error of the gradient near that of float32 itself (a bound on the loss does not
# exist: some models carry any rounding on into it). close: after 200 steps the held-out loss is within 0.5 % of DDP's.
# any: it converges, perhaps with another learning rate.
LEVELS = ("exact", "close", "any")
# Adam divides by the root of its second moments, which are small numbers from few steps at first: an error is divided too.
FIRST_ADAM_STEP = 100


@dataclass(frozen=True)
class FidelityRow:
    """One scheme with its options, at one level, under some optimizers."""

    spec: str  # NAME:option=value,..., with ON_DEVICE at its end where it is reduced between devices
    level: str  # the most faithful that takes it
    families: frozenset[str]  # of the optimizers under which it holds its level (core/optimizers.py)
    shape: str  # how it communicates (costs.py)
    bits: float  # a value on the wire, of a dense gradient
    codec: str = ""  # whose speed stands for its own (`codecs.by_name`); "" where it has none to speak of
    by_name_only: bool = False  # never unless it is asked for
    not_before: int = 0  # under Adam-like optimizers, the first step
    zero_bits: float | None = None  # of a value that is zero, where that is less
    densest: float = 1.0  # the largest share of values that are not zero at which it is tried
    stands_in: bool = False  # only where no row before it, of its level and scheme, holds

    @property
    def is_on_device(self) -> bool:
        """Whether its buckets are reduced between devices."""
        return self.spec.endswith(ON_DEVICE)

    @property
    def scheme(self) -> str:
        """The spec, wherever buckets are reduced."""
        return self.spec.removesuffix(ON_DEVICE)

    @property
    def name(self) -> str:
        """Of the scheme, without its options."""
        return self.scheme.partition(":")[0]

    def directly(self) -> "FidelityRow":
        """The same with a ring's messages sent to owners, who round a value twice instead of once a rank."""
        if self.shape != "ring" or "topology=" in self.spec:
            return self
        joint = "," if ":" in self.spec else ":"
        return replace(self, spec=f"{self.spec}{joint}topology=direct", shape="direct")

    def on_device(self) -> "FidelityRow":
        """The same between devices, where a ring takes a collective a hop."""
        direct = self.directly()
        return self if self.is_on_device else replace(direct, spec=direct.spec + ON_DEVICE)

    def holds_under(self, families: Iterable[str]) -> bool:
        """Return whether it may be used where these step the model: all of them. SGD beside others counts as unknown."""
        several = frozenset(families)
        return self.families >= (several - _SGD | {"unknown"} if len(several) > 1 and several & _SGD else several)


_ALL = frozenset(FAMILIES)
_SGD, _ADAM = frozenset({"sgd"}), frozenset({"adam"})
_KNOWN = _ALL - {"unknown"}
# Bounds the error of every value by itself, whatever a step makes of it.
_TWELVE_BITS = "gcomp:importance=uniform,bits=12"

TABLE: tuple[FidelityRow, ...] = (
    FidelityRow("plain", "exact", _ALL, "sum", 32),
    FidelityRow("gcomp:tolerance=32,least_bits=7", "exact", _KNOWN, "ring", 13.5, _TWELVE_BITS, zero_bits=1.0),
    FidelityRow(_TWELVE_BITS, "exact", _ALL, "ring", 16.5, _TWELVE_BITS, zero_bits=1.0, stands_in=True),
    # DDP's own sum, of the values at the union: measured with its index (two ranks, 2 M values) 0.50, 1.41, 4.2 and 10.6 bits a
    # value where a share of 0.01, 0.03, 0.1 and 0.3 is not zero. GComp takes 1.2, 1.5, 2.6 and 5.7.
    FidelityRow("homomorphic", "exact", _ALL, "agreed-sum", 45, zero_bits=0.05, densest=0.1),
    FidelityRow("bf16", "close", _ALL, "sum", 16),
    FidelityRow("embedded-float:bits=8", "close", _ALL, "ring", 8.03, "embedded-float:bits=8"),
    FidelityRow("embedded-float:bits=5", "close", _ADAM, "ring", 5.03, "embedded-float:bits=5"),
    FidelityRow("truncated-float:bits=8,rounding=stochastic", "close", _SGD, "ring", 8.03, "truncated-float:bits=8"),
    FidelityRow("embedded-float:bits=4", "any", _ALL, "ring", 4.03, "embedded-float:bits=4"),
    FidelityRow("thc", "any", _ALL, "agreed-sum", 8, "thc"),
    FidelityRow("qsgd", "any", _ALL, "quantised", 6.2, "qsgd"),
    FidelityRow("terngrad", "any", _ALL, "agreed-sum", 4, "ternary"),
    FidelityRow("one-bit", "any", _ALL, "quantised", 1.1, "one-bit", True, FIRST_ADAM_STEP),
    FidelityRow("two-bit", "any", _ALL, "quantised", 2.1, "two-bit", True, FIRST_ADAM_STEP),
    FidelityRow("acp-sgd", "any", _ALL, "sum", 0.5, "", True, FIRST_ADAM_STEP),
    FidelityRow("power-sgd", "any", _ALL, "sum", 1.0, "", True, FIRST_ADAM_STEP),
    FidelityRow("top-k", "any", _ALL, "gather", 0.1, "", True, FIRST_ADAM_STEP),
    FidelityRow("sign-sgd", "any", _ALL, "quantised", 1.5, "", True, FIRST_ADAM_STEP),
)

MANY_RANKS = 8  # from here on what is lost at each hop of a ring would add up
# At the end of a spec: reduced between devices, not in host memory.
ON_DEVICE = "@device"

# These own the optimizer's step or its momentum, let replicas drift, or are there to be compared with: no turns for them.
NEVER = (
    "aqgb",
    "auto",
    "broadcast",
    "dgc",
    "one-bit-adam",
    "periodic",
    "power-sgd-overlap",
    "slimgc",
    "truncate",
    "zlib",
    "zstd",
)


def levels_to(level: str) -> tuple[str, ...]:
    """`level` and those that are more faithful. Raises: InvalidArgument (there is none)."""
    if level not in LEVELS:
        raise InvalidArgument(f"no fidelity is called {level!r}; {describe_choices(str(level), LEVELS)}")
    return LEVELS[: LEVELS.index(level) + 1]


def check_spec(spec: object) -> str:
    """`spec` if it is a text. Raises: InvalidArgument."""
    if not isinstance(spec, str):
        raise InvalidArgument(f"a candidate is a text NAME:option=value, not {type(spec).__name__}")
    return spec


def rows_for(
    fidelity: str | Sequence[str], families: Iterable[str], also: Sequence[str] = (), n_ranks: int = 2
) -> list[FidelityRow]:
    """The rows that may be used, plain first: by the least faithful level allowed, the families of the optimizers that step
    the parameters and the ranks, and `also` some specs; or a list of specs alone. Specs take what the table has by name only,
    too. Raises: InvalidArgument (a scheme that takes no turns, or one in `also` that is less faithful)."""
    if not isinstance(fidelity, str):
        chosen, named = [], [row_of(spec) for spec in fidelity]
    else:
        levels, named = levels_to(fidelity), [row_of(spec) for spec in also]
        for row in named:
            if row.level not in levels:
                raise InvalidArgument(
                    f'{row.spec!r} is not as faithful as "{fidelity}"; fidelity="{row.level}" would take it'
                )
        allowed = [row for row in TABLE if row.level in levels and not row.by_name_only]
        chosen = needed([row for row in allowed if row.holds_under(families)])
        if n_ranks >= MANY_RANKS:
            chosen = [row if row.level == "exact" else row.directly() for row in chosen]
    return list({row.spec: row for row in [TABLE[0], *chosen, *named]}.values())


def needed(rows: Sequence[FidelityRow]) -> list[FidelityRow]:
    """The rows without those that stand in for one that holds."""
    held = {(row.level, row.name) for row in rows if not row.stands_in}
    return [row for row in rows if not row.stands_in or (row.level, row.name) not in held]


def row_of(spec: str) -> FidelityRow:
    """The table's row for a spec; for options that are not in it, that of the scheme, at the level "any". Raises:
    InvalidArgument."""
    if check_spec(spec).endswith(ON_DEVICE):
        spec = spec.removesuffix(ON_DEVICE)
        same = next((row for row in TABLE if row.on_device().scheme == spec), None)
        return same.on_device() if same is not None else row_of(spec).on_device()
    name, _ = parse_spec(spec)
    if name in NEVER:
        raise InvalidArgument(f"scheme {name!r} takes no turns with others; attach it by itself")
    of_scheme = [row for row in TABLE if row.name == name]
    if not of_scheme:
        known = describe_choices(name, sorted({row.name for row in TABLE}))
        raise InvalidArgument(f"no scheme that takes turns is called {name!r}; {known}")
    other = replace(of_scheme[0], spec=spec, level="any", families=_ALL, by_name_only=True)
    return next((one for row in of_scheme for one in (row, row.directly()) if one.spec == spec), other)
