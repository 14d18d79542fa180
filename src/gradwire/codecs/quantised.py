"""The codecs `one-bit`, `two-bit` and `qsgd`, and the base of all quantisers' codecs.

The base makes native calls and launches kernels, with error feedback in the same sweep as encoding.
"""

import itertools
from collections.abc import Sequence
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from gradwire import _native
from gradwire.checks import choice as check_choice
from gradwire.checks import count as check_count
from gradwire.codecs.tensors import (
    bytes_in,
    check_64_bits,
    check_positive,
    check_room,
    check_size,
    check_tensor,
    dtype_code,
)
from gradwire.errors import InvalidArgument, Unsupported
from gradwire.gpu.kernels import Kernels, kernels_for, kernels_on, table_of, upload_once, zeros_between_launches
from gradwire.gpu.launching import SHARED_OF_CHECKSUM, THREADS, fill_struct, parts

# Of the kernels (gpu/source/quantised.hpp): values that are added up together where a codec has no blocks, bytes of such
# sums, bytes of a message that a block of threads writes or reads.
_CPU_BLOCK, _SUMS_BYTES, _PIECE_BYTES = 4096, 32, 2048
_HEADER_BYTES = 32
_SHARED_OF_SUMS = _SUMS_BYTES * THREADS + 8
_SHARED_OF_PIECE = SHARED_OF_CHECKSUM + 16 + 4 * _PIECE_BYTES

_RULES = {"fixed": 0, "mean": 1, "two-means": 2}
_TWO_SCALES = 2  # the rule of native/quantisers/codec.hpp: for the same values
_BLOCKS = tuple(128 << i for i in range(6))
_SCALE_VALUES = (None, 64, *_BLOCKS)
# Of a threshold that is also what values decode to, in units of the mean magnitude: the squared error is least at sqrt(2)
# for a Laplace distribution and at 1.1 for a Gaussian; 1.25 is 1.2 % and 2.6 % above the least.
_DEFAULT_THRESHOLD, _PAPER_THRESHOLD = 1.25, 0.5


class _Layout(NamedTuple):
    """The places of everything in a message that is made on a device."""

    n_bytes: int  # of the message
    head_bytes: int  # of them before its codes, behind its header
    n_sums: int  # blocks or groups of values that are added up together
    # n_pieces + 1 rows of three: of each tensor's piece its first value, group and word; last, where all end. None
    # without scales by group.
    groups: list[tuple[int, int, int]] | None = None
    per_group: int = 1  # scales

    @property
    def n_blocks(self) -> int:
        """Of threads, of which each takes a piece of what stands before the codes, or of these."""
        n_codes = self.n_bytes - _HEADER_BYTES - self.head_bytes
        return max(1, parts(self.head_bytes, _PIECE_BYTES) + parts(n_codes, _PIECE_BYTES))


