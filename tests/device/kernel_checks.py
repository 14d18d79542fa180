"""Kernels beside the CPU's code, bit for bit: one run over tables of data, on the emulator or on a GPU.

Each `assert_*` compares one case, and raises AssertionError where it differs.
"""

import itertools
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gradwire.codecs import packed_values
from gradwire.codecs.count_sketch import index_words
from gradwire.codecs.embedded_float import EmbeddedFloat
from gradwire.codecs.gcomp import GCompCodec, HuffmanTable
from gradwire.codecs.hadamard import Thc
from gradwire.codecs.packed_values import FLAGS_AT, HEAD_WORDS, PAST_THE_END
from gradwire.codecs.quantised import OneBit, Qsgd, Quantised, TwoBit
from gradwire.codecs.selection import add_elements, take_by_sample, take_largest
from gradwire.codecs.selection import raise_error as raise_selection_error
from gradwire.codecs.signs import Signs
from gradwire.codecs.ternary import Ternary
from gradwire.codecs.truncated_float import TruncatedFloat
from gradwire.errors import GradwireError
from gradwire.gpu.kernels import Kernels, using
from gradwire.gpu.launching import raise_error
from gradwire.schemes.compressed import count_of
from gradwire.schemes.dgc import draw_sample
from gradwire.schemes.matrices import multiply, orthogonalise

# Of threads and blocks on the emulator: forward, backward, two by chance.
ORDERS = (0, 1, 5, 6)
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
CONTENTS = ("gradient", "zeros", "negative zeros", "subnormal", "large", "nan", "infinity", "one")
LOSS_SCALE = 512.0
STEP, SIGN_STEP = (1 << 50) + 7, (1 << 60) + 11

QUANTISERS: dict[str, Quantised] = {
    "one-bit": OneBit(), "one-bit two-means": OneBit("two-means"), "one-bit fixed": OneBit("fixed", 0.25),
    "two-bit": TwoBit(), "two-bit absolute": TwoBit(0.01, relative=False),
    "one-bit by group": OneBit(scale_values=512),
    "one-bit two-means by group": OneBit("two-means", scale_values=64),
    "two-bit by group": TwoBit(scale_values=128), "four levels by group": TwoBit(scale_values=64, levels=4),
    "qsgd": Qsgd(), "qsgd 127": Qsgd(levels=127, block=128, seed=(1 << 63) + 5),
    "qsgd 4096": Qsgd(levels=3, block=4096),
}  # fmt: skip
QUANTISED_SIZES = (0, 1, 31, 32, 33, 63, 64, 65, 511, 513, 4095, 4096, 4097, 9_000)

Float = TruncatedFloat | EmbeddedFloat


def floats() -> dict[str, Float]:
    """Every format and rounding; 2 to 16 bits, and embedded floats of some more."""
    found: dict[str, Float] = {}
    for bits in range(2, 17):
        found[f"truncated {bits}"] = TruncatedFloat(bits)
        native = TruncatedFloat(bits, "native", "stochastic", seed=(1 << 63) + bits)
        found |= {f"truncated native {bits} stochastic": native, f"embedded {bits}": EmbeddedFloat(bits)}
    narrow = (("fp16", 16), ("fp16", 5), ("fp8-e4m3", 8), ("fp8-e4m3", 3), ("fp8-e5m2", 7), ("fp6-e3m2", 6))
    for (name, bits), rounding in itertools.product(narrow, ("nearest", "truncate", "stochastic")):
        found[f"{name} {bits} {rounding}"] = TruncatedFloat(bits, name, rounding, partition=32)
    for rounding in ("truncate", "stochastic"):
        found[f"fp4-e2m1 4 {rounding}"] = TruncatedFloat(4, "fp4-e2m1", rounding, partition=1024)
        found[f"native 11 {rounding}"] = TruncatedFloat(11, "native", rounding, partition=64)
    for bits, partition, form in ((17, 32, 2), (24, 64, 2), (25, 64, 2), (31, 1024, 2), (7, 256, 1), (31, 64, 1)):
        found[f"embedded {bits} by {partition}, format {form}"] = EmbeddedFloat(bits, partition, form)
    return found


