"""GComp's quantisation metric: how much of each gradient value can still reach its parameter, one byte an element.

The bytes are computed where parameters and moments lie: by a native kernel, or by torch operations on a device.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gradwire import _native
from gradwire.checks import choice as check_choice
from gradwire.codecs.tensors import check_positive, check_tensor
from gradwire.core.bucket import Slot, flatten_like, local_of, offsets_of, slot_of
from gradwire.core.optimizers import Optimizers, Place
from gradwire.core.session import Session
from gradwire.core.staging import StagedBucket
from gradwire.errors import InvalidArgument, Unsupported
from gradwire.schemes.gcomp.probing import Probe
from gradwire.schemes.gcomp.terms import Rule, Terms, rule_of

__all__ = ["Promise", "QuantisationMetric"]

_ADVICE = 'importance="uniform" (a fixed number of bits) and importance="none" (lossless) work with every optimizer'

_MANTISSA_BITS = {torch.float64: 52, torch.float32: 23, torch.float16: 10, torch.bfloat16: 7}

# What float32 holds without overflow: beyond it S would be Inf or NaN, and the metric says nothing.
_LARGEST_FLOAT32 = torch.finfo(torch.float32).max
# As native/gcomp/importance.hpp has them.
_LOWEST_CODE, _INFINITY = 348, 0x7F800000

# 1 MiB of float32: long beside the handful of calls a tile takes, small beside any bucket.
_TILE_ELEMENTS = 1 << 18

# Below, no bit of any gradient could be let go of; above, nothing is left of a parameter's mantissa.
_LEAST_TOLERANCE, _MOST_TOLERANCE = 2.0**-20, 2.0**20
# Vectors of fewer values (biases, scales of norms) keep a tolerance of 1: they are few, and many times as large as the elements
# of a matrix, so that their last places, and not those of the many, were what a loss moved by.
_FEW_VALUES = 1 << 16


@dataclass(frozen=True)
class Promise:
    """The bound on how far the bits that are let go of may move a parameter. Raises: InvalidArgument.

    One message moves what the optimizer adds to A (terms.py) by at most tolerance x 2^-23 |A|, A's last place or two
    (times 1 + rho under Adam; 2^-10 and 2^-7 for float16 and bfloat16). N ranks round N times: together that is as much
    in the mean square, as roundings to nearest are independent, and at the worst sqrt(N) times as much.

    Args:
        tolerance: last places of the parameter, from 2^-20 to 2^20; more than 1 is for matrices and long vectors.
        horizon: "step": what one step adds. "life": what a gradient adds while the momentum holds it, 1 / (1 - mu) or
            1 / (1 - beta1) times as much.
        rounding, format: of the codec. Truncating goes one way, so the N errors are added up; format 1 is as published.
        is_alike: whether the mean is rounded like the partial sums before it.
    """

    tolerance: float = 1.0
    horizon: str = "step"
    rounding: str = "nearest"
    format: int = 2
    is_alike: bool = False

    def __post_init__(self) -> None:
        check_choice("horizon", self.horizon, ("step", "life"))
        is_number = isinstance(self.tolerance, int | float) and not isinstance(self.tolerance, bool)
        if not (is_number and _LEAST_TOLERANCE <= self.tolerance <= _MOST_TOLERANCE):
            raise InvalidArgument(
                f"tolerance is {self.tolerance!r}; it is a number of the parameter's last places, from 2^-20 to 2^20: 1 for "
                "the promise as it is, 32 for fewer bytes than bfloat16"
            )

    def room(self, world_size: int) -> float:
        """S x this is what the importance byte holds. A codec of format 2 sends multiples of 2^-24 of the byte's power
        of two: rounded to nearest, one message is off by at most half of that. The squares of N such errors add up."""
        if self.format == 1:
            return self.tolerance * world_size / 2 ** (world_size - 1).bit_length()
        if self.rounding == "truncate":
            return 2.0 * self.tolerance
        roundings = world_size if self.is_alike or world_size == 1 else 2 * (world_size - 1)
        return 4.0 * self.tolerance * world_size / math.sqrt(roundings)

    def mean_room(self, world_size: int) -> int:
        """By how many quarter octaves the byte of the last message is larger, which all others read. It travels N - 1
        times, the N - 1 before it once each. The fewest bytes for the same mean square let the last one be off by as
        much as all before it together: by sqrt(N - 1) times as much as one of them."""
        if self.is_alike or self.format == 1 or self.rounding == "truncate" or world_size < 3:
            return 0
        return math.floor(2 * math.log2(world_size - 1))


class QuantisationMetric:
    """Importance bytes of gradients, read from a live optimizer just before its step.

    S = |A| / gain (terms.py) is delta of the paper's table times |g|. The byte is S x `Promise.room` to a quarter octave,
    rounded down; byte 0: nothing may be dropped.

    Hyper-parameters, groups and state are read at every call: schedules, `add_param_group` and `load_state_dict` need
    no notice. A parameter in no group of the optimizer, or whose state does not exist yet (first step), has bytes 0.

    Optimizers (one or several) with a rule (terms.py) follow it; others are probed (probing.py), and what that does not
    settle has bytes 0, too: `is_known` says whether there is more than that.

    Source: Li et al., GComp, SoCC 2024, section 5.1, table 2, appendix A. The byte: native/gcomp/importance.hpp.
    Raises: InvalidArgument (world_size), Unsupported (`differentiable`).
    """

    def __init__(self, optimizer: Any, world_size: int, promise: Promise | None = None) -> None:
        if world_size < 1:
            raise InvalidArgument(f"world_size must be at least 1, got {world_size}")
        self.promise = promise or Promise()
        self._world_size = world_size
        rules = [rule_of(one) for one in Optimizers(optimizer)]
        self.optimizers = Optimizers([one for one, _ in rules])
        self._rules: dict[torch.optim.Optimizer, Rule] = {
            one: rule or Probe(one, self.promise.horizon == "life") for one, rule in rules
        }
        self._tiles: dict[tuple[int, torch.device], Tensor] = {}
        # Bytes that are written before they are asked for.
        self._ready = torch.empty(0, dtype=torch.uint8, device="cpu")
        self._n_ready = 0
        for parameter, place in self.optimizers.places().items():
            _require_supported(*place)
            _mantissa_bits(parameter.dtype)

    @property
    def is_known(self) -> bool:
        """True if any optimizer has a rule, or has shown by its steps what it does."""
        return any(not isinstance(rule, Probe) or rule.is_plain for rule in self._rules.values())

    @classmethod
    def beside(cls, session: Session, promise: Promise) -> "QuantisationMetric":
        """That of the session's optimizer. Raises: InvalidArgument (there is none), Unsupported."""
        if not session.optimizers:
            raise InvalidArgument(
                'importance="paper" reads the optimizer, and none was given: pass HookState(scheme, optimizer=optimizer), or '
                'choose importance="uniform" or "none"'
            )
        return cls(session.optimizers, session.communicator.world_size, promise)

    def write_importance(
        self,
        parameters: Sequence[Tensor],
        offsets: Sequence[int],
        out: Tensor,
        loss_scale: float = 1.0,
        gradient_dtype: torch.dtype | None = None,
    ) -> None:
        """Write the byte of every element of `parameters`, in the order in which DDP lays gradients out in a bucket.

        Reads the parameter and its moments once, and allocates nothing once warm (a parameter whose state has another memory
        layout than itself excepted). Not to be called from two threads at once.

        Args:
            offsets: of each parameter's first element in `out`, one per parameter.
            out: (n,) uint8, contiguous, CPU. Elements of no parameter are left alone.
            gradient_dtype: of what is sent, where it is not the parameter's own: the metric compares last places.
        Raises: InvalidArgument, Unsupported (a group with `differentiable`, complex parameters, incomplete state).
        """
        check_tensor("out", out, torch.uint8)
        if len(parameters) != len(offsets):
            raise InvalidArgument(f"one offset per parameter: {len(parameters)} parameters, {len(offsets)} offsets")
        for parameter, offset in zip(parameters, offsets, strict=True):
            if not 0 <= offset <= out.numel() - parameter.numel():
                raise InvalidArgument(
                    f"{parameter.numel()} elements at {offset} do not fit in out, which has {out.numel()}"
                )
        self.of_bucket(parameters, offsets, loss_scale, gradient_dtype).write(0, out)

    def of_bucket(
        self,
        slots: Sequence[Slot | Tensor],
        offsets: Sequence[int],
        loss_scale: float = 1.0,
        gradient_dtype: torch.dtype | None = None,
        staged: StagedBucket | None = None,
    ) -> _native.BucketImportance:
        """The bytes of `write_importance` for any range of the bucket, from parameters and state as they are then. The
        optimizer must not step before it has been used; it is void when this is called again. Of a bucket from a device
        (`staged`) the bytes are computed there, and wait for nothing else. Raises: OutOfMemory."""
        places = sorted(zip(offsets, map(slot_of, slots), strict=True), key=lambda place: place[0])
        written: Sequence[Tensor | None] = [None] * len(places)
        if staged is not None:
            in_order, device = [slot for _, slot in places], staged.on_device.device
            *begins, n_elements = offsets_of(in_order)

            def compute() -> Tensor:
                out = torch.empty(n_elements, dtype=torch.uint8, device=device)
                return self.write_on_device(in_order, begins, out, loss_scale, gradient_dtype)

            written = staged.compute(compute).split([slot.numel() for slot in in_order])
        terms_of = self._reader(loss_scale, gradient_dtype)
        windows: list[tuple[int, int, int, int, int, float, float, float, int]] = []
        reads: list[Tensor] = []
        self._n_ready = 0
        for (offset, slot), ready in zip(places, written, strict=True):
            n = slot.numel()
            if n == 0:
                continue
            if ready is None:
                terms = terms_of(slot)
                if terms is not None and _are_plain(terms):
                    theta, second, first = (0 if one is None else one.data_ptr() for one in _operands(terms))
                    reads += [one for one in _operands(terms) if one is not None]
                    windows.append((offset, n, theta, second, first, terms.a, terms.b, terms.c, 0))
                    continue
                ready = self._reserve(n).zero_()
                if terms is not None:
                    self._write(terms, ready)
            reads.append(ready)
            windows.append((offset, n, 0, 0, 0, 0.0, 0.0, 0.0, ready.data_ptr()))
        importance = _native.BucketImportance(windows, self.promise.mean_room(self._world_size))
        importance.reads = reads
        return importance

    def write_on_device(
        self,
        slots: Sequence[Slot],
        offsets: Sequence[int],
        out: Tensor,
        loss_scale: float = 1.0,
        gradient_dtype: torch.dtype | None = None,
    ) -> Tensor:
        """`out` (n,) uint8 on a device, where the bytes of each slot are from its offset on, and 0 elsewhere; waits for
        nothing."""
        terms_of = self._reader(loss_scale, gradient_dtype)
        out.zero_()
        for slot, offset in zip(slots, offsets, strict=True):
            terms = terms_of(slot)
            if terms is not None:
                self._write(terms, out[offset : offset + slot.numel()])
        return out

    def _reader(self, loss_scale: float, gradient_dtype: torch.dtype | None) -> Callable[[Slot], Terms | None]:
        """A function of a slot that lays out its terms; None: nothing of it may be dropped. Raises: InvalidArgument."""
        check_positive("loss_scale", loss_scale)
        places = self.optimizers.places()
        room, is_for_life = self.promise.room(self._world_size), self.promise.horizon == "life"

        def read(slot: Slot) -> Terms | None:
            parameter = slot.parameter
            if parameter is None or slot.numel() == 0:
                return None
            terms = self._read_terms(parameter, places.get(parameter))
            if terms is None:
                return None
            gap = _mantissa_bits(gradient_dtype or parameter.dtype) - _mantissa_bits(parameter.dtype)
            factor = room * loss_scale * 2.0**gap / (terms.life if is_for_life else 1.0)
            if parameter.dim() < 2 and parameter.numel() < _FEW_VALUES:
                factor /= max(1.0, self.promise.tolerance)
            return _lay_out(terms, parameter, factor, slice(slot.start, slot.start + slot.numel()))

        return read

    def _read_terms(self, parameter: Tensor, place: Place | None) -> Terms | None:
        if place is None:
            return None
        optimizer, group = place
        _require_supported(optimizer, group)
        name, shape = type(optimizer).__name__, tuple(parameter.shape)
        try:
            # .get: the state is a defaultdict, and an entry made here would be taken for a first step done.
            terms = self._rules[optimizer](parameter, group, optimizer.state.get(parameter, {}))
        except KeyError as missing:
            raise Unsupported(
                f"{name}: the state of a parameter of shape {shape} or its group has no {missing}, "
                "as if an option had been switched on after the first step; make a new optimizer, or: " + _ADVICE
            ) from missing
        except Exception as error:
            raise Unsupported(
                f"{name}: its rule (gradwire.register_update) raised {type(error).__name__} for a parameter of shape "
                f"{shape}: {error}; correct it, or: {_ADVICE}"
            ) from error
        if terms is None or (isinstance(terms, Terms) and terms.life >= 1):
            return terms
        raise Unsupported(
            f"{name}: its rule (gradwire.register_update) gave {terms!r:.200} for a parameter of shape {shape}; a rule gives "
            f"Terms, with a life of at least 1, or None; correct it, or: {_ADVICE}"
        )

    def _reserve(self, n: int) -> Tensor:
        """(n,) uint8 of this call's own, from memory that grows to what a bucket needs."""
        first, self._n_ready = self._n_ready, self._n_ready + n
        if self._ready.numel() < self._n_ready:  # the smaller one lives on in the windows that read it
            self._ready, first, self._n_ready = torch.empty(2 * self._n_ready, dtype=torch.uint8, device="cpu"), 0, n
        return self._ready[first : first + n]

    def _write(self, terms: Terms, out: Tensor) -> None:
        """The bytes of a parameter that the kernel cannot read where it lies, in its memory order, tile by tile."""
        device = out.device
        for begin in range(0, out.numel(), _TILE_ELEMENTS):
            tile = slice(begin, min(begin + _TILE_ELEMENTS, out.numel()))
            theta_tile, second_tile, first_tile = (
                None if values is None else self._float32(number, values[tile], device)
                for number, values in enumerate(_operands(terms))
            )
            assert theta_tile is not None
            if terms.mean is not None and second_tile is not None:
                mean_tile = self._float32(3, terms.mean[1][tile], device)
                second_tile.addcmul_(mean_tile, mean_tile, value=-terms.mean[0])
            if terms.shift is not None:
                theta_tile.add_(self._float32(3, terms.shift[1][tile], device), alpha=terms.shift[0])
            write = _native.importance if device.type == "cpu" else _write_on_device
            write(theta_tile, second_tile, first_tile, terms.a, terms.b, terms.c, out[tile])

    def _float32(self, number: int, values: Tensor, device: torch.device) -> Tensor:
        """A float32 copy on the device of one tile of operand `number`, until its next one."""
        if (number, device) not in self._tiles:
            self._tiles[number, device] = torch.empty(_TILE_ELEMENTS, dtype=torch.float32, device=device)
        return self._tiles[number, device][: values.numel()].copy_(values)


