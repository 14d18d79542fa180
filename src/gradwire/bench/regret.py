"""What `auto` loses: against DDP without gradwire and against every fixed scheme that it may use, in one run, in turns.

A cell is a workload, so many ranks, a network and a class of fidelity. All contenders train in the same processes in turns of
ten steps, so a machine that is busy for a while is busy for all of them; `auto` sees its own steps alone and pays for its own
trials.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from itertools import product
from pathlib import Path
from typing import Any

from gradwire.errors import InvalidArgument

RATES = ("100mbit", "300mbit", "1gbit", "none")
WORKLOADS = ("gpt", "resnet", "ncf", "lstm", "many-tensors", "huge-embedding")
_TURN = 10
_MARK = "@regret "
# The bars: against DDP in every cell, and in the second half against the best fixed scheme.
LEAST_X_DDP, LEAST_X_BEST = 0.98, 0.95


def measure_regret(
    workloads: Sequence[str],
    ranks: Sequence[int],
    rates: Sequence[str],
    fidelities: Sequence[str],
    steps: int = 300,
    seconds: float = 60.0,
    done: Iterable[dict[str, Any]] = (),
) -> Iterator[dict[str, Any]]:
    """A record a cell, as soon as it is there; cells of which `done` has a record are left out.

    Args:
        rates: of each rank's link, "none" for loopback as it is.
        steps: of each contender; fewer once `auto` and DDP have each trained for `seconds`.
    Raises: InvalidArgument, PeerLost (a rank failed).
    """
    known = {cell_of(record) for record in done}
    for workload, n_ranks, rate, fidelity in product(workloads, ranks, rates, fidelities):
        if (workload, n_ranks, rate, fidelity) not in known:
            yield run_cell(workload, n_ranks, rate, fidelity, steps, seconds)


def cell_of(record: dict[str, Any]) -> tuple[str, int, str, str]:
    """What a record is of."""
    return record["workload"], record["ranks"], record["rate"], record["fidelity"]


def run_cell(workload: str, n_ranks: int, rate: str, fidelity: str, steps: int, seconds: float) -> dict[str, Any]:
    """One cell, in ranks of its own. Raises: PeerLost."""
    from gradwire.ranks.launch import start_ranks
    from gradwire.ranks.supervisor import end_on_signals

    found: dict[str, Any] = {}

    def take_line(rank: int, line: str) -> None:
        if line.startswith(_MARK):
            found.update(json.loads(line[len(_MARK) :]))
        else:
            print(f"[{rank}] {line}", file=sys.stderr, flush=True)

    command = [sys.executable, "-m", "gradwire", "regret", "--workload", workload, "--fidelity", fidelity]
    command += ["--steps", str(steps), "--seconds", str(seconds)]
    with end_on_signals(), start_ranks(command, n_ranks, rate, on_line=take_line) as launch:
        shaped = launch.shaped
        rates_bps = launch.network.rate_bps
        launch.wait().raise_if_failed()
    return {
        "workload": workload,
        "ranks": n_ranks,
        "rate": rate,
        "rate_bps": rates_bps,
        "is_shaped": shaped,
        "fidelity": fidelity,
    } | found


def train_as_rank(workload_name: str, fidelity: str, steps: int, seconds: float) -> None:
    """As one rank of a cell: rank 0 prints what was found."""
    import torch
    import torch.distributed as dist

    from gradwire import workloads
    from gradwire.bench.train_contenders import TrainContender
    from gradwire.core.threads import use_fair_share_of_cores
    from gradwire.registry import parse_spec

    dist.init_process_group("gloo")
    use_fair_share_of_cores()
    name, options = parse_spec(workload_name)
    workload = workloads.by_name(name, **options)
    auto = TrainContender(f"auto:fidelity={fidelity}", workload, 0)
    candidates = auto.stats()["auto"]["candidates"]
    fixed = [c["spec"] for c in candidates if not c["excluded"] and c["spec"] != "plain"]
    contenders = {"ddp": TrainContender("ddp", workload, 0), "auto": auto}
    contenders |= {spec: TrainContender(spec, workload, 0) for spec in fixed}
    order = list(contenders.values())
    for contender in order:
        contender.run_step()
    n_done, spent_s = 0, 0.0
    while n_done < steps:
        for contender in order:
            dist.barrier()
            started = time.perf_counter()
            for _ in range(_TURN):
                contender.run_step()
            if contender in (auto, contenders["ddp"]):
                spent_s += time.perf_counter() - started
        order.reverse()
        n_done += _TURN
        slowest = torch.tensor([spent_s])
        dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
        if float(slowest) > 2 * seconds:
            break
    times: dict[str, list[float]] = {}
    for spec, contender in contenders.items():
        values = torch.tensor([t.iteration_s for t in contender.times[-n_done:]], dtype=torch.float64)
        dist.all_reduce(values, op=dist.ReduceOp.MAX)
        times[spec] = values.tolist()
    if dist.get_rank() == 0:
        deviation = max(abs(a - b) for a, b in zip(auto.losses, contenders["ddp"].losses, strict=True))
        print(_MARK + json.dumps(make_record(times, auto.stats()["auto"]) | {"loss_deviation": deviation}), flush=True)
    for contender in contenders.values():
        contender.close()
    dist.destroy_process_group()


def make_record(times: dict[str, list[float]], auto: dict[str, Any]) -> dict[str, Any]:
    """The figures of a cell from every contender's seconds a step, "ddp" and "auto" among them, and what auto says of itself.

    `x_ddp`: over the whole run; `x_best_last_half`: against `best`, which of DDP and the fixed schemes took least in the
    second half. Above 1 auto is faster.
    """
    half = len(times["ddp"]) // 2
    late = {spec: sum(values[half:]) for spec, values in times.items() if spec != "auto"}
    total = {spec: sum(values) for spec, values in times.items()}
    best = min(late, key=lambda spec: (late[spec], spec))
    predicted = {c["spec"]: c.get("predicted_ms") for c in auto["candidates"] if not c["excluded"]}
    return {
        "n_steps": len(times["ddp"]),
        "x_ddp": total["ddp"] / total["auto"],
        "x_best": min(seconds for spec, seconds in total.items() if spec != "auto") / total["auto"],
        "x_best_last_half": late[best] / sum(times["auto"][half:]),
        "x_ddp_last_half": late["ddp"] / sum(times["auto"][half:]),
        "best": best,
        "ends_with": auto["scheme"],
        "median_ms": {spec: 1e3 * sorted(values)[len(values) // 2] for spec, values in times.items()},
        "predicted_ms": predicted,
        "spent_s": auto["spent_s"],
        "decisions": auto["decisions"],
    }


def below_the_bars(records: Iterable[dict[str, Any]]) -> list[str]:
    """A line for each cell that misses a bar."""
    lines = []
    for record in records:
        if record["x_ddp"] < LEAST_X_DDP or record["x_best_last_half"] < LEAST_X_BEST:
            workload, n_ranks, rate, fidelity = cell_of(record)
            lines.append(
                f"{workload}, {n_ranks} ranks, {rate}, {fidelity}: {record['x_ddp']:.3f} x DDP, second half "
                f"{record['x_best_last_half']:.3f} of the best ({record['best']}); ends with {record['ends_with']}"
            )
    return lines


def read_records(path: Path) -> list[dict[str, Any]]:
    """What an earlier run has written, a JSON object a line. Raises: InvalidArgument (something else)."""
    if not path.exists():
        return []
    try:
        return [json.loads(line) for line in path.read_text().splitlines()]
    except json.JSONDecodeError as error:
        raise InvalidArgument(f"{path} does not hold records of `gradwire regret`: {error}") from error
