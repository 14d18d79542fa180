"""The one driver of `bench allreduce`, `train` and `regret`: the launcher's side, then a rank's.

A benchmark makes methods, the same on every rank, and says what a record of them holds; what is counted in a turn, which links
it runs on, and where records go is done here. Ranks may ask the launcher, which owns the links, to change them in the middle
of a run: rank 0 asks on standard output, where the launcher reads each line, and waits for the answer, a file beside the log.
"""

import argparse
import contextlib
import dataclasses
import math
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from gradwire import _native, schemes
from gradwire.core.threads import use_fair_share_of_cores
from gradwire.errors import GradwireError, InvalidArgument
from gradwire.registry import parse_spec
from gradwire_lab.ranks.launch import run_gradwire
from gradwire_lab.ranks.netlab import Netlab
from gradwire_lab.ranks.netlab.rate import format_rate, parse_rate, with_way
from gradwire_lab.ranks.network import Network, current_network
from gradwire_lab.results.captions import duration
from gradwire_lab.results.records import Record, RecordLog, write_csv, write_json

DEFAULT_RANKS = 4
_QUESTION = "gradwire bench: change links to "


def is_rank() -> bool:
    """Whether this process was started as a rank, by the launcher below or by torchrun."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def check_ranks(args: argparse.Namespace) -> None:
    """Raises: InvalidArgument, before any rank is started (ranks, nodes, rates, links that `--then` cannot change)."""
    n_ranks, per_node = args.ranks if args.ranks is not None else DEFAULT_RANKS, args.ranks_per_node
    if n_ranks < 1:
        raise InvalidArgument(f"--ranks must be at least 1, got {n_ranks}")
    if per_node < 1 or n_ranks % per_node:
        raise InvalidArgument(f"{n_ranks} ranks do not make whole nodes of {per_node}")
    n_links = n_ranks // per_node
    for rate in args.rate or ():
        n_rates = len([parse_rate(word) for word in rate.split(",")])
        if n_rates not in (1, n_links):
            who = "ranks" if per_node == 1 else "nodes"
            raise InvalidArgument(f"--rate {rate}: {n_rates} rates for {n_links} {who}")
    then = getattr(args, "then", ())  # not every benchmark has it
    if then and args.log is None and (is_rank() or not args.rate or "none" in args.rate):
        raise InvalidArgument("--then changes the links of the test network: give the rate to begin with, --rate RATE")
    for rates in then:
        each = [parse_rate(word) for word in rates.split(",")]
        if None in each or len(each) not in (1, n_links):
            words = f"one rate such as 100mbit, or {n_links} with commas between"
            raise InvalidArgument(f"--then {rates}: expected {words}")


def measure_in_ranks(
    bench: str, args: argparse.Namespace, measure: Callable[[], Iterable[list[Record]]], specs: Sequence[str] = ()
) -> list[Record]:
    """As a rank keep what `measure` yields, as it comes; else run `gradwire bench BENCH` in `--ranks` processes, once a
    rate. If one of `specs` sums in the network, the emulation of an aggregating switch runs beside them. Returns the
    ranks' records; those so far are written even after a failure."""
    check_ranks(args)
    if is_rank():
        with as_rank():
            use_fair_share_of_cores()
            records: list[Record] = []
            for batch in measure():
                records += batch
                if dist.get_rank() == 0 and args.log:
                    RecordLog(args.log).append(batch)
                elif dist.get_rank() == 0:
                    write_results(args, records)
        return []
    with tempfile.TemporaryDirectory(prefix="gradwire-bench-") as folder:
        log = RecordLog(args.log or Path(folder) / "records.jsonl")
        command = ["bench", bench, *args.arguments, "--log", str(log.path)]
        started: list[Netlab] = []

        def take_line(rank: int, line: str) -> None:
            if line.startswith(_QUESTION):
                _answer(log.path, started[-1], line)
            else:
                print(line, flush=True)  # only rank 0 writes on standard output, so lines need no rank before them

        how: dict[str, Any] = {"switch": needs_switch(specs), "ranks_per_node": args.ranks_per_node}
        for rate in [with_way(args, one) for one in args.rate or ["none"]]:
            each = rate.split(",") if "," in rate else rate
            try:
                run_gradwire(command, args.ranks or DEFAULT_RANKS, each, take_line, on_start=started.append, **how)
            finally:
                write_results(args, log.read())
        return log.read()


def needs_switch(specs: Sequence[str]) -> bool:
    """Whether one of them sums in the network: `dense-switch`, or any scheme with `aggregator=switch`."""
    parsed = [parse_spec(spec) for spec in specs]
    return any(name == "dense-switch" or options.get("aggregator") == "switch" for name, options in parsed)


