"""gradwire bench codec: ratio and speed of every codec and its baselines on real gradients."""

import argparse
import functools
import os
import sys
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from gradwire import codecs
from gradwire.codecs.gcomp import GCompCodec, describe
from gradwire.codecs.huffman import HuffmanTable
from gradwire.errors import CorruptMessage, InvalidArgument, Unsupported, needs_extra
from gradwire.registry import parse_spec
from gradwire.schemes.gcomp.importance import Promise, QuantisationMetric
from gradwire.telemetry.environment import describe_environment
from gradwire_lab.bench.driver import Task, threads, time_interleaved, write_results
from gradwire_lab.bench.level_rule import Float64Array, allowed_scale, entropy_bits, exponent_histogram, make_optimizer
from gradwire_lab.bench.measures.gradients import gradient_file
from gradwire_lab.results.experiment import Column, Table
from gradwire_lab.results.records import Record
from gradwire_lab.results.tables import Grid, print_grid, tabulate
from gradwire_lab.workloads.gradients import FloatArray, GradientFile, load_gradients

REFERENCE = "zstd"
# Every lane of a buffer that a decoder is to fill, so that one that leaves it alone is found out.
_POISON = np.uint32(0xFFC0DEAD)
_MANTISSA_BITS = {torch.float32: 23, torch.bfloat16: 7, torch.float16: 10}
_DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in _MANTISSA_BITS}
# What `all` means beside every codec and baseline with its own defaults: GComp as published, its other modes, dtypes and cap,
# and its table before training.
_ASKED = ("format=1", "importance=none", "importance=uniform,bits=10", "bits=14", "table=prior")
_VARIANTS = [f"gcomp:{options}" for options in (*_ASKED, "dtype=bfloat16", "dtype=float16")]


def run(args: argparse.Namespace) -> int:
    """Measure, print a table a file and thread count, write the records."""
    threads = args.threads or sorted({1, len(os.sched_getaffinity(0))})
    if min(threads) < 1 or args.rounds < 1:
        raise InvalidArgument(f"--threads {args.threads} --rounds {args.rounds}: both count from 1")
    names = choose_specs(args.codec)
    # All of them, before anything is timed.
    files = [load_gradients(gradient_file(name, Path("runs/bench"))) for name in args.gradients]
    environment = describe_environment()
    records: list[Record] = []
    for file in files:
        for n_threads in threads:
            batch = measure(file, names, n_threads, args.rounds)
            records += [{**record, **environment} for record in batch]
            print_grid(make_grid(file, n_threads, batch), args.wide)
            # After every table: whoever stops the run keeps what was measured.
            write_results(args, records)
    return 0


def measure(file: GradientFile, names: Sequence[str], n_threads: int, n_rounds: int) -> list[Record]:
    """One flat record for each of `names` that can use `n_threads`, timed in turns, each result verified. The reference
    (zstd -1) runs along even if it is not among them: a ratio to it is only fair within one run."""
    running: dict[str, TimedMethod] = {}
    tasks: dict[str, Task] = {}
    with threads(n_threads):
        for name in dict.fromkeys([*names, REFERENCE]):
            try:
                method = by_spec(name, file, n_threads)
            except Unsupported as error:
                if name == REFERENCE:
                    raise
                print(f"left out: {error}", file=sys.stderr)
                continue
            if method is not None:
                running[name] = method
                method.encode()
                tasks[f"{name} encode"] = Task(method.encode)
                tasks[f"{name} decode"] = Task(method.decode, method.poison, method.verify)
        timings = time_interleaved(tasks, n_rounds, what=f"{file.name}, samples")
    entropy = entropy_bits(exponent_histogram(file.gradient))
    records = []
    for name in filter(running.__contains__, names):
        method, n_bytes = running[name], running[name].n_bytes
        record: Record = {
            "codec": method.spec,
            "gradients": method.file.name,
            "threads": n_threads,
            "setting": method.setting,
            "importance": method.importance,
            "n_elements": method.file.gradient.size,
            "n_bytes": n_bytes,
            "encoded_bytes": len(method.message),
            "ratio": len(method.message) / n_bytes,
            "exponent_entropy_bits": entropy,
            **{"exponent_bits": None, "bound_bytes": None, **method.parts()},
            "verified": method.guarantee,
        }
        for way in ("encode", "decode"):
            timing, reference = timings[f"{name} {way}"], timings[f"{REFERENCE} {way}"]
            ends = ("", timing.median_s), ("_low", timing.high_s), ("_high", timing.low_s)  # the slow end of the times
            record |= {f"{way}_gb_per_s{end}": n_bytes / seconds / 1e9 for end, seconds in ends}
            # Bytes a second, not values.
            record[f"{way}_vs_zstd"] = n_bytes / file.gradient.nbytes * reference.median_s / timing.median_s
            record["n_samples"] = timing.n_samples
        records.append(record)
    return records


