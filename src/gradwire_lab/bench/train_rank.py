"""The rank's side of `bench train`: methods take turns in blocks, or one after another where memory is short."""

from __future__ import annotations

import argparse
import dataclasses
import gc
import itertools
import os
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from gradwire.errors import Unsupported
from gradwire.telemetry.environment import describe_environment
from gradwire.wire.communicator import ring_bytes
from gradwire_lab.bench import kernel_counters, over_ranks
from gradwire_lab.bench.launching import write_results
from gradwire_lab.bench.link_changes import change_links
from gradwire_lab.bench.timing import Timing
from gradwire_lab.bench.train_methods import BASELINES, SHARDED, StepTimes, TrainMethod, describe
from gradwire_lab.ranks.netlab.rate import format_rate, parse_rate
from gradwire_lab.ranks.network import Network, current_network
from gradwire_lab.results.records import RecordLog
from gradwire_lab.workloads import Workload

# Steps of one method before the next has its turn: long enough that caches are its own, short against drifts of the
# machine's load.
BLOCK_STEPS = 5
# Losses of this many last steps are averaged: one batch's loss is noise.
_LOSS_STEPS = 10
# Of the free memory, what methods may take together; the rest is for activations and messages.
_MEMORY_SHARE = 0.5


class TrainBench:
    """One run. Every call is collective."""

    def __init__(self, args: argparse.Namespace, workload: Workload, specs: Sequence[str]) -> None:
        self.args, self.workload, self.specs = args, workload, specs
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        self._environment = describe_environment()
        self._shared_s: float | None = None
        self._records: list[dict[str, Any]] = []
        # What every link, or each, is set to in each phase; the first is as the launcher made them.
        self._phases: list[str] = [_describe(current_network()), *args.then]
        self._rates = self._phases[0]
        self._n_changes = 0

    def run(self) -> list[dict[str, Any]]:
        """Train every method; returns the records, on every rank."""
        first = self._start(self.specs[0])
        if first is None or len(self.specs) == 1 or self._fits(first):
            others = [self._start(spec) for spec in self.specs[1:]]
            methods = [method for method in (first, *others) if method is not None]
            return self._train(methods, is_interleaved=len(methods) > 1)
        records = self._train([first], is_interleaved=False)
        del first
        for spec in self.specs[1:]:
            gc.collect()  # models, hooks and attachments refer to each other: they must be gone before the next one comes
            method = self._start(spec)
            if method is not None:
                records += self._train([method], is_interleaved=False)
            del method
        return records

    def _start(self, spec: str) -> TrainMethod | None:
        try:
            return TrainMethod(spec, self.workload, self.args.seed, self.args.overlap)
        except Unsupported as error:  # the same on every rank: it depends on the options alone
            if "all" not in self.args.scheme:
                raise
            if self.rank == 0:
                print(f"left out: {spec}: {error}", flush=True)
            return None

    def _fits(self, method: TrainMethod) -> bool:
        """Whether all methods of all ranks on this machine fit into its memory at once; the same on every rank."""
        needed = method.memory_bytes() * len(self.specs) * int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        fits = torch.tensor([float(needed < _MEMORY_SHARE * _available_bytes())])
        dist.all_reduce(fits, op=dist.ReduceOp.MIN)
        return bool(fits.item())

    def _train(self, methods: Sequence[TrainMethod], is_interleaved: bool) -> list[dict[str, Any]]:
        self._run_blocks([_Counter(method) for method in methods], [self._n_warmup(c) for c in methods])
        for method in methods:
            method.check_settled()
        by_phase: list[list[_Counter]] = []
        for phase, rates in enumerate(self._phases):
            self._change_links(rates)
            by_phase.append([_Counter(method, phase) for method in methods])
            self._run_blocks(by_phase[-1], [self.args.steps] * len(methods))
        self._change_links(self._phases[0])
        losses = [over_ranks.mean(method.losses) for method in methods]
        clocks = [self._wall_clock(method) for method in methods]
        # Run one after another, later methods are compared at the end of the first, usually DDP.
        shared_s = self._shared_s = self._shared_s or min(clock[-1] for clock in clocks)
        records = [
            self._record(counter, loss, clock, shared_s, is_interleaved)
            for counters in by_phase
            for counter, loss, clock in zip(counters, losses, clocks, strict=True)
        ]
        for method in methods:
            method.close()
        self._records += records
        if self.rank == 0:
            if self.args.log:
                RecordLog(self.args.log).append(records)
            else:
                write_results(self.args, self._records)
        return records

    def _n_warmup(self, method: TrainMethod) -> int:
        """Steps of this method that do not count: what it measures first is not how it will train."""
        return max(self.args.warmup, method.settling_steps)

    def _run_blocks(self, counters: Sequence[_Counter], n_steps: Sequence[int]) -> None:
        # Turns are for methods that could disturb each other; the end of one costs a step that looks ahead its lead.
        n_block = BLOCK_STEPS if len(counters) > 1 else max(n_steps)
        for done in range(0, max(n_steps), n_block):
            for counter, n in zip(counters, n_steps, strict=True):
                if n > done:
                    counter.run_block(min(n_block, n - done))

    def _change_links(self, rates: str) -> None:
        if rates == self._rates:
            return
        if self.rank == 0:
            change_links(self.args.log, self._n_changes, rates)
        self._rates, self._n_changes = rates, self._n_changes + 1
        dist.barrier()

    def _wall_clock(self, method: TrainMethod) -> list[float]:
        """When each step of this method would have ended, had it trained alone: sums of the slowest rank's steps."""
        return list(itertools.accumulate(over_ranks.largest([times.iteration_s for times in method.times])))

    def _record(
        self, counter: _Counter, losses: list[float], clock: list[float], shared_s: float, is_interleaved: bool
    ) -> dict[str, Any]:
        method = counter.method
        n_warmup = self._n_warmup(method)
        first = n_warmup + counter.phase * self.args.steps
        counted = slice(first, first + self.args.steps)
        times = method.times[counted]
        steps_s = [end - start for start, end in zip([0.0, *clock], clock, strict=False)][counted]
        timing = Timing.of(steps_s)
        split: dict[str, float | None] = dict.fromkeys(("compute_s", "exposed_s", "wait_s"))
        if method.name not in SHARDED:
            split |= self._split(times)
        wire, kernel = over_ranks.mean([counter.sent_bytes / len(times), counter.kernel_bytes / len(times)])
        codec_s = None if counter.codec_s is None else over_ranks.mean([counter.codec_s / len(times)])[0]
        decode_s = None if counter.decode_s is None else over_ranks.mean([counter.decode_s / len(times)])[0]
        # Of equally many steps for all, whatever each took to settle.
        n_trained = self.args.warmup + (counter.phase + 1) * self.args.steps
        (cpu_s,) = over_ranks.mean([counter.cpu_s / len(times)])
        n_bytes = 4 * method.n_parameters
        ring = ring_bytes(n_bytes, self.world_size)
        network = current_network()
        rates = self._phases[counter.phase]
        if counter.phase:
            each = tuple(parse_rate(word) for word in rates.split(","))
            network = dataclasses.replace(network, rates_bps=each)
        described = self.workload.describe()
        return {
            "scheme": method.name,
            "options": describe(method),
            "ranks": self.world_size,
            "ranks_per_node": network.ranks_per_node,
            "rate_bps": network.rate_bps,
            "rates": _describe(network),
            "phase": counter.phase,
            "iteration_s": timing.median_s,
            "iteration_s_low": timing.low_s,
            "iteration_s_high": timing.high_s,
            **split,
            "codec_s": codec_s,
            "decode_s": decode_s,
            **self._overlap(counter, len(times)),
            "cpu_s": cpu_s,
            "wire_bytes": wire,
            "wire_bytes_origin": "computed" if method.name in BASELINES else "counted",
            "kernel_bytes": kernel if counter.has_kernel else None,
            "wire_ratio": wire / ring if ring else 1.0,
            "samples_per_s": self.world_size * self.workload.batch_size / timing.median_s,
            "loss": statistics.fmean(losses[:n_trained][-_LOSS_STEPS:]),
            "loss_at_s": shared_s,
            "loss_after_s": _loss_at(losses, clock, shared_s),
            "n_steps": len(times),
            "n_warmup": n_warmup,
            "n_bytes": n_bytes,
            "is_interleaved": is_interleaved,
            "emulated": described["compute"] != "real",
            "shaped": network.shaped,
            **described,
            **self._environment,
            "network": str(network),
        }

    def _split(self, times: Sequence[StepTimes]) -> dict[str, float]:
        """Medians over the steps of means over the ranks; waiting is split into slower ranks and the network.

        A rank that ends its backward pass before the slowest one waits for that rank first, whatever the network does:
        `wait_s`. The rest is `exposed_s`. Durations are compared, not clocks: all ranks leave a step together.
        """
        local = torch.tensor([step.local_s for step in times], dtype=torch.float64)
        slowest = local.clone()
        dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
        waiting = torch.tensor([step.waiting_s for step in times], dtype=torch.float64)
        wait = torch.minimum(slowest - local, waiting)
        update = torch.tensor([step.update_s for step in times], dtype=torch.float64)
        parts = torch.stack([local + update, waiting - wait, wait])
        dist.all_reduce(parts)
        medians = (parts / self.world_size).median(dim=1).values.tolist()
        return dict(zip(("compute_s", "exposed_s", "wait_s"), medians, strict=True))

    def _overlap(self, counter: _Counter, n_steps: int) -> dict[str, float | None]:
        """Means over ranks and steps of `Timeline.measure`; None where it was not asked for or cannot be told."""
        if not self.args.overlap:
            return {}
        names = ("overlap_s", "exposed_codec_s")
        found = counter.method.overlap(counter.started_s, counter.ended_s)
        if found is None:  # the same on every rank
            return dict.fromkeys(names)
        means = over_ranks.mean([found[name] / n_steps for name in names])
        return dict(zip(names, means, strict=True))