FLOATS = floats()
# Of float32, which alone has so many bits.
WIDE_FLOATS: dict[str, Float] = {
    f"truncated native {bits} {rounding}": TruncatedFloat(bits, "native", rounding)
    for bits, rounding in itertools.product((17, 20, 25, 31, 32), ("nearest", "truncate", "stochastic"))
}
FLOAT_SIZES = (0, 1, 31, 32, 33, 255, 256, 257, 1_000)
FLOAT_EDGES = (16_383, 16_384, 16_385)  # of chunks


def table_of(few: int, weights: slice, weight: int, zeros: int) -> HuffmanTable:
    """A table for exponents that were each seen `few` times, those of `weights` `weight` times, and zeros."""
    counts = torch.full((256,), few, dtype=torch.int64)
    counts[0], counts[weights] = zeros, weight
    return HuffmanTable.from_histogram(counts)


GCOMP = {
    "uniform": GCompCodec("uniform", bits=6),
    "paper": GCompCodec("paper"),
    "paper, few codes": GCompCodec("paper", bits=5, table=table_of(0, slice(110, 124), 10, 5)),  # the rest is escaped
    "none, every exponent has a code": GCompCodec("none", table=table_of(1, slice(100, 132), 8, 1)),
    "truncate": GCompCodec("truncate", bits=7),
    "paper, truncated": GCompCodec("paper", rounding="truncate"),
    "paper, 4 to 9 bits": GCompCodec("paper", bits=9, least_bits=4),
}
GCOMP_SIZES = (0, 1, 3, 4, 5, 15, 16, 17, 33, 1_000)