def _lay_out(terms: Terms, parameter: Tensor, factor: float, part: slice) -> Terms | None:
    """The terms of one part of a parameter, times `factor`: tensors are (n,) in the order of its gradient in a DDP
    bucket. None where a step size lies beyond float32 (eta below 1e-38, say, or NaN): nothing may be dropped then."""
    a, b, c = terms.a * factor, terms.b * factor, terms.c * factor
    if not max(abs(a), abs(b), abs(c)) <= _LARGEST_FLOAT32:
        return None
    parameter = local_of(parameter)

    def flat(values: Tensor) -> Tensor:
        values = local_of(values.detach())
        if values.shape != parameter.shape:
            raise Unsupported(
                f"the optimizer holds state of shape {tuple(values.shape)} for a parameter of shape "
                f"{tuple(parameter.shape)}; sharded and flattened optimizers are not supported; {_ADVICE}"
            )
        return flatten_like(values, parameter)[part]

    second, first = (None if one is None else flat(one) for one in (terms.second_moment, terms.first_moment))
    mean, shift = (None if one is None else (one[0], flat(one[1])) for one in (terms.mean, terms.shift))
    theta = parameter if terms.stands_for is None else terms.stands_for
    return Terms(a, b, c, second, first, mean, shift, stands_for=flat(theta))