class _Counter:
    """Bytes and codec time of one method's blocks in one phase (between changes of the links), on this rank."""

    def __init__(self, method: TrainMethod, phase: int = 0) -> None:
        self.method, self.phase = method, phase
        self.started_s = self.ended_s = time.perf_counter()
        self.sent_bytes = 0.0
        self.kernel_bytes = 0.0
        self.cpu_s = 0.0  # of all threads of this rank, and of the kernel on their behalf
        self.has_kernel = kernel_counters.sent_bytes() is not None
        self.codec_s = None if method.codec_s() is None else 0.0
        self.decode_s = None if method.decode_s() is None else 0.0

    def run_block(self, n_steps: int) -> None:
        """Run steps, all ranks starting together, and count what they took."""
        method = self.method
        dist.barrier()
        sent, codec_s, kernel = method.sent_bytes(), method.codec_s(), kernel_counters.sent_bytes()
        decode_s, cpu_s = method.decode_s(), time.process_time()
        for _ in range(n_steps):
            method.run_step()
        method.finish_block()
        self.ended_s = time.perf_counter()
        self.cpu_s += time.process_time() - cpu_s
        dist.barrier()  # now everything sent has arrived, so the kernel has counted it
        self.sent_bytes += method.sent_bytes() - sent
        self.kernel_bytes += (kernel_counters.sent_bytes() or 0) - (kernel or 0)
        spent_s = method.codec_s()
        if self.codec_s is not None and spent_s is not None and codec_s is not None:
            self.codec_s += spent_s - codec_s
        decoded_s = method.decode_s()
        if self.decode_s is not None and decoded_s is not None and decode_s is not None:
            self.decode_s += decoded_s - decode_s


def _describe(network: Network) -> str:
    """The links' rates as `--rate` takes them: one for all, or one a rank."""
    words = [format_rate(rate) for rate in network.rates_bps]
    return ",".join(words[:1] if len(set(words)) == 1 else words)


def _loss_at(losses: Sequence[float], clock: Sequence[float], moment_s: float) -> float:
    """The mean loss of the last steps that had ended at `moment_s`."""
    n_ended = max(1, sum(end <= moment_s for end in clock))
    return statistics.fmean(losses[max(0, n_ended - _LOSS_STEPS) : n_ended])


def _available_bytes() -> float:
    for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines():
        if line.startswith("MemAvailable:"):
            return float(line.split()[1]) * 1024
    return 0.0
