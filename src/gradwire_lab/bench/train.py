"""gradwire bench train: iteration time, its parts, bytes and loss of a workload under every scheme and baseline."""

import argparse
import gc
import itertools
import math
import statistics
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from gradwire import schemes
from gradwire.errors import InvalidArgument, Unsupported
from gradwire.registry import choose_specs, parse_spec, spec_of
from gradwire.telemetry.environment import describe_environment
from gradwire.wire.communicator import ring_bytes
from gradwire_lab import workloads
from gradwire_lab.bench import driver, train_methods
from gradwire_lab.bench.driver import Progress, Timing
from gradwire_lab.bench.train_methods import BASELINES, StepTimes, TrainMethod, describe
from gradwire_lab.ranks.network import Network
from gradwire_lab.results.experiment import Column, Table
from gradwire_lab.results.records import Record
from gradwire_lab.results.tables import Grid, print_grid, tabulate
from gradwire_lab.training.sharding import SHARDED, ranks_per_node
from gradwire_lab.workloads import Workload

REFERENCE = "ddp"

# Steps of one method before the next has its turn: long enough that caches are its own, short against drifts of the
# machine's load.
TURN_STEPS = 5
# Losses of this many last steps are averaged: one batch's loss is noise.
_LOSS_STEPS = 10
# Of the free memory, what methods may take together; the rest is for activations and messages.
_MEMORY_SHARE = 0.5


def run(args: argparse.Namespace) -> int:
    """Measure as a rank, or start the ranks that do."""
    if args.steps < 1 or args.warmup < 1:
        words = "both count from 1 (DDP rebuilds its buckets after the first step)"
        raise InvalidArgument(f"--steps {args.steps} --warmup {args.warmup}: {words}")
    workloads.check_name(parse_spec(args.workload)[0])
    # Beside what `all` means: doors, codecs on the training thread, and schemes of one optimizer.
    more = [*train_methods.BY_NAME_ONLY, *filter(schemes.needs_momenta, schemes.names())]
    specs = choose_specs(args.scheme, [name for name in [*BASELINES, *schemes.names()] if name not in more], more)
    for spec in specs:
        train_methods.check_baseline_options(*parse_spec(spec))
    given = {"batch_size": args.batch_size, "optimizer": args.optimizer}
    name, options = parse_spec(args.workload)
    options |= {key: value for key, value in given.items() if value is not None}

    def measure() -> Iterator[list[Record]]:
        records: list[Record] = []
        for batch in TrainBench(args, workloads.by_name(name, compute=args.compute, **options), specs).run():
            records += batch
            yield batch
        if dist.get_rank() == 0:
            for phase in range(1 + len(args.then)):
                print_grid(make_grid([record for record in records if record["phase"] == phase]), args.wide)

    driver.measure_in_ranks("train", args, measure, specs)
    return 0


Turns = list[driver.Turn]


