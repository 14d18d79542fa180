"""gradwire bench allreduce: time and bytes of every scheme's all-reduce beside the backend's own, every result verified."""

import argparse
import math
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist

from gradwire import schemes
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
from gradwire_lab.results.records import Record
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
    # Of the registry, what reduces without a model around it.
    alone = [name for name in schemes.names() if not (schemes.owns_step(name) or schemes.needs_momenta(name))]
    specs = choose_specs(args.scheme, [*BASELINES, *alone], BY_NAME_ONLY)
    file = load_gradients(args.gradients) if args.gradients else None
    source = GradientSource(file, args.density, args.pattern)
    usual = QUICK_SIZES if args.quick else FULL_SIZES
    sizes = args.n_bytes or (usual if file is None else (file.gradient.nbytes,))

    def measure() -> Iterator[list[Record]]:
        environment = describe_environment()
        for n_bytes in sizes:
            records = [{**record, **environment} for record in measure_size(args, source, specs, n_bytes)]
            yield records
            if dist.get_rank() == 0:
                print_grid(make_grid(records), args.wide)

    driver.measure_in_ranks("allreduce", args, measure, specs)
    return 0


# ---- what is timed: schemes outside DDP, and the backend's own all-reduce, each a row of functions


class Reduction(NamedTuple):
    """One way to replace a tensor by its mean over the ranks.

    reduce: replaces a buffer (n,) float32 by the mean, and returns when it is there. finish: what follows off the clock; the
    bytes that this rank has sent. period: steps after which everything repeats; a sample is made of whole periods.
    """

    reduce: Callable[[torch.Tensor], object]
    finish: Callable[[], int]
    close: Callable[[], None] = lambda: None
    period: int = 1


def _backend(name: str, n_elements: int) -> Reduction:
    """torch.distributed's own all-reduce, as DDP without a hook calls it: divide, then sum. The backend does not say
    what it sends; counted are the bytes of a ring, which Gloo's algorithm is."""
    is_half, world_size = name == "ddp-bf16", dist.get_world_size()

    def reduce(buffer: torch.Tensor) -> None:
        message = buffer.bfloat16() if is_half else buffer
        message.div_(world_size)
        dist.all_reduce(message)
        if is_half:
            buffer.copy_(message)

    return Reduction(reduce, lambda: ring_bytes((2 if is_half else 4) * n_elements, world_size))


def _scheme(name: str, options: dict[str, Any], state: OptimizerState | None, n_elements: int) -> Reduction:
    """A scheme of the registry in a Reducer of its own, which gets the whole gradient as one bucket."""
    optimizer = make_optimizer(state, n_elements) if state is not None else None
    names = {"gradient": optimizer.param_groups[0]["params"][0]} if optimizer is not None else {}
    scheme = make_scheme(name, driver.published(name, options))
    reducer = Reducer(scheme, names=names, optimizer=optimizer)
    slots = list(reducer.slots.values())

    def finish() -> int:
        reducer.wait_until_idle()
        reducer.close_pass(reducer.step - 1, 0)
        return reducer.recorder.steps[-1].bytes_sent

    # `periodic` communicates in one call of `every`.
    period = int(scheme.configuration["every"]) if name == "periodic" else 1
    offsets = [0] * len(slots)
    return Reduction(
        lambda buffer: reducer.reduce(buffer, slots, offsets, 0, True).wait(), finish, reducer.close, period
    )


