"""GComp's quantisation metric: how much of each gradient value can still reach its parameter, one byte an element.

The bytes are computed where parameters and moments lie: by a native kernel, or by torch operations on a device.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gradwire import _native
from gradwire.codecs.tensors import check_tensor
from gradwire.core.bucket import Slot, flatten_like, local_of, offsets_of, slot_of
from gradwire.core.session import Session
from gradwire.core.staging import StagedBucket
from gradwire.errors import InvalidArgument, Unsupported
from gradwire.schemes.gcomp.terms import TERMS_BY_OPTIMIZER, Terms

__all__ = ["QuantisationMetric"]

_ADVICE = 'importance="uniform" (a fixed number of bits) and importance="none" (lossless) work with every optimizer'

_MANTISSA_BITS = {torch.float64: 52, torch.float32: 23, torch.float16: 10, torch.bfloat16: 7}

# What float32 holds without overflow: beyond it S would be Inf or NaN, and the metric says nothing.
_LARGEST_FLOAT32 = torch.finfo(torch.float32).max
# As native/gcomp/importance.hpp has them.
_LOWEST_CODE, _INFINITY = 348, 0x7F800000

# 1 MiB of float32: long beside the handful of calls a tile takes, small beside any bucket.
_TILE_ELEMENTS = 1 << 18


class QuantisationMetric:
    """Importance bytes of gradients, read from a live optimizer just before its step.

    S = |A| N / (gain 2^ceil(log2 N)) for N ranks (terms.py): delta of the paper's table times |g|, and the safety that
    N truncations of partial sums need. Dropping the low n bits of every partial sum s with S > 2^n |s| moves the
    parameter by less than 2^-23 |A|, two units in A's last place (times 1 + rho under Adam, see terms.py; 2^-10 and
    2^-7 for float16 and bfloat16). The byte is S to a quarter octave, rounded down; byte 0: nothing may be dropped.

    Hyper-parameters, groups and state are read at every call: schedules, `add_param_group` and `load_state_dict` need
    no notice. A parameter in no group of the optimizer, or whose state does not exist yet (first step), has bytes 0.

    Not for optimizers that are not in `TERMS_BY_OPTIMIZER`: there use importance="uniform" or "none".

    Args:
        optimizer: SGD, Adagrad, RMSprop, Adam or AdamW of torch.optim, or a subclass that inherits their `step`.
        world_size: ranks whose gradients are averaged.
    Raises: InvalidArgument (world_size), Unsupported (unknown optimizer, `differentiable`).
    Source: Li et al., GComp, SoCC 2024, section 5.1, table 2, appendix A. The byte: native/gcomp/importance.hpp.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, world_size: int) -> None:
        if world_size < 1:
            raise InvalidArgument(f"world_size must be at least 1, got {world_size}")
        self._optimizer = optimizer
        self._terms_of = _find_terms(optimizer)
        self._world_factor = world_size / 2 ** (world_size - 1).bit_length()
        self._tiles: dict[tuple[int, torch.device], Tensor] = {}
        # Bytes that are written before they are asked for.
        self._ready = torch.empty(0, dtype=torch.uint8, device="cpu")
        self._n_ready = 0
        for group in optimizer.param_groups:
            _require_supported(optimizer, group)
            for parameter in group["params"]:
                _mantissa_bits(parameter.dtype)

    @classmethod
    def beside(cls, session: Session) -> QuantisationMetric:
        """That of the session's optimizer. Raises: InvalidArgument (there is none), Unsupported."""
        if not session.optimizers:
            raise InvalidArgument(
                'importance="paper" reads the optimizer, and none was given: pass HookState(scheme, optimizer=optimizer), or '
                'choose importance="uniform" or "none"'
            )
        if len(session.optimizers) > 1:
            raise Unsupported(f'importance="paper" reads one optimizer, not {session.optimizers}: {_ADVICE}')
        return cls(next(iter(session.optimizers)), session.communicator.world_size)

    def write_importance(
        self,
        parameters: Sequence[Tensor],
        offsets: Sequence[int],
        out: Tensor,
        loss_scale: float = 1.0,
        gradient_dtype: torch.dtype | None = None,
    ) -> None:
        """Write the byte of every element of `parameters`, in the order in which DDP lays gradients out in a bucket.

        Args:
            parameters: as in the optimizer's groups; float32, bfloat16, float16 or float64, any device.
            offsets: of each parameter's first element in `out`, one per parameter.
            out: (n,) uint8, contiguous, CPU. Elements of no parameter are left alone.
            loss_scale: what gradients are multiplied by (GradScaler's scale).
            gradient_dtype: of what is sent, where it is not the parameter's own: the metric compares last places.
        Raises: InvalidArgument, Unsupported (a group with `differentiable`, complex parameters, incomplete state).
        Cost: reads the parameter and its moments once, allocates nothing once warm (a parameter whose state has another
            memory layout than itself excepted). Not to be called from two threads at once.
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
        """The bytes of `write_importance` for any range of the bucket, from parameters and state as they are then.

        The optimizer must not step before it has been used; it is void when this is called again.

        Args:
            staged: of a bucket from a device: the bytes are computed there, and wait for nothing else. Raises: OutOfMemory.
        """
        places = sorted(zip(offsets, map(slot_of, slots), strict=True), key=lambda place: place[0])
        written: Sequence[Tensor | None] = [None] * len(places)
        if staged is not None:
            in_order, device = [slot for _, slot in places], staged.on_device.device
            on_host = staged.compute(lambda: self.bytes_on_device(in_order, device, loss_scale, gradient_dtype))
            written = on_host.split([slot.numel() for slot in in_order])
        operands_of = self._reader(loss_scale, gradient_dtype)
        windows: list[tuple[int, int, int, int, int, float, float, float, int]] = []
        reads: list[Tensor] = []
        self._n_ready = 0
        for (offset, slot), ready in zip(places, written, strict=True):
            n = slot.numel()
            if n == 0:
                continue
            if ready is None:
                operands = operands_of(slot)
                if operands is not None and operands.are_plain:
                    theta, second, first = (0 if one is None else one.data_ptr() for one in operands.in_kernel)
                    a, b, c = operands.terms.a, operands.terms.b, operands.terms.c
                    reads += [one for one in operands.in_kernel if one is not None]
                    windows.append((offset, n, theta, second, first, a, b, c, 0))
                    continue
                ready = self._reserve(n).zero_()
                if operands is not None:
                    self._write(operands, ready)
            reads.append(ready)
            windows.append((offset, n, 0, 0, 0, 0.0, 0.0, 0.0, ready.data_ptr()))
        importance = _native.BucketImportance(windows)
        importance.reads = reads
        return importance

    def bytes_on_device(
        self,
        slots: Sequence[Slot],
        device: torch.device,
        loss_scale: float = 1.0,
        gradient_dtype: torch.dtype | None = None,
    ) -> Tensor:
        """(n,) uint8 on the device: the bytes of all elements of `slots`, one slot after the other; waits for nothing."""
        *offsets, n_elements = offsets_of(slots)
        out = torch.empty(n_elements, dtype=torch.uint8, device=device)
        self.write_on_device(slots, offsets, out, loss_scale, gradient_dtype)
        return out

    def write_on_device(
        self,
        slots: Sequence[Slot],
        offsets: Sequence[int],
        out: Tensor,
        loss_scale: float = 1.0,
        gradient_dtype: torch.dtype | None = None,
    ) -> None:
        """As `bytes_on_device`, into `out` (n,) uint8: each slot's from its offset on, and 0 elsewhere."""
        operands_of = self._reader(loss_scale, gradient_dtype)
        out.zero_()
        for slot, offset in zip(slots, offsets, strict=True):
            operands = operands_of(slot)
            if operands is not None:
                self._write(operands, out[offset : offset + slot.numel()])

    def _reader(self, loss_scale: float, gradient_dtype: torch.dtype | None) -> Callable[[Slot], _Operands | None]:
        """A function of a slot that gives its operands; None: nothing of it may be dropped. Raises: InvalidArgument."""
        if not (math.isfinite(loss_scale) and loss_scale > 0):
            raise InvalidArgument(f"loss_scale must be positive and finite, got {loss_scale}")
        groups = {parameter: group for group in self._optimizer.param_groups for parameter in group["params"]}

        def read(slot: Slot) -> _Operands | None:
            parameter = slot.parameter
            if parameter is None or slot.numel() == 0:
                return None
            terms = self._read_terms(parameter, groups.get(parameter))
            if terms is None:
                return None
            gap = _mantissa_bits(gradient_dtype or parameter.dtype) - _mantissa_bits(parameter.dtype)
            factor = self._world_factor * loss_scale * 2.0**gap
            return _operands(terms, parameter, factor, slice(slot.start, slot.start + slot.numel()))

        return read

    def _read_terms(self, parameter: Tensor, group: dict[str, Any] | None) -> Terms | None:
        if group is None:
            return None
        _require_supported(self._optimizer, group)
        try:
            # .get: the state is a defaultdict, and an entry made here would be taken for a first step done.
            return self._terms_of(parameter, group, self._optimizer.state.get(parameter, {}))
        except KeyError as missing:
            name = type(self._optimizer).__name__
            raise Unsupported(
                f"{name}: the state of a parameter of shape {tuple(parameter.shape)} or its group has no {missing}, "
                "as if an option had been switched on after the first step; make a new optimizer, or: " + _ADVICE
            ) from missing

    def _reserve(self, n: int) -> Tensor:
        """(n,) uint8 of this call's own, from memory that grows to what a bucket needs."""
        first, self._n_ready = self._n_ready, self._n_ready + n
        if self._ready.numel() < self._n_ready:  # the smaller one lives on in the windows that read it
            self._ready, first, self._n_ready = torch.empty(2 * self._n_ready, dtype=torch.uint8, device="cpu"), 0, n
        return self._ready[first : first + n]

    def _write(self, operands: _Operands, out: Tensor) -> None:
        """The bytes of a parameter that the kernel cannot read where it lies, in its memory order, tile by tile."""
        terms, device = operands.terms, out.device
        for begin in range(0, out.numel(), _TILE_ELEMENTS):
            tile = slice(begin, min(begin + _TILE_ELEMENTS, out.numel()))
            theta_tile, second_tile, first_tile = (
                None if values is None else self._float32(number, values[tile], device)
                for number, values in enumerate(operands.in_kernel)
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
        key = number, device
        if key not in self._tiles:
            self._tiles[key] = torch.empty(_TILE_ELEMENTS, dtype=torch.float32, device=device)
        return self._tiles[key][: values.numel()].copy_(values)


class _Operands(NamedTuple):
    """The operands of one parameter's metric; tensors are (n,) in the order of its gradient."""

    theta: Tensor
    terms: Terms

    @property
    def in_kernel(self) -> tuple[Tensor, Tensor | None, Tensor | None]:
        return self.theta, self.terms.second_moment, self.terms.first_moment

    @property
    def are_plain(self) -> bool:
        """The kernel can read them where they lie."""
        return self.terms.mean is None and self.terms.shift is None and all(map(_is_plain, self.in_kernel))


def _operands(terms: Terms, parameter: Tensor, factor: float, part: slice) -> _Operands | None:
    """Lay out the operands of one part of a parameter, in its memory order.

    None where a step size lies beyond float32 (eta below 1e-38, say, or NaN): nothing may be dropped then.
    """
    a, b, c = terms.a * factor, terms.b * factor, terms.c * factor
    if not max(abs(a), abs(b), abs(c)) <= _LARGEST_FLOAT32:
        return None
    parameter = local_of(parameter)

    def flat(values: Tensor) -> Tensor:
        return _flatten_like(values, parameter)[part]

    second, first = (None if one is None else flat(one) for one in (terms.second_moment, terms.first_moment))
    mean, shift = (None if one is None else (one[0], flat(one[1])) for one in (terms.mean, terms.shift))
    return _Operands(flat(parameter), Terms(a, b, c, second, first, mean, shift))


def _write_on_device(
    theta: Tensor, second_moment: Tensor | None, first_moment: Tensor | None, a: float, b: float, c: float, out: Tensor
) -> None:
    """out (n,) uint8 = the bytes of `_native.importance` for (n,) float32 operands, all on one device; enqueues only.

    Every product and sum is an operation of its own, and so rounded on its own: as in the kernel for CPUs.
    """
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


def _find_terms(optimizer: torch.optim.Optimizer) -> Callable[..., Terms | None]:
    for known, terms_of in TERMS_BY_OPTIMIZER.items():
        if isinstance(optimizer, known) and _code_of_step(type(optimizer)) is _code_of_step(known):
            return terms_of
    names = ", ".join(known.__name__ for known in TERMS_BY_OPTIMIZER)
    kind = f"{type(optimizer).__module__}.{type(optimizer).__qualname__}"
    wrapped = getattr(optimizer, "optimizer", None) or getattr(optimizer, "optim", None)
    hint = f"it wraps a {type(wrapped).__name__}: pass that one, if its step is all that changes parameters; or: "
    raise Unsupported(
        f'importance="paper" knows how {names} of torch.optim use a gradient; {kind} is none of them, nor a subclass '
        f"that inherits their step. " + (hint if isinstance(wrapped, torch.optim.Optimizer) else "") + _ADVICE
    )


def _code_of_step(cls: type[torch.optim.Optimizer]) -> Any:
    # torch wraps `step` anew in every class that is instantiated; what is inside tells whether it is the same.
    return inspect.unwrap(cls.step)


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


def _is_plain(values: Tensor | None) -> bool:
    return values is None or (values.dtype == torch.float32 and values.device.type == "cpu" and values.is_contiguous())


def _flatten_like(values: Tensor, parameter: Tensor) -> Tensor:
    """`values` as (n,) in the order of `parameter`'s gradient in a DDP bucket. Raises: Unsupported."""
    values = local_of(values.detach())
    if values.shape != parameter.shape:
        raise Unsupported(
            f"the optimizer holds state of shape {tuple(values.shape)} for a parameter of shape "
            f"{tuple(parameter.shape)}; sharded and flattened optimizers are not supported; {_ADVICE}"
        )
    return flatten_like(values, parameter)
