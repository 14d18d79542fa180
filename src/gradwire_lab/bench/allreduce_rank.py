"""The rank's side of `bench allreduce`: time every scheme in turns, verify what it gives, gather the ranks' figures."""

from __future__ import annotations

import argparse
import time
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from gradwire.core.threads import use_fair_share_of_cores
from gradwire.errors import CorruptMessage
from gradwire.registry import parse_spec
from gradwire.telemetry.environment import describe_environment
from gradwire.wire.communicator import Communicator, ring_bytes
from gradwire_lab.bench import kernel_counters, over_ranks
from gradwire_lab.bench.allreduce_bounds import Exact, error_bound
from gradwire_lab.bench.launching import write_results
from gradwire_lab.bench.reducers import BASELINES, BackendReducer, SchemeReducer, TimedReducer
from gradwire_lab.bench.sources import GradientSource
from gradwire_lab.bench.timing import MIN_SAMPLE_S, Timing
from gradwire_lab.ranks.network import current_network
from gradwire_lab.results.records import RecordLog
from gradwire_lab.workloads.gradients import OptimizerState

# A longer gradient is checked at this many stretches of this many elements, evenly spread, both ends among them: half a
# million, since checking four million in float64 took longer than most reductions of 25 MB. The checksum covers all.
_CHECKED_STRETCHES, _STRETCH_ELEMENTS = 128, 1 << 12
_MAX_REPEATS = 50


@dataclass
class _Tally:
    """One scheme's samples at one size, on this rank."""

    n_rounds: int
    n_repeats: int
    samples_s: list[float] = field(default_factory=list)
    cpu_s: list[float] = field(default_factory=list)  # of this process, all threads and the kernel, a call
    sent_bytes: list[float] = field(default_factory=list)  # a call
    kernel_bytes: list[float] = field(default_factory=list)
    verdict: str = ""
    relative_error: float = 0.0  # of the last result, by norms


