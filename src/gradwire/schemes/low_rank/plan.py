"""How one bucket is compressed: its matrices in groups of one shape, and the rest, which travels as it is."""

from __future__ import annotations

from collections.abc import Callable

import torch

from gradwire.core.bucket import Bucket
from gradwire.core.slot import Slot
from gradwire.schemes.low_rank.factors import checksum
from gradwire.schemes.low_rank.matrices import MatrixGroup, MatrixShape, MatrixState
from gradwire.schemes.selection import Selection, TensorSpan


class LowRankPlan:
    """The groups of one bucket layout, and the tensors that travel as they are."""

    def __init__(self, bucket: Bucket, groups: list[MatrixGroup], dense: list[TensorSpan]) -> None:
        self.slots = bucket.slots
        self.layout_hash = bucket.layout_hash
        self.groups = groups
        self.dense = dense
        self.n_dense = sum(span.n_elements for span in dense)
        self.checksum = 0

    def sign_factors(self, incoming: Callable[[MatrixGroup], torch.Tensor]) -> None:
        """Note the checksum of what comes in next, for ranks to compare."""
        self.checksum = 0
        for group in self.groups:
            self.checksum = checksum(incoming(group), self.checksum)


class Plans:
    """A plan for every bucket layout in use, and the state of every matrix: by slot, as buckets are rebuilt.

    Also how much the model shrinks, for the size of fused buffers.
    """

    def __init__(self, shape_of: Callable[[Slot], MatrixShape | None], device: torch.device) -> None:
        self._shape_of, self._device = shape_of, device
        self._plans: list[LowRankPlan] = []
        self._keys: dict[Slot, str] = {}
        self.states: dict[Slot, MatrixState] = {}
        self.n_elements = 0
        self.n_factor_elements = {"p": 0, "q": 0}  # with the dense rest, which is sent with either

    def find(self, bucket: Bucket) -> LowRankPlan | None:
        """The plan of this bucket, if it has one."""
        for plan in self._plans:
            if plan.slots == bucket.slots and plan.layout_hash == bucket.layout_hash:
                return plan
        return None

    def make(self, bucket: Bucket) -> LowRankPlan:
        """A new plan; plans that share a slot with it are of an old layout, and go."""
        keys = {slot: self._count(slot) for slot in bucket.slots}
        chosen = Selection(bucket, lambda slot, _: slot is not None and self._shape_of(slot) is not None)
        groups: dict[MatrixShape, list[tuple[Slot, int, str, MatrixState]]] = {}
        for slot, span in zip(chosen.slots, chosen.compressed, strict=True):
            shape = self._shape_of(slot)
            assert shape is not None
            state = self.states.setdefault(slot, MatrixState())
            groups.setdefault(shape, []).append((slot, span.offset, keys[slot], state))
        dense = [span for span in chosen.raw if span.n_elements]
        stacked = [MatrixGroup(shape, members, self._device) for shape, members in groups.items()]
        plan = LowRankPlan(bucket, stacked, dense)
        slots = set(plan.slots)
        self._plans = [old for old in self._plans if slots.isdisjoint(old.slots) and old.slots]
        self._plans.append(plan)
        return plan

    def forget_layouts(self) -> None:
        """Build all plans anew from the states."""
        self._plans.clear()

    def rate_of(self, side: str) -> float:
        """Elements sent / elements of the gradient, over the whole model as far as it has been seen."""
        return self.n_factor_elements[side] / self.n_elements if self.n_elements else 1.0

    def _count(self, slot: Slot) -> str:
        """Its key; at first sight its values are added to the model's."""
        key = self._keys.get(slot)
        if key is None:
            shape = self._shape_of(slot)
            # Without names: the order in which slots first appear, which is the same on all ranks.
            key = self._keys[slot] = slot.name or f"#{len(self._keys)}"
            n = slot.numel()
            self.n_elements += n
            self.n_factor_elements["p"] += shape.rank * shape.n_rows if shape else n
            self.n_factor_elements["q"] += shape.rank * shape.n_columns if shape else n
        return key
