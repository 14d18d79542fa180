"""The demo: a small GPT on a slow network, with DDP, with PyTorch's bf16 hook, and with the two lines of gradwire.

All four train in turns, in the same processes, on the same batches from the same weights; every trial that `auto` makes is
on its own bill. What is not won is not claimed: the summary says so.
"""

import argparse
import itertools
import json
import os
import time
from pathlib import Path
from statistics import fmean, median_high
from typing import Any

from gradwire.errors import InvalidArgument, Unsupported
from gradwire.planning.plan import describe_rate
from gradwire_lab.cli.options import add_ranks, add_way, add_workload, option, switch
from gradwire_lab.ranks.launch import run_gradwire
from gradwire_lab.ranks.netlab.rate import parse_link, with_way
from gradwire_lab.results.records import write_json, write_text
from gradwire_lab.results.tables import Grid, print_grid

_SECONDS, _QUICK_SECONDS = 110.0, 25.0
_MOST_STEPS = 200
_TURN = 4  # steps
_FEWEST_STEPS = 16  # after fewer, `auto` has not tried anything
METHODS = {"ddp": "DDP", "ddp-bf16": "DDP, bf16 hook", "auto": "gradwire", "auto:fidelity=close": 'fidelity="close"'}
_MARK = "@demo "


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_workload(parser)
    add_ranks(parser, 2, "100mbit")
    add_way(parser)
    option(parser, "--seconds", "S", f"approximate training time (default: {_SECONDS:.0f})", type=float)
    switch(parser, "--quick", f"{_QUICK_SECONDS:.0f} seconds of training")
    option(parser, "--out", "DIR", "folder of demo.json and demo.svg", Path("runs/demo"), type=Path)


def run(args: argparse.Namespace) -> int:
    from gradwire_lab import workloads

    seconds = args.seconds if args.seconds is not None else _QUICK_SECONDS if args.quick else _SECONDS
    if not seconds > 0:
        raise InvalidArgument(f"--seconds must be positive, got {seconds}")
    if args.ranks < 2:
        raise InvalidArgument(f"--ranks {args.ranks}: with one rank there is nothing to communicate; take 2 or more")
    if "RANK" in os.environ:
        _train(args.workload, seconds)
        return 0
    rate = with_way(args, args.rate)
    parse_link(rate, 0, args.ranks)
    workloads.by_name(args.workload)
    result: dict[str, Any] = {}

    def take_line(rank: int, line: str) -> None:
        if line.startswith(_MARK):
            result.update(json.loads(line[len(_MARK) :]))
        else:
            print(line, flush=True)

    words = f"{args.workload} on {args.ranks} local ranks, links of {rate}"
    print(f"{words}; {seconds:.0f} s of training, in turns.", flush=True)
    command = ["demo", "--workload", args.workload, "--seconds", str(seconds)]
    result["shaped"] = run_gradwire(command, args.ranks, rate, take_line)
    result["rate"] = rate if result["shaped"] else "none"
    write_json(args.out / "demo.json", result)
    show(result)
    print(f"\nAll figures: {args.out / 'demo.json'}" + _draw(result, args.out / "demo.svg"))
    return 0


def _train(workload_name: str, seconds: float) -> None:
    """As one rank: all methods in turns until the time is up, then one line of JSON from rank 0."""
    import torch.distributed as dist

    from gradwire.core.threads import use_fair_share_of_cores
    from gradwire_lab import workloads
    from gradwire_lab.bench import driver
    from gradwire_lab.bench.train_methods import TrainMethod

    dist.init_process_group("gloo")
    use_fair_share_of_cores()
    workload = workloads.by_name(workload_name)
    methods = {spec: TrainMethod(spec, workload, 0) for spec in METHODS}
    for method in methods.values():
        method.step()  # DDP cuts its buckets anew after the first
    ends, order = time.monotonic() + seconds, list(methods.values())
    for n_done in range(_TURN, _MOST_STEPS + 1, _TURN):
        for method in order:
            dist.barrier()
            for _ in range(_TURN):
                method.step()
        order.reverse()
        (late_s,) = driver.largest_over_ranks([time.monotonic() - ends])
        if late_s > 0 and n_done >= _FEWEST_STEPS:
            break
        if dist.get_rank() == 0:
            print(f"  {n_done} steps of each, {max(0.0, -late_s):.0f} s to go", flush=True)
    runs: dict[str, dict[str, Any]] = {}
    for spec, method in methods.items():
        found = runs[spec] = {
            "step_s": driver.largest_over_ranks([times.iteration_s for times in method.times[-n_done:]]),
            "losses": driver.mean_over_ranks(method.losses[-n_done:]),
            "sent_bytes_per_step": method.stats()["sent_bytes"] / (n_done + 1),
        }
        if method.name == "auto":  # what it decided and why, and what it would take on faster networks
            attachment: Any = method.attachment
            plans = {rate_bps: attachment.scheme.plan_for(float(rate_bps)) for rate_bps in (10**9, 10**10)}
            names = ("plain_s", "best", "best_s")
            found["elsewhere"] = {str(rate): dict(zip(names, plan, strict=True)) for rate, plan in plans.items()}
            found["auto"] = method.own_stats()["auto"]
    if dist.get_rank() == 0:
        result = {"n_steps": n_done, "ranks": dist.get_world_size(), "workload": workload_name, "runs": runs}
        print(_MARK + json.dumps(result), flush=True)
    for method in methods.values():
        method.close()
    dist.destroy_process_group()