class Quantised:
    """A codec that keeps a few bits of every value (docs/format.md#quantised).

    Messages do not say the dtype of what was encoded: they decode to float32, rounded to the dtype of `out`. A gradient
    with Inf or NaN becomes a message that says so and decodes to NaN everywhere.

    A message on a device takes `message_room` bytes, of which one that is not finite uses the header alone.
    """

    name: str
    feeds_back = True
    draws: ClassVar[bool] = False  # whether values are rounded by chance
    _has_kernels: ClassVar[bool] = False
    _shared: ClassVar[tuple[str, ...]] = ()  # options that ranks must share, beside scale_values
    _kind: ClassVar[int]
    _per_word: ClassVar[int] = 16  # codes in 32 bits
    # What the native encoder is told; see native/quantisers/codec.hpp.
    _rule = 1
    _parameter = 0.0
    _levels = 0
    _block = 0
    seed = 0
    # Values to a scale, where they are less than a message's; such a codec wants to know where tensors begin (`cuts`).
    scale_values: int | None = None

    def __init__(self) -> None:
        self._layouts: dict[tuple[int, tuple[int, ...]], _Layout] = {}

    @property
    def configuration(self) -> dict[str, Any]:
        """The options that ranks must share, as plain values."""
        shared = (*self._shared, "scale_values") if self.scale_values else self._shared
        return {name: getattr(self, name) for name in shared}

    def check_device(self, device: torch.device) -> Kernels:
        if not self._has_kernels:
            raise Unsupported(f"{self.name} has no kernels: one-bit, two-bit and qsgd have")
        return kernels_on(device)

    def max_encoded_bytes(self, n_elements: int, dtype: torch.dtype, n_cuts: int = 0) -> int:
        """Bytes of a message of `n_elements` finite values with up to `n_cuts` cuts; no message is longer."""
        dtype_code(dtype)
        check_size(n_elements)
        return _native.quantiser_max_bytes(self._kind, self._levels, self._block, n_elements, n_cuts)

    def message_room(self, n_elements: int, cuts: Sequence[int] = ()) -> int:
        """Bytes of every finite message of `n_elements` values with just these cuts."""
        return self._layout(n_elements, cuts).n_bytes

    def encode(
        self,
        gradient: Tensor,
        out: Tensor,
        importance: Tensor | None = None,
        *,
        step: int = 0,
        cuts: Sequence[int] = (),
        residual: Tensor | None = None,
        new_residual: Tensor | None = None,
        residual_scale: float = 1.0,
    ) -> int | Tensor:
        """As `DeviceCodec.encode`. With a residual, error feedback in one sweep: residual += gradient; encode(residual);
        residual -= decoded. If a value is not finite, the message says only that, and the residual stays.

        Args:
            cuts: where tensors begin in `gradient`, ascending, from 1 to n - 1; only for codecs with `scale_values`,
                none of whose scales then serves two tensors.
            residual: (n,) float32: what earlier messages left out, divided by `residual_scale`; None: nothing.
            new_residual: (n,) float32: where the new residual goes; `residual` itself if not given. Given another
                tensor, `residual` is not changed, so that a step may still be thrown away.
            residual_scale: what the gradient is multiplied by and the residual is not (AMP's loss scale); positive.
        """
        check_64_bits("step", step)
        check_positive("residual_scale", residual_scale)
        new_residual = residual if new_residual is None else new_residual
        if kernels_for(gradient.device) is None:
            for name, tensor in (("residual", residual), ("new_residual", new_residual)):
                if tensor is not None:
                    check_tensor(name, tensor, torch.float32, gradient.numel())
            code, values = dtype_code(gradient.dtype), bytes_in("gradient", gradient)
            if cuts and self.scale_values is None:
                raise InvalidArgument(f"{self.name} has one scale a message here, which cuts mean nothing to")
            if any(not 0 < cut < gradient.numel() for cut in cuts):
                raise InvalidArgument(f"cuts lie from 1 to {gradient.numel() - 1}, got {list(cuts)[:8]}")
            # With cuts the native code says what is too small.
            n_needed = 0 if cuts else self.max_encoded_bytes(gradient.numel(), gradient.dtype)
            room, options = check_room(self.name, out, n_needed), (*self.native_options, step)
            return _native.quantiser_encode(values, code, residual, residual_scale, new_residual, *options, room, cuts)
        n, device = gradient.numel(), gradient.device
        launch = self.check_device(device).launch
        layout = self._layout(n, cuts)
        n_bytes = torch.empty(1, dtype=torch.int64, device=device)
        sum_bytes = _SUMS_BYTES * layout.n_sums if layout.groups is None else 0
        sums = torch.empty(sum_bytes, dtype=torch.uint8, device=device)
        checksums = torch.empty(layout.n_blocks, dtype=torch.int32, device=device)
        turns = zeros_between_launches(device, 2)
        parameters = fill_struct(
            "QuantiseGroups", values=gradient, residual=residual, left_out=new_residual, message=out, sums=sums,
            pieces=checksums, n_bytes=n_bytes, n=n, seed=self.seed, step=step, residual_scale=residual_scale,
            parameter=self._parameter, kind=self._kind, dtype=dtype_code(gradient.dtype), rule=self._rule, turns=turns,
            levels=self._levels, block=self._block or _CPU_BLOCK, **self._grouping(layout, device),
        )  # fmt: skip
        names = ("gw_grouped_measure", "gw_grouped_pack")
        if layout.groups is None:
            names = ("gw_quantised_measure", "gw_quantised_pack_levels" if self._levels else "gw_quantised_pack")
        launch(names[0], max(1, parts(8 * layout.n_sums, THREADS)), THREADS, _SHARED_OF_SUMS, parameters)
        launch(names[1], layout.n_blocks, THREADS, _SHARED_OF_PIECE, parameters)
        return n_bytes

    def decode(
        self,
        message: Tensor,
        out: Tensor,
        importance: Tensor | None = None,
        *,
        divisor: float = 1.0,
        adds: bool = False,
        cuts: Sequence[int] = (),
        error: Tensor | None = None,
    ) -> None:
        """As `DeviceCodec.decode`; into float32 values / divisor can be added. `cuts` are looked at on a device only."""
        code = dtype_code(out.dtype)
        if adds and out.dtype != torch.float32:
            raise InvalidArgument("values are added to float32 only: pass a float32 tensor as out")
        n = out.numel()
        if kernels_for(out.device) is None:
            encoded, decoded = bytes_in("message", message, torch.uint8), bytes_in("out", out)
            _native.quantiser_decode(encoded, self._kind, code, decoded, divisor, adds)
            return
        launch = self.check_device(out.device).launch
        layout = self._layout(n, cuts)
        error = torch.zeros(1, dtype=torch.int32, device=out.device) if error is None else error
        checksums = torch.empty(layout.n_blocks, dtype=torch.int32, device=out.device)
        turns = zeros_between_launches(out.device, 2)
        parameters = fill_struct(
            "DequantiseGroups", message=message, out=out, pieces=checksums, error=error, n=n,
            turns=turns, payload=layout.n_bytes - _HEADER_BYTES, divisor=divisor,
            kind=self._kind, dtype=code, adds=adds, levels=self._levels, block=self._block,
            **self._grouping(layout, out.device),
        )  # fmt: skip
        kernel = "gw_grouped_unpack" if layout.groups else f"gw_quantised_unpack{'_levels' if self._levels else ''}"
        launch(kernel, layout.n_blocks, THREADS, _SHARED_OF_PIECE, parameters)

    def exchange_codec(
        self, dtype: torch.dtype, importance: _native.BucketImportance | None, first_step: int = 0
    ) -> _native.ExchangeCodec:
        """This codec as exchanges call it, whose n-th message draws by step `first_step` + n."""
        return _native.quantiser_exchange_codec(self.native_options, check_64_bits("first_step", first_step))

    @property
    def native_options(self) -> tuple[int, int, float, int, int, int]:
        """Kind, rule, parameter, levels, block, seed: see native/quantisers/codec.hpp."""
        return self._kind, self._rule, self._parameter, self._levels, self._block, self.seed

    def _grouping(self, layout: _Layout, device: torch.device) -> dict[str, Any]:
        """`Grouping` of gpu/source/quantised.hpp."""
        if layout.groups is None:
            return {}
        uploaded, n_pieces = upload_once(device, table_of, *layout.groups), len(layout.groups) - 1
        sizes = {"group_values": self.scale_values, "per_group": layout.per_group}
        return {"groups": uploaded, "n_pieces": n_pieces, **sizes}

    def _layout(self, n_elements: int, cuts: Sequence[int]) -> _Layout:
        key = n_elements, tuple(cuts)
        if key not in self._layouts:
            self._layouts[key] = self._lay_out(*key)
        return self._layouts[key]

    def _lay_out(self, n_elements: int, cuts: tuple[int, ...]) -> _Layout:
        if self.scale_values is None:
            n_bytes = self.max_encoded_bytes(n_elements, torch.float32)
            n_sums = parts(n_elements, self._block or _CPU_BLOCK)
            return _Layout(n_bytes, 4 * n_sums if self._levels else 0, n_sums)
        bounds = [0, *cuts, n_elements] if n_elements or cuts else [0]
        if any(start >= end for start, end in itertools.pairwise(bounds)):
            raise InvalidArgument(f"cuts ascend and lie from 1 to {n_elements - 1}, got {list(cuts)[:8]}")
        rows = [(0, 0, 0)]
        for start, end in itertools.pairwise(bounds):
            _, first_group, first_word = rows[-1]
            n = end - start
            rows.append((end, first_group + parts(n, self.scale_values), first_word + parts(n, self._per_word)))
        _, n_groups, n_words = rows[-1]
        per_group = 2 if self._rule == _TWO_SCALES else 1
        head_bytes = 4 + 4 * len(cuts) + 4 * parts(2 * per_group * n_groups, 4)
        return _Layout(_HEADER_BYTES + head_bytes + 4 * n_words, head_bytes, n_groups, rows, per_group)


