"""gradwire bench allreduce: time and bytes of every scheme's all-reduce beside the backend's own, every result verified."""

import argparse
import math
import time
import zlib
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from gradwire import schemes
from gradwire.core.threads import use_fair_share_of_cores
from gradwire.errors import CorruptMessage, InvalidArgument, Unsupported
from gradwire.reducer import Reducer
from gradwire.registry import choose_specs, parse_spec, spec_of
from gradwire.telemetry.environment import describe_environment
from gradwire.telemetry.recorder import Recorder
from gradwire.wire.communicator import Communicator, ring_bytes
from gradwire.wire.wire import Wire
from gradwire_lab.bench import driver
from gradwire_lab.bench.driver import MIN_SAMPLE_S, Progress, Timing
from gradwire_lab.bench.level_rule import Float64Array, allowed_scale, make_optimizer
from gradwire_lab.bench.sources import GradientSource
from gradwire_lab.ranks.network import current_network
from gradwire_lab.results.captions import format_bytes
from gradwire_lab.results.experiment import Column, Table
from gradwire_lab.results.tables import Grid, print_grid, tabulate
from gradwire_lab.switch import Switch
from gradwire_lab.training.sharding import make_scheme
from gradwire_lab.workloads.gradients import OptimizerState, load_gradients

QUICK_SIZES = (1 << 10, 1 << 16, 1 << 20, 25_000_000)
FULL_SIZES = tuple(1 << power for power in range(10, 25, 2)) + (25_000_000, 100_000_000, 400_000_000)
REFERENCE = "ddp"
BASELINES = ("ddp", "ddp-bf16")
BY_NAME_ONLY = ("two-level", "dense-switch")  # `all` does not mean them: they need several ranks a node, or a switch

# Values in a sum of the dense switch: while one is on its way the next is scaled. 16 MB are 0.6 s at 200 Mb/s, a round trip a
# thousandth.
_BLOCK_ELEMENTS = 1 << 22
_NOT_FINITE = 1 << 20  # above every exponent of float32

# A longer gradient is checked at this many stretches of this many elements, evenly spread, both ends among them: half a
# million, since checking four million in float64 took longer than most reductions of 25 MB. The checksum covers all.
_CHECKED_STRETCHES, _STRETCH_ELEMENTS = 128, 1 << 12
_MAX_REPEATS = 50
# Half a unit in the last place, relative: what one rounding to the format may change.
_FLOAT32_ROUNDING = 2.0**-24
_BFLOAT16_ROUNDING = 2.0**-9
# Below this a float32 is subnormal, and GComp's message has no mantissa for it.
_SMALLEST_NORMAL = 2.0**-126
# Rounding may make a partial sum larger, by less than this in all, before the next one is rounded.
_CREEP = 1.01


def run(args: argparse.Namespace) -> int:
    """Measure as a rank, or start the ranks that do."""
    args.rounds = args.rounds or (5 if args.quick else 9)
    args.budget = args.budget or (2.0 if args.quick else 20.0)
    if args.rounds < 1 or min(args.n_bytes or [4]) < 4:
        words = "rounds count from 1, bytes from 4 (one float32)"
        raise InvalidArgument(f"--rounds {args.rounds} --n-bytes {args.n_bytes}: {words}")
    specs = choose_specs(args.scheme, reducing(), BY_NAME_ONLY)
    file = load_gradients(args.gradients) if args.gradients else None
    source = GradientSource(file, args.density, args.pattern)
    sizes = args.n_bytes or (QUICK_SIZES if args.quick else FULL_SIZES)
    if source.file is not None and not args.n_bytes:
        sizes = (source.file.gradient.nbytes,)

    def measure() -> None:
        use_fair_share_of_cores()
        bench = AllReduceBench(args, source, specs)
        for n_bytes in sizes:
            records = bench.run_size(n_bytes)
            if bench.rank == 0:
                print_grid(make_grid(records), args.wide)

    driver.measure_in_ranks("allreduce", args, measure, specs)
    return 0


# ---- what is timed: schemes outside DDP, and the backend's own all-reduce, behind one face


