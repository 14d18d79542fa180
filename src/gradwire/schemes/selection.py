"""Which tensors of a bucket are compressed, and which travel raw: by name, by size, by shape.

A `Select` is the rule, a `Selection` what it makes of one bucket.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from fnmatch import fnmatchcase
from typing import Any, NamedTuple

import torch
from torch import nn

from gradwire.core.bucket import Bucket
from gradwire.core.session import Session
from gradwire.core.slot import Slot
from gradwire.errors import InvalidArgument

# Names, `*` and `?` as in file names; as one text, joined by "+"; or a function of (name, shape).
Names = str | Sequence[str] | Callable[[str, torch.Size], bool]
_MAX_SHOWN = 24


# Whether a tensor, (its slot or None, its bytes), is compressed; the same answer on all ranks.
Select = Callable[[Slot | None, int], bool]


class TensorSpan(NamedTuple):
    """Tensor number `position`: `n_elements` values from `offset` of the bucket and `fused` of the buffer of its kind.

    `slot` is None in a bucket that has none: the whole of it counts as one tensor, without error feedback.
    """

    slot: Slot | None
    offset: int
    n_elements: int
    fused: int
    position: int

    def in_bucket(self, buffer: torch.Tensor) -> torch.Tensor:
        """Its view of the bucket's buffer."""
        return buffer[self.offset : self.offset + self.n_elements]

    def in_fused(self, buffer: torch.Tensor) -> torch.Tensor:
        """Its view of the buffer in which the tensors of its kind lie one after the other."""
        return buffer[self.fused : self.fused + self.n_elements]


class Selection:
    """One bucket's tensors by what becomes of them.

    Args:
        keeps_places: compressed tensors are fused in a buffer that is laid out as the bucket, with gaps where raw ones lie.

    Attributes:
        raw, compressed: the tensors of each kind, in the bucket's order.
        n_raw, n_compressed: values of each kind.
        raw_runs, compressed_runs: the same, neighbours joined into one run: what is copied at a time.
    """

    def __init__(self, bucket: Bucket, takes: Select, keeps_places: bool = False) -> None:
        element_bytes = bucket.buffer.element_size()
        raw: list[TensorSpan] = []
        compressed: list[TensorSpan] = []
        self.n_raw = self.n_compressed = 0
        for position, (slot, offset, n_elements) in enumerate(tensors_of(bucket)):
            if takes(slot, n_elements * element_bytes):
                fused = offset if keeps_places else self.n_compressed
                compressed.append(TensorSpan(slot, offset, n_elements, fused, position))
                self.n_compressed += n_elements
            else:
                raw.append(TensorSpan(slot, offset, n_elements, self.n_raw, position))
                self.n_raw += n_elements
        self.raw, self.compressed = tuple(raw), tuple(compressed)
        self.raw_runs, self.compressed_runs = tuple(_join(raw)), tuple(_join(compressed))

    @property
    def slots(self) -> tuple[Slot, ...]:
        """The compressed slots; with `offsets`, where they lie in the fused buffer."""
        return tuple(span.slot for span in self.compressed if span.slot is not None)

    @property
    def offsets(self) -> tuple[int, ...]:
        """Offset in the fused buffer of each compressed slot."""
        return tuple(span.fused for span in self.compressed if span.slot is not None)


def tensors_of(bucket: Bucket) -> Sequence[tuple[Slot | None, int, int]]:
    """(slot, offset, number of values) of each tensor of the bucket."""
    if not bucket.slots:
        return [(None, 0, bucket.n_elements)]
    return [(slot, offset, slot.numel()) for slot, offset in zip(bucket.slots, bucket.offsets, strict=True)]


def _join(spans: Sequence[TensorSpan]) -> list[TensorSpan]:
    runs: list[TensorSpan] = []
    for span in spans:
        if runs and runs[-1].offset + runs[-1].n_elements == span.offset:
            runs[-1] = runs[-1]._replace(slot=None, n_elements=runs[-1].n_elements + span.n_elements)
        elif span.n_elements:
            runs.append(span._replace(slot=None))
    return runs


class AtLeast:
    """Selects tensors of `n_bytes` or more; empty ones never."""

    def __init__(self, n_bytes: int) -> None:
        self.n_bytes = max(1, n_bytes)

    def __call__(self, slot: Slot | None, n_bytes: int) -> bool:
        return n_bytes >= self.n_bytes


def matrices(slot: Slot | None, n_bytes: int = 0) -> bool:
    """Selects what has two dimensions or more, and what nothing is known of."""
    return slot is None or slot.dim() >= 2


class ByName:
    """Selects the tensors that `only` names (all, if it names none), but for those that `exempt` names.

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
        if self and not any(self(slot) for slot in slots.values()):
            raise InvalidArgument(f"exempt= and only= leave nothing to compress; there are {_shown(slots)}")

    def __call__(self, slot: Slot | None, n_bytes: int = 0) -> bool:
        """Whether `slot` is compressed."""
        if slot is None:
            return True
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
