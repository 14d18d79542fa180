"""Which tensors of a bucket are compressed, and which travel raw: by name, by size, by shape."""

from collections.abc import Callable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any, NamedTuple

import torch
from torch import nn

from gradwire.core.bucket import Bucket, Layout, Slot
from gradwire.core.session import Session
from gradwire.errors import InvalidArgument
from gradwire.wire.wire import Wire

# Names, `*` and `?` as in file names; as one text, joined by "+"; or a function of (name, shape).
Names = str | Sequence[str] | Callable[[str, torch.Size], bool] | None
_MAX_SHOWN = 24
# Whether a tensor, by its slot or None, is compressed; the same answer on all ranks.
Select = Callable[[Slot | None], bool]


class TensorSpan(NamedTuple):
    """Tensor number `position`: `n_elements` values from `offset` of the bucket and `fused` of the buffer of its kind."""

    slot: Slot | None  # None: the whole of a bucket without slots counts as one tensor, without error feedback
    offset: int
    n_elements: int
    fused: int
    position: int

    def in_bucket(self, buffer: torch.Tensor) -> torch.Tensor:
        return buffer[self.offset : self.offset + self.n_elements]

    def in_fused(self, buffer: torch.Tensor) -> torch.Tensor:
        return buffer[self.fused : self.fused + self.n_elements]


class Selection:
    """One bucket's tensors by what becomes of them, in its order; `runs` of neighbours are what is copied at a time.

    `keeps_places`: compressed tensors are fused in a buffer that is laid out as the bucket, with gaps where raw ones lie.
    """

    def __init__(self, bucket: Bucket, takes: Select, keeps_places: bool = False) -> None:
        self.raw: list[TensorSpan] = []
        self.compressed: list[TensorSpan] = []
        self.n_raw = self.n_compressed = 0
        for position, (slot, offset, n_elements) in enumerate(tensors_of(bucket)):
            if takes(slot):
                fused = offset if keeps_places else self.n_compressed
                self.compressed.append(TensorSpan(slot, offset, n_elements, fused, position))
                self.n_compressed += n_elements
            else:
                self.raw.append(TensorSpan(slot, offset, n_elements, self.n_raw, position))
                self.n_raw += n_elements
        self.raw_runs, self.compressed_runs = _join(self.raw), _join(self.compressed)

        # The compressed slots, and where they lie in the fused buffer.
        self.slots = tuple(span.slot for span in self.compressed if span.slot is not None)
        self.offsets = tuple(span.fused for span in self.compressed if span.slot is not None)


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


def matrices(slot: Slot | None) -> bool:
    """Selects what has two dimensions or more, and what nothing is known of."""
    return slot is None or slot.dim() >= 2


# Small tensors are spared where they are no more than this share of all values.
_MAX_SPARED_SHARE = 0.02


def is_small(slot: Slot) -> bool:
    """Return whether a tensor is of one dimension or less, or what its model calls a norm or a bias."""
    return slot.dim() < 2 or any(
        word in part for part in slot.name.lower().split(".")[-2:] for word in ("norm", "bias")
    )