def change_links(log: Path, rates: str, patience_s: float = 20.0) -> None:
    """Rank 0's side: have every link changed to `rates` ("100mbit", or one a rank with commas)."""
    path = _answer_path(log)
    print(f"{_QUESTION}{rates}", flush=True)
    deadline = time.monotonic() + patience_s
    while not path.exists():
        if time.monotonic() > deadline:
            raise GradwireError(f"the launcher did not change the links to {rates} within {patience_s:.0f} s")
        time.sleep(0.01)
    answer = path.read_text(encoding="utf-8")
    path.unlink()
    if answer:
        raise GradwireError(f"links were not changed to {rates}: {answer}")


def _answer(log: Path, lab: Netlab, question: str) -> None:
    """Change the lab's links as asked, and say so, or why not."""
    answer, each = "", question.removeprefix(_QUESTION).split(",")
    try:
        if not lab.shaped:
            raise GradwireError("the ranks have no shaped links")
        for rank in range(lab.network.n_ranks_on_machine or 0):
            lab.set_rate(rank, each[rank % len(each)])
    except GradwireError as error:
        answer = str(error)
    _answer_path(log).write_text(answer, encoding="utf-8")


def _answer_path(log: Path) -> Path:
    return log.with_name(f"{log.name}.links")


def write_results(args: argparse.Namespace, records: list[Record]) -> None:
    """Write `--json` and `--csv`, where given and if there are records: an interrupted run leaves earlier results be."""
    for path, write in ((args.json, write_json), (args.csv, write_csv)):
        if records and path:
            write(path, records)


# ---- a rank: warm up, take turns, time, count, gather, record

Turn = dict[str, float]


def published(name: str, options: dict[str, Any]) -> dict[str, Any]:
    """The options under which a scheme, or the one that two-level or fsdp2 has inside, is the same beside any optimizer."""
    return schemes.as_published(str(options.get("scheme", name)), options)


@contextlib.contextmanager
def as_rank() -> Iterator[None]:
    """Inside, this process is a rank of Gloo's default group."""
    dist.init_process_group("gloo")
    try:
        yield
    finally:
        dist.destroy_process_group()


def take_turn(
    step: Callable[[], None], stats: Callable[[], Turn], n_steps: int, finish: Callable[[], None] = lambda: None
) -> Turn:
    """Run steps, all ranks starting together, and `finish` what they put off; the differences of `stats`, and times.
    Every call is collective. `cpu_s` is of all threads and of the kernel; `kernel_bytes` NaN where the kernel cannot
    tell."""
    dist.barrier()
    before, kernel = stats(), sent_by_kernel()
    started_s, cpu_s = time.perf_counter(), time.process_time()
    for _ in range(n_steps):
        step()
    finish()
    turn = {"started_s": started_s, "ended_s": time.perf_counter(), "cpu_s": time.process_time() - cpu_s}
    dist.barrier()  # now everything sent has arrived, so the kernel has counted it
    turn |= {name: value - before[name] for name, value in stats().items()}
    return turn | {"kernel_bytes": sent_by_kernel() - kernel}


def sent_by_kernel() -> float:
    """Bytes that this rank's interface (GLOO_SOCKET_IFNAME) has sent, headers included; NaN where the kernel cannot tell."""
    interface = os.environ.get("GLOO_SOCKET_IFNAME", "lo")
    with contextlib.suppress(OSError):
        for line in Path("/proc/net/dev").read_text(encoding="ascii").splitlines():
            name, _, columns = line.partition(":")
            if name.strip() == interface != "lo":  # which carries every rank's traffic
                return float(columns.split()[8])  # 8 columns received, then bytes sent
    return math.nan


# ---- what all ranks measured, as one: collective, and the same on every rank


def mean_over_ranks(values: Sequence[float]) -> list[float]:
    """Of each value, the mean over the ranks."""
    summed = torch.tensor(values, dtype=torch.float64)
    dist.all_reduce(summed)
    return (summed / dist.get_world_size()).tolist()


def largest_over_ranks(values: Sequence[float]) -> list[float]:
    """Of each value, the largest of any rank: of seconds, the slowest one's."""
    found = torch.tensor(values, dtype=torch.float64)
    dist.all_reduce(found, op=dist.ReduceOp.MAX)
    return found.tolist()


# ---- the links phase by phase


