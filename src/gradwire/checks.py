"""Checks of options and numbers: each returns the value, or says what it has to be."""

import math
from collections.abc import Collection
from typing import TypeVar

from gradwire.errors import InvalidArgument

Value = TypeVar("Value")


def choice(name: str, value: Value, known: Collection[Value]) -> Value:
    """`value` if it is one of `known`; 64.0 is not 64, nor True 1. Raises: InvalidArgument."""
    if value not in known or (isinstance(value, bool | float) and type(value) not in map(type, known)):
        raise InvalidArgument(f"{name} is one of {', '.join(map(str, known))}, not {value!r}")
    return value


def finite(name: str, value: float, at_least: float = -math.inf) -> float:
    """`value` if it is finite and not below `at_least`. Raises: InvalidArgument."""
    if not math.isfinite(value) or value < at_least:
        bound = "" if at_least == -math.inf else f" and at least {at_least:g}"
        raise InvalidArgument(f"{name} must be finite{bound}, got {value}")
    return float(value)


def share(name: str, value: float) -> float:
    """`value` if it is in (0, 1]. Raises: InvalidArgument."""
    if not 0 < value <= 1:
        raise InvalidArgument(f"{name} must be more than 0 and at most 1, got {value}")
    return float(value)


def count(name: str, value: int, at_least: int = 1, at_most: int | None = None) -> int:
    """`value` if it is a whole number from `at_least` (to `at_most`). Raises: InvalidArgument."""
    if isinstance(value, bool) or not isinstance(value, int) or value < at_least or value > (at_most or value):
        bound = "" if at_most is None else f" to {at_most}"
        raise InvalidArgument(f"{name} is {value!r}; it must be a whole number from {at_least}{bound}")
    return value