class TimedReducer(ABC):
    """One way to replace a tensor by its mean over the ranks.

    Attributes:
        period: steps after which everything repeats; a sample is made of whole periods.
        Given by whoever times it:
        gradient, buffer: (n,) float32: what a step reduces, and where.
        n_rounds, n_repeats: of samples, and of steps in one. turns: what they took.
        promise, error: what the last result was held to, and how far it was off, relative by norms.
    """

    gradient: torch.Tensor
    buffer: torch.Tensor
    n_rounds: int
    n_repeats: int
    promise: str
    error: float
    period = 1

    def __init__(self, name: str, options: dict[str, Any] | None = None) -> None:
        self.name, self.options = name, options or {}
        self.times: list[float] = []
        self.turns: list[driver.Turn] = []
        self.sent_bytes = 0  # by this rank, so far
        self._filling_s = 0.0

    def step(self) -> None:
        """One reduction. Filling the buffer and finishing the step are off the clock."""
        filling_since_s = time.thread_time()
        self.buffer.copy_(self.gradient)
        self._filling_s += time.thread_time() - filling_since_s
        started = time.perf_counter()
        self.reduce(self.buffer)
        self.times.append(time.perf_counter() - started)
        self.finish_step()

    def stats(self) -> dict[str, float]:
        """`filling_s`: processor time that is none of the reduction's."""
        return {"sent_bytes": float(self.sent_bytes), "filling_s": self._filling_s}

    @abstractmethod
    def reduce(self, buffer: torch.Tensor) -> None:
        """Replace `buffer` (n,) float32 by the mean; returns when it is there."""

    def finish_step(self) -> None:
        """What follows a reduction off the clock."""

    def finish_turn(self) -> None:
        """Nothing is put off."""

    def close(self) -> None:
        """Let go of everything."""


class BackendReducer(TimedReducer):
    """torch.distributed's own all-reduce, as DDP without a hook calls it: divide, then sum.

    The backend does not say what it sends; counted are the bytes of a ring, which Gloo's algorithm is.
    """

    def reduce(self, buffer: torch.Tensor) -> None:
        message = buffer.bfloat16() if self.name == "ddp-bf16" else buffer
        message.div_(dist.get_world_size())
        dist.all_reduce(message)
        self.sent_bytes += ring_bytes(message.nbytes, dist.get_world_size())
        if message is not buffer:
            buffer.copy_(message)


class SchemeReducer(TimedReducer):
    """A scheme of the registry in a Reducer of its own, which gets the whole gradient as one bucket."""

    def __init__(self, name: str, options: dict[str, Any], state: OptimizerState | None, n_elements: int) -> None:
        super().__init__(name, options)
        optimizer = make_optimizer(state, n_elements) if state is not None else None
        names = {"gradient": optimizer.param_groups[0]["params"][0]} if optimizer is not None else {}
        self._reducer = Reducer(make_scheme(name, driver.published(name, options)), names=names, optimizer=optimizer)
        self._slots = list(self._reducer.slots.values())
        # `periodic` communicates in one call of `every`.
        self.period = int(self._reducer.scheme.configuration["every"]) if name == "periodic" else 1

    def reduce(self, buffer: torch.Tensor) -> None:
        self._reducer.reduce(buffer, self._slots, [0] * len(self._slots), 0, True).wait()

    def finish_step(self) -> None:
        self._reducer.wait_until_idle()
        self._reducer.close_pass(self._reducer.step - 1, 0)
        self.sent_bytes += self._reducer.recorder.steps[-1].bytes_sent

    def close(self) -> None:
        self._reducer.close()


