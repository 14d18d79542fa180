"""The schemes that `auto` may use: one table, by how faithful they are and under which optimizer, with the evidence.

A row is here because of a measurement, not because of an adjective: "unbiased" is not "close". Code, docs and tests read
this table; a row that is added needs a run of 200 steps beside DDP with the same seeds and data (experiment `lossy-auto`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from gradwire.errors import InvalidArgument
from gradwire.registry import describe_choices, parse_spec

LEVELS = ("exact", "close", "any")
PROMISES = {
    "exact": "for 200 steps the loss of every step is within 2e-5 of DDP's",
    "close": "after 200 steps the held-out loss is within 0.5 % of DDP's",
    "any": "converges as its paper says; it may need another learning rate, so compare losses first",
}
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
        zero_bits: of a value that is zero, where that is less.
        codec: whose speed stands for its own (`codecs.by_name`); "" where it has none to speak of.
        by_name_only: never unless it is asked for.
        not_before: under Adam-like optimizers, the first step.
        evidence: what was measured: a GPT under AdamW for 200 steps, a ResNet under SGD with momentum.
    """

    spec: str
    level: str
    optimizers: str
    shape: str
    bits: float
    codec: str
    evidence: str
    by_name_only: bool = False
    not_before: int = 0
    zero_bits: float | None = None


TABLE: tuple[FidelityRow, ...] = (
    FidelityRow("plain", "exact", "all", "sum", 32, "", "DDP's own all-reduce: the same bits"),
    FidelityRow(
        "gcomp:importance=uniform,bits=12", "exact", "adam", "ring", 16.5, "gcomp:importance=uniform,bits=12",
        "GPT: loss within 1.6e-5 of DDP's at every step, 0.52 of the bytes", zero_bits=1.0,
    ),
    FidelityRow(
        "gcomp", "exact", "sgd", "ring", 25, "gcomp:importance=none",
        "ResNet: loss within 2.8e-6 of DDP's at every step, 0.49 of the bytes", zero_bits=1.0,
    ),
    FidelityRow(
        "bf16", "close", "all", "sum", 16, "",
        "ResNet: loss 0.361 against 0.361; GPT: 0.000 nats behind, 0.50 of the bytes",
    ),
    FidelityRow(
        "embedded-float:bits=8", "close", "all", "ring", 8.03, "embedded-float:bits=8",
        "ResNet: loss 0.360 against 0.361; GPT: 0.004 nats behind, 0.25 of the bytes",
    ),
    FidelityRow(
        "embedded-float:bits=5", "close", "adam", "ring", 5.03, "embedded-float:bits=5",
        "GPT: 0.009 nats behind, 0.005 nats after 500 steps, 0.16 of the bytes",
    ),
    FidelityRow(
        "truncated-float:bits=8,rounding=stochastic", "close", "sgd", "ring", 8.03, "truncated-float:bits=8",
        "ResNet: loss 0.361 against 0.361, rounded towards zero; stochastic rounding is no worse",
    ),
    FidelityRow(
        "embedded-float:bits=4", "any", "all", "ring", 4.03, "embedded-float:bits=4",
        "digits under SGD: 98.4 % against 98.4 %; GPT: 0.033 nats behind, 0.026 nats after 500 steps, 0.13 of the bytes",
    ),
    FidelityRow("thc", "any", "all", "agreed-sum", 8, "thc", "ResNet: loss 0.367 against 0.361; GPT: 0.025 nats behind"),
    FidelityRow(
        "qsgd", "any", "all", "quantised", 4.1, "qsgd", "ResNet: loss 0.372 against 0.361; GPT: 0.30 nats behind",
    ),
    FidelityRow(
        "terngrad", "any", "all", "agreed-sum", 4, "ternary",
        "GPT: 0.25 nats behind; with a scale a bucket 0.20, and ResNet: loss 0.406 against 0.361",
    ),
    FidelityRow(
        "homomorphic", "exact", "all", "sum", 32, "",
        "sums sparse gradients as they are; a dense one travels as plain does", by_name_only=True,
    ),
    FidelityRow(
        "one-bit", "any", "all", "quantised", 1.1, "one-bit",
        "ResNet: loss 0.581 against 0.361 after few steps; digits under SGD: 98.3 % against 98.4 %; "
        "GPT: 0.42 nats behind; error feedback", True, FIRST_ADAM_STEP,
    ),
    FidelityRow(
        "two-bit", "any", "all", "quantised", 2.1, "two-bit",
        "ResNet: loss 0.695 against 0.361 after few steps; digits under SGD: 98.5 % against 98.4 %; "
        "GPT: 0.24 nats behind; error feedback", True, FIRST_ADAM_STEP,
    ),
    FidelityRow(
        "acp-sgd", "any", "all", "sum", 0.5, "",
        "ResNet: loss 1.170 against 0.361 after few steps; digits under SGD: 98.8 % against 98.4 %; "
        "GPT: 0.002 nats behind, 0.11 nats with embeddings compressed too; low rank", True, FIRST_ADAM_STEP,
    ),
    FidelityRow(
        "power-sgd", "any", "all", "sum", 1.0, "",
        "ResNet: loss 0.748 against 0.361 after few steps; low rank", True, FIRST_ADAM_STEP,
    ),
    FidelityRow(
        "top-k", "any", "all", "gather", 0.1, "",
        "ResNet: loss 1.418 against 0.361 after few steps; sparse", True, FIRST_ADAM_STEP,
    ),
    FidelityRow(
        "sign-sgd", "any", "all", "gather", 1.0, "",
        "ResNet: loss 3.203 against 0.361: needs a learning rate of its own", True, FIRST_ADAM_STEP,
    ),
)  # fmt: skip

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
            evidence = "options of your own: nothing was measured with them"
            return FidelityRow(
                spec, "any", "all", row.shape, row.bits, row.codec, evidence, True, row.not_before, row.zero_bits
            )
    known = sorted({parse_spec(row.spec)[0] for row in TABLE})
    raise InvalidArgument(f"no scheme that takes turns is called {name!r}; {describe_choices(name, known)}")
