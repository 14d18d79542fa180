"""`gradwire recommend`: which scheme, if any; under torchrun, on this machine, or offline from a saved plan."""

import argparse
import importlib
import importlib.util
import json
import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from gradwire import checks
from gradwire.errors import InvalidArgument, Unsupported
from gradwire.planning.box import GpuLinks, advise, plan_box, read_topology
from gradwire.planning.plan import Plan, describe_rate
from gradwire.registry import describe_choices, parse_spec
from gradwire_lab.cli.options import add_json, add_ranks, add_way, option
from gradwire_lab.ranks.launch import run_gradwire
from gradwire_lab.ranks.netlab.rate import parse_rate, with_way
from gradwire_lab.results.records import write_text
from gradwire_lab.results.tables import Grid, print_grid


def add_arguments(parser: argparse.ArgumentParser) -> None:
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--workload", metavar="NAME", help="one of gradwire's own (default: gpt)")
    words = "your own training: FUNCTION() returns (ddp, optimizer, step); step() runs one forward and backward pass"
    what.add_argument("--entry", metavar="MODULE:FUNCTION", help=words)
    what.add_argument("--profile", type=Path, metavar="FILE", help="a plan saved with --json: nothing is measured")
    words = "GPUs of one machine, by arithmetic: also plain_s=S, a step under DDP on all, or bus_rate=BYTES/S; gradient_bits=16"
    what.add_argument("--box", metavar="ranks=N,parameters=N,compute_s=S,...", help=words)
    option(parser, "--topology", "FILE", "what `nvidia-smi topo -m` printed (default: it is asked on GPUs)", type=Path)
    option(parser, "--for-ranks", "N", "with --profile: the number of ranks to predict for", type=int)
    option(parser, "--path", "rtt_ms=MS,loss=SHARE,streams=N", "with --profile: a path between sites to predict for")
    parser.add_argument("--fidelity", choices=["exact", "close", "any"], help="default: any, or the plan's")
    option(parser, "--seconds", "S", "approximate time to spend", 60.0)
    add_ranks(parser)  # with --profile the other network's rate
    add_way(parser)
    add_json(parser, "write the plan: for --profile, and for attach")


def run(args: argparse.Namespace) -> int:
    checks.finite("--seconds", args.seconds, 0.001)
    if args.profile is not None or args.box is not None:
        names = ("ranks",) if args.box is None else ("ranks", "rate", "for_ranks", "path", "fidelity")
        idle = [name.replace("_", "-") for name in names if getattr(args, name) not in (None, "none")]
        idle += [word.partition("=")[0] for word in with_way(args, args.rate).split("/")[1:]]
        if idle:
            raise InvalidArgument(f"omit --{idle[0]}: nothing is measured; --profile takes --for-ranks, --rate, --path")
    if args.profile is not None:
        plan = _read(args.profile)
        plan = replace(plan, fidelity=args.fidelity or plan.fidelity)
        if args.for_ranks is not None or args.rate != "none" or args.path is not None:
            rate_bps = None if args.rate == "none" else float(parse_rate(args.rate) or 0)
            plan = plan.elsewhere(args.for_ranks, rate_bps, **_path(args.path or ""))
    elif args.box is not None:
        for name, value in (box := parse_spec(f"box:{args.box}")[1]).items():
            if isinstance(value, str) or not 0 < value < 1e15:
                raise InvalidArgument(f"--box {name}={value}: expected a number above 0")
        try:
            plan = plan_box(**box)
        except TypeError as error:
            raise InvalidArgument(f"--box takes what gradwire.planning.box.plan_box does: {error}") from error
    elif args.for_ranks is not None or args.path is not None:
        raise InvalidArgument("--for-ranks and --path predict from a plan: give it with --profile FILE")
    elif "RANK" not in os.environ:
        command = ["recommend", "--fidelity", args.fidelity or "any", "--seconds", str(args.seconds)]
        for flag, value in (("--workload", args.workload), ("--entry", args.entry), ("--json", args.json)):
            command += [] if value is None else [flag, str(value)]
        if args.entry is not None:
            _check_entry(args.entry)
        n_ranks = checks.count("--ranks", 4 if args.ranks is None else args.ranks, 2)  # one has nothing to communicate
        run_gradwire(command, n_ranks, with_way(args, args.rate))
        return 0
    elif with_way(args, args.rate) != "none" or args.ranks is not None:
        raise InvalidArgument("--ranks, --rate and ways are of ranks that this command starts: not under torchrun")
    else:
        plan = _measure(args)
        if os.environ["RANK"] != "0":
            return 0
    _show(plan, args)
    return 0


def _measure(args: argparse.Namespace) -> Plan:
    import torch.distributed as dist

    from gradwire.planning.recommend import recommend

    if not dist.is_initialized() and args.entry is None:
        dist.init_process_group("gloo")
    ddp, optimizer, step = _load_entry(args.entry) if args.entry else _load_workload(args.workload or "gpt")
    plan = recommend(ddp, optimizer, step, seconds=args.seconds, fidelity=args.fidelity or "any")
    if dist.is_initialized():
        dist.destroy_process_group()
    return plan


