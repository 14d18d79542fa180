"""What a codec is given wrongly raises a typed error that says what to do; what only looks unusual is taken."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor

from float_messages import decode, encode, same_bits
from gradwire import codecs
from gradwire.codecs.count_sketch import CountSketch
from gradwire.codecs.embedded_float import EmbeddedFloat
from gradwire.codecs.gcomp import GCompCodec, HuffmanTable, describe
from gradwire.codecs.hadamard import Thc
from gradwire.codecs.ternary import Ternary
from gradwire.codecs.truncated_float import TruncatedFloat
from gradwire.errors import BufferTooSmall, CorruptMessage, InvalidArgument, Unsupported

GRADIENT = torch.linspace(-1, 1, 64)
OUT = torch.empty(1_000, dtype=torch.uint8)
IMPORTANCE = torch.zeros(64, dtype=torch.uint8)
each_codec = pytest.mark.parametrize("name", codecs.names())


def weights(name: str, n: int = 64) -> dict[str, Tensor]:
    """The importance bytes, for the one codec that needs them."""
    return {"importance": torch.zeros(n, dtype=torch.uint8)} if name == "gcomp" else {}


# Of codecs: an option, and values that it cannot have alone; it is named.
WRONG: list[tuple[str, str, tuple[object, ...]]] = [
    ("one-bit", "scale_values", (0, 63, 32, 64.0, 8192, 100, True, "512", -64)),
    ("two-bit", "scale_values", (0, 63, 32, 64.0, 8192, 100, True, "512", -64)),
    ("two-bit", "threshold", (-1, float("inf"))), ("ternary", "clip", (0,)), ("ternary", "seed", (-1, 1 << 64)),
    ("qsgd", "levels", (0, 128, True, "7")), ("qsgd", "block", (100,)), ("qsgd", "seed", (0.5,)),
    ("qsgd", "colour", (1,)), ("thc", "clip", (0.0, -1.0, float("inf"))), ("zlib", "level", (0, 10)),
    ("zstd", "level", (0, 23)), ("raw", "level", (1,)), ("embedded-float", "bits", (1, 33)),
    ("embedded-float", "partition", (16, 100, 2048)), ("truncated-float", "bits", (1, 33)),
    ("truncated-float", "format", ("fp6",)), ("truncated-float", "rounding", ("up",)),
    ("truncated-float", "seed", (-1, 1 << 64)), ("truncated-float", "partition", (48, 2048)),
    ("gcomp", "importence", ("none",)),
]  # fmt: skip
OPTIONS: list[tuple[str, dict[str, Any], str]] = [
    ("one-bit", {"scale": "median"}, "fixed, mean, two-means"), ("one-bit", {"threshold": 0.5}, 'scale="fixed"'),
    ("one-bit", {"scale": "fixed", "threshold": 0.0}, "threshold"),
    ("one-bit", {"scale": "fixed", "threshold": float("nan")}, "threshold"),
    ("one-bit", {"scale": "fixed", "scale_values": 512}, "fixed"),
    ("two-bit", {"levels": 2, "scale_values": 64}, "levels is one of 3, 4"), ("two-bit", {"levels": 4}, "levels=4"),
    ("two-bit", {"levels": 4, "scale_values": 64, "threshold": 1.0}, "levels=4"),
    ("two-bit", {"levels": 4, "scale_values": 64, "relative": False}, "levels=4"),
    ("two-bit", {"relative": False, "scale_values": 512}, "relative"),
    ("embedded-float", {"format": 3}, "format is one of 1, 2"),
    ("truncated-float", {"bits": 9, "format": "fp8-e4m3"}, "bits"),
    ("truncated-float", {"bits": 5, "format": "fp4-e2m1"}, "bits"),
    ("gcomp", {"importance": "all"}, "none, paper, uniform, truncate"),
    ("gcomp", {"importance": "uniform"}, "bits=10"), ("gcomp", {"importance": "none", "bits": 3}, "means nothing"),
    ("gcomp", {"importance": "paper", "bits": 3, "format": 1}, "use format=2"),
    ("gcomp", {"format": 3}, "format is one of 1, 2"), ("gcomp", {"rounding": "up"}, "nearest, truncate"),
    ("gcomp", {"importance": "uniform", "bits": 24}, "0 to 23"),
    ("gcomp", {"importance": "uniform", "bits": -1}, "0 to 23"),
    *((name, {option: value}, option) for name, option, values in WRONG for value in values),
]  # fmt: skip


@pytest.mark.parametrize(("name", "options", "match"), OPTIONS)
def test_options_out_of_range_are_refused(name: str, options: dict[str, Any], match: str) -> None:
    with pytest.raises(InvalidArgument, match=match):
        codecs.by_name(name, **options)


@each_codec
def test_what_is_no_gradient_no_message_and_no_room_is_refused(name: str) -> None:
    codec: Any = codecs.by_name(name)
    n_most = codec.max_encoded_bytes(64, torch.float32)
    for gradient, n, match in (
        (GRADIENT.double(), 64, "float32, bfloat16 (and|or) float16"),
        (GRADIENT.int(), 64, "float32, bfloat16 (and|or) float16"),
        (GRADIENT.long(), 64, "float32, bfloat16 (and|or) float16"),
        (GRADIENT.reshape(8, 8), 64, r"(gradient|out): .*\(8, 8\): flatten"),
        (GRADIENT[::2], 32, r"(gradient|out): .*\.contiguous\(\)"),
        (GRADIENT.to("meta"), 64, "meta: copy it"),
    ):
        with pytest.raises(InvalidArgument, match=match):
            codec.encode(gradient, OUT, **weights(name, n))
        with pytest.raises(InvalidArgument, match=match):
            codec.decode(encode(codec, GRADIENT, **weights(name)), gradient, **weights(name, n))
    for out, match in (
        (torch.empty(1_000), "expected torch.uint8, got torch.float32"),
        (OUT.int(), "expected torch.uint8, got torch.int32"),
        (OUT.view(torch.int8), "expected torch.uint8, got torch.int8"),
        (OUT.reshape(10, 100), "one dimension"),
        (OUT[::2], "not contiguous"),
    ):
        with pytest.raises(InvalidArgument, match=f"out: .*{match}"):
            codec.encode(GRADIENT, out, **weights(name))
        with pytest.raises(InvalidArgument, match=f"message: .*{match}"):
            codec.decode(out, torch.empty(64), **weights(name))
    with pytest.raises(BufferTooSmall, match=f"may (take|need) {n_most}"):
        codec.encode(GRADIENT, OUT[: n_most - 1], **weights(name))
    codec.encode(GRADIENT, OUT[:n_most], **weights(name))
    for n, dtype in ((-1, torch.float32), (1, torch.float64)):
        with pytest.raises(InvalidArgument):
            codec.max_encoded_bytes(n, dtype)


@each_codec
def test_single_values_of_strided_tensors_and_gradients_that_require_grad_are_taken(name: str) -> None:
    """Tensors of one value count as contiguous whatever their stride."""
    codec: Any = codecs.by_name(name)
    strided, target = torch.tensor([1.5, 2.5, 3.5])[::2][1:], torch.zeros(4)[::3][1:]
    message = encode(codec, strided, **weights(name, 1))
    assert torch.equal(message, encode(codec, torch.tensor([3.5]), **weights(name, 1)))
    codec.decode(message, target, **weights(name, 1))
    assert target.item() == decode(codec, message, 1, **weights(name, 1)).item()
    attached = encode(codec, GRADIENT.clone().requires_grad_(), **weights(name))
    assert torch.equal(attached, encode(codec, GRADIENT, **weights(name)))


@pytest.mark.parametrize("name", [name for name in codecs.names() if name != "gcomp"])
def test_importance_changes_nothing_where_no_mode_asks_for_it(name: str) -> None:
    codec = codecs.by_name(name)
    assert torch.equal(encode(codec, GRADIENT, importance=IMPORTANCE + 255), encode(codec, GRADIENT))


@each_codec
def test_one_codec_serves_many_threads(name: str) -> None:
    codec = codecs.by_name(name)
    gradients = [torch.randn(20_000 + i).round(decimals=1) for i in range(16)]

    def there_and_back(gradient: Tensor) -> Tensor:
        more = weights(name, gradient.numel())
        return decode(codec, encode(codec, gradient, **more), gradient.numel(), **more)

    with ThreadPoolExecutor(4) as pool:
        for alone, found in zip(map(there_and_back, gradients), pool.map(there_and_back, gradients), strict=True):
            assert same_bits(found, alone)


def encoded(codec: Any, **more: Any) -> Tensor:
    return OUT[: codec.encode(GRADIENT, OUT, **more)].clone()


def of_paper(importance: Tensor | None, **more: Any) -> None:
    GCompCodec().decode(encoded(GCompCodec(), importance=IMPORTANCE), torch.empty(64), importance, **more)


def with_residual(name: str, residual: Tensor, **more: Any) -> None:
    codec: Any = codecs.by_name(name)
    codec.encode(GRADIENT, OUT, residual=residual, **more)


QUANTISERS = ("one-bit", "two-bit", "ternary", "qsgd", "thc")
ONES, NORMS, CODES = torch.ones(100), torch.ones(1), torch.zeros(128, dtype=torch.uint8)
COUNTS = torch.zeros(256, dtype=torch.int64)
SHARES = Ternary().share(65, [(0, 65)], torch.device("cpu"))
Call = Callable[[], object]
CALLS: list[tuple[Call, type[Exception], str | None]] = [
    (lambda: GCompCodec().encode(GRADIENT, OUT), InvalidArgument, r"encode\(gradient, out, importance\)"),
    (lambda: GCompCodec().encode(GRADIENT, OUT, IMPORTANCE[:63]), InvalidArgument, "63 values, the gradient 64"),
    (lambda: GCompCodec().encode(GRADIENT, OUT, IMPORTANCE.int()), InvalidArgument, "importance: expected torch.uint8"),
    (lambda: GCompCodec("uniform", 8).encode(GRADIENT.bfloat16(), OUT), InvalidArgument, "bfloat16 has 7 bits"),
    (lambda: of_paper(None), InvalidArgument, "importance"),
    (lambda: of_paper(IMPORTANCE[:63]), InvalidArgument, "importance"),
    (lambda: of_paper(IMPORTANCE, adds=True, divisor=2), InvalidArgument, "without a divisor"),
    (lambda: of_paper(IMPORTANCE, divisor=0), InvalidArgument, "divisor"),
    (lambda: GCompCodec(format=1).histogram(GRADIENT.half(), COUNTS), InvalidArgument, "32 counts"),
    (lambda: TruncatedFloat(24).encode(GRADIENT.bfloat16(), OUT), InvalidArgument, "bits=16 keeps all"),
    *(
        (lambda planes=planes: EmbeddedFloat().encode_planes(GRADIENT, *planes, OUT), InvalidArgument, "planes")
        for planes in ((-1, 4), (0, 0), (0, 33), (32, 1), (30, 3), (1 << 30, 1 << 30))
    ),
    (lambda: EmbeddedFloat().receive(5, torch.float32).write(ONES[:5]), InvalidArgument, "add_planes first"),
    *(
        (lambda name=name, wrong=wrong: with_residual(name, wrong), InvalidArgument, "residual")
        for name in QUANTISERS
        for wrong in (torch.zeros(63), torch.zeros(64, dtype=torch.float16), torch.zeros(128)[::2])
    ),
    *(
        (lambda n=name, s=scale: with_residual(n, ONES[:64], residual_scale=s), InvalidArgument, "residual_scale")
        for name in QUANTISERS
        for scale in (0.0, -1.0, float("inf"), float("nan"))
    ),
    *(
        (lambda name=name, step=step: encoded(codecs.by_name(name), step=step), InvalidArgument, "step")
        for name in (*QUANTISERS, "truncated-float")
        for step in (-1, 1 << 64)
    ),
    (lambda: encoded(codecs.by_name("one-bit"), cuts=[50]), InvalidArgument, "cuts"),
    *(
        (lambda cuts=cuts: encoded(codecs.by_name("one-bit", scale_values=64), cuts=cuts), InvalidArgument, "cuts")
        for cuts in ([0], [64], [50, 50], [60, 50])
    ),
    (lambda: Ternary().count_bytes(10, 128), Unsupported, "127"),
    (lambda: Ternary().write_counts(ONES[:65], SHARES, ONES[:1], 2, OUT[:32], 0), InvalidArgument, None),
    (lambda: Ternary().read_counts(OUT[:32], SHARES, ONES[:1], 2, torch.empty(65)), InvalidArgument, None),
    (lambda: Thc().write_norms(ONES, torch.empty(2)), InvalidArgument, None),
    (lambda: Thc().write_codes(ONES, NORMS, CODES[:-1], n_ranks=2, sign_step=0, step=0), InvalidArgument, None),
    (lambda: Thc().write_codes(ONES, torch.ones(2), CODES, n_ranks=2, sign_step=0, step=0), InvalidArgument, None),
    # sums of nine ranks have two bytes
    (lambda: Thc().read_sums(CODES, NORMS, 9, torch.empty(100), sign_step=0), InvalidArgument, None),
    (lambda: Thc().read_sums(CODES[:-1], NORMS, 2, torch.empty(100), sign_step=0), InvalidArgument, None),
    (lambda: Thc().sums_are_wide(1_001), Unsupported, "1000"),
    (lambda: codecs.by_name("one-bit", scale_values=64.0), InvalidArgument, "not 64.0"),
    (lambda: codecs.by_name("gcomp", format=True), InvalidArgument, "not True"),
    (lambda: CountSketch(batch_values=1000), InvalidArgument, "power of two"),
    (lambda: CountSketch(gamma=1.2), InvalidArgument, "lossy"),
    (lambda: CountSketch(gamma=11), InvalidArgument, "gamma"),
    (lambda: CountSketch(seed=-1), InvalidArgument, "seed"),
]


@pytest.mark.parametrize(("call", "error", "match"), CALLS)
def test_calls_that_cannot_be_are_refused(call: Call, error: type[Exception], match: str | None) -> None:
    with pytest.raises(error, match=match):
        call()


def test_truncate_drops_eighteen_bits_towards_zero_by_default() -> None:
    codec = codecs.by_name("truncate")
    decoded = decode(codec, encoded(codec), 64)
    assert torch.equal(decoded.view(torch.int32), GRADIENT.view(torch.int32) & ~((1 << 18) - 1))


def test_codec_encodes_with_the_table_put_in_use_and_keeps_a_bounded_number() -> None:
    codec = GCompCodec("none")
    tables = [HuffmanTable.from_histogram(torch.arange(256).roll(k)) for k in range(8)]
    for table in tables:
        codec.use_table(table)
        assert codec.table_in_use(torch.float32) == codec.table_in_use(torch.float16) == table
        assert describe(encoded(codec))["table_id"] == table.id
    for i, table in enumerate(tables):
        with nullcontext() if i >= 2 else pytest.raises(CorruptMessage, match=f"{table.id:#018x}"):
            codec.decode(encoded(GCompCodec("none", table=table)), torch.empty(64))


def test_description_adds_up_to_the_message() -> None:
    parts = describe(encoded(GCompCodec(), importance=IMPORTANCE))
    segments = ("header_bytes", "exponent_bytes", "level_bytes", "mantissa_bytes")
    assert sum(parts[part] for part in segments) == parts["message_bytes"]
    assert (parts["importance"], parts["dtype"], parts["n_elements"]) == ("paper", "float32", 64)
