"""Which tensors a scheme compresses, by name; the others are reduced plainly."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import nn

from gradwire.core.session import Session
from gradwire.core.slot import Slot
from gradwire.errors import InvalidArgument

# Names, `*` and `?` as in file names; as one text, joined by "+"; or a function of (name, shape).
Names = str | Sequence[str] | Callable[[str, torch.Size], bool]
_MAX_SHOWN = 24


class Selection:
    """The tensors that `only` names (all, if it names none), but for those that `exempt` names.

    Tensors without a name are compressed. Raises: InvalidArgument (names that are no names).
    """

    def __init__(self, exempt: Names = (), only: Names = ()) -> None:
        self._rules = {"exempt": _rule("exempt", exempt), "only": _rule("only", only)}
        self._exempted: set[int] = set()  # parameters that a scheme leaves out besides, by id

    def __bool__(self) -> bool:
        """Whether anything may be left out."""
        return any(map(bool, self._rules.values())) or bool(self._exempted)

    @property
    def configuration(self) -> dict[str, Any]:
        """What ranks must share; nothing if nothing is named."""
        return {key: rule.text for key, rule in self._rules.items() if rule}

    def bind(self, session: Session, exempted: Sequence[torch.Tensor] = ()) -> None:
        """Check the names against the model's. Raises: InvalidArgument (a name that matches nothing; nothing is left)."""
        self._exempted = {id(parameter) for parameter in exempted}
        slots = dict(session.slots)
        if not slots:
            return
        for key, rule in self._rules.items():
            rule.check(key, slots)
        if self and not any(self.takes(slot) for slot in slots.values()):
            raise InvalidArgument(f"exempt= and only= leave nothing to compress; there are {_shown(slots)}")

    def takes(self, slot: Slot) -> bool:
        """Whether `slot` is compressed."""
        if slot.parameter is not None and id(slot.parameter) in self._exempted:
            return False
        only, exempt = self._rules["only"], self._rules["exempt"]
        return not slot.name or ((not only or only.matches(slot)) and not (exempt and exempt.matches(slot)))


class _Rule:
    """Patterns, or a function."""

    def __init__(self, patterns: tuple[str, ...], function: Callable[[str, torch.Size], bool] | None) -> None:
        self.patterns, self.function = patterns, function
        self.text: Any = list(patterns)

    def __bool__(self) -> bool:
        return bool(self.patterns) or self.function is not None

    def matches(self, slot: Slot) -> bool:
        if self.function is not None:
            return bool(self.function(slot.name, slot.shape))
        return any(fnmatchcase(slot.name, pattern) for pattern in self.patterns)

    def check(self, key: str, slots: dict[str, Slot]) -> None:
        if self.function is not None:
            self.text = [name for name, slot in slots.items() if self.matches(slot)]
            return
        for pattern in self.patterns:
            if not any(fnmatchcase(name, pattern) for name in slots):
                raise InvalidArgument(f"{key}={pattern!r} matches no tensor; there are {_shown(slots)}")


def _rule(key: str, names: Names) -> _Rule:
    if isinstance(names, str):
        names = [] if names in ("", "none") else names.split("+")
    if callable(names):
        return _Rule((), names)
    if not isinstance(names, Sequence) or not all(isinstance(name, str) and name for name in names):
        raise InvalidArgument(
            f"{key} takes names (* and ? stand for any), or a function of (name, shape), not {names!r}"
        )
    return _Rule(tuple(names), None)


def _shown(slots: dict[str, Slot]) -> str:
    shown = ", ".join(list(slots)[:_MAX_SHOWN])
    return shown if len(slots) <= _MAX_SHOWN else f"{shown}, ... ({len(slots)} in all)"


def embeddings_and_heads(model: nn.Module | None) -> list[torch.Tensor]:
    """Weights with a row for each word: of embeddings, and of linear layers with as many outputs as one has words."""
    modules = list(model.modules()) if model is not None else []
    embeddings = [module for module in modules if isinstance(module, nn.Embedding | nn.EmbeddingBag)]
    words = {module.num_embeddings for module in embeddings}
    heads = [module for module in modules if isinstance(module, nn.Linear) and module.out_features in words]
    found = {id(module.weight): module.weight for module in [*embeddings, *heads]}
    return list(found.values())