def make_grid(file: GradientFile, n_threads: int, records: Sequence[Record]) -> Grid:
    """The records of one file and thread count, for people."""
    entropy = entropy_bits(exponent_histogram(file.gradient))
    columns = [Column("ratio", form=".4f")]
    for way in ("encode", "decode"):
        speed = Column(f"{way}_gb_per_s", f"{way} GB/s", form=".2f", spread=True)
        columns += [speed, Column(f"{way}_vs_zstd", "x", form=".1f")]
    columns += [Column("over_bound", "over bound, %", 100, "+.2f"), Column("exponent_bits", form=".3f")]
    columns += [Column("setting"), Column("verified")]
    shown = [
        {**one, "over_bound": one["encoded_bytes"] / one["bound_bytes"] - 1 if one["bound_bytes"] else None}
        for one in sorted(records, key=lambda one: float(one["ratio"]))
    ]
    size = f"{file.gradient.size:,} values, {n_threads} thread{'s' if n_threads > 1 else ''}"
    title = f"{file.name}: {size}; exponent entropy {entropy:.3f} bits"
    caption = "GB/s of the gradient, medians (quartiles); x: of zstd -1 in the same run; every round trip verified. "
    caption += "Over bound: the message against its exponents' entropy and the bits chosen for the other parts"
    return tabulate(shown, Table(columns, rows=("codec",), title=title), caption)


# ---- general and numeric compressors of others, each with the setting that its authors recommend where speed matters

Floats = npt.NDArray[np.float32]


class Baseline(NamedTuple):
    """A compressor: of an array (n,) float32, which stays as it is, one message; what holds the array's bytes."""

    encode: Callable[[Floats], bytes]
    decode: Callable[[bytes], Any]


def _zstd(n_threads: int) -> Baseline:
    import zstandard

    # 0 compresses on the calling thread; 1 would start a worker and only add its hand-over.
    compressor = zstandard.ZstdCompressor(level=1, threads=n_threads if n_threads > 1 else 0)
    return Baseline(lambda array: compressor.compress(array.data), zstandard.ZstdDecompressor().decompress)


def _zlib(n_threads: int) -> Baseline:
    return Baseline(lambda array: zlib.compress(array.data, level=1), zlib.decompress)


def _lz4(n_threads: int) -> Baseline:
    import lz4.frame as lz4

    return Baseline(lambda array: lz4.compress(array.data, compression_level=0), lz4.decompress)


def _blosc2(n_threads: int) -> Baseline:
    """Separates the planes of the exponent before it matches."""
    import blosc2

    options = {"codec": blosc2.Codec.ZSTD, "clevel": 1, "filters": [blosc2.Filter.BITSHUFFLE], "nthreads": n_threads}
    return Baseline(
        lambda array: blosc2.compress2(array, typesize=array.itemsize, **options),
        lambda message: blosc2.decompress2(message, nthreads=n_threads),
    )


def _zipnn(n_threads: int) -> Baseline:
    """Huffman over the bytes of the exponent, made for models and gradients (Hershcovitch et al., 2024)."""
    import zipnn

    codec = zipnn.ZipNN(input_format="byte", bytearray_dtype="float32", threads=n_threads)
    # ZipNN reorders its input in place, so it gets a copy; any real user of it pays for that too.
    return Baseline(lambda array: codec.compress(array.tobytes()), codec.decompress)