def _operands(terms: Terms) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    return terms.stands_for, terms.second_moment, terms.first_moment


def _are_plain(terms: Terms) -> bool:
    """Return whether the kernel can read the operands where they lie."""
    return (
        terms.mean is None
        and terms.shift is None
        and all(
            one is None or (one.dtype == torch.float32 and one.device.type == "cpu" and one.is_contiguous())
            for one in _operands(terms)
        )
    )


def _write_on_device(
    theta: Tensor, second_moment: Tensor | None, first_moment: Tensor | None, a: float, b: float, c: float, out: Tensor
) -> None:
    """out (n,) uint8 = the bytes of `_native.importance` for (n,) float32 operands, all on one device; enqueues only.
    Every product and sum is an operation of its own, and so rounded on its own: as in the kernel for CPUs."""
    factor: Tensor | float = b if second_moment is None else second_moment.sqrt().mul_(a).add_(b)
    scale = theta * factor
    if first_moment is not None:
        scale.add_(first_moment * c)
    magnitude = scale.view(torch.int32).bitwise_and_(0x7FFFFFFF)
    code = (magnitude >> 21).sub_(_LOWEST_CODE).clamp_(0, 255)
    code.masked_fill_(magnitude > _INFINITY, 0)
    if second_moment is not None:
        code.masked_fill_(second_moment.view(torch.int32) <= 0, 0)  # on the bits: subnormals count
    out.copy_(code)


def _require_supported(optimizer: torch.optim.Optimizer, group: dict[str, Any]) -> None:
    if group.get("differentiable", False):
        raise Unsupported(
            f"{type(optimizer).__name__} with differentiable=True: its step is part of a graph that importance bytes, "
            f"read between two steps, are not; use differentiable=False, or: {_ADVICE}"
        )


def _mantissa_bits(dtype: torch.dtype) -> int:
    if dtype not in _MANTISSA_BITS:
        raise Unsupported(f'importance="paper" compares last places of real floating-point numbers, not {dtype}')
    return _MANTISSA_BITS[dtype]
