"""GComp's quantisation metric: how much of each gradient value can still reach its parameter, one byte an element."""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gradwire import _native
from gradwire.codecs.tensors import check_tensor
from gradwire.core.bucket import offsets_of
from gradwire.core.slot import Slot, flatten_like, local_of, slot_of
from gradwire.core.staging import StagedBucket
from gradwire.errors import InvalidArgument, Unsupported
from gradwire.schemes.gcomp import importance_on_device
from gradwire.schemes.gcomp.terms import TERMS_BY_OPTIMIZER, Terms

__all__ = ["QuantisationMetric"]

_ADVICE = 'importance="uniform" (a fixed number of bits) and importance="none" (lossless) work with every optimizer'

_MANTISSA_BITS = {torch.float64: 52, torch.float32: 23, torch.float16: 10, torch.bfloat16: 7}

# What float32 holds without overflow: beyond it S would be Inf or NaN, and the metric says nothing.
_LARGEST_FLOAT32 = torch.finfo(torch.float32).max

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
        self._tiles = _Tiles()
        self._ready = torch.empty(
            0, dtype=torch.uint8, device="cpu"
        )  # bytes that are written before they are asked for
        self._n_ready = 0
        for group in optimizer.param_groups:
            _require_supported(optimizer, group)
            for parameter in group["params"]:
                _mantissa_bits(parameter.dtype)

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
        """What `write_importance` writes, for any range of the bucket, from parameters and state as they are then.

        The optimizer must not step before it has been used; it is void when this is called again.

        Args:
            staged: of a bucket from a device: the bytes are computed there, and wait for nothing else. Raises: OutOfMemory.
        """
        places = sorted(zip(offsets, map(slot_of, slots), strict=True), key=lambda place: place[0])
        if staged is not None:
            in_order, device = [slot for _, slot in places], staged.on_device.device
            on_host = staged.compute(lambda: self.bytes_on_device(in_order, device, loss_scale, gradient_dtype))
            return _windows_of(on_host, places)
        operands_of = self._reader(loss_scale, gradient_dtype)
        windows: list[tuple[int, int, int, int, int, float, float, float, int]] = []
        reads: list[Tensor] = []
        self._n_ready = 0
        for offset, slot in places:
            n, operands = slot.numel(), operands_of(slot)
            if n == 0:
                continue
            if operands is None:
                ready = self._reserve(n).zero_()
            elif operands.is_plain:
                reads += operands.tensors
                windows.append((offset, n, *operands.addresses, operands.a, operands.b, operands.c, 0))
                continue
            else:
                ready = self._reserve(n)
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
        """What to read for a slot; None: nothing of it may be dropped. Raises: InvalidArgument."""
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
        for begin in range(0, out.numel(), _TILE_ELEMENTS):
            tile = slice(begin, min(begin + _TILE_ELEMENTS, out.numel()))
            load = functools.partial(self._tiles.load, tile=tile, device=out.device)
            theta_tile = load(0, operands.theta)
            second_tile = None if operands.second is None else load(1, operands.second)
            first_tile = None if operands.first is None else load(2, operands.first)
            if operands.mean is not None and second_tile is not None:
                mean_tile = load(3, operands.mean[1])
                second_tile.addcmul_(mean_tile, mean_tile, value=-operands.mean[0])
            if operands.shift is not None:
                theta_tile.add_(load(3, operands.shift[1]), alpha=operands.shift[0])
            write = _native.importance if out.device.type == "cpu" else importance_on_device.write_importance
            write(theta_tile, second_tile, first_tile, operands.a, operands.b, operands.c, out[tile])


@dataclass(frozen=True)
class _Operands:
    """The terms of one parameter, as (n,) in the order of its gradient."""

    a: float
    b: float
    c: float
    theta: Tensor
    second: Tensor | None
    first: Tensor | None
    mean: tuple[float, Tensor] | None
    shift: tuple[float, Tensor] | None

    @property
    def is_plain(self) -> bool:
        """Whether the kernel can read them where they lie."""
        return self.mean is None and self.shift is None and all(map(_is_plain, (self.theta, self.second, self.first)))

    @property
    def tensors(self) -> list[Tensor]:
        return [values for values in (self.theta, self.second, self.first) if values is not None]

    @property
    def addresses(self) -> tuple[int, int, int]:
        theta, second, first = (
            0 if values is None else values.data_ptr() for values in (self.theta, self.second, self.first)
        )
        return theta, second, first


def _operands(terms: Terms, parameter: Tensor, factor: float, part: slice) -> _Operands | None:
    """Those of one part of a parameter, in its memory order.

    None where a step size lies beyond float32 (eta below 1e-38, say, or NaN): nothing may be dropped then.
    """
    a, b, c = terms.a * factor, terms.b * factor, terms.c * factor
    if not max(abs(a), abs(b), abs(c)) <= _LARGEST_FLOAT32:
        return None
    parameter = local_of(parameter)

    def flatten(values: Tensor | None) -> Tensor | None:
        return None if values is None else _flatten_like(values, parameter)[part]

    def flatten_weighted(weighted: tuple[float, Tensor] | None) -> tuple[float, Tensor] | None:
        return None if weighted is None else (weighted[0], _flatten_like(weighted[1], parameter)[part])

    return _Operands(
        a, b, c, _flatten_like(parameter, parameter)[part], flatten(terms.second_moment), flatten(terms.first_moment),
        flatten_weighted(terms.mean), flatten_weighted(terms.shift),
    )  # fmt: skip


def _windows_of(ready: Tensor, places: Sequence[tuple[int, Slot]]) -> _native.BucketImportance:
    """Bytes that are there already, one slot's after the other's, as the kernels ask for them."""
    windows, address = [], ready.data_ptr()
    for offset, slot in places:
        if slot.numel():
            windows.append((offset, slot.numel(), 0, 0, 0, 0.0, 0.0, 0.0, address))
        address += slot.numel()
    importance = _native.BucketImportance(windows)
    importance.reads = [ready]
    return importance


class _Tiles:
    """Float32 copies of one tile of each operand, where the kernel cannot read the operand itself."""

    def __init__(self) -> None:
        self._buffers: dict[tuple[int, torch.device], Tensor] = {}

    def load(self, slot: int, values: Tensor, tile: slice, device: torch.device) -> Tensor:
        key = slot, device
        if key not in self._buffers:
            self._buffers[key] = torch.empty(_TILE_ELEMENTS, dtype=torch.float32, device=device)
        return self._buffers[key][: tile.stop - tile.start].copy_(values[tile])


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
