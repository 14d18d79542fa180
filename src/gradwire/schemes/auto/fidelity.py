"""The schemes that `auto` may use: one table, by how faithful they are and under which optimizer.

A row is here because of a measurement, not because of an adjective: "unbiased" is not "close". What was measured stands in
docs/auto.md; a row that is added needs a run of 200 steps beside DDP with the same seeds and data (experiment `lossy-auto`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from gradwire.errors import InvalidArgument
from gradwire.registry import describe_choices, parse_spec

# What a row of a level has to keep. exact: for 200 steps the loss of every step is within 2e-5 of DDP's. close:
# after 200 steps the held-out loss is within 0.5 % of DDP's. any: it converges, perhaps with another learning rate.
LEVELS = ("exact", "close", "any")
_ADAM_LIKE = ("Adam", "AdamW", "Adamax", "NAdam", "RAdam", "SparseAdam", "Adagrad", "RMSprop", "Adadelta", "Lion")
# Adam divides by the root of its second moments, which are small numbers from few steps at first: an error is divided too.
FIRST_ADAM_STEP = 100


@dataclass(frozen=True)
class FidelityRow:
    """One scheme with its options, at one level, under some optimizers.

    Attributes:
        spec: NAME:option=value,...
        level: the least faithful level that takes it is any, the most faithful exact.
        optimizers: "all", "adam" (those that divide by a moment) or "sgd".
        shape: how it communicates (costs.py).
        bits: a value on the wire, of a dense gradient.
        codec: whose speed stands for its own (`codecs.by_name`); "" where it has none to speak of.
        by_name_only: never unless it is asked for.
        not_before: under Adam-like optimizers, the first step.
        zero_bits: bits of a value that is zero, where that is less.
    """

    spec: str
    level: str
    optimizers: str
    shape: str
    bits: float
    codec: str = ""
    by_name_only: bool = False
    not_before: int = 0
    zero_bits: float | None = None


TABLE: tuple[FidelityRow, ...] = (
    FidelityRow("plain", "exact", "all", "sum", 32),
    FidelityRow(
        "gcomp:importance=uniform,bits=12",
        "exact",
        "adam",
        "ring",
        16.5,
        "gcomp:importance=uniform,bits=12",
        zero_bits=1.0,
    ),
    FidelityRow("gcomp", "exact", "sgd", "ring", 25, "gcomp:importance=none", zero_bits=1.0),
    FidelityRow("bf16", "close", "all", "sum", 16),
    FidelityRow("embedded-float:bits=8", "close", "all", "ring", 8.03, "embedded-float:bits=8"),
    FidelityRow("embedded-float:bits=5", "close", "adam", "ring", 5.03, "embedded-float:bits=5"),
    FidelityRow("truncated-float:bits=8,rounding=stochastic", "close", "sgd", "ring", 8.03, "truncated-float:bits=8"),
    FidelityRow("embedded-float:bits=4", "any", "all", "ring", 4.03, "embedded-float:bits=4"),
    FidelityRow("thc", "any", "all", "agreed-sum", 8, "thc"),
    FidelityRow("qsgd", "any", "all", "quantised", 6.2, "qsgd"),
    FidelityRow("terngrad", "any", "all", "agreed-sum", 4, "ternary"),
    FidelityRow("homomorphic", "exact", "all", "sum", 32, by_name_only=True),
    FidelityRow("one-bit", "any", "all", "quantised", 1.1, "one-bit", True, FIRST_ADAM_STEP),
    FidelityRow("two-bit", "any", "all", "quantised", 2.1, "two-bit", True, FIRST_ADAM_STEP),
    FidelityRow("acp-sgd", "any", "all", "sum", 0.5, "", True, FIRST_ADAM_STEP),
    FidelityRow("power-sgd", "any", "all", "sum", 1.0, "", True, FIRST_ADAM_STEP),
    FidelityRow("top-k", "any", "all", "gather", 0.1, "", True, FIRST_ADAM_STEP),
    FidelityRow("sign-sgd", "any", "all", "quantised", 1.5, "", True, FIRST_ADAM_STEP),
)

# These own the optimizer's step or its momentum, let replicas drift, or are there to be compared with: no turns for them.
NEVER = (
    "aqgb",
    "auto",
    "broadcast",
    "dgc",
    "one-bit-adam",
    "periodic",
    "power-sgd-overlap",
    "random-k",
    "slimgc",
    "top-k-adam",
    "truncate",
    "zlib",
    "zstd",
)


def family_of_optimizer(optimizer: torch.optim.Optimizer | None) -> str:
    """ "adam" for those that divide by a moment of the gradient, "sgd" for all others; without one the careful answer."""
    if optimizer is None:
        return "adam"
    return "adam" if any(cls.__name__ in _ADAM_LIKE for cls in type(optimizer).__mro__) else "sgd"


def check_level(level: str) -> str:
    """`level` if it is one. Raises: InvalidArgument."""
    if level not in LEVELS:
        raise InvalidArgument(f"no fidelity is called {level!r}; {describe_choices(str(level), LEVELS)}")
    return level


def rows_for(
    level: str, optimizer_family: str, also: Sequence[str] = (), only: Sequence[str] | None = None
) -> list[FidelityRow]:
    """The rows that may be used, plain first.

    Args:
        level: the least faithful level allowed.
        optimizer_family: of `family_of_optimizer`.
        also: specs to add. only: specs instead of the table's. Both take what stands in the table by name only too.
    Raises: InvalidArgument (a scheme that takes no turns, or one that is less faithful than `level`; not under `only`).
    """
    check_level(level)
    allowed = LEVELS[: LEVELS.index(level) + 1]
    named = [row_of(spec) for spec in (also if only is None else only)]
    for row in named:
        if only is None and row.level not in allowed:
            raise InvalidArgument(f'{row.spec!r} is not as faithful as "{level}"; fidelity="{row.level}" would take it')
    chosen = [
        row
        for row in TABLE
        if only is None
        and row.level in allowed
        and row.optimizers in ("all", optimizer_family)
        and not row.by_name_only
    ]
    by_spec = {row.spec: row for row in [TABLE[0], *chosen, *named]}
    return list(by_spec.values())


def row_of(spec: str) -> FidelityRow:
    """The table's row for a spec; for options that are not in it, that of the scheme, at the level "any".

    Raises: InvalidArgument.
    """
    if not isinstance(spec, str):
        raise InvalidArgument(f"a candidate is a text NAME:option=value, not {type(spec).__name__}")
    name, _ = parse_spec(spec)
    if name in NEVER:
        raise InvalidArgument(f"scheme {name!r} takes no turns with others; attach it by itself")
    for row in TABLE:
        if row.spec == spec:
            return row
    for row in TABLE:
        if parse_spec(row.spec)[0] == name:
            return replace(row, spec=spec, level="any", optimizers="all", by_name_only=True)
    known = sorted({parse_spec(row.spec)[0] for row in TABLE})
    raise InvalidArgument(f"no scheme that takes turns is called {name!r}; {describe_choices(name, known)}")