class OneBit(Quantised):
    """The sign of every value, and one or two scales for all of them (Seide et al., Interspeech 2014). 1/32 of float32.

    Values from zero up (and -0.0) decode to +scale, values below zero to -scale.

    Args:
        scale: "mean": the mean magnitude, so that the sum of magnitudes is kept; "two-means": the mean of the values
            from zero up for the one sign, of those below for the other, which is the smallest squared error that one
            bit can have; "fixed": `threshold` for every message, as in SlimGC's experiments.
        threshold: only with "fixed"; 0.5 if not given, which is in units of a gradient *summed* over the batch: with a
            mean loss, divide it by the batch size.
        scale_values: values to a scale, 64, 128, ..., 4096; None for one scale a message. A scale is then rounded to
            bfloat16, so that 64 values take 1.25 bits each, 512 take 1.03, and belongs to values of one tensor (`cuts`).
    When not to use this: without error feedback; every value decodes to the same magnitude, zeros included.
    """

    name = "one-bit"
    _kind = 0
    _shared = ("scale", "threshold")
    _per_word = 32
    _has_kernels = True

    def __init__(self, scale: str = "mean", threshold: float | None = None, scale_values: int | None = None) -> None:
        super().__init__()
        check_choice("scale", scale, _RULES)
        if threshold is not None and scale != "fixed":
            raise InvalidArgument(f'threshold={threshold} means nothing with scale="{scale}": use scale="fixed"')
        if scale_values is not None and scale == "fixed":
            raise InvalidArgument('scale_values means nothing with scale="fixed", which is one for all values')
        self.scale = scale
        self.scale_values = check_choice("scale_values", scale_values, _SCALE_VALUES)
        self._block = self.scale_values or 0
        self.threshold = check_positive("threshold", 0.5 if threshold is None else threshold)
        self._rule = _RULES[scale]
        self._parameter = self.threshold if scale == "fixed" else 0.0


