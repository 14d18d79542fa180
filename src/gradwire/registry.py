"""Things with names and options: `NAME:option=value` is read, and a wrong name or option is answered by those there are."""

import difflib
import importlib
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Generic, TypeVar, get_type_hints

from gradwire.errors import InvalidArgument

Made = TypeVar("Made")


# What was registered from outside of the library, by kind: name -> "module:class".
_REGISTERED: dict[str, dict[str, str]] = {}


def register(kind: str, name: str, place: str) -> None:
    """Make the class at `place`, "module:class", known by name; it is imported when it is first asked for.

    Args:
        kind: "scheme", "codec" or "aggregator".
    """
    _REGISTERED.setdefault(kind, {})[name] = place


class Registry(Generic[Made]):
    """Classes by name, or functions that make an object of the class that they are annotated with; imported when asked for.

    Args:
        kind: what they are called in an error.
        places: name -> "module:class" or "module:function".
    """

    def __init__(self, kind: str, places: Mapping[str, str]) -> None:
        self._kind, self._own = kind, places

    @property
    def _places(self) -> dict[str, str]:
        return {**self._own, **_REGISTERED.get(self._kind, {})}

    def names(self) -> list[str]:
        return sorted(self._places)

    def class_of(self, name: str) -> type[Made]:
        """Raises: InvalidArgument (no such name)."""
        maker = self._maker_of(name)
        made: type[Made] = maker if isinstance(maker, type) else get_type_hints(maker)["return"]
        return made

    def _maker_of(self, name: str) -> Callable[..., Made]:
        if name not in self._places:
            raise InvalidArgument(f"no {self._kind} is called {name!r}; {describe_choices(name, self.names())}")
        module_path, maker = self._places[name].split(":")
        found: Callable[..., Made] = getattr(importlib.import_module(module_path), maker)
        return found

    def make(self, name: str, options: Mapping[str, Any]) -> Made:
        """Raises: InvalidArgument (no such name or option, or a value out of range)."""
        maker = self._maker_of(name)
        try:
            return maker(**options)
        except TypeError as error:
            wrong = describe_wrong_option(self.class_of(name), maker, options)
            raise InvalidArgument(f"{self._kind} {name!r}{' ' + wrong if wrong else f': {error}'}") from error


def describe_choices(wrong: str, names: Iterable[str]) -> str:
    """The names to choose from instead of a `wrong` one, the nearest first: the end of a message."""
    known, name = list(names), wrong.lower()
    nearest = difflib.get_close_matches(name.replace("_", "-"), known, n=1) or difflib.get_close_matches(
        name, known, n=1
    )
    return (f"did you mean {nearest[0]!r}? " if nearest else "") + f"there are: {', '.join(known)}"


def describe_wrong_option(cls: type, maker: Callable[..., Any], options: Iterable[str]) -> str | None:
    """The first of `options` that `maker` of a `cls` does not take, and those it takes; None if it takes them all."""
    takes = [] if maker is cls else _parameters_of(maker)[0]
    for ancestor in cls.__mro__:  # one that takes **options hands them on to the next ...
        init = vars(ancestor).get("__init__")
        if init is None:
            continue
        names, hands_on = _parameters_of(init)
        takes += names
        if not hands_on or "options_of" in vars(ancestor):
            break
    if hasattr(cls, "options_of"):  # ... or to a part that it is made with
        takes += _parameters_of(cls.options_of.__init__)[0]
    takes = [name for name in dict.fromkeys(takes) if name != "self"]
    wrong = next((option for option in options if option not in takes), None)
    if wrong is None:
        return None
    return f"has no option {wrong!r}; " + (describe_choices(wrong, takes) if takes else "it takes none")


def _parameters_of(init: Any) -> tuple[list[str], bool]:
    """What a constructor takes by name, and whether it takes **options besides."""
    parameters = inspect.signature(init).parameters.values()
    names = [one.name for one in parameters if one.kind in (one.POSITIONAL_OR_KEYWORD, one.KEYWORD_ONLY)]
    return names, any(one.kind is one.VAR_KEYWORD for one in parameters)


def parse_spec(spec: str) -> tuple[str, dict[str, Any]]:
    """`NAME` or `NAME:option=value,option=value` to a name and its options; numbers and true/false become such. Raises:
    InvalidArgument."""
    name, _, text = spec.partition(":")
    options: dict[str, Any] = {}
    for pair in filter(None, text.split(",")):
        key, equals, value = pair.partition("=")
        if not key or not equals:
            raise InvalidArgument(f"{spec!r}: expected NAME:option=value,option=value")
        options[key] = _parse_value(value)
    return name, options


def spec_of(record: Mapping[str, Any]) -> str:
    """The spec that a record's `scheme` and `options` were written from."""
    return f"{record['scheme']}:{record['options']}" if record["options"] else str(record["scheme"])


def _parse_value(text: str) -> Any:
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            pass
    return {"true": True, "false": False, "none": "none"}.get(text.lower(), text)


def choose_specs(asked: list[str], known: list[str], more: Sequence[str] = ()) -> list[str]:
    """`all` spelt out to `known`, doubles dropped; `more` are names that `all` does not mean. Raises: InvalidArgument
    (a name that is in neither)."""
    for spec in asked:
        name = parse_spec(spec)[0]
        if name not in ("all", *known, *more):
            listing = ", ".join([*known, *more])
            raise InvalidArgument(f"nothing to measure is called {name!r}; there are: all, {listing}")
    return list(dict.fromkeys(one for spec in asked for one in (known if spec == "all" else [spec])))