def _check_entry(entry: str) -> tuple[str, str]:
    """Module and function, before any rank is started. Raises: InvalidArgument (no such module from here)."""
    module_path, _, name = entry.partition(":")
    if not module_path or not name:
        raise InvalidArgument(f"--entry is MODULE:FUNCTION, got {entry!r}")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        found = importlib.util.find_spec(module_path)
    except ImportError as error:  # a package above it
        raise InvalidArgument(f"--entry {entry}: {error}") from error
    if found is None:
        raise InvalidArgument(f"--entry {entry}: there is no module {module_path!r} here; run this where it is found")
    return module_path, name


def _load_entry(entry: str) -> Any:
    module_path, name = _check_entry(entry)
    module = importlib.import_module(module_path)
    if not hasattr(module, name):
        raise InvalidArgument(f"--entry {entry}: module {module_path!r} has no {name!r}")
    made = getattr(module, name)()
    if not isinstance(made, tuple) or len(made) != 3:
        raise InvalidArgument(f"--entry {entry} has to give (ddp, optimizer, step)")
    return made


def _load_workload(spec: str) -> Any:
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    from gradwire_lab import workloads

    workload = workloads.by_name(spec)
    ddp = DistributedDataParallel(workload.build_model(0), **workload.ddp_options())
    optimizers = workload.build_optimizers(ddp)
    batch = workload.batch_at(0, dist.get_rank(), dist.get_world_size(), workload.batch_size, 0)
    return ddp, optimizers, lambda: workload.loss(ddp, batch).backward()


def _read(path: Path) -> Plan:
    try:
        return Plan.from_dict(json.loads(path.read_text()))
    except OSError as error:
        raise Unsupported(f"cannot read {path}: {error}") from error
    except (ValueError, RecursionError) as error:
        raise InvalidArgument(f"{path} is not JSON that gradwire writes: {error}") from error


def _path(text: str) -> dict[str, Any]:
    given, known = parse_spec(f"path:{text}")[1], ("rtt_ms", "loss", "streams")
    for name, value in given.items():
        if name not in known:
            raise InvalidArgument(f"--path has no {name!r}; {describe_choices(name, known)}")
        if isinstance(value, str):
            raise InvalidArgument(f"--path {name}={value}: expected a number")
    return {"rtt_s": given.pop("rtt_ms", 0) / 1e3, **given}


def _topology(args: argparse.Namespace) -> GpuLinks | None:
    if args.topology is None:
        return read_topology() if args.box is None else None
    try:
        return GpuLinks.from_text(args.topology.read_text())
    except (OSError, UnicodeDecodeError) as error:
        raise Unsupported(f"cannot read {args.topology}: {error}") from error


def _show(plan: Plan, args: argparse.Namespace) -> None:
    machine, link = plan.profile.machine, plan.profile.link
    where = f"{machine.n_local} on {machine.n_cores} cores; link {describe_rate(8 * link.rate)}"
    if machine.on_device:
        where = f"on GPUs; bus bandwidth {link.rate / 1e9:.3g} GB/s, as NCCL counts it"
    print(f"{machine.n_ranks} ranks, {where}, {1e3 * link.backend_hop_s:.2g} ms a hop;")
    waits_ms = 1e3 * max(0.0, plan.plain_s - plan.compute_s)
    print(f"a step computes {1e3 * plan.compute_s:.0f} ms and waits {waits_ms:.0f} ms")
    print_grid(make_grid(plan))
    if args.box is not None:
        print("By arithmetic: nothing was measured here, and kernels are taken to move 350 GB/s of memory.")
    if plan.slow_ranks():
        print(f"Slow links: rank {', '.join(map(str, plan.slow_ranks()))}; everybody waits for them.")
    print(advise(plan, _topology(args)) if machine.on_device else plan.sentence())
    if args.json is not None:
        write_text(args.json, json.dumps(plan.as_dict(), indent=1) + "\n")


def make_grid(plan: Plan) -> Grid:
    """One line a scheme, 80 columns."""
    rows = []
    for one in plan.forecasts():
        name, level, pays_below = one.spec + " *" * one.by_name_only, one.level, describe_rate(one.pays_below_bps)
        if one.spec == "plain":
            name, level, pays_below = "DDP", "", ""
        step_ms = f"{1e3 * one.step_s:.1f}" + " m" * one.is_measured
        speed = f"{plan.plain.step_s / one.step_s:.2f}" if one.step_s else "-"
        rows.append([name, level, step_ms, speed, f"{one.sent_bytes / 1e6:.3g}", pays_below])
    caption = "m: measured in steps of this model; the others predicted. *: by name only"
    return Grid("", ["scheme", "fidelity", "ms", "x DDP", "MB", "pays below"], rows, caption)
