"""How contenders are named on the command line: `NAME` or `NAME:option=value,option=value`."""

from __future__ import annotations

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


def choose_specs(asked: list[str], known: list[str]) -> list[str]:
    """`all` spelt out to `known`, doubles dropped. Raises: InvalidArgument (a name that is not in `known`)."""
    for spec in asked:
        name = parse_spec(spec)[0]
        if name not in ("all", *known):
            raise InvalidArgument(f"nothing to measure is called {name!r}; there are: all, {', '.join(known)}")
    return list(dict.fromkeys(one for spec in asked for one in (known if spec == "all" else [spec])))