def _dense_switch() -> Reduction:
    """In-network aggregation without compression: sums of int32 in the switch, one exponent for all values. What
    SwitchML and ATP do: agree on the largest exponent, scale to int32 with room for the sum, add, scale back. When not
    to use this: in training. It keeps as many bits as the largest value of all leaves, and has no fallback."""
    communicator = Communicator()
    n_ranks, wire, aggregator = communicator.world_size, Wire(communicator), Switch()
    recorder = Recorder(communicator.rank, n_ranks)
    aggregator.bind(communicator, recorder)

    def reduce(buffer: torch.Tensor) -> None:
        wire.record = recorder.open_bucket(0, 0, buffer.nbytes)
        communicator.submit(reduce_on_lane, buffer).wait()
        recorder.close_bucket(wire.record)

    def reduce_on_lane(buffer: torch.Tensor) -> None:
        largest = max(-float(buffer.min()), float(buffer.max()))
        # A value below 2^e; a sum of N below 2^(e + ceil(log2 N)), which must stay below 2^31.
        exponent = math.frexp(largest)[1] if math.isfinite(largest) else _NOT_FINITE
        agreed = torch.tensor([exponent], dtype=torch.int32)
        aggregator.max_int32(agreed, wire)
        if int(agreed) >= _NOT_FINITE:
            raise Unsupported("dense-switch sums finite gradients only: fixed point has no Inf or NaN")
        quantum = math.ldexp(1.0, int(agreed) + (n_ranks - 1).bit_length() - 30)
        integers = communicator.scratch("dense switch", 4 * buffer.numel()).view(torch.int32)
        sums = []
        for start in range(0, buffer.numel(), _BLOCK_ELEMENTS):
            block = slice(start, min(start + _BLOCK_ELEMENTS, buffer.numel()))
            integers[block].copy_(buffer[block].mul_(1.0 / quantum).round_())
            sums.append((block, aggregator.start_sum(integers[block], wire)))
        for block, one in sums:
            one()
            buffer[block].copy_(integers[block]).mul_(quantum / n_ranks)

    def close() -> None:
        aggregator.close()
        communicator.close()

    return Reduction(reduce, lambda: recorder.close_step(0, 0).bytes_sent, close)


class TimedReduction:
    """A baseline or a scheme by its spec, timed on `gradient`, (n,) float32. Raises: InvalidArgument.

    `promise`, `error`: what the last result was held to, and how far it was off, relative by norms.
    """

    n_rounds: int
    n_repeats: int
    promise: str
    error: float

    def __init__(self, spec: str, gradient: torch.Tensor, buffer: torch.Tensor, state: OptimizerState | None) -> None:
        self.name, self.options = parse_spec(spec)
        self.gradient, self.buffer = gradient, buffer
        if self.name in BASELINES:
            self.options, self.way = {}, _backend(self.name, buffer.numel())
        elif self.name == "dense-switch":
            self.options, self.way = {}, _dense_switch()
        else:
            if self.name == "gcomp" and state is None:
                # Its default reads an optimizer; a gradient without one can still be sent without loss.
                self.options = {"importance": "none", **self.options}
            self.way = _scheme(self.name, self.options, state, buffer.numel())
        self.times: list[float] = []
        self.turns: list[driver.Turn] = []
        self._sent_bytes, self._filling_s = 0, 0.0

    def step(self) -> None:
        """One reduction. Filling the buffer and finishing the step are off the clock."""
        filling_since_s = time.thread_time()
        self.buffer.copy_(self.gradient)
        self._filling_s += time.thread_time() - filling_since_s
        started = time.perf_counter()
        self.way.reduce(self.buffer)
        self.times.append(time.perf_counter() - started)
        self._sent_bytes += self.way.finish()

    def stats(self) -> dict[str, float]:
        """`filling_s`: processor time that is none of the reduction's."""
        return {"sent_bytes": float(self._sent_bytes), "filling_s": self._filling_s}


# ---- all of them in turns; every function is collective