class ByName:
    """Selects the tensors that `only` names (all, if it names none), but for those that `exempt` names.

    Tensors without a name are compressed. Raises: InvalidArgument (names that are no names).

    Args:
        exempt: None, without `only`: small tensors (`is_small`) are spared, as long as all of them together are a small share:
            they are in the bucket that is compressed, as zeros, and travel beside it. () exempts nothing.
    """

    def __init__(self, exempt: Names = None, only: Names = ()) -> None:
        self.spares = exempt is None and not only
        self._exempt, self._only = _read("exempt", exempt), _read("only", only)
        self.n_spared, self.spared_share = 0, 0.0  # values, as far as layouts have been seen
        self._places: dict[Layout, torch.Tensor | None] = {}
        self._known: Mapping[str, Slot] = {}
        self._exempted: set[int] = set()  # parameters that a scheme leaves out besides, by id
        options = {"exempt": self._exempt, "only": self._only}
        # What ranks must share: of each option patterns, or, once bound, the tensors that its function names.
        self.configuration: dict[str, Any] = {
            key: [] if callable(names) else list(names) for key, names in options.items() if names
        }
        if self.spares:
            self.configuration["exempt"] = "small"

    def __bool__(self) -> bool:
        """Return whether anything may be left out."""
        return bool(self._exempt or self._only or self._exempted)

    def bind(self, session: Session, exempted: Sequence[torch.Tensor] = ()) -> None:
        """Check the names against the model's. Raises: InvalidArgument (a name that matches nothing; nothing is left)."""
        self._exempted = {id(parameter) for parameter in exempted}
        self._known = session.slots
        self._places.clear()
        slots = dict(session.slots)
        if not slots:
            return
        shown = ", ".join(list(slots)[:_MAX_SHOWN]) + (
            f", ... ({len(slots)} in all)" if len(slots) > _MAX_SHOWN else ""
        )
        for key, names in (("exempt", self._exempt), ("only", self._only)):
            if callable(names):
                self.configuration[key] = [name for name, slot in slots.items() if _are_of(names, slot)]
                continue
            for pattern in names:
                if not any(fnmatchcase(name, pattern) for name in slots):
                    raise InvalidArgument(f"{key}={pattern!r} matches no tensor; there are {shown}")
        if self and not any(self(slot) for slot in slots.values()):
            raise InvalidArgument(f"exempt= and only= leave nothing to compress; there are {shown}")

    def release(self) -> None:
        """Let the tensors go."""
        self._known = {}
        self._places.clear()

    def look_for_small(self, bucket: Bucket) -> torch.Tensor | None:
        """(m,) int64: which of the bucket's values are spared; None: none are. First asked where buckets are handed over, so
        that all ranks know as many tensors."""
        if not self.spares or bucket.layout in self._places:
            return self._places.get(bucket.layout)
        named = list(self._known.values())
        known = [one for one in named if getattr(one.parameter, "requires_grad", True)] or named or bucket.slots
        n_small, n = (sum(slot.numel() for slot in slots) for slots in (filter(is_small, known), known))
        spans = [span for slot, span in zip(bucket.slots, bucket.spans, strict=True) if slot.numel() and is_small(slot)]
        places = None
        if spans and n_small <= _MAX_SPARED_SHARE * n:
            places = torch.cat([torch.arange(*span, dtype=torch.int64, device="cpu") for span in spans])
            self.n_spared, self.spared_share = n_small, n_small / n
        self._places[bucket.layout] = places
        return places

    def places_of_small(self, bucket: Bucket, wire: Wire) -> torch.Tensor | None:
        """The same where the bucket lies; on the lane."""
        places = self._places.get(bucket.layout)
        if places is not None and places.device != bucket.buffer.device:
            places = self._places[bucket.layout] = wire.place(places)
        return places

    def __call__(self, slot: Slot | None) -> bool:
        """Return whether `slot` is compressed."""
        if slot is None:
            return True
        if slot.parameter is not None and id(slot.parameter) in self._exempted:
            return False
        return not slot.name or ((not self._only or _are_of(self._only, slot)) and not _are_of(self._exempt, slot))


# As `Names`, read: patterns, or a function.
_Read = tuple[str, ...] | Callable[[str, torch.Size], bool]


def _read(key: str, names: Names) -> _Read:
    if names in (None, "", "none"):
        return ()
    if isinstance(names, str):
        names = names.split("+")
    if callable(names):
        return names
    if not isinstance(names, Sequence) or not all(isinstance(name, str) and name for name in names):
        taken = "names (* and ? stand for any), or a function of (name, shape)"
        raise InvalidArgument(f"{key} takes {taken}, not {names!r}")
    return tuple(names)


def _are_of(names: _Read, slot: Slot) -> bool:
    """Return whether `names` name the slot."""
    if callable(names):
        return bool(names(slot.name, slot.shape))
    return any(fnmatchcase(slot.name, pattern) for pattern in names)


def embeddings_and_heads(model: nn.Module | None) -> list[torch.Tensor]:
    """Weights with a row for each word: of embeddings, and of linear layers with as many outputs as one has words."""
    modules = list(model.modules()) if model is not None else []
    embeddings = [module for module in modules if isinstance(module, nn.Embedding | nn.EmbeddingBag)]
    words = {module.num_embeddings for module in embeddings}
    heads = [module for module in modules if isinstance(module, nn.Linear) and module.out_features in words]
    return list(dict.fromkeys(module.weight for module in [*embeddings, *heads]))