class AllReduceBench:
    """All sizes of one run. Every method is collective."""

    def __init__(self, args: argparse.Namespace, source: GradientSource, specs: Sequence[str]) -> None:
        self.args, self.source, self.specs = args, source, specs
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        self._environment = describe_environment()
        use_fair_share_of_cores()
        self._communicator = Communicator()
        self._log = RecordLog(args.log) if args.log and self.rank == 0 else None
        self.records: list[dict[str, Any]] = []

    def close(self) -> None:
        """Let the communicator go."""
        self._communicator.close()

    def run_size(self, n_bytes: int) -> list[dict[str, Any]]:
        """Measure every scheme on a gradient of `n_bytes` of float32; returns the records, on every rank."""
        n_elements = max(1, n_bytes // 4)
        gradient = torch.from_numpy(self.source.gradient(self.rank, n_elements))
        exact = self._compute_exact(gradient)
        state = self.source.file.state if self.source.file is not None else None
        reducers = [make_reducer(spec, self._communicator, state, n_elements) for spec in self.specs]
        buffer = torch.empty_like(gradient)
        records: list[dict[str, Any]] = []
        try:
            tallies = [self._plan(reducer, gradient, buffer) for reducer in reducers]
            for round_index in range(max(tally.n_rounds for tally in tallies)):
                for reducer, tally in zip(reducers, tallies, strict=True):
                    if round_index < tally.n_rounds:
                        self._sample(reducer, tally, gradient, buffer)
                        self._verify(reducer, tally, buffer, exact, state)
            for reducer, tally in zip(reducers, tallies, strict=True):
                records.append(self._record(reducer, tally, n_elements))
        finally:
            for reducer in reducers:
                reducer.close()
        self.records += records
        if self.rank == 0:
            if self._log:
                self._log.append(records)
            else:
                write_results(self.args, self.records)
        return records

    def _plan(self, reducer: TimedReducer, gradient: torch.Tensor, buffer: torch.Tensor) -> _Tally:
        """Warm up (`--warmup` calls, fewer where `--budget` is spent before), and fit rounds and repeats into `--budget`.

        Equal on all ranks.
        """
        total_s = once_s = 0.0
        for _ in range(max(1, self.args.warmup)):
            buffer.copy_(gradient)
            dist.barrier()
            started = time.perf_counter()
            reducer.reduce(buffer)
            elapsed_s = time.perf_counter() - started
            reducer.finish_step()
            once_s = max(over_ranks.largest([elapsed_s])[0], 1e-5)
            total_s += once_s
            if total_s > self.args.budget:
                break
        n_repeats = min(_MAX_REPEATS, max(1, round(MIN_SAMPLE_S / once_s)))
        n_repeats = -(-n_repeats // reducer.period) * reducer.period
        n_rounds = int(min(self.args.rounds, max(3, self.args.budget / (once_s * n_repeats))))
        return _Tally(n_rounds, n_repeats)

    def _sample(self, reducer: TimedReducer, tally: _Tally, gradient: torch.Tensor, buffer: torch.Tensor) -> None:
        """One sample: repeats of the same reduction; filling the buffer and finishing the step are off the clock.

        Of the processors' time only the filling is left out: it holds the ends of steps, and one barrier a sample.
        """
        elapsed_s = filling_s = 0.0
        dist.barrier()
        kernel_before, reducer.sent_bytes = kernel_counters.sent_bytes(), 0
        cpu_before_s = time.process_time()
        for _ in range(tally.n_repeats):
            filling_since_s = time.thread_time()
            buffer.copy_(gradient)
            filling_s += time.thread_time() - filling_since_s
            started = time.perf_counter()
            reducer.reduce(buffer)
            elapsed_s += time.perf_counter() - started
            reducer.finish_step()
        dist.barrier()  # now everything sent has arrived, so the kernel has counted it
        tally.cpu_s.append((time.process_time() - cpu_before_s - filling_s) / tally.n_repeats)
        kernel_after = kernel_counters.sent_bytes()
        tally.samples_s.append(elapsed_s / tally.n_repeats)
        tally.sent_bytes.append(reducer.sent_bytes / tally.n_repeats)
        if kernel_before is not None and kernel_after is not None:
            tally.kernel_bytes.append((kernel_after - kernel_before) / tally.n_repeats)

    def _compute_exact(self, gradient: torch.Tensor) -> Exact:
        positions = checked_positions(gradient.numel())
        mine = torch.from_numpy(gradient.numpy()[positions])
        everyone = [torch.empty_like(mine) for _ in range(self.world_size)]
        dist.all_gather(everyone, mine)
        total, magnitude = np.zeros(positions.size), np.zeros(positions.size)
        for values in everyone:
            total += values.numpy()
            magnitude += np.abs(values.numpy())
        return Exact(total / self.world_size, magnitude / self.world_size, positions, self.world_size)

    def _verify(
        self, reducer: TimedReducer, tally: _Tally, buffer: torch.Tensor, exact: Exact, state: OptimizerState | None
    ) -> None:
        """Hold the result to its promise. Raises: CorruptMessage, on every rank."""
        result = buffer.numpy()
        checksums = self._gather(float(zlib.crc32(result.data)))
        error = np.abs(result[exact.positions].astype(np.float64) - exact.mean)
        bound = error_bound(reducer.name, reducer.options, exact, state, reducer.quantum)
        n_wrong = int((~np.isfinite(error)).sum() if bound is None else (~(error <= bound)).sum())
        n_wrong_by_rank = self._gather(float(n_wrong))
        drifts_by_design = reducer.name == "periodic"  # its replicas meet only every few steps
        if len(set(checksums)) > 1 and not drifts_by_design:
            raise CorruptMessage(f"{reducer.name}: ranks hold different results (CRC-32 {checksums}); the run stops")
        if any(n_wrong_by_rank):
            raise CorruptMessage(
                f"{reducer.name}: of {exact.positions.size} checked, {n_wrong_by_rank} by rank are not within "
                "its bound, or not finite; its time would mean nothing: the run stops"
            )
        scale = float(np.sqrt((exact.mean**2).sum())) or 1.0
        tally.relative_error = float(np.sqrt((error**2).sum())) / scale
        promise = "finite (drifts)" if drifts_by_design else "equal on all ranks"
        tally.verdict = promise if bound is None else "within bound"

    def _gather(self, value: float) -> list[float]:
        mine = torch.tensor([value], dtype=torch.float64)
        everyone = [torch.empty_like(mine) for _ in range(self.world_size)]
        dist.all_gather(everyone, mine)
        return [float(one) for one in everyone]

    def _record(self, reducer: TimedReducer, tally: _Tally, n_elements: int) -> dict[str, Any]:
        timing = Timing.of(over_ranks.largest(tally.samples_s), tally.n_repeats)  # it has ended when its last rank has
        sent = self._gather(float(np.median(tally.sent_bytes)))
        kernel = self._gather(float(np.median(tally.kernel_bytes)) if tally.kernel_bytes else -1.0)
        cpu = self._gather(float(np.median(tally.cpu_s)))
        n_bytes = 4 * n_elements
        network = current_network()
        ring = ring_bytes(n_bytes, self.world_size)
        bandwidth = n_bytes / timing.median_s / 1e9
        return {
            "scheme": reducer.name,
            "options": ",".join(f"{key}={value}" for key, value in reducer.options.items()),
            "ranks": self.world_size,
            "ranks_per_node": network.ranks_per_node,
            "rate_bps": network.rate_bps,
            "n_bytes": n_bytes,
            "gradients": self.source.name,
            "time_s": timing.median_s,
            "time_s_low": timing.low_s,
            "time_s_high": timing.high_s,
            "cpu_s": sum(cpu) / self.world_size,
            "wire_bytes": sum(sent) / self.world_size,
            "wire_bytes_max": max(sent),
            "kernel_bytes": sum(kernel) / self.world_size if min(kernel) >= 0 else None,
            "wire_ratio": sum(sent) / self.world_size / ring if ring else 1.0,
            "algorithm_gb_per_s": bandwidth,
            "bus_gb_per_s": bandwidth * 2 * (self.world_size - 1) / self.world_size,
            "verified": tally.verdict,
            "n_verified": min(n_elements, _CHECKED_STRETCHES * _STRETCH_ELEMENTS),
            "relative_error": tally.relative_error,
            "n_samples": timing.n_samples,
            "n_repeats": timing.n_repeats,
            "shaped": network.shaped,
            **self._environment,
        }


def make_reducer(spec: str, communicator: Communicator, state: OptimizerState | None, n_elements: int) -> TimedReducer:
    """A baseline or a scheme from its spec. Raises: InvalidArgument."""
    name, options = parse_spec(spec)
    if name in BASELINES:
        return BackendReducer(name)
    if name == "dense-switch":
        from gradwire_lab.bench.dense_switch import DenseSwitchReducer

        return DenseSwitchReducer(communicator)
    if name == "gcomp" and state is None:
        # Its default reads an optimizer; a gradient without one can still be sent without loss.
        options = {"importance": "none", **options}
    return SchemeReducer(name, options, state, n_elements)


def checked_positions(n_elements: int) -> np.ndarray:
    """Elements that are compared with the exact mean: all, or evenly spread stretches of a long gradient."""
    if n_elements <= _CHECKED_STRETCHES * _STRETCH_ELEMENTS:
        return np.arange(n_elements)
    starts = np.linspace(0, n_elements - _STRETCH_ELEMENTS, _CHECKED_STRETCHES).astype(np.int64)
    return (starts[:, None] + np.arange(_STRETCH_ELEMENTS)).ravel()
