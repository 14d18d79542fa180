"""The rank's side of `bench regret`: auto, DDP and the fixed schemes train in turns."""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import time
from typing import Any

import torch.distributed as dist

from gradwire.core.threads import use_fair_share_of_cores
from gradwire.registry import parse_spec
from gradwire.telemetry.environment import describe_environment
from gradwire_lab import workloads
from gradwire_lab.bench import over_ranks
from gradwire_lab.bench.link_changes import change_links
from gradwire_lab.bench.regret_figures import make_records
from gradwire_lab.bench.train_methods import TrainMethod, describe
from gradwire_lab.ranks.netlab.rate import format_rate, parse_rate
from gradwire_lab.ranks.network import Network, current_network
from gradwire_lab.results.records import RecordLog

TURN = 10  # steps
_FIXED_EVERY = 3  # turns


def train_as_rank(args: argparse.Namespace) -> None:
    """One run; rank 0 writes the records. Collective. Raises: GradwireError."""
    dist.init_process_group("gloo")
    try:
        use_fair_share_of_cores()
        name, options = parse_spec(args.workload)
        _Run(args, workloads.by_name(name, **options)).run()
    finally:
        dist.destroy_process_group()


class _Run:
    def __init__(self, args: argparse.Namespace, workload: workloads.Workload) -> None:
        self._args, self._workload = args, workload
        self._environment = describe_environment()
        named = {spec: TrainMethod(spec, workload, args.seed) for spec in dict.fromkeys(args.scheme)}
        self._autos = {spec: one for spec, one in named.items() if one.name == "auto"}
        allowed = [
            candidate["spec"]
            for auto in self._autos.values()
            for candidate in auto.stats()["auto"]["candidates"]
            if not candidate["excluded"] and candidate["spec"] not in ("plain", *named)
        ]
        self._named = named
        self._fixed = {spec: TrainMethod(spec, workload, args.seed) for spec in dict.fromkeys(allowed)}

    def run(self) -> None:
        everyone = [*self._named.values(), *self._fixed.values()]
        for method in everyone:
            method.run_step()  # DDP cuts its buckets anew after the first
        network = current_network()
        for phase, rates in enumerate(["", *self._args.then]):
            if rates:
                network = self._change_links(network, phase, rates)
            self._write(phase, network, self._run_phase())
        for method in everyone:
            method.close()

    def _change_links(self, network: Network, phase: int, rates: str) -> Network:
        if dist.get_rank() == 0:
            change_links(self._args.log, phase - 1, rates)
        dist.barrier()
        return dataclasses.replace(network, rates_bps=tuple(parse_rate(word) for word in rates.split(",")))

    def _run_phase(self) -> list[dict[str, int]]:
        """How many steps each method has taken: before the first turn, and after each."""
        everyone = {**self._named, **self._fixed}
        n_steps = [{spec: len(one.times) for spec, one in everyone.items()}]
        n_done, n_turns, spent_s = 0, 0, 0.0
        counted = [one for spec, one in self._named.items() if spec == "ddp" or spec in self._autos]
        while n_done < self._args.steps:
            methods = [*self._named.values(), *(self._fixed.values() if n_turns % _FIXED_EVERY == 0 else ())]
            for method in reversed(methods) if n_turns % 2 else methods:
                dist.barrier()
                started = time.perf_counter()
                for _ in range(TURN):
                    method.run_step()
                if method in counted:
                    spent_s += time.perf_counter() - started
            n_done, n_turns = n_done + TURN, n_turns + 1
            n_steps.append({spec: len(one.times) for spec, one in everyone.items()})
            if over_ranks.largest([spent_s])[0] > len(counted) * self._args.seconds:
                break
        return n_steps

    def _write(self, phase: int, network: Network, n_steps: list[dict[str, int]]) -> None:
        turns_s, losses = {}, {}
        for spec, method in {**self._named, **self._fixed}.items():
            all_s = over_ranks.largest([times.iteration_s for times in method.times])
            turns_s[spec] = [all_s[since[spec] : until[spec]] for since, until in itertools.pairwise(n_steps)]
            losses[spec] = over_ranks.mean(method.losses)
        first = next((n_steps[0][spec] for spec in self._autos), 0)
        stats = {spec: auto.stats()["auto"] for spec, auto in self._autos.items()}
        found = make_records(turns_s, stats, first if phase else 0)
        if dist.get_rank() != 0:
            return
        rates = network.rates_bps if len(set(network.rates_bps)) > 1 else network.rates_bps[:1]
        shared = {
            "ranks": dist.get_world_size(),
            "rate_bps": network.rate_bps,
            "rates": ",".join(map(format_rate, rates)) or "none",
            "phase": phase,
            "shaped": network.shaped,
        }
        records: list[dict[str, Any]] = []
        for spec, method in self._named.items():
            strays = max(abs(mine - ddps) for mine, ddps in zip(losses[spec], losses["ddp"], strict=True))
            described = {"scheme": method.name, "options": describe(method), "loss_deviation": strays}
            records.append(described | shared | found[spec] | self._workload.describe() | self._environment)
        RecordLog(self._args.log).append(records)
