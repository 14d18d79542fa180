"""gradwire bench allreduce: time and bytes of every scheme's all-reduce beside the backend's own, every result verified."""

from __future__ import annotations

import argparse
import math
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from gradwire.core.threads import use_fair_share_of_cores
from gradwire.errors import CorruptMessage, InvalidArgument
from gradwire.registry import choose_specs, spec_of
from gradwire.telemetry.environment import describe_environment
from gradwire.wire.communicator import ring_bytes
from gradwire_lab.bench import driver, reducers
from gradwire_lab.bench.launching import check_ranks, is_rank, run_in_ranks
from gradwire_lab.bench.level_rule import Float64Array, allowed_scale
from gradwire_lab.bench.reducers import TimedReducer, make_reducer
from gradwire_lab.bench.sources import GradientSource
from gradwire_lab.bench.timing import MIN_SAMPLE_S, Progress, Timing
from gradwire_lab.ranks.network import current_network
from gradwire_lab.results.captions import format_bytes
from gradwire_lab.results.experiment import Column, Table
from gradwire_lab.results.grids import tabulate
from gradwire_lab.results.tables import Grid, print_grid
from gradwire_lab.workloads.gradients import OptimizerState, load_gradients

QUICK_SIZES = (1 << 10, 1 << 16, 1 << 20, 25_000_000)
FULL_SIZES = tuple(1 << power for power in range(10, 25, 2)) + (25_000_000, 100_000_000, 400_000_000)
REFERENCE = "ddp"

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
        raise InvalidArgument(
            f"--rounds {args.rounds} --n-bytes {args.n_bytes}: rounds count from 1, bytes from 4 (one float32)"
        )
    specs = choose_specs(args.scheme, reducers.names(), reducers.BY_NAME_ONLY)
    file = load_gradients(args.gradients) if args.gradients else None
    source = GradientSource(file, args.density, args.pattern)
    check_ranks(args)
    if not is_rank():
        return run_in_ranks("allreduce", args, specs)
    sizes = args.n_bytes or (QUICK_SIZES if args.quick else FULL_SIZES)
    if source.file is not None and not args.n_bytes:
        sizes = (source.file.gradient.nbytes,)
    with driver.as_rank():
        use_fair_share_of_cores()
        bench = AllReduceBench(args, source, specs)
        for n_bytes in sizes:
            records = bench.run_size(n_bytes)
            if bench.rank == 0:
                print_grid(make_grid(records), args.wide)
    return 0


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
        for method in methods:
            method.gradient, method.buffer = gradient, buffer
        try:
            plans = [self._plan(method) for method in methods]
            turns: list[list[driver.Turn]] = [[] for _ in methods]
            verdicts = [("", 0.0)] * len(methods)
            n_samples = sum(n_rounds for n_rounds, _ in plans)
            progress = Progress(f"{format_bytes(n_bytes)}, samples", n_samples, self.rank != 0)
            for round_index in range(max(n_rounds for n_rounds, _ in plans)):
                for number, (method, (n_rounds, n_repeats)) in enumerate(zip(methods, plans, strict=True)):
                    if round_index < n_rounds:
                        turns[number].append(driver.take_turn(method, n_repeats))
                        verdicts[number] = self._verify(method, exact, state)
                        progress.advance()
            records = [
                self._record(method, n_repeats, kept, verdict, exact)
                for method, (_, n_repeats), kept, verdict in zip(methods, plans, turns, verdicts, strict=True)
            ]
        finally:
            for method in methods:
                method.close()
        self._records.add(records)
        return records

    def _plan(self, method: TimedReducer) -> tuple[int, int]:
        """Rounds, and steps in a sample, that fit into `--budget`; equal on all ranks.

        It warms up: `--warmup` steps, fewer where the budget is spent before.
        """
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
        n_repeats = -(-n_repeats // method.period) * method.period
        return int(min(self.args.rounds, max(3, self.args.budget / (once_s * n_repeats)))), n_repeats

    def _compute_exact(self, gradient: torch.Tensor) -> Exact:
        positions = checked_positions(gradient.numel())
        everyone = _gather(torch.from_numpy(gradient.numpy()[positions])).numpy().astype(np.float64)
        return Exact(everyone.mean(axis=0), np.abs(everyone).mean(axis=0), positions, self.world_size)

    def _verify(self, method: TimedReducer, exact: Exact, state: OptimizerState | None) -> tuple[str, float]:
        """Hold the last result to its promise; returns which, and its relative error by norms.

        Raises: CorruptMessage, on every rank.
        """
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
        scale = float(np.linalg.norm(exact.mean)) or 1.0
        return promise if bound is None else "within bound", float(np.linalg.norm(error)) / scale

    def _record(
        self, method: TimedReducer, n_repeats: int, turns: list[driver.Turn], verdict: tuple[str, float], exact: Exact
    ) -> dict[str, Any]:
        samples_s = [float(np.mean(method.times[at : at + n_repeats])) for at in range(0, len(method.times), n_repeats)]
        timing = Timing.of(driver.largest_over_ranks(samples_s), n_repeats)  # it has ended when its last rank has
        names = ("sent_bytes", "cpu_s", "filling_s", "kernel_bytes")
        counted = [[turn[name] / n_repeats for name in names] for turn in turns]
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
            "verified": verdict[0],
            "n_verified": exact.positions.size,
            "relative_error": verdict[1],
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
