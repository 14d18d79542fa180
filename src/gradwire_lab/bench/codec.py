"""gradwire bench codec: ratio and speed of every codec and its baselines on real gradients."""

from __future__ import annotations

import argparse
import os
import sys
import zlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from gradwire import codecs
from gradwire.codecs.gcomp import GCompCodec, describe
from gradwire.codecs.huffman import HuffmanTable
from gradwire.errors import CorruptMessage, InvalidArgument, Unsupported
from gradwire.registry import parse_spec
from gradwire.schemes.gcomp.importance import Promise, QuantisationMetric
from gradwire.telemetry.environment import describe_environment
from gradwire_lab.bench.driver import Task, threads, time_interleaved, write_results
from gradwire_lab.bench.level_rule import allowed_scale, entropy_bits, exponent_histogram, make_optimizer
from gradwire_lab.bench.measures.gradients import gradient_file
from gradwire_lab.results.experiment import Column, Table
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
    records: list[dict[str, Any]] = []
    for file in files:
        for n_threads in threads:
            batch = measure(file, names, n_threads, args.rounds)
            records += [{**record, **environment} for record in batch]
            print_grid(make_grid(file, n_threads, batch), args.wide)
            # After every table: whoever stops the run keeps what was measured.
            write_results(args, records)
    return 0


