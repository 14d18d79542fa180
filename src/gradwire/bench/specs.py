"""How contenders are named on the command line: `NAME` or `NAME:option=value,option=value`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from gradwire.errors import InvalidArgument


def parse_spec(spec: str) -> tuple[str, dict[str, Any]]:
    """`NAME` or `NAME:option=value,option=value` to a name and its options; numbers and true/false become such.

    Raises: InvalidArgument.
    """
    name, _, text = spec.partition(":")
    options: dict[str, Any] = {}
    for pair in filter(None, text.split(",")):
        key, equals, value = pair.partition("=")
        if not key or not equals:
            raise InvalidArgument(f"{spec!r}: expected NAME:option=value,option=value")
        options[key] = _parse_value(value)
    return name, options


def _parse_value(text: str) -> Any:
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            pass
    return {"true": True, "false": False, "none": "none"}.get(text.lower(), text)


def choose_specs(asked: list[str], known: list[str], more: Sequence[str] = ()) -> list[str]:
    """`all` spelt out to `known`, doubles dropped; `more` are names that `all` does not mean.

    Raises: InvalidArgument (a name that is in neither).
    """
    for spec in asked:
        name = parse_spec(spec)[0]
        if name not in ("all", *known, *more):
            listing = ", ".join([*known, *more])
            raise InvalidArgument(f"nothing to measure is called {name!r}; there are: all, {listing}")
    return list(dict.fromkeys(one for spec in asked for one in (known if spec == "all" else [spec])))


def needs_switch(specs: Sequence[str]) -> bool:
    """Whether one of them sums in the network: `dense-switch`, or any scheme with `aggregator=switch`."""
    parsed = [parse_spec(spec) for spec in specs]
    return any(name == "dense-switch" or options.get("aggregator") == "switch" for name, options in parsed)