class TrainBench:
    """One run: methods take turns, or train one after another where memory is short. Every call is collective."""

    def __init__(self, args: argparse.Namespace, workload: Workload, specs: Sequence[str]) -> None:
        self.args, self.workload, self.specs = args, workload, specs
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        self._environment, self._shared_s = describe_environment(), 0.0

    def run(self) -> Iterator[list[Record]]:
        """Train every method; yields the records of those that were trained together, on every rank."""
        methods = [self._start(self.specs[0])]
        are_together = methods[0] is None or len(self.specs) == 1 or self._fits(methods[0])
        for spec in self.specs[1:]:
            if not are_together:
                yield self._train(methods)
                methods.clear()
                gc.collect()  # models, hooks and attachments refer to each other: they must be gone before the next one comes
            methods.append(self._start(spec))
        yield self._train(methods)

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
        """Whether parameters, gradients, buckets, two moments and a scratch of all methods fit here; the same on every rank."""
        needed = 6 * 4 * method.n_parameters * len(self.specs) * ranks_per_node()
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
        available = sum(1024 * float(line.split()[1]) for line in lines if line.startswith("MemAvailable:"))
        return driver.largest_over_ranks([float(needed >= _MEMORY_SHARE * available)]) == [0.0]

    def _train(self, started: Sequence[TrainMethod | None]) -> list[Record]:
        methods = [method for method in started if method is not None]
        if not methods:
            return []
        n_steps = [self.args.steps] * len(methods)
        # What a scheme measures first is not how it will train.
        n_warmup = [max(self.args.warmup, method.settling_steps) for method in methods]
        n_all = sum(n_warmup) + sum(n_steps) * (1 + len(self.args.then))
        progress = Progress(f"{self.workload.name}, steps", n_all, self.rank != 0)
        _take_turns(methods, n_warmup, progress)
        for method in methods:
            method.check()
        by_phase = [(network, _take_turns(methods, n_steps, progress)) for network in driver.phases(self.args)]
        losses = [driver.mean_over_ranks(method.losses) for method in methods]
        # When each step of a method would have ended, had it trained alone: sums of the slowest rank's steps.
        steps_s = [driver.largest_over_ranks([times.iteration_s for times in method.times]) for method in methods]
        # Run one after another, later methods are compared at the end of the first, usually DDP.
        self._shared_s = self._shared_s or min(map(sum, steps_s))
        records = [
            {**self._record(phase, network, *of_method), "is_interleaved": len(methods) > 1}
            for phase, (network, turns) in enumerate(by_phase)
            for of_method in zip(methods, turns, n_warmup, losses, steps_s, strict=True)
        ]
        for method in methods:
            method.close()
        return records

    def _record(
        self, phase: int, network: Network, method: TrainMethod, turns: Turns, n_warmup: int, *found: list[float]
    ) -> Record:
        losses, steps_s = found  # of every step: the mean over the ranks, the slowest one's
        first = n_warmup + phase * self.args.steps
        counted = slice(first, first + self.args.steps)
        times = method.times[counted]
        timing = Timing.of(steps_s[counted])
        names = [name for name in turns[0] if name not in ("started_s", "ended_s")]
        spent = driver.mean_over_ranks([sum(turn[name] for turn in turns) / len(times) for name in names])
        means = dict(zip(names, spent, strict=True))
        # Of equally many steps for all, whatever each took to settle.
        n_trained = self.args.warmup + (phase + 1) * self.args.steps
        n_ended = max(1, sum(end <= self._shared_s for end in itertools.accumulate(steps_s)))
        n_bytes = 4 * method.n_parameters
        ring = ring_bytes(n_bytes, self.world_size)
        parts: Record = dict.fromkeys(("compute_s", "exposed_s", "wait_s"))
        if method.name not in SHARDED:
            parts |= split_steps(times)
        described = self.workload.describe()
        return {
            "scheme": method.name,
            "options": describe(method),
            "ranks": self.world_size,
            "ranks_per_node": network.ranks_per_node,
            "rate_bps": network.rate_bps,
            "rates": driver.rates_of(network),
            "phase": phase,
            **timing.fields("iteration_s"),
            **parts,
            "codec_s": means.get("codec_s"),
            "decode_s": means.get("decode_s"),
            **self._overlap(method, turns, len(times)),
            "cpu_s": means["cpu_s"],
            "wire_bytes": means["sent_bytes"],
            "wire_bytes_origin": "computed" if method.name in BASELINES else "counted",
            "kernel_bytes": None if math.isnan(means["kernel_bytes"]) else means["kernel_bytes"],
            "wire_ratio": means["sent_bytes"] / ring if ring else 1.0,
            "samples_per_s": self.world_size * self.workload.batch_size / timing.median_s,
            "loss": statistics.fmean(losses[:n_trained][-_LOSS_STEPS:]),
            "loss_at_s": self._shared_s,
            "loss_after_s": statistics.fmean(losses[max(0, n_ended - _LOSS_STEPS) : n_ended]),
            "n_steps": len(times),
            "n_warmup": n_warmup,
            "n_bytes": n_bytes,
            "emulated": described["compute"] != "real",
            "shaped": network.shaped,
            **described,
            **self._environment,
            "network": str(network),
        }

    def _overlap(self, method: TrainMethod, turns: Turns, n_steps: int) -> dict[str, float | None]:
        """Means over ranks and steps of `Timeline.measure`; None where it was not asked for or cannot be told."""
        if not self.args.overlap:
            return {}
        found = method.overlap(turns[0]["started_s"], turns[-1]["ended_s"])
        if found is None:  # the same on every rank
            return {"overlap_s": None, "exposed_codec_s": None}
        means = driver.mean_over_ranks([seconds / n_steps for seconds in found.values()])
        return dict(zip(found, means, strict=True))


