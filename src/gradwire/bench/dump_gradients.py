"""gradwire bench dump-gradients: train a workload in this process and write gradients with the optimizer's state."""

from __future__ import annotations

import argparse
from pathlib import Path

import torch

from gradwire import workloads
from gradwire.errors import InvalidArgument
from gradwire.results.console import make_console
from gradwire.training.snapshot import write_snapshot
from gradwire.workloads import Workload


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of `gradwire bench dump-gradients`."""
    parser.add_argument("--workload", default="gpt", metavar="NAME", help="what to train (gpt)")
    parser.add_argument("--steps", nargs="+", type=int, default=[50], metavar="N", help="steps to write, from 2 (50)")
    parser.add_argument("--out", type=Path, default=Path("runs/gradients"), metavar="DIR", help="folder of the files")
    parser.add_argument("--optimizer", metavar="NAME", help="optimizer (the workload's own)")
    parser.add_argument("--batch-size", type=int, metavar="N", help="samples a step (the workload's own)")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of weights and batches (0)")


def run(args: argparse.Namespace) -> int:
    """Train to the last of `--steps`, writing one file a step."""
    if min(args.steps) < 2:
        raise InvalidArgument("--steps counts from 2: before the first step an optimizer has no state")
    options = {"optimizer": args.optimizer} if args.optimizer else {}
    workload = workloads.by_name(args.workload, **options)
    batch_size = args.batch_size or workload.batch_size
    console = make_console()
    for path in dump(workload, sorted(set(args.steps)), args.out, batch_size, args.seed):
        console.print(f"wrote {path}")
    return 0


def dump(workload: Workload, steps: list[int], folder: Path, batch_size: int, seed: int) -> list[Path]:
    """Write `WORKLOAD_OPTIMIZER_stepN.npz` for each of `steps` (ascending); returns the paths.

    Raises: Unsupported (an optimizer that the format does not know), GradwireError (the file cannot be written).
    """
    model = workload.build_model(seed)
    optimizer = workload.build_optimizer(model)
    scheduler = workload.build_scheduler(optimizer)
    model.train()
    paths: list[Path] = []
    for step in range(1, steps[-1] + 1):
        torch.manual_seed(seed * 1_000_003 + step)
        optimizer.zero_grad(set_to_none=True)
        workload.loss(model, workload.batch_at(step - 1, 0, 1, batch_size, seed)).backward()
        if step in steps:
            paths.append(folder / f"{workload.name}_{workload.optimizer}_step{step}.npz")
            write_snapshot(paths[-1], optimizer, step)
        optimizer.step()
        if scheduler is not None:
            scheduler.step()
    return paths
