"""What there is instead of a wrong name or option: the end of a registry's error message."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Iterable


def describe_choices(wrong: str, names: Iterable[str]) -> str:
    """What there is instead of a `wrong` name, the nearest first to be tried: the end of a message."""
    known = list(names)
    nearest = difflib.get_close_matches(wrong.lower().replace("_", "-"), known, n=1) or difflib.get_close_matches(
        wrong.lower(), known, n=1
    )
    return f"there are: {', '.join(known)}" + (f"; did you mean {nearest[0]!r}?" if nearest else "")


def describe_wrong_option(cls: type, options: Iterable[str]) -> str | None:
    """The first of `options` that `cls` does not take, and those that it takes; None if it takes them all."""
    takes: list[str] = []
    for ancestor in cls.__mro__:  # one that takes **options hands them on to the next
        init = vars(ancestor).get("__init__")
        if init is None:
            continue
        parameters = inspect.signature(init).parameters.values()
        takes += [one.name for one in parameters if one.kind in (one.POSITIONAL_OR_KEYWORD, one.KEYWORD_ONLY)]
        if not any(one.kind is one.VAR_KEYWORD for one in parameters):
            break
    takes = [name for name in dict.fromkeys(takes) if name != "self"]
    wrong = next((option for option in options if option not in takes), None)
    if wrong is None:
        return None
    return f"has no option {wrong!r}; " + (describe_choices(wrong, takes) if takes else "it takes none")