def _take_turns(methods: Sequence[TrainMethod], n_steps: Sequence[int], progress: Progress) -> list[Turns]:
    """Each method's turns, one method after the other until each has taken its `n_steps`."""
    # Turns are for methods that could disturb each other; the end of one costs a step that looks ahead its lead.
    n_a_turn = TURN_STEPS if len(methods) > 1 else max(n_steps)
    turns: list[Turns] = [[] for _ in methods]
    for done in range(0, max(n_steps), n_a_turn):
        for method, n, kept in zip(methods, n_steps, turns, strict=True):
            if n > done:
                n_now = min(n_a_turn, n - done)
                kept.append(driver.take_turn(method.step, method.stats, n_now, method.finish_turn))
                progress.advance(n_now)
    return turns


def split_steps(times: Sequence[StepTimes]) -> dict[str, float]:
    """Medians over the steps of means over the ranks; waiting is split into slower ranks and the network. Collective. A
    rank that ends its backward pass before the slowest one waits for that rank first, whatever the network does:
    `wait_s`. The rest is `exposed_s`. Durations are compared, not clocks: all ranks leave a step together."""
    parts = [(step.local_s, step.waiting_s, step.update_s) for step in times]
    local, waiting, update = torch.tensor(parts, dtype=torch.float64).T
    slowest = torch.tensor(driver.largest_over_ranks(local.tolist()), dtype=torch.float64)
    wait = torch.minimum(slowest - local, waiting)
    split = torch.stack([local + update, waiting - wait, wait])
    dist.all_reduce(split)
    medians = (split / dist.get_world_size()).median(dim=1).values.tolist()
    return dict(zip(("compute_s", "exposed_s", "wait_s"), medians, strict=True))


def make_grid(records: Sequence[dict[str, Any]]) -> Grid:
    """The records of one network, for people."""
    first = records[0]
    network = first["rates"] if first["rate_bps"] else f"not shaped ({first['network']})"
    marks = [f"computation {first['compute']}"] if first["compute"] != "real" else []
    marks += ["methods one after another"] if not first["is_interleaved"] and len(records) > 1 else []
    network = f"then {network}" if first["phase"] else network
    words = f"{first['workload']}, {first['ranks']} ranks, {network}, {first['n_steps']} steps"
    moment = f"{first['loss_at_s']:.1f} s"
    columns = [
        Column("iteration_s", "step ms", 1e3, ",.1f", spread=True),
        Column("iteration_s", "x ddp", kind="ratio"),
        Column("exposed_s", "exposed", 1e3, ",.1f"),
        Column("wire_bytes", "MB sent", 1e-6, ",.3f"),
        Column("loss", form=".4f"),
        *(Column(f"{name}_s", name, 1e3, ",.1f") for name in ("codec", "compute", "wait")),
        Column("wire_ratio", "ratio", form=".3f"),
        Column("samples_per_s", "samples/s", form=",.1f"),
        Column("loss_after_s", f"loss at {moment}", form=".4f"),
    ]
    caption = "ms a step, medians; codec time is busy time, hidden or not; loss: mean of the last steps, and of those "
    table = Table(columns, rows=("method",), title=", ".join([words, *marks]))
    named = [{**record, "method": spec_of(record)} for record in records]
    return tabulate(named, table, f"{caption}before {moment}", {"method": REFERENCE})