def measure_size(args: argparse.Namespace, source: GradientSource, specs: Sequence[str], n_bytes: int) -> list[Record]:
    """Measure every scheme on a gradient of `n_bytes` of float32; returns the records, on every rank."""
    n_elements = max(1, n_bytes // 4)
    gradient = torch.from_numpy(source.gradient(dist.get_rank(), n_elements))
    positions: np.ndarray = np.arange(n_elements)
    if n_elements > _CHECKED_STRETCHES * _STRETCH_ELEMENTS:
        starts = np.linspace(0, n_elements - _STRETCH_ELEMENTS, _CHECKED_STRETCHES).astype(np.int64)
        positions = (starts[:, None] + np.arange(_STRETCH_ELEMENTS)).ravel()
    everyone = _gather(torch.from_numpy(gradient.numpy()[positions])).numpy().astype(np.float64)
    exact = Exact(everyone.mean(axis=0), np.abs(everyone).mean(axis=0), positions, len(everyone))
    state = source.file.state if source.file is not None else None
    buffer = torch.empty_like(gradient)
    methods: list[TimedReduction] = []
    try:
        for spec in specs:
            methods.append(TimedReduction(spec, gradient, buffer, state))
        for method in methods:
            _plan(method, args)
        n_samples = sum(method.n_rounds for method in methods)
        progress = Progress(f"{format_bytes(n_bytes)}, samples", n_samples, dist.get_rank() != 0)
        for round_index in range(max(method.n_rounds for method in methods)):
            for method in methods:
                if round_index < method.n_rounds:
                    method.turns.append(driver.take_turn(method.step, method.stats, method.n_repeats))
                    _verify(method, exact, state)
                    progress.advance()
        return [_record(method, source.name, positions.size) for method in methods]
    finally:
        for method in methods:
            method.way.close()


def _plan(method: TimedReduction, args: argparse.Namespace) -> None:
    """Warm up: `--warmup` steps, fewer where `--budget` is spent before. Rounds and repeats are what fits into it."""
    total_s = once_s = 0.0
    for _ in range(max(1, args.warmup)):
        dist.barrier()
        method.step()
        once_s = max(driver.largest_over_ranks(method.times[-1:])[0], 1e-5)
        total_s += once_s
        if total_s > args.budget:
            break
    method.times.clear()
    n_repeats, period = min(_MAX_REPEATS, max(1, round(MIN_SAMPLE_S / once_s))), method.way.period
    method.n_repeats = -(-n_repeats // period) * period
    method.n_rounds = int(min(args.rounds, max(3, args.budget / (once_s * method.n_repeats))))


def _verify(method: TimedReduction, exact: "Exact", state: OptimizerState | None) -> None:
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


def _record(method: TimedReduction, gradients: str, n_verified: int) -> Record:
    n_repeats, world_size, network = method.n_repeats, dist.get_world_size(), current_network()
    samples_s = [float(np.mean(method.times[at : at + n_repeats])) for at in range(0, len(method.times), n_repeats)]
    timing = Timing.of(driver.largest_over_ranks(samples_s), n_repeats)  # it has ended when its last rank has
    counted = [(turn["sent_bytes"], turn["cpu_s"] - turn["filling_s"], turn["kernel_bytes"]) for turn in method.turns]
    mine = (np.median(counted, axis=0) / n_repeats).tolist()
    mean_sent, mean_cpu_s, mean_kernel = driver.mean_over_ranks(mine)
    n_bytes = method.buffer.nbytes
    ring, bandwidth = ring_bytes(n_bytes, world_size), n_bytes / timing.median_s / 1e9
    return {
        "scheme": method.name,
        "options": ",".join(f"{key}={value}" for key, value in method.options.items()),
        "ranks": world_size,
        "ranks_per_node": network.ranks_per_node,
        "rate_bps": network.rate_bps,
        "n_bytes": n_bytes,
        "gradients": gradients,
        **timing.fields("time_s"),
        "cpu_s": mean_cpu_s,
        "wire_bytes": mean_sent,
        "wire_bytes_max": driver.largest_over_ranks(mine[:1])[0],
        "kernel_bytes": None if np.isnan(mean_kernel) else mean_kernel,
        "wire_ratio": mean_sent / ring if ring else 1.0,
        "algorithm_gb_per_s": bandwidth,
        "bus_gb_per_s": bandwidth * 2 * (world_size - 1) / world_size,
        "verified": method.promise,
        "n_verified": n_verified,
        "relative_error": method.error,
        "n_samples": timing.n_samples,
        "n_repeats": n_repeats,
        "shaped": network.shaped,
    }


def _gather(mine: torch.Tensor) -> torch.Tensor:
    """(ranks, n): everyone's `mine` (n,)."""
    everyone = torch.empty(dist.get_world_size(), *mine.shape, dtype=mine.dtype)
    dist.all_gather(list(everyone), mine)
    return everyone


# ---- how far each scheme's mean may lie from the exact one


class Exact(NamedTuple):
    """The exact result at the checked elements, and what the bounds are made of."""

    mean: Float64Array  # of the ranks' gradients
    mean_magnitude: Float64Array  # mean of their absolute values: no partial sum, divided by the ranks, is larger
    positions: np.ndarray  # of the checked elements in the gradient
    n_ranks: int


def error_bound(name: str, options: dict[str, Any], exact: Exact, state: OptimizerState | None) -> Float64Array | None:
    """The largest allowed |result - mean| of each checked element; None where a scheme promises none. Every scheme of
    sums pays one rounding a rank and one for the division; GComp adds N truncations of partial sums."""
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