def phases(args: argparse.Namespace) -> Iterator[Network]:
    """The links as the launcher made them, then as `--then` changes them; in the end they are as they were. Collective."""
    first = current_network()
    began = now = rates_of(first)
    later = [(dataclasses.replace(first, rates_bps=tuple(map(parse_rate, one.split(",")))), one) for one in args.then]
    for network, rates in [(first, began), *later, (None, began)]:
        if rates != now:
            if dist.get_rank() == 0:
                change_links(args.log, rates)
            now = rates
            dist.barrier()
        if network is not None:
            yield network


def rates_of(network: Network) -> str:
    """The links' rates as `--rate` takes them: one for all, or one a rank."""
    words = [format_rate(rate) for rate in network.rates_bps]
    return ",".join(words[:1] if len(set(words)) == 1 else words)


# ---- timing against noise: methods take turns (A B C A B C), warm-up rounds are dropped, a sample lasts long enough

# Below some 50 ms a sample is at the mercy of one scheduler tick (4 ms) or one page-fault storm.
MIN_SAMPLE_S = 0.05
_SAID_EVERY_S = 5.0


class Task(NamedTuple):
    """One method: `call` is timed; `before` and `after` run outside the clock, once a sample (poison, verify)."""

    call: Callable[[], object]
    before: Callable[[], object] = lambda: None
    after: Callable[[], object] = lambda: None


@dataclass(frozen=True)
class Timing:
    """Seconds a call: the median of the samples and their quartiles."""

    median_s: float
    low_s: float
    high_s: float
    n_samples: int
    n_repeats: int  # calls in one sample

    @staticmethod
    def of(samples_s: list[float], n_repeats: int = 1) -> "Timing":
        """Summarise samples; with fewer than four the spread is the whole range."""
        if len(samples_s) < 4:
            low, high = min(samples_s), max(samples_s)
        else:
            low, _, high = statistics.quantiles(samples_s, n=4, method="inclusive")
        return Timing(statistics.median(samples_s), low, high, len(samples_s), n_repeats)

    def fields(self, name: str, scale: float = 1.0) -> dict[str, float]:
        """For a record: `name`, and its quartiles as `name_low` and `name_high`."""
        return {name: self.median_s * scale, f"{name}_low": self.low_s * scale, f"{name}_high": self.high_s * scale}


def time_interleaved(
    tasks: Mapping[str, Task],
    n_rounds: int,
    n_warmup: int = 1,
    min_sample_s: float = MIN_SAMPLE_S,
    what: str = "samples",
) -> dict[str, Timing]:
    """Time every task once a round, in the mapping's order, for `n_warmup` dropped and `n_rounds` counted rounds."""

    def sample(task: Task, n_repeats: int) -> float:
        task.before()
        start = time.perf_counter()
        for _ in range(n_repeats):
            task.call()
        elapsed_s = time.perf_counter() - start
        task.after()
        return elapsed_s

    progress = Progress(what, len(tasks) * (n_warmup + n_rounds))
    repeats: dict[str, int] = {}
    for name, task in tasks.items():
        sample(task, 1)  # cold: it does not count
        repeats[name] = max(1, math.ceil(min_sample_s / max(sample(task, 1), 1e-7)))
    samples: dict[str, list[float]] = {name: [] for name in tasks}
    for round_index in range(n_warmup + n_rounds):
        for name, task in tasks.items():
            elapsed_s = sample(task, repeats[name])
            if round_index >= n_warmup:
                samples[name].append(elapsed_s / repeats[name])
            progress.advance()
    return {name: Timing.of(samples[name], repeats[name]) for name in tasks}


class Progress:
    """Says how far a measurement of `n` pieces is, and about how long the rest takes, every five seconds."""

    def __init__(self, what: str, n: int, is_silent: bool = False) -> None:
        self._what, self._n, self._done, self._is_silent = what, n, 0, is_silent
        self._began_s = self._said_s = time.monotonic()

    def advance(self, n_pieces: int = 1) -> None:
        self.reach(self._done + n_pieces)

    def reach(self, done: int) -> None:
        """So many pieces are done in all."""
        self._done, now_s = done, time.monotonic()
        if not self._is_silent and now_s - self._said_s >= _SAID_EVERY_S and 0 < done < self._n:
            self._said_s = now_s
            left_s = (now_s - self._began_s) / done * (self._n - done)
            print(f"  {self._what}: {done} of {self._n}, about {duration(left_s)} left", flush=True)


@contextlib.contextmanager
def threads(n_threads: int) -> Iterator[None]:
    """Inside, gradwire's codecs and torch's own operations use so many threads."""
    before = _native.thread_count(), torch.get_num_threads()
    _native.set_thread_count(n_threads)
    torch.set_num_threads(n_threads)
    try:
        yield
    finally:
        _native.set_thread_count(before[0])
        torch.set_num_threads(before[1])
