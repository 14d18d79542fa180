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
        _train_to(made, int(step), path)
    return path


def _train_to(workload: Workload, last: int, path: Path, seed: int = 0) -> None:
    """Train alone to step `last` and write its gradient. Raises: Unsupported (the optimizer), GradwireError."""
    model = workload.build_model(seed)
    optimizer = workload.build_optimizer(model)
    schedulers = workload.build_schedulers([optimizer])
    model.train()
    for step in range(1, last + 1):
        torch.manual_seed(seed * 1_000_003 + step)
        optimizer.zero_grad(set_to_none=True)
        workload.loss(model, workload.batch_at(step - 1, 0, 1, workload.batch_size, seed)).backward()
        if step == last:
            write_snapshot(path, optimizer, step)
        optimizer.step()
        for scheduler in schedulers:
            scheduler.step()