class DenseSwitchReducer(TimedReducer):
    """In-network aggregation without compression: sums of int32 in the switch, one exponent for all values.

    What SwitchML and ATP do: agree on the largest exponent, scale to int32 with room for the sum, add, scale back.

    When not to use this: in training. It keeps as many bits as the largest value of all leaves, and has no fallback.
    """

    def __init__(self) -> None:
        super().__init__("dense-switch")
        self._communicator = Communicator()
        self._wire = Wire(self._communicator)
        self._recorder = Recorder(self._communicator.rank, self._communicator.world_size)
        self._aggregator = Switch()
        self._aggregator.bind(self._communicator, self._recorder)

    def reduce(self, buffer: torch.Tensor) -> None:
        self._wire.record = self._recorder.open_bucket(len(self.times), 0, buffer.nbytes)
        self._communicator.submit(self._reduce_on_lane, buffer).wait()
        self._recorder.close_bucket(self._wire.record)

    def _reduce_on_lane(self, buffer: torch.Tensor) -> None:
        largest = max(-float(buffer.min()), float(buffer.max()))
        # A value below 2^e; a sum of N below 2^(e + ceil(log2 N)), which must stay below 2^31.
        exponent = math.frexp(largest)[1] if math.isfinite(largest) else _NOT_FINITE
        agreed = torch.tensor([exponent], dtype=torch.int32)
        self._aggregator.max_int32(agreed, self._wire)
        if int(agreed) >= _NOT_FINITE:
            raise Unsupported("dense-switch sums finite gradients only: fixed point has no Inf or NaN")
        headroom_bits = (self._communicator.world_size - 1).bit_length()
        quantum = math.ldexp(1.0, int(agreed) + headroom_bits - 30)
        integers = self._communicator.scratch("dense switch", 4 * buffer.numel()).view(torch.int32)
        sums = []
        for start in range(0, buffer.numel(), _BLOCK_ELEMENTS):
            block = slice(start, min(start + _BLOCK_ELEMENTS, buffer.numel()))
            integers[block].copy_(buffer[block].mul_(1.0 / quantum).round_())
            sums.append((block, self._aggregator.start_sum(integers[block], self._wire)))
        for block, one in sums:
            one()
            buffer[block].copy_(integers[block]).mul_(quantum / self._communicator.world_size)

    def finish_step(self) -> None:
        self.sent_bytes += self._recorder.close_step(len(self.times) - 1, 0).bytes_sent

    def close(self) -> None:
        self._aggregator.close()
        self._communicator.close()


def make_reducer(spec: str, state: OptimizerState | None, n_elements: int) -> TimedReducer:
    """A baseline or a scheme from its spec. Raises: InvalidArgument."""
    name, options = parse_spec(spec)
    if name in BASELINES:
        return BackendReducer(name)
    if name == "dense-switch":
        return DenseSwitchReducer()
    if name == "gcomp" and state is None:
        # Its default reads an optimizer; a gradient without one can still be sent without loss.
        options = {"importance": "none", **options}
    return SchemeReducer(name, options, state, n_elements)


def reducing() -> list[str]:
    """The baselines, then every scheme of the registry that reduces without a model around it."""
    alone = [name for name in schemes.names() if not (schemes.owns_step(name) or schemes.needs_momenta(name))]
    return [*BASELINES, *alone]


# ---- all of them in turns