def measure(file: GradientFile, names: Sequence[str], n_threads: int, n_rounds: int) -> list[dict[str, Any]]:
    """One flat record for each of `names` that can use `n_threads`, timed in turns; every sample's result is verified.

    The reference (zstd -1) runs along even if it is not among `names`: a ratio to it is only fair within one run.
    """
    with threads(n_threads):
        running: dict[str, TimedMethod] = {}
        for name in dict.fromkeys([*names, REFERENCE]):
            try:
                if method := by_spec(name, file, n_threads):
                    running[name] = method
            except Unsupported as error:
                if name == REFERENCE:
                    raise
                print(f"left out: {error}", file=sys.stderr)
        tasks: dict[str, Task] = {}
        for name, method in running.items():
            method.encode()
            tasks[f"{name} encode"] = Task(method.encode)
            tasks[f"{name} decode"] = Task(method.decode, method.poison, method.verify)
        timings = time_interleaved(tasks, n_rounds, what=f"{file.name}, samples")
    entropy = entropy_bits(exponent_histogram(file.gradient))
    records = []
    for name, method in ((name, running[name]) for name in names if name in running):
        n_bytes = method.n_bytes
        record: dict[str, Any] = {
            "codec": method.spec,
            "gradients": method.file.name,
            "threads": n_threads,
            "setting": method.setting,
            "importance": method.importance,
            "n_elements": method.file.gradient.size,
            "n_bytes": n_bytes,
            "encoded_bytes": method.encoded_bytes,
            "ratio": method.encoded_bytes / n_bytes,
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


def make_grid(file: GradientFile, n_threads: int, records: Sequence[dict[str, Any]]) -> Grid:
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
    caption = (
        "GB/s of the gradient, medians (quartiles); x: of zstd -1 in the same run; every round trip verified. Over "
    )
    caption += "bound: the message against its exponents' entropy and the bits chosen for the other parts"
    return tabulate(shown, Table(columns, rows=("codec",), title=title), caption)


# ---- general and numeric compressors of others, each with the setting that its authors recommend where speed matters

Floats = npt.NDArray[np.float32]
# Array to message, and message to what holds the array's bytes.
Both = tuple[Callable[[Floats], bytes], Callable[[bytes], Any]]


class Baseline(NamedTuple):
    """A compressor: of an array (n,) float32, which stays as it is, one message; the array, which may be read-only."""

    encode: Callable[[Floats], bytes]
    decode: Callable[[bytes], Floats]


def _zstd(n_threads: int) -> Both:
    import zstandard

    # 0 compresses on the calling thread; 1 would start a worker and only add its hand-over.
    compressor = zstandard.ZstdCompressor(level=1, threads=n_threads if n_threads > 1 else 0)
    return lambda array: compressor.compress(array.data), zstandard.ZstdDecompressor().decompress


def _lz4(n_threads: int) -> Both:
    import lz4.frame as lz4

    return lambda array: lz4.compress(array.data, compression_level=0), lz4.decompress


def _blosc2(n_threads: int) -> Both:
    """Separates the planes of the exponent before it matches."""
    import blosc2

    options = {"codec": blosc2.Codec.ZSTD, "clevel": 1, "filters": [blosc2.Filter.BITSHUFFLE], "nthreads": n_threads}
    return (
        lambda array: blosc2.compress2(array, typesize=array.itemsize, **options),
        lambda message: blosc2.decompress2(message, nthreads=n_threads),
    )


def _zipnn(n_threads: int) -> Both:
    """Huffman over the bytes of the exponent, made for models and gradients (Hershcovitch et al., 2024)."""
    import zipnn

    codec = zipnn.ZipNN(input_format="byte", bytearray_dtype="float32", threads=n_threads)
    # ZipNN reorders its input in place, so it gets a copy; any real user of it pays for that too.
    return lambda array: codec.compress(array.tobytes()), codec.decompress


def _pcodec(n_threads: int) -> Both:
    """A numeric codec that models columns of numbers."""
    from pcodec import ChunkConfig, standalone

    return lambda array: standalone.simple_compress(
        array, ChunkConfig(compression_level=1)
    ), standalone.simple_decompress


# name: (setting, whether threads change anything, what makes it). The first is the reference of every table: `zstd -1`.
_BASELINES: dict[str, tuple[str, bool, Callable[[int], Both]]] = {
    "zstd": ("level 1", True, _zstd),
    "zlib": ("level 1", False, lambda n_threads: (lambda array: zlib.compress(array.data, level=1), zlib.decompress)),
    "lz4": ("frame, level 0", False, _lz4),
    "blosc2": ("bitshuffle + zstd level 1", True, _blosc2),
    "zipnn": ("byte input, float32", True, _zipnn),
    "pcodec": ("level 1", False, _pcodec),
}


def baseline_names() -> list[str]:
    """The baselines in the order of the tables."""
    return list(_BASELINES)


def baseline_by_name(name: str, n_threads: int = 1) -> Baseline:
    """A new baseline. Raises: InvalidArgument (unknown name), Unsupported (its package is not installed)."""
    if name not in _BASELINES:
        raise InvalidArgument(f"no baseline is called {name!r}; there are: {', '.join(baseline_names())}")
    try:
        encode, decode = _BASELINES[name][2](n_threads)
    except ImportError as error:
        raise Unsupported(f"baseline {name!r}: {error}; pip install 'gradwire[bench]'") from error
    return Baseline(encode, lambda message: np.frombuffer(decode(message), np.float32))


# ---- what is timed, each judging its own round trips


class TimedMethod(ABC):
    """One codec with one gradient and one thread count, ready to run; buffers are kept, as a scheme would keep them.

    Attributes:
        name, spec: without and with options. importance: GComp's mode; empty where a codec has none.
        guarantee: what `verify` holds the result to.
        n_bytes: of what is encoded.
    """

    spec: str
    importance: str = ""
    guarantee: str = "bits"

    def __init__(self, name: str, setting: str, file: GradientFile) -> None:
        self.name, self.setting, self.file = name, setting, file
        self.n_bytes, self.encoded_bytes = file.gradient.nbytes, 0

    @abstractmethod
    def encode(self) -> None:
        """Gradient to message, with everything that the codec needs computed anew."""

    @abstractmethod
    def decode(self) -> None:
        """Message to values."""

    @abstractmethod
    def decoded(self) -> np.ndarray:
        """The values of the last `decode`, (n,) float32."""

    @abstractmethod
    def poison(self) -> None:
        """Make the output hold nothing that could pass for a result."""

    def parts(self) -> dict[str, float]:
        """What a message with parts tells: `exponent_bits` a value, and `bound_bytes`, the sum of the parts' bounds."""
        return {}

    def verify(self) -> None:
        """Judge the last round trip. Raises: CorruptMessage, with the first value that is wrong."""
        values, decoded = self.file.gradient, self.decoded()
        if decoded.size != values.size:
            raise CorruptMessage(f"{self.name}: decoded {decoded.size} values of {values.size} from {self.file.name}")
        self.complain(values.view(np.uint32) != decoded.view(np.uint32))

    def complain(self, is_wrong: np.ndarray) -> None:
        """Raises: CorruptMessage where any value `is_wrong`."""
        if is_wrong.any():
            first = int(is_wrong.argmax())
            raise CorruptMessage(
                f"{self.name}: {int(is_wrong.sum())} of {is_wrong.size} values of {self.file.name} break its promise "
                f"({self.guarantee}); the first is element {first}: {self.file.gradient[first]!r} came back as "
                f"{self.decoded()[first]!r}. Its timing would mean nothing, so the run stops"
            )


class BaselineMethod(TimedMethod):
    """A baseline: bytes in, bytes out, allocated by the package as for any of its users."""

    def __init__(self, name: str, n_threads: int, file: GradientFile) -> None:
        super().__init__(name, _BASELINES[name][0], file)
        self._baseline, self._message = baseline_by_name(name, n_threads), b""
        self.poison()

    def encode(self) -> None:
        self._message = self._baseline.encode(self.file.gradient)
        self.encoded_bytes = len(self._message)

    def decode(self) -> None:
        self._values = self._baseline.decode(self._message)

    def poison(self) -> None:
        self._values = np.zeros(0, np.float32)

    def decoded(self) -> np.ndarray:
        return self._values


class CodecMethod(TimedMethod):
    """A codec of gradwire's registry, which says nothing of its loss: equal messages must give equal values."""

    def __init__(
        self, name: str, options: dict[str, Any], file: GradientFile, dtype: torch.dtype = torch.float32
    ) -> None:
        super().__init__(name, ", ".join(f"{key} {value}" for key, value in options.items()) or "default", file)
        self.codec = codecs.by_name(name.removeprefix("gradwire:"), **options)
        self.gradient = torch.from_numpy(file.gradient).to(dtype)
        self.n_bytes = self.gradient.nbytes
        self._message = torch.empty(self.codec.max_encoded_bytes(file.gradient.size, dtype), dtype=torch.uint8)
        self._values = torch.empty_like(self.gradient)
        self._once: torch.Tensor | None = None

    def encode(self) -> None:
        self.encoded_bytes = int(self.codec.encode(self.gradient, self._message))

    def decode(self) -> None:
        self.codec.decode(self.message(), self._values)

    def message(self) -> torch.Tensor:
        """The last message, exactly."""
        return self._message[: self.encoded_bytes]

    def poison(self) -> None:
        size = self._values.element_size()
        poison = np.array([_POISON], np.uint32).view(np.uint8)[-size:]  # of two bytes: the upper ones
        self._values.view(torch.uint8).numpy().reshape(-1, poison.size)[:] = poison

    def decoded(self) -> np.ndarray:
        return self._values.float().numpy()

    def verify(self) -> None:
        values, decoded = self.file.gradient.view(np.uint32), self.decoded().view(np.uint32)
        if np.array_equal(values, decoded):
            return
        self.guarantee = "repeatable, every value written"
        if self._once is None:
            self._once = self._values.clone()
        self.complain((decoded != self._once.numpy().view(np.uint32)) | (decoded == _POISON))


class GCompMethod(CodecMethod):
    """GComp or truncate; by default its messages of format 2, and with `format=1` truncating ones, as published.

    `table=fitted` (the default) encodes with the table of this gradient's own exponents, as training does once its
    table was refreshed; making a table is no part of the encoder. `table=prior` is the built-in table of a first step.
    `dtype=bfloat16` or `float16`: gradient, parameter and optimizer state are rounded to that dtype, and speeds count
    its bytes. Without optimizer state in the file importance "paper" has nothing to read: "none" takes its place, or with a cap
    "uniform".
    """

    codec: GCompCodec

    def __init__(self, name: str, given: dict[str, Any], file: GradientFile) -> None:
        options = dict(given)
        table, dtype_name = options.pop("table", "fitted"), options.pop("dtype", "float32")
        if table not in ("fitted", "prior"):
            raise InvalidArgument(f"table={table}: expected fitted or prior")
        if dtype_name not in _DTYPES:
            raise InvalidArgument(f"dtype={dtype_name}: expected {', '.join(_DTYPES)}")
        dtype = _DTYPES[dtype_name]
        if name == "gcomp" and "importance" not in options:
            stand_in = "uniform" if "bits" in options else "none"
            options["importance"] = "paper" if file.state is not None else stand_in
        elif options.get("importance") == "paper" and file.state is None:
            raise InvalidArgument(f'{file.path}: importance "paper" needs the optimizer\'s state, but {file.missing}')
        if options.get("format") == 1:
            if dtype is not torch.float32:
                raise InvalidArgument(f"dtype={dtype_name} is measured with format=2")
            if name == "gcomp":
                options.setdefault("rounding", "truncate")
        self.tolerance = float(options.pop("tolerance", 1.0))
        super().__init__(name, options, _rounded_file(file, dtype), dtype)
        self.importance = self.codec.importance + (f" {self.codec.bits}" if self.codec.bits is not None else "")
        short = "" if dtype is torch.float32 else f", {dtype_name}"
        self.setting = f"{self.importance}, format {self.codec.format}, {table} table{short}"
        if "importance" in given:
            self.importance = ""  # the name says it already
        if table == "fitted":
            counts = torch.from_numpy(exponent_histogram(self.file.gradient))
            self.codec.use_table(HuffmanTable.from_histogram(counts))
        self._importance_bytes: torch.Tensor | None = None
        if self.codec.importance == "paper":
            assert self.file.state is not None
            optimizer = make_optimizer(self.file.state, dtype=dtype)
            promise = Promise(self.tolerance, rounding=self.codec.rounding, format=self.codec.format)
            self._parameter: torch.Tensor = optimizer.param_groups[0]["params"][0]
            self._metric = QuantisationMetric(optimizer, 1, promise)
            self._importance_bytes = torch.empty(file.gradient.size, dtype=torch.uint8)
        guarantees = {"paper": "distance by the rule", "none": "bits", "uniform": "rounding"}
        self.guarantee = guarantees.get(self.codec.importance, "truncation")
        self._allowed = self._make_bound()

    def encode(self) -> None:
        if self._importance_bytes is not None:
            self._metric.write_importance([self._parameter], [0], self._importance_bytes)
        self.encoded_bytes = int(self.codec.encode(self.gradient, self._message, self._importance_bytes))

    def decode(self) -> None:
        self.codec.decode(self.message(), self._values, self._importance_bytes)

    def parts(self) -> dict[str, float]:
        """The bound: exponents at their entropy over the gradient; levels, signs, mantissas at the bits chosen for them."""
        parts = describe(self.message())
        exponents = entropy_bits(exponent_histogram(self.file.gradient)) * self.file.gradient.size / 8
        bound_bytes = exponents + float(parts["level_bytes"] + parts["mantissa_bytes"])
        return {"exponent_bits": float(parts["exponent_bits"]), "bound_bytes": bound_bytes}

    def _make_bound(self) -> np.ndarray:
        """How far each decoded value (n,) may lie from the original one, zeros, subnormals, Inf and NaN aside."""
        codec, n_mantissa = self.codec, _MANTISSA_BITS[self.gradient.dtype]
        magnitude = np.abs(self.file.gradient.astype(np.float64))
        if codec.importance == "none":
            return np.zeros_like(magnitude)
        if codec.importance == "uniform":
            assert codec.bits is not None
            return np.ldexp(magnitude, -codec.bits - 1)
        if codec.importance != "paper":
            return np.ldexp(magnitude, (codec.bits or 0) - n_mantissa)
        assert self.file.state is not None
        total, slack = allowed_scale(self.file.state)
        # The promise; levels of format 1 are as published, and the nearest is half as far.
        rounds = codec.rounding == "nearest"
        allowed = self.tolerance * np.ldexp(total + slack, -n_mantissa - (rounds and codec.format == 1))
        return allowed if codec.bits is None else np.maximum(allowed, np.ldexp(magnitude, -codec.bits - rounds))

    def verify(self) -> None:
        values, decoded = self.file.gradient, self.decoded()
        exponent = values.view(np.uint32) >> 23 & 0xFF
        with np.errstate(invalid="ignore", over="ignore"):
            distance = np.abs(values.astype(np.float64) - decoded.astype(np.float64))
            is_wrong = ~(distance <= self._allowed) | (np.sign(values) != np.sign(decoded))
        is_wrong = np.where(exponent == 0, decoded.view(np.uint32) != 0, is_wrong)  # zeros and subnormals become +0
        self.complain(np.where(exponent == 0xFF, values.view(np.uint32) != decoded.view(np.uint32), is_wrong))


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


def names() -> list[str]:
    """Every codec and every baseline; a codec that has a baseline's name is `gradwire:NAME`."""
    taken = baseline_names()
    return [*(f"gradwire:{name}" if name in taken else name for name in codecs.names()), *taken]


def choose_specs(asked: Sequence[str]) -> list[str]:
    """`all` spelt out, doubles dropped. Raises: InvalidArgument (a name that is neither codec nor baseline)."""
    for spec in asked:
        if _split(spec)[0] not in ("all", *names()):
            raise InvalidArgument(f"no codec or baseline is called {spec!r}; there are: all, {', '.join(names())}")
    everything = [*names(), *_VARIANTS]
    return list(dict.fromkeys(one for spec in asked for one in (everything if spec == "all" else [spec])))


def by_spec(spec: str, file: GradientFile, n_threads: int) -> TimedMethod | None:
    """A method, or None where it cannot use `n_threads` threads. Raises: InvalidArgument (unknown name, option)."""
    name, options = _split(spec)
    method: TimedMethod
    if name not in _BASELINES:
        method = (GCompMethod if name in ("gcomp", "truncate") else CodecMethod)(name, options, file)
    elif options:
        raise InvalidArgument(f"{spec}: baselines take no options")
    elif n_threads > 1 and not _BASELINES[name][1]:
        return None
    else:
        method = BaselineMethod(name, n_threads, file)
    method.spec = spec
    return method


def _split(spec: str) -> tuple[str, dict[str, Any]]:
    prefix = "gradwire:" if spec.startswith("gradwire:") else ""
    name, options = parse_spec(spec.removeprefix(prefix))
    return prefix + name, options