def _pcodec(n_threads: int) -> Baseline:
    """A numeric codec that models columns of numbers."""
    from pcodec import ChunkConfig, standalone

    config = ChunkConfig(compression_level=1)
    return Baseline(lambda array: standalone.simple_compress(array, config), standalone.simple_decompress)


# name: (setting, whether threads change anything, what makes it). The first is the reference of every table: `zstd -1`.
BASELINES: dict[str, tuple[str, bool, Callable[[int], Baseline]]] = {
    "zstd": ("level 1", True, _zstd),
    "zlib": ("level 1", False, _zlib),
    "lz4": ("frame, level 0", False, _lz4),
    "blosc2": ("bitshuffle + zstd level 1", True, _blosc2),
    "zipnn": ("byte input, float32", True, _zipnn),
    "pcodec": ("level 1", False, _pcodec),
}


def baseline_by_name(name: str, n_threads: int = 1) -> Baseline:
    """A new baseline. Raises: Unsupported (its package is not installed)."""
    try:
        encode, decode = BASELINES[name][2](n_threads)
    except ImportError as error:
        raise needs_extra(f"baseline {name!r}: {error}", "bench") from error
    return Baseline(encode, lambda message: np.frombuffer(decode(message), np.float32))


# ---- what is timed, each judging its own round trips


@dataclass
class TimedMethod:
    """One codec with one gradient and one thread count, ready to run, as a table of functions."""

    spec: str
    name: str  # without options
    setting: str
    file: GradientFile
    n_bytes: int  # of what is encoded
    encoder: Callable[[], Any]  # makes the message of the gradient, with everything that the codec needs computed anew
    decoder: Callable[[Any], Any]  # makes the values, (n,), of a message, in the `buffer` if there is one
    buffer: torch.Tensor | None = None
    importance: str = ""  # GComp's mode; empty where a codec has none
    guarantee: str = "bits"  # what `verify` holds the result to
    allowed: Float64Array | None = None  # distance from the original values; zeros, subnormals, Inf and NaN aside
    message: Any = b""  # the last one
    _values: Any = None
    _once: np.ndarray | None = None

    def encode(self) -> None:
        """Gradient to message."""
        self.message = self.encoder()

    def decode(self) -> None:
        """Message to values."""
        self._values = self.decoder(self.message)

    def decoded(self) -> np.ndarray:
        """The values of the last `decode`, (n,) float32."""
        values = self._values
        return values.float().numpy() if isinstance(values, torch.Tensor) else values

    def poison(self) -> None:
        """Make the output hold nothing that could pass for a result."""
        self._values = np.zeros(0, np.float32)
        if self.buffer is not None:
            size = self.buffer.element_size()
            poison = np.array([_POISON], np.uint32).view(np.uint8)[-size:]  # of two bytes: the upper ones
            self.buffer.view(torch.uint8).numpy().reshape(-1, size)[:] = poison
            self._values = self.buffer

    def parts(self) -> dict[str, float]:
        """`exponent_bits` a value, and `bound_bytes`: exponents at their entropy, other parts at the bits chosen for them."""
        if self.allowed is None:
            return {}
        parts = describe(self.message)
        exponents = entropy_bits(exponent_histogram(self.file.gradient)) * self.file.gradient.size / 8
        bound_bytes = exponents + float(parts["level_bytes"] + parts["mantissa_bytes"])
        return {"exponent_bits": float(parts["exponent_bits"]), "bound_bytes": bound_bytes}

    def verify(self) -> None:
        """Judge the last round trip. Raises: CorruptMessage, with the first value that is wrong."""
        values, decoded = self.file.gradient, self.decoded()
        if decoded.size != values.size:
            raise CorruptMessage(f"{self.name}: decoded {decoded.size} values of {values.size} from {self.file.name}")
        is_wrong = is_other = values.view(np.uint32) != decoded.view(np.uint32)
        if self.allowed is not None:
            exponent = values.view(np.uint32) >> 23 & 0xFF
            with np.errstate(invalid="ignore", over="ignore"):
                distance = np.abs(values.astype(np.float64) - decoded.astype(np.float64))
                is_wrong = ~(distance <= self.allowed) | (np.sign(values) != np.sign(decoded))
            is_wrong = np.where(exponent == 0, decoded.view(np.uint32) != 0, is_wrong)  # zeros and subnormals become +0
            is_wrong = np.where(exponent == 0xFF, is_other, is_wrong)
        elif self.buffer is not None and is_wrong.any():
            # A codec that says nothing of its loss: equal messages must give equal values.
            self.guarantee = "repeatable, every value written"
            if self._once is None:
                self._once = self.buffer.clone().numpy()
            is_wrong = (decoded != self._once) | (decoded.view(np.uint32) == _POISON)
        if is_wrong.any():
            first = int(is_wrong.argmax())
            raise CorruptMessage(
                f"{self.name}: {int(is_wrong.sum())} of {is_wrong.size} values of {self.file.name} break its promise "
                f"({self.guarantee}); the first is element {first}: {values[first]!r} came back as {decoded[first]!r}. "
                "Its timing would mean nothing, so the run stops"
            )