def show(result: dict[str, Any]) -> None:
    """The table, what was decided, and where it would not help."""
    runs = result["runs"]
    network = "loopback without a limit" if result["rate"] == "none" else f"links of {result['rate']}"
    target, reached = seconds_to_the_same_loss(runs)
    others = [spec for spec in runs if spec != "ddp"]
    late = [median_high(found["step_s"][result["n_steps"] // 2 :]) for found in runs.values()]
    rows = [
        [f"s to a loss of {target:.3f}", *(f"{seconds:.1f}" for seconds in reached.values())],
        ["x faster than DDP", "", *(f"{reached['ddp'] / reached[spec]:.2f}" for spec in others)],
        ["s in all, with trials", *(f"{sum(found['step_s']):.1f}" for found in runs.values())],
        ["ms a step, second half", *(f"{1e3 * seconds:.0f}" for seconds in late)],
        ["MB sent a step", *(f"{found['sent_bytes_per_step'] / 1e6:.2f}" for found in runs.values())],
        ["loss, last 4 steps", *(f"{fmean(found['losses'][-4:]):.5f}" for found in runs.values())],
        ["loss strays by", "", *(f"{strays(runs[spec], runs['ddp']):.1e}" for spec in others)],
    ]
    title = f"{result['workload']}, {result['ranks']} ranks, {result['n_steps']} steps each, {network}"
    print_grid(Grid(title, ["", *(METHODS[spec] for spec in runs)], rows))
    for spec, found in ((spec, found) for spec, found in runs.items() if "auto" in found):
        print(f"\n{METHODS[spec]}: {verdict(reached['ddp'], reached[spec])}")
        for decision in found["auto"]["decisions"][:8]:
            print(f"  step {decision['step']}: {decision['kind']} {decision['scheme']}: {decision['why']}")
        for rate_bps, plan in found["elsewhere"].items():
            best = f"{plan['best']} {1e3 * plan['best_s']:.0f} ms a step"
            best = "nothing wins 3 %" if plan["best"] == "plain" else best
            rate = describe_rate(float(rate_bps))
            print(f"  at {rate}, predicted: {best}; plain DDP, {1e3 * plan['plain_s']:.0f} ms a step")


def verdict(ddp_s: float, seconds: float) -> str:
    """In words how the seconds to a loss compare with DDP's; what is slower is called so."""
    speed = ddp_s / seconds
    times = f"{seconds:.1f} s to the loss for which DDP takes {ddp_s:.1f} s, trials included"
    if speed >= 1.03:
        return f"{speed:.3g} x faster: {times}."
    if speed >= 0.98:
        return f"as fast as DDP: {times}. Nothing was to be won here, and nothing was lost."
    return f"slower here, {speed:.2f} x: {times}. A run this short, or another program on the machine."


def seconds_to_the_same_loss(runs: dict[str, dict[str, Any]]) -> tuple[float, dict[str, float]]:
    """(a loss that all of `runs` have come down to, {method: the seconds of training after which it had}). A loss is
    the mean over 8 steps, since one batch's is noise, and the lowest so far."""
    curves = {spec: _falling(found["losses"]) for spec, found in runs.items()}
    target = max(curve[-1] for curve in curves.values())
    n_above = {spec: sum(loss > target for loss in curve) for spec, curve in curves.items()}
    return target, {spec: sum(runs[spec]["step_s"][: n + 1]) for spec, n in n_above.items()}


def _falling(losses: list[float]) -> list[float]:
    means = [fmean(losses[max(0, at - 8) : at]) for at in range(1, len(losses) + 1)]
    return list(itertools.accumulate(means, min))


def _draw(result: dict[str, Any], path: Path) -> str:
    """Loss over seconds of training, as SVG; what to say of it."""
    from gradwire_lab.results.experiment import Column, Plot
    from gradwire_lab.results.plots import to_svg
    from gradwire_lab.results.tables import Value

    series = {}
    for spec, found in result["runs"].items():
        losses = map(Value, _falling(found["losses"]))
        series[METHODS[spec]] = list(zip(itertools.accumulate(found["step_s"]), losses, strict=True))
    plot = Plot("seconds", Column("loss", "loss, lowest mean of 8 steps"), x_title="seconds of training")
    try:
        write_text(path, to_svg(plot, series))
    except Unsupported:  # without matplotlib there is no picture
        return ""
    return f"; loss over time: {path}"


def strays(found: dict[str, Any], baseline: dict[str, Any]) -> float:
    """The largest difference of a step's loss from the baseline's."""
    return max(abs(a - b) for a, b in zip(found["losses"], baseline["losses"], strict=True))