def values_of(content: str, n: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    """(n,) of `dtype` on the CPU."""
    generator = torch.Generator().manual_seed(seed + n)
    values = torch.randn(n, generator=generator) * torch.exp(torch.randn(n, generator=generator) * 2 - 6)
    share = {"sparse": 0.05, "few": 0.001, "zeros": 0.0, "one": 0.0}.get(content, 0.95)
    values[torch.rand(n, generator=generator) >= share] *= 0  # of both signs
    factors = {"subnormal": (1e-37, 1e-5), "large": (1e37, 1e3), "smaller": (1e36, 1e3), "tiny": (1e-30, 1e-5)}
    values *= factors.get(content, (1.0, 1.0))[dtype == torch.float16]
    if content == "zeros":
        values.zero_()
    elif content == "negative zeros":
        values.fill_(-0.0)
    elif content == "alike":  # equal magnitudes are taken by their places
        values.sign_().mul_(0.5)
    elif content == "short":  # many are equal
        values = values.bfloat16().float()
    elif content == "steep":  # a sample's threshold has to be moved far
        values = torch.exp(torch.randn(n, generator=generator) * 30).clamp(max=3e38)
    elif content == "specials":  # -0 is a zero; NaN, and what a rank sends with it, is none
        values[::3] = -0.0
    if n and content in ("nan", "infinity", "specials"):
        values[n // 3] = float("-inf") if content == "infinity" else float("nan")
    if n and content == "one":
        values[n - 1] = 1.5
    return values.to(dtype)


def importance_of(n: int) -> Tensor:
    """(n,) uint8: around the size of the values of `values_of`, some of any value."""
    generator = torch.Generator().manual_seed(n)
    importance = (torch.randn(n, generator=generator) * 30 + 150).clamp(0, 255).to(torch.uint8)
    importance[torch.rand(n, generator=generator) < 0.1] = 0
    return importance


def spans_of(n: int, *cuts: int) -> list[tuple[int, int]]:
    """Tensors of one value, of none, of some more, and the rest."""
    return [(0, 0), *itertools.pairwise(sorted({0, n, *(cut for cut in (1, 70, *cuts) if cut < n)}))]


# ---- what differs

_FENCE = 0x37  # a finite value of every dtype


class Fenced(NamedTuple):
    """Memory with some behind it that nobody is to write to."""

    inner: Tensor
    whole: Tensor

    def check(self, n_used: int | None = None) -> None:
        """Raises: AssertionError (something past its first `n_used` elements was written; None: past its end)."""
        rest = self.whole[self.inner.numel() if n_used is None else n_used :].cpu().view(torch.uint8)
        assert bool((rest == _FENCE).all()), "past the end was written"


def fenced(n: int, dtype: torch.dtype, place: torch.device, values: Tensor | None = None) -> Fenced:
    """(n,) of `dtype`, filled with `values`, if given."""
    whole = torch.full(((n + 8) * dtype.itemsize,), _FENCE, dtype=torch.uint8, device=place).view(dtype)
    if values is not None:
        whole[:n] = values.to(place)
    return Fenced(whole[:n], whole)


def require_same(found: Tensor, expected: Tensor, what: str, *, any_nan: bool = False) -> None:
    """Bit by bit; with `any_nan`, whatever a NaN looks like. Raises: AssertionError, with the first that differ."""
    words = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}[expected.element_size()]
    found = found.cpu()
    assert found.shape == expected.shape, f"{what} of another shape"
    differs = found.contiguous().view(words) != expected.view(words)
    if any_nan:
        differs &= ~(found.isnan() & expected.isnan())
    assert not bool(differs.any()), f"other {what}, the first at {differs.nonzero()[:8].view(-1).tolist()}"


def require_alike(kernels: Kernels, run: Callable[[torch.device], Iterator[tuple[str, Tensor]]]) -> None:
    """What `run` yields in a place, by name, is the same on the CPU and where kernels do the work."""
    expected = [(what, values.clone()) for what, values in run(torch.device("cpu"))]
    with using(kernels):
        for (what, wanted), (_, found) in zip(expected, run(kernels.device), strict=True):
            require_same(found, wanted, what, any_nan=what == "sums")


# ---- messages

Way = tuple[torch.dtype, float, bool]  # values / a divisor, or added to others


def assert_messages(
    kernels: Kernels, codec: Any, values: Tensor, room: int, ways: Sequence[Way], importance: Tensor | None = None,
    residual: Tensor | None = None, cuts: Sequence[int] = (), *, is_exact: bool = False,
) -> None:  # fmt: skip
    """Message, residual and decoded values of the kernels are the CPU's, and nothing beside them is written.
    `is_exact`: the kernels read a message in memory of just its length, and write nothing else of the room."""
    n, place = values.numel(), kernels.device
    options: dict[str, Any] = {"step": STEP, "cuts": cuts} if isinstance(codec, Quantised) else {"step": STEP}
    weights = None if importance is None else importance.to(place)
    expected, written = torch.empty(room, dtype=torch.uint8), fenced(room, torch.uint8, place)
    if residual is None:
        n_bytes = int(codec.encode(values, expected, importance, **options))
        with using(kernels):
            n_found = int(codec.encode(values.to(place), written.inner, weights, **options))
    else:
        left, found_left = torch.empty(n), fenced(n, torch.float32, place)
        options |= {"residual_scale": 2 * LOSS_SCALE}
        n_bytes = int(codec.encode(values, expected, residual=residual, new_residual=left, **options))
        with using(kernels):
            options |= {"residual": residual.to(place), "new_residual": found_left.inner}
            n_found = int(codec.encode(values.to(place), written.inner, **options))
        require_same(found_left.inner, left, "residuals")
        found_left.check()
    assert n_found == n_bytes, f"{n_found} bytes, not {n_bytes}"
    require_same(written.inner[:n_bytes], expected[:n_bytes], "bytes")
    written.check(n_bytes if is_exact else None)
    message = expected[:n_bytes]
    for dtype, divisor, adds in ways:
        wanted = torch.linspace(-1, 1, n).to(dtype)
        out, error = fenced(n, dtype, place, wanted), torch.zeros(1, dtype=torch.int32, device=place)
        codec.decode(message, wanted, importance, divisor=divisor, adds=adds)
        options = {"cuts": cuts} if isinstance(codec, Quantised) else {}
        with using(kernels):
            there = message.to(place) if is_exact else written.inner
            codec.decode(there, out.inner, weights, divisor=divisor, adds=adds, error=error, **options)
        raise_error(int(error), codec.name, place)
        is_plain = divisor == 1 and not adds and not isinstance(codec, Quantised)
        require_same(out.inner, wanted, f"values ({dtype}, / {divisor}, adds: {adds})", any_nan=not is_plain)
        out.check()


def assert_quantised(kernels: Kernels, codec: Quantised, values: Tensor, residual: Tensor | None = None) -> None:
    """Cut where tensors begin: after one value, a piece about as long as a group, in the middle, and near the end."""
    n = values.numel()
    cuts = sorted({cut for cut in (1, 66, 578, n // 2, n - 1) if 0 < cut < n}) if codec.scale_values else []
    ways = [(values.dtype, 1.0, False), (torch.float32, 3.0, False), (torch.float32, 3.0, True)]
    assert_messages(kernels, codec, values, codec.message_room(n, cuts), ways, residual=residual, cuts=cuts)


def assert_floats(kernels: Kernels, codec: Float, values: Tensor) -> None:
    room = codec.max_encoded_bytes(values.numel(), values.dtype)
    assert_messages(kernels, codec, values, room, [(values.dtype, *way) for way in ((1, False), (3, False), (1, True))])


def assert_gcomp(kernels: Kernels, codec: GCompCodec, values: Tensor, importance: Tensor) -> None:
    """And counts of exponents."""
    room = codec.max_encoded_bytes(values.numel(), values.dtype)
    ways = [(values.dtype, *way) for way in ((1, False), (3, False), (4, False), (1, True))]
    assert_messages(kernels, codec, values, room, ways, importance, is_exact=True)
    expected, counts = torch.ones(256, dtype=torch.int64), torch.ones(256, dtype=torch.int64, device=kernels.device)
    codec.histogram(values, expected)
    with using(kernels):
        codec.histogram(values.to(kernels.device), counts)
    require_same(counts, expected, "counts of exponents")


# ---- kernels that make no messages


def assert_products(kernels: Kernels, shape: tuple[int, int, int], way: tuple[torch.dtype, bool]) -> None:
    (rank, n, m), (dtype, subtract), place = shape, way, kernels.device
    left, right, matrix = (drawn_factors(size) for size in ((rank, n), (rank, m), (n, m)))
    expected, found = matrix.to(dtype, copy=True), matrix.to(place, dtype, copy=True)
    multiply(None, left[None], right[None], [expected], subtract)
    multiply(kernels, left[None].to(place), right[None].to(place), [found], subtract)
    require_same(found, expected, "products")


def assert_orthogonal(kernels: Kernels, shape: tuple[int, int]) -> None:
    """Orthonormal factors of nine matrices: one of zeros, of equal rows, of one column, and very large and small ones."""
    factors = drawn_factors((9, *shape))
    factors[1] = 0
    factors[2, -1] = factors[2, 0]
    factors[3, :, 1:] = 0
    factors[4:] *= torch.tensor([1e15, 1e34, 1e-25, 1e-38, 1e-43]).view(5, 1, 1)
    found = factors.to(kernels.device, copy=True)
    orthogonalise(None, factors)
    orthogonalise(kernels, found)
    require_same(found, factors, "factors")


def drawn_factors(shape: tuple[int, ...]) -> Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(shape, generator=generator) * torch.exp(torch.randn(shape, generator=generator))


def assert_selection(kernels: Kernels, values: Tensor, share: float, way: str) -> None:
    """The native core's elements in its order, and their sums. `way`: "exact": the largest; by thresholds from samples:
    of the "whole", of "spans", of many spans of "threes"."""
    n, samples = values.numel(), []
    if way == "exact":
        counts = [count_of(share, n)]
    else:
        spans = [(0, n)] if way == "whole" else spans_of(n, *(range(3, n, 3) if way == "threes" else (4_700, 25_000)))
        if len(spans) > 3:
            del spans[2]  # its values are in no span
        counts = [count_of(share, end - start) for start, end in spans]
        generator = torch.Generator().manual_seed(11)
        samples = [draw_sample(end - start, k, generator) for (start, end), k in zip(spans, counts, strict=True)]

    def run(place: torch.device) -> Iterator[tuple[str, Tensor]]:
        left = values.to(place, copy=True)
        if way == "exact":
            count = torch.tensor(counts, dtype=torch.int32, device=place)
            indices, taken, is_finite = take_largest(left, *counts)
            yield "whether values are finite", is_finite
        else:
            zeroed = torch.ones_like(left)
            count, indices, taken = take_by_sample(left, spans, counts, samples, zeroed)
            yield "places beside them", zeroed
        yield from (("numbers", count), ("elements", indices), ("values", taken), ("values left", left))
        sums, error = torch.linspace(-1, 1, n).to(place), torch.zeros(1, dtype=torch.int32, device=place)
        add_elements(indices, taken, sums, error, count)
        raise_selection_error(int(error))
        yield "sums", sums

    require_alike(kernels, run)


def assert_signs(kernels: Kernels, shape: tuple[int, int], dtype: torch.dtype, ties: bool) -> None:
    """Signs of `shape` (values, ranks) and their majority: zeros of both signs, subnormals, and ranks that are alike."""
    (n, n_ranks), place, signs = shape, kernels.device, Signs(ties)
    values = torch.randn(n_ranks, n, generator=torch.Generator().manual_seed(n + n_ranks))
    values *= torch.tensor([1.0, 0.0, 1e-39, 1e37]).repeat(-(-n // 4))[:n]
    values[:, ::9] = values[:1, ::9]
    values = finite(values, dtype)
    n_words = signs.n_words(values[0])
    expected, voted = torch.empty(n_ranks, n_words, dtype=torch.int32), torch.empty(n, dtype=dtype)
    for words, own in zip(expected, values, strict=True):
        assert bool(signs.pack(own, words)), "finite values were called others"
    signs.vote(expected, voted, LOSS_SCALE)
    # A word before them, and one that stays as it is.
    found = torch.full((n_ranks, n_words + 2), -1, dtype=torch.int32, device=place)
    flags, out = torch.zeros(1, dtype=torch.int32, device=place), fenced(n, dtype, place)
    with using(kernels):
        for words, own in zip(found, values.to(place), strict=True):
            assert bool(signs.pack(own, words[:-1])), "finite values were called others"
        signs.vote(found[:, :-1], out.inner, LOSS_SCALE, flags)
    packed = found.cpu()
    require_same(packed[:, 1:-1], expected, "signs")
    assert not bool(packed[:, 0].any()), "finite values were noted as others"
    assert int(flags) == 0, "finite values were noted as others"
    assert bool((packed[:, -1] == -1).all()), "words past the message were written"
    require_same(out.inner, voted, "majority")
    bad = values[-1].to(place, copy=True)  # one rank's value that is not finite: all are NaN
    bad[n // 2] = float("-inf") if n % 2 else float("nan")
    with using(kernels):
        is_finite = signs.pack(bad, found[-1, :-1])
        signs.vote(found[:, :-1], out.inner, LOSS_SCALE, flags)
    assert (bool(is_finite), int(flags)) == (False, 1), "a value that is not finite was not told"
    assert bool(out.inner.isnan().all()), "a value that is not finite was not told"
    out.check()


def assert_ternary(kernels: Kernels, values: Tensor, n_ranks: int, is_cut: bool) -> None:
    """Scales, fields and means of ranks that all drew the same."""
    n, values = values.numel(), finite(values)
    codec, spans = Ternary(2.5, seed=n), spans_of(n, 4700) if is_cut else [(0, n)]

    def run(place: torch.device) -> Iterator[tuple[str, Tensor]]:
        there, shares = values.to(place, copy=True), codec.share(n, spans, place)
        scales = torch.zeros(len(shares.spans), device=place)
        codec.write_scales(there, shares, scales)
        yield "scales", scales[[start < end for start, end in shares.spans]]  # what is empty has none on a device
        scales *= 1.5  # another rank's are larger
        fields = fenced(codec.count_bytes(n, n_ranks), torch.uint8, place)
        codec.write_counts(there, shares, scales, n_ranks, fields.inner, STEP)
        yield "fields", fields.inner
        fields.check()
        codec.read_counts(fields.inner * n_ranks, shares, scales, n_ranks, there)
        yield "means", there

    require_alike(kernels, run)


def assert_thc(kernels: Kernels, values: Tensor, n_ranks: int) -> None:
    """Norms, codes, residuals and means; without a residual for 9 ranks and an even number of values."""
    n, codec, values = values.numel(), Thc(seed=values.numel()), finite(values)
    residual = values_of("gradient", n) / 3 if n_ranks == 8 or n % 2 else None
    draws: dict[str, Any] = {"n_ranks": n_ranks, "sign_step": SIGN_STEP, "step": STEP, "residual_scale": LOSS_SCALE}

    def run(place: torch.device) -> Iterator[tuple[str, Tensor]]:
        there, old = values.to(place), None if residual is None else residual.to(place)
        norms = torch.zeros(codec.n_norms(n), device=place)
        codec.write_norms(there, norms, old, LOSS_SCALE)
        yield "norms", norms
        norms *= 1.5  # another rank's are larger
        codes, left = fenced(codec.code_bytes(n, n_ranks), torch.uint8, place), fenced(n, torch.float32, place)
        new = None if old is None else left.inner
        codec.write_codes(there, norms, codes.inner, residual=old, new_residual=new, **draws)
        yield "codes", codes.inner
        codes.check()
        yield "residuals", left.inner
        left.check(0 if old is None else None)
        codec.summable(codes.inner, n_ranks).mul_(n_ranks)  # all of them drew the same
        out = fenced(n, values.dtype, place)
        codec.read_sums(codes.inner, norms, n_ranks, out.inner, sign_step=SIGN_STEP)
        yield "means", out.inner
        out.check()

    require_alike(kernels, run)


def finite(values: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    return values.float().clamp(-3e38, 3e38).to(dtype or values.dtype).nan_to_num(posinf=6e4, neginf=-6e4)


def assert_index(kernels: Kernels, values: Tensor) -> None:
    """Head, bits, counts, packed values and values again."""
    n, place = values.numel(), kernels.device
    there = values.to(place)
    n_words, facts = HEAD_WORDS + index_words(n), 0x12345678
    message, found = torch.empty(n_words, dtype=torch.int32), fenced(n_words, torch.int32, place)
    head, found_index = found.inner[:HEAD_WORDS], found.inner[HEAD_WORDS:]
    packed_values.write_index(values, message, facts)
    with using(kernels):
        packed_values.write_index(there, found.inner, facts)
    require_same(head, message[:HEAD_WORDS], "head")
    require_same(found.inner, message, "bits")
    found.check()

    index = message[HEAD_WORDS:]
    index |= index.roll(1) & (index.roll(7) | 0x10101)  # other ranks have other non-zeros
    if n % 32:
        index[-1] &= (1 << n % 32) - 1
    found.inner.copy_(message)
    count = int(packed_values.count(index, n))
    packed, again = torch.empty(count, dtype=values.dtype), torch.empty(n, dtype=values.dtype)
    packed_values.pack(values, index, packed)
    packed_values.unpack(packed, index, again)
    room, unpacked = fenced(count, values.dtype, place), fenced(n, values.dtype, place, values)
    with using(kernels):
        ends = packed_values.count(found_index, n, head)
        packed_values.pack(there, found_index, room.inner, ends)
        packed_values.unpack(room.inner, found_index, unpacked.inner, ends)
    assert int(ends[-1]) == count, "other counts"
    require_same(room.inner, packed, "packed values")
    require_same(unpacked.inner, again, "values")
    room.check()
    unpacked.check()
    if n % 32:
        found.inner[-1] |= torch.iinfo(torch.int32).min
        with using(kernels):
            assert int(packed_values.count(found_index, n, head)[-1]) == count, "a bit past the end was counted"
        assert bool(int(head[FLAGS_AT]) & PAST_THE_END), "a bit past the end was not told"


# ---- families of kernels, and all cases of each


class Family(NamedTuple):
    """Kernels that are checked alike: what compares one case, and the values of each of its axes. A codec is given by
    its name in `codecs`; the axes content, n and dtype together make `values`."""

    compare: Callable[..., None]
    axes: dict[str, Collection[Any]]
    codecs: dict[str, Any] = {}  # noqa: RUF012 - a NamedTuple, nothing changes it


VALUES: dict[str, Collection[Any]] = {"n": QUANTISED_SIZES, "content": CONTENTS, "dtype": DTYPES}
CODES: dict[str, Collection[Any]] = {"content": ("gradient", "zeros", "tiny", "smaller"), "dtype": DTYPES}
SHAPES = ((1, 1, 1), (1, 7, 300), (2, 16, 17), (4, 33, 65), (4, 257, 31), (9, 40, 11), (12, 12, 100))  # rank, n, m
BOTH = (False, True)
PRODUCTS = (*((dtype, False) for dtype in DTYPES), (torch.float32, True))  # dtypes, and whether they are subtracted
SIGN_SHAPES = ((1, 1), (31, 2), (32, 3), (33, 255), (255, 4), (257, 2), (9_000, 3), (9_001, 4))
INDEXED = ("sparse", "gradient", "zeros", "specials", "subnormal", "infinity", "one")
SELECTED = ("gradient", "zeros", "negative zeros", "alike", "short", "subnormal", "few", "steep")
TAKEN = {"content": SELECTED, "share": (0.001, 0.1, 1.0), "way": ("exact", "whole", "spans")}
FAMILIES = {
    "quantised": Family(assert_quantised, {"codec": QUANTISERS, **VALUES, "residual": BOTH}, QUANTISERS),
    "floats": Family(assert_floats, {"codec": FLOATS, **VALUES, "n": FLOAT_SIZES}, {**FLOATS, **WIDE_FLOATS}),
    "gcomp": Family(assert_gcomp, {"codec": GCOMP, **VALUES, "n": (*GCOMP_SIZES, *FLOAT_EDGES)}, GCOMP),
    "products": Family(assert_products, {"shape": SHAPES, "way": PRODUCTS}),
    "orthogonal": Family(assert_orthogonal, {"shape": [(rank, n) for rank, n, _ in SHAPES if rank <= n]}),
    "selection": Family(assert_selection, {"n": (1, 33, 2047, 2049, 16_385, 40_000), **TAKEN}),
    "signs": Family(assert_signs, {"shape": SIGN_SHAPES, "dtype": DTYPES, "ties": BOTH}),
    "ternary": Family(assert_ternary, {"n": (1, 63, 65, 4097, 9_000), **CODES, "n_ranks": (3, 9), "is_cut": BOTH}),
    "thc": Family(assert_thc, {"n": (1, 65, 300, 1024, 2_500), **CODES, "n_ranks": (8, 9)}),
    "index": Family(assert_index, {"n": (1, 31, 32, 33, 1023, 1024, 1025, 9_000), "content": INDEXED, "dtype": DTYPES}),
}


def run(kernels: Kernels, family: str, **axes: Collection[Any]) -> int:
    """Compare every case of a family, with other values of some of its axes; returns how many there were. Raises:
    AssertionError (the first case that differs, by name)."""
    compare, own, codecs = FAMILIES[family]
    assert axes.keys() <= own.keys()
    n_cases = 0
    for chosen in itertools.product(*{**own, **axes}.values()):
        case = dict(zip(own, chosen, strict=True))
        try:
            compare(kernels, **_arguments(family, case, codecs))
        except (AssertionError, GradwireError, RuntimeError) as error:
            raise AssertionError(f"{family}, {', '.join(map(str, chosen))}: {error}") from error
        n_cases += 1
    return n_cases


def _arguments(family: str, case: dict[str, Any], codecs: dict[str, Any]) -> dict[str, Any]:
    arguments = dict(case)
    if "content" in case:
        n = arguments.pop("n")
        arguments["values"] = values_of(arguments.pop("content"), n, arguments.pop("dtype", torch.float32))
        if family == "gcomp":
            arguments["importance"] = importance_of(n)
        if "residual" in case:
            residual = values_of("gradient", n, seed=7) / 1024
            arguments["residual"] = residual if case["residual"] else None
    if codecs:
        arguments["codec"] = codecs[case["codec"]]
    return arguments