def _coders(codec: Any, gradient: torch.Tensor, *importance: torch.Tensor, weigh: Any = None) -> dict[str, Any]:
    """What a codec gives a `TimedMethod`; `weigh`: writes the `importance` bytes that encoder and decoder go by."""
    values = torch.empty_like(gradient)
    room = torch.empty(codec.max_encoded_bytes(gradient.numel(), gradient.dtype), dtype=torch.uint8)

    def encode() -> torch.Tensor:
        if weigh is not None:
            weigh()
        return room[: int(codec.encode(gradient, room, *importance))]

    def decode(message: torch.Tensor) -> torch.Tensor:
        codec.decode(message, values, *importance)
        return values

    return {"n_bytes": gradient.nbytes, "encoder": encode, "decoder": decode, "buffer": values}


def _time_gcomp(spec: str, name: str, given: dict[str, Any], file: GradientFile) -> TimedMethod:
    """GComp or truncate; by default its messages of format 2, and with `format=1` truncating ones, as published.

    `table=fitted` is the table of this gradient's own exponents, as in training once it was refreshed; making it is no part of
    the encoder. `table=prior` is that of a first step. `dtype=` rounds gradient, parameter and optimizer state, and speeds
    count its bytes. Without state importance "paper" has nothing to read: "none" takes its place, or with a cap "uniform".
    """
    options = dict(given)
    table, dtype_name = options.pop("table", "fitted"), options.pop("dtype", "float32")
    if table not in ("fitted", "prior"):
        raise InvalidArgument(f"table={table}: expected fitted or prior")
    if dtype_name not in _DTYPES:
        raise InvalidArgument(f"dtype={dtype_name}: expected {', '.join(_DTYPES)}")
    if name == "gcomp" and "importance" not in options:
        stand_in = "uniform" if "bits" in options else "none"
        options["importance"] = "paper" if file.state is not None else stand_in
    elif options.get("importance") == "paper" and file.state is None:
        raise InvalidArgument(f'{file.path}: importance "paper" needs the optimizer\'s state, but {file.missing}')
    if options.get("format") == 1:
        if dtype_name != "float32":
            raise InvalidArgument(f"dtype={dtype_name} is measured with format=2")
        if name == "gcomp":
            options.setdefault("rounding", "truncate")
    tolerance, dtype = float(options.pop("tolerance", 1.0)), _DTYPES[dtype_name]
    codec, file = codecs.by_name(name, **options), _rounded_file(file, dtype)
    assert isinstance(codec, GCompCodec)
    if table == "fitted":
        codec.use_table(HuffmanTable.from_histogram(torch.from_numpy(exponent_histogram(file.gradient))))
    gradient = torch.from_numpy(file.gradient).to(dtype)
    coders = _coders(codec, gradient)
    if codec.importance == "paper":
        assert file.state is not None
        optimizer = make_optimizer(file.state, dtype=dtype)
        metric = QuantisationMetric(optimizer, 1, Promise(tolerance, rounding=codec.rounding, format=codec.format))
        read, written = optimizer.param_groups[0]["params"], torch.empty(file.gradient.size, dtype=torch.uint8)
        coders = _coders(codec, gradient, written, weigh=lambda: metric.write_importance(read, [0], written))
    importance = codec.importance + (f" {codec.bits}" if codec.bits is not None else "")
    short = "" if dtype_name == "float32" else f", {dtype_name}"
    guarantees = {"paper": "distance by the rule", "none": "bits", "uniform": "rounding"}
    setting = f"{importance}, format {codec.format}, {table} table{short}"
    method = TimedMethod(spec, name, setting, file, **coders)
    method.importance = "" if "importance" in given else importance  # the name says it already
    method.guarantee = guarantees.get(codec.importance, "truncation")
    method.allowed = _allowed_distance(codec, file, _MANTISSA_BITS[dtype], tolerance)
    return method