class TwoBit(Quantised):
    """+t, 0 or -t for every value, by a threshold t (SlimGC's 2-bit quantiser, that of MXNet). 1/16 of float32.

    Values >= t decode to t, values <= -t to -t, others to 0. With `levels=4` nothing decodes to zero: a value becomes the
    nearest of four levels, whose squared error for normally distributed values is the least that two bits can have (Max
    1960): 0.12 of their square, where three levels leave 0.35.

    Args:
        threshold: t; relative, 1.25 if not given; absolute, 0.5 as in the paper, which is in units of a gradient
            *summed* over the batch (with a mean loss, divide it by the batch size).
        relative: t is in units of each message's mean magnitude. The default, because an absolute threshold that does
            not fit the gradient's scale sends either nothing or noise, and that scale changes in the course of training.
        scale_values: values to a mean magnitude, 64, 128, ..., 4096; None for one threshold a message. A threshold is
            then rounded to bfloat16 and belongs to values of one tensor (`cuts`).
        levels: 3 (+t, 0, -t), or 4: +-0.5675 and +-1.893 mean magnitudes, with `scale_values` only and without a
            threshold.
    When not to use this: without error feedback; values below the threshold would never be sent.
    """

    name = "two-bit"
    _kind = 1
    _shared = ("threshold", "relative")
    _has_kernels = True

    def __init__(
        self, threshold: float | None = None, relative: bool = True, scale_values: int | None = None, levels: int = 3
    ) -> None:
        super().__init__()
        self.levels = check_choice("levels", levels, (3, 4))
        if levels == 4 and (threshold is not None or not relative or scale_values is None):
            raise InvalidArgument(
                "levels=4 is for scale_values=64, 128, ..., 4096, whose mean magnitudes it follows: leave threshold and "
                "relative out"
            )
        default = _DEFAULT_THRESHOLD if relative else _PAPER_THRESHOLD
        self.threshold = check_positive("threshold", default if threshold is None else threshold)
        self.relative = bool(relative)
        if scale_values is not None and not relative:
            raise InvalidArgument(
                "scale_values means nothing with relative=False, whose threshold is one for all values"
            )
        self.scale_values = check_choice("scale_values", scale_values, _SCALE_VALUES)
        self._block = self.scale_values or 0
        self._rule = _TWO_SCALES if levels == 4 else 1 if self.relative else 0
        self._parameter = self.threshold

    @property
    def configuration(self) -> dict[str, Any]:
        return {**super().configuration, **({"levels": 4} if self.levels == 4 else {})}


class Qsgd(Quantised):
    """Levels between zero and the norm of a block, rounded by chance (Alistarh et al., NeurIPS 2017).

    x becomes norm x sign(x) x l / levels, where l is |x| / norm x levels rounded up or down by chance: right on average.

    Every block has its own Euclidean norm; a block of norm zero (below 2^-100) decodes to zeros. With up to 7 levels
    and the sign a value takes 4 bits, with more 8: 0.133 or 0.258 of float32 at 512 values a block.

    Args:
        levels: 1 to 127; 7 in the comparison of SlimGC.
        block: values to a norm: 128, 256, ..., 4096. Smaller blocks have smaller norms and so smaller errors.
        seed: of the rounding.
    When not to use this: at levels 7 where one-bit or two-bit with error feedback converges: they send less.
    """

    name = "qsgd"
    _kind = 3
    _shared = ("levels", "block", "seed")
    draws = True
    _has_kernels = True
    feeds_back = False

    def __init__(self, levels: int = 7, block: int = 512, seed: int = 0) -> None:
        super().__init__()
        self.levels = self._levels = check_count("levels", levels, 1, 127)
        self.block = self._block = check_choice("block", block, _BLOCKS)
        self.seed = check_64_bits("seed", seed)


def describe(message: Tensor) -> dict[str, Any]:
    """What a message's header says, as plain values. Raises: as `decode`; the codes are checked by the checksum only."""
    return _native.quantiser_describe(bytes_in("message", message, torch.uint8))
