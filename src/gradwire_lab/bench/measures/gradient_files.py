"""Gradients of real training with the optimizer's state, made when they are needed: `gpt@400` is step 400 of GPT's."""

from __future__ import annotations

from pathlib import Path

import torch

from gradwire.errors import InvalidArgument
from gradwire_lab import workloads
from gradwire_lab.training.snapshot import write_snapshot
from gradwire_lab.workloads import Workload


def gradient_file(name: str, folder: Path) -> Path:
    """The file that `name` stands for: WORKLOAD@STEP, trained to that step if it is not there; any other is a path.

    Raises: InvalidArgument.
    """
    workload, at, step = name.partition("@")
    if not at:
        return Path(name)
    if not step.isdigit():
        raise InvalidArgument(f"gradients {name!r}: expected WORKLOAD@STEP or a path")
    made = workloads.by_name(workload)
    path = folder / "gradients" / f"{made.name}_{made.optimizer}_step{step}.npz"
    if not path.is_file():
        dump(made, [int(step)], path.parent, made.batch_size, seed=0)
    return path


def dump(workload: Workload, steps: list[int], folder: Path, batch_size: int, seed: int) -> list[Path]:
    """Write `WORKLOAD_OPTIMIZER_stepN.npz` for each of `steps` (ascending); returns the paths.

    Raises: Unsupported (an optimizer that the format does not know), GradwireError (the file cannot be written).
    """
    model = workload.build_model(seed)
    optimizer = workload.build_optimizer(model)
    schedulers = workload.build_schedulers([optimizer])
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
        for scheduler in schedulers:
            scheduler.step()
    return paths