def _allowed_distance(codec: GCompCodec, file: GradientFile, n_mantissa: int, tolerance: float) -> Float64Array:
    magnitude, bits = np.abs(file.gradient.astype(np.float64)), codec.bits or 0
    if codec.importance == "none":
        return np.zeros_like(magnitude)
    if codec.importance != "paper":
        return np.ldexp(magnitude, -bits - 1 if codec.importance == "uniform" else bits - n_mantissa)
    assert file.state is not None
    total, slack = allowed_scale(file.state)
    # The promise; levels of format 1 are as published, and the nearest is half as far.
    rounds = codec.rounding == "nearest"
    allowed = tolerance * np.ldexp(total + slack, -n_mantissa - (rounds and codec.format == 1))
    return allowed if codec.bits is None else np.maximum(allowed, np.ldexp(magnitude, -bits - rounds))


def _rounded_file(file: GradientFile, dtype: torch.dtype) -> GradientFile:
    """What the file would hold in `dtype`, still as float32."""
    if dtype is torch.float32:
        return file

    def rounded(values: FloatArray) -> FloatArray:
        return torch.from_numpy(values).to(dtype).float().numpy()

    state = file.state
    if state is not None:
        arrays = {name: rounded(array) for name, array in state.arrays.items()}
        state = replace(state, parameter=rounded(state.parameter), arrays=arrays)
    return replace(file, gradient=rounded(file.gradient), state=state)


# ---- by name


def choose_specs(asked: Sequence[str]) -> list[str]:
    """`all` spelt out, doubles dropped. Raises: InvalidArgument (a name that is neither codec nor baseline)."""
    # A codec that has a baseline's name is `gradwire:NAME`.
    names = [*(f"gradwire:{name}" if name in BASELINES else name for name in codecs.names()), *BASELINES]
    for spec in asked:
        if _split(spec)[0] not in ("all", *names):
            raise InvalidArgument(f"no codec or baseline is called {spec!r}; there are: all, {', '.join(names)}")
    everything = [*names, *_VARIANTS]
    return list(dict.fromkeys(one for spec in asked for one in (everything if spec == "all" else [spec])))


def by_spec(spec: str, file: GradientFile, n_threads: int) -> TimedMethod | None:
    """A method, or None where it cannot use `n_threads` threads. Raises: InvalidArgument (unknown name, option)."""
    name, options = _split(spec)
    if name in ("gcomp", "truncate"):
        return _time_gcomp(spec, name, options, file)
    if name not in BASELINES:
        codec = codecs.by_name(name.removeprefix("gradwire:"), **options)
        setting = ", ".join(f"{key} {value}" for key, value in options.items()) or "default"
        return TimedMethod(spec, name, setting, file, **_coders(codec, torch.from_numpy(file.gradient)))
    if options:
        raise InvalidArgument(f"{spec}: baselines take no options")
    setting, uses_threads, _ = BASELINES[name]
    if n_threads > 1 and not uses_threads:
        return None
    baseline = baseline_by_name(name, n_threads)
    encoder = functools.partial(baseline.encode, file.gradient)
    return TimedMethod(spec, name, setting, file, file.gradient.nbytes, encoder, baseline.decode)


def _split(spec: str) -> tuple[str, dict[str, Any]]:
    prefix = "gradwire:" if spec.startswith("gradwire:") else ""
    name, options = parse_spec(spec.removeprefix(prefix))
    return prefix + name, options
