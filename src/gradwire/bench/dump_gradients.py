"""gradwire bench dump-gradients: train a workload in this process and write gradients with the optimizer's state."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import numpy as np
import torch

from gradwire import workloads
from gradwire.bench.console import make_console
from gradwire.bench.gradients import FloatArray
from gradwire.errors import GradwireError, InvalidArgument, Unsupported
from gradwire.workloads import Workload

# torch's names of hyper-parameters, and theirs in a file where those differ.
_SCALARS = {
    "lr": "learning_rate",
    "weight_decay": "weight_decay",
    "eps": "eps",
    "alpha": "alpha",
    "momentum": "momentum",
    "dampening": "dampening",
    "nesterov": "nesterov",
    "lr_decay": "lr_decay",
}
_ARRAYS = ("exp_avg", "exp_avg_sq", "momentum_buffer", "square_avg", "sum")


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
            paths.append(_write(folder / f"{workload.name}_{workload.optimizer}_step{step}.npz", optimizer, step))
        optimizer.step()
        if scheduler is not None:
            scheduler.step()
    return paths


def _write(path: Path, optimizer: torch.optim.Optimizer, step: int) -> Path:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("wb") as file:
            np.savez(file, **collect_arrays(optimizer, step))
    except OSError as error:
        raise GradwireError(f"could not write {path}: {error.strerror or error}") from error
    return path


def collect_arrays(optimizer: torch.optim.Optimizer, step: int) -> dict[str, Any]:
    """The arrays and scalars of a gradient file, from `optimizer` between backward and its step number `step`.

    Raises: Unsupported.
    """
    group = optimizer.param_groups[0]
    name = type(optimizer).__name__.lower()
    if name not in ("sgd", "adagrad", "rmsprop", "adam", "adamw"):
        raise Unsupported(f"gradient files know SGD, Adagrad, RMSprop, Adam and AdamW, not {type(optimizer).__name__}")
    for option in ("amsgrad", "centered", "maximize"):
        if group.get(option):
            raise Unsupported(f"gradient files have no place for {type(optimizer).__name__}'s option {option}")
    if len(optimizer.param_groups) > 1 or (name == "rmsprop" and group["momentum"]):
        raise Unsupported("gradient files hold one parameter group, and no momentum of RMSprop")
    parameters = [parameter for parameter in group["params"] if parameter.grad is not None]
    arrays: dict[str, Any] = {
        "gradient": _flatten([parameter.grad for parameter in parameters]),
        "parameter": _flatten(parameters),
    }
    for key in _ARRAYS:
        held = [optimizer.state[parameter].get(key) for parameter in parameters]
        if any(values is not None for values in held):
            arrays[key] = _flatten(
                [torch.zeros_like(p) if values is None else values for p, values in zip(parameters, held, strict=True)]
            )
    scalars = {_SCALARS[key]: np.float32(value) for key, value in group.items() if key in _SCALARS}
    if "betas" in group:
        scalars["beta1"], scalars["beta2"] = (np.float32(beta) for beta in group["betas"])
    return {**arrays, **scalars, "step": np.int64(step), "optimizer": np.array(name)}


def _flatten(tensors: list[Any]) -> FloatArray:
    flat = torch.cat([tensor.detach().reshape(-1).to(torch.float32) for tensor in tensors])
    return flat.numpy()