class AllReduceBench:
    """All sizes of one run. Every method is collective."""

    def __init__(self, args: argparse.Namespace, source: GradientSource, specs: Sequence[str]) -> None:
        self.args, self.source, self.specs = args, source, specs
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        self._environment = describe_environment()
        self._records = driver.Records(args)

    def run_size(self, n_bytes: int) -> list[dict[str, Any]]:
        """Measure every scheme on a gradient of `n_bytes` of float32; returns the records, on every rank."""
        n_elements = max(1, n_bytes // 4)
        gradient = torch.from_numpy(self.source.gradient(self.rank, n_elements))
        exact = self._compute_exact(gradient)
        state = self.source.file.state if self.source.file is not None else None
        methods = [make_reducer(spec, state, n_elements) for spec in self.specs]
        buffer = torch.empty_like(gradient)
        try:
            for method in methods:
                method.gradient, method.buffer = gradient, buffer
                self._plan(method)
            n_samples = sum(method.n_rounds for method in methods)
            progress = Progress(f"{format_bytes(n_bytes)}, samples", n_samples, self.rank != 0)
            for round_index in range(max(method.n_rounds for method in methods)):
                for method in methods:
                    if round_index < method.n_rounds:
                        method.turns.append(driver.take_turn(method, method.n_repeats))
                        self._verify(method, exact, state)
                        progress.advance()
            records = [self._record(method, exact) for method in methods]
        finally:
            for method in methods:
                method.close()
        self._records.add(records)
        return records

    def _plan(self, method: TimedReducer) -> None:
        """Warm up: `--warmup` steps, fewer where `--budget` is spent before. Rounds and repeats are what fits into it."""
        total_s = once_s = 0.0
        for _ in range(max(1, self.args.warmup)):
            dist.barrier()
            method.step()
            once_s = max(driver.largest_over_ranks(method.times[-1:])[0], 1e-5)
            total_s += once_s
            if total_s > self.args.budget:
                break
        method.times.clear()
        n_repeats = min(_MAX_REPEATS, max(1, round(MIN_SAMPLE_S / once_s)))
        method.n_repeats = -(-n_repeats // method.period) * method.period
        method.n_rounds = int(min(self.args.rounds, max(3, self.args.budget / (once_s * method.n_repeats))))

    def _compute_exact(self, gradient: torch.Tensor) -> "Exact":
        positions = checked_positions(gradient.numel())
        everyone = _gather(torch.from_numpy(gradient.numpy()[positions])).numpy().astype(np.float64)
        return Exact(everyone.mean(axis=0), np.abs(everyone).mean(axis=0), positions, self.world_size)

    def _verify(self, method: TimedReducer, exact: "Exact", state: OptimizerState | None) -> None:
        """Hold the last result to its promise. Raises: CorruptMessage, on every rank."""
        result = method.buffer.numpy()
        error = np.abs(result[exact.positions].astype(np.float64) - exact.mean)
        bound = error_bound(method.name, method.options, exact, state)
        n_wrong = int((~np.isfinite(error)).sum() if bound is None else (~(error <= bound)).sum())
        mine = torch.tensor([float(zlib.crc32(result.data)), float(n_wrong)], dtype=torch.float64)
        checksums, n_wrong_by_rank = _gather(mine).T.tolist()
        drifts_by_design = method.name == "periodic"  # its replicas meet only every few steps
        if len(set(checksums)) > 1 and not drifts_by_design:
            raise CorruptMessage(f"{method.name}: ranks hold different results (CRC-32 {checksums}); the run stops")
        if any(n_wrong_by_rank):
            raise CorruptMessage(
                f"{method.name}: of {exact.positions.size} checked, {n_wrong_by_rank} by rank are not within "
                "its bound, or not finite; its time would mean nothing: the run stops"
            )
        promise = "finite (drifts)" if drifts_by_design else "equal on all ranks"
        method.promise = promise if bound is None else "within bound"
        method.error = float(np.linalg.norm(error)) / (float(np.linalg.norm(exact.mean)) or 1.0)

    def _record(self, method: TimedReducer, exact: "Exact") -> dict[str, Any]:
        n_repeats = method.n_repeats
        samples_s = [float(np.mean(method.times[at : at + n_repeats])) for at in range(0, len(method.times), n_repeats)]
        timing = Timing.of(driver.largest_over_ranks(samples_s), n_repeats)  # it has ended when its last rank has
        names = ("sent_bytes", "cpu_s", "filling_s", "kernel_bytes")
        counted = [[turn[name] / n_repeats for name in names] for turn in method.turns]
        counted = [[sent, cpu_s - filling_s, kernel] for sent, cpu_s, filling_s, kernel in counted]
        mine = np.median(counted, axis=0).tolist()
        mean_sent, mean_cpu_s, mean_kernel = driver.mean_over_ranks(mine)
        n_bytes, network = method.buffer.nbytes, current_network()
        ring = ring_bytes(n_bytes, self.world_size)
        bandwidth = n_bytes / timing.median_s / 1e9
        return {
            "scheme": method.name,
            "options": ",".join(f"{key}={value}" for key, value in method.options.items()),
            "ranks": self.world_size,
            "ranks_per_node": network.ranks_per_node,
            "rate_bps": network.rate_bps,
            "n_bytes": n_bytes,
            "gradients": self.source.name,
            **timing.fields("time_s"),
            "cpu_s": mean_cpu_s,
            "wire_bytes": mean_sent,
            "wire_bytes_max": driver.largest_over_ranks(mine[:1])[0],
            "kernel_bytes": None if np.isnan(mean_kernel) else mean_kernel,
            "wire_ratio": mean_sent / ring if ring else 1.0,
            "algorithm_gb_per_s": bandwidth,
            "bus_gb_per_s": bandwidth * 2 * (self.world_size - 1) / self.world_size,
            "verified": method.promise,
            "n_verified": exact.positions.size,
            "relative_error": method.error,
            "n_samples": timing.n_samples,
            "n_repeats": timing.n_repeats,
            "shaped": network.shaped,
            **self._environment,
        }


def _gather(mine: torch.Tensor) -> torch.Tensor:
    """(ranks, n): everyone's `mine` (n,)."""
    everyone = torch.empty(dist.get_world_size(), *mine.shape, dtype=mine.dtype)
    dist.all_gather(list(everyone), mine)
    return everyone


def checked_positions(n_elements: int) -> np.ndarray:
    """Elements that are compared with the exact mean: all, or evenly spread stretches of a long gradient."""
    if n_elements <= _CHECKED_STRETCHES * _STRETCH_ELEMENTS:
        return np.arange(n_elements)
    starts = np.linspace(0, n_elements - _STRETCH_ELEMENTS, _CHECKED_STRETCHES).astype(np.int64)
    return (starts[:, None] + np.arange(_STRETCH_ELEMENTS)).ravel()


# ---- how far each scheme's mean may lie from the exact one


@dataclass(frozen=True)
class Exact:
    """The exact result at the checked elements, and what the bounds are made of."""

    mean: Float64Array  # of the ranks' gradients
    mean_magnitude: Float64Array  # mean of their absolute values: no partial sum, divided by the ranks, is larger
    positions: np.ndarray  # of the checked elements in the gradient
    n_ranks: int


def error_bound(name: str, options: dict[str, Any], exact: Exact, state: OptimizerState | None) -> Float64Array | None:
    """The largest allowed |result - mean| of each checked element; None where a scheme promises none.

    Every scheme of sums pays one rounding a rank and one for the division; GComp adds N truncations of partial sums.
    """
    n_roundings = exact.n_ranks + 1
    sums = n_roundings * _FLOAT32_ROUNDING * exact.mean_magnitude + _SMALLEST_NORMAL
    if name in ("ddp", "plain", "zstd", "zlib"):
        return sums
    if name == "ddp-bf16":
        return 2 * n_roundings * _BFLOAT16_ROUNDING * exact.mean_magnitude + _SMALLEST_NORMAL
    if name == "truncate":
        return sums + exact.n_ranks * 2.0 ** (options.get("bits", 18) - 23) * exact.mean_magnitude
    if name == "gcomp":
        flushed = exact.n_ranks * _SMALLEST_NORMAL
        importance = options.get("importance", "paper")
        if importance == "none":
            return sums + flushed
        if importance == "uniform":
            return sums + flushed + exact.n_ranks * 2.0 ** -(options["bits"] + 1) * exact.mean_magnitude * _CREEP
        if importance == "paper" and state is not None:
            # n bits of a partial sum s go only where S > 2^n |s|: each of the N cuts is below 2^(n-23) |s| < 2^-23 S,
            # and the mean divides their sum by N. In format 2 their squares add up to the promise's, half of it the mean's.
            is_published, n = options.get("format", 2) == 1, exact.n_ranks
            scale, slack = allowed_scale(state, n if is_published else 1)
            repeated = exact.positions % scale.size
            worst = 1.0 if is_published or n == 1 else math.sqrt((n - 1) / 2) + math.sqrt(1 / 2)
            worst *= float(options.get("tolerance", 1.0))
            return sums + flushed + 2.0**-23 * worst * (scale + slack)[repeated]
    if name == "homomorphic" and not options.get("sparsifier"):
        sums_plainly = options.get("mode", "packed") == "packed" and options.get("aggregator") != "switch"
        return sums if sums_plainly or options.get("mode") == "plain" else None
    return None


# ---- for people


def make_grid(records: Sequence[dict[str, Any]]) -> Grid:
    """The records of one size."""
    first = records[0]
    network = f"{first['rate_bps'] / 1e6:g} Mb/s" if first["rate_bps"] else f"not shaped ({first['network']})"
    columns = [
        Column("time_s", "time ms", 1e3, ",.2f", spread=True),
        Column("time_s", "x ddp", kind="ratio"),
        Column("wire_ratio", "ratio", form=".3f"),
        Column("wire_bytes", "wire bytes", form=",.0f"),
        Column("algorithm_gb_per_s", "algbw GB/s", form=".3f"),
        Column("bus_gb_per_s", "busbw GB/s", form=".3f"),
        Column("kernel_bytes", form=",.0f"),
        Column("relative_error", "error", form=".1e"),
        Column("verified"),
    ]
    title = f"all-reduce of {format_bytes(first['n_bytes'])} ({first['gradients']}), {first['ranks']} ranks, {network}"
    caption = "time: median over samples of the slowest rank; bytes: sent per rank, mean"
    named = [{**record, "method": spec_of(record)} for record in records]
    return tabulate(named, Table(columns, rows=("method",), title=title), caption, {"method": REFERENCE})
