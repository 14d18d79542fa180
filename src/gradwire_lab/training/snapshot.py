"""A gradient with the optimizer's state just before its step, as an .npz file: what `gradwire bench codec` and others read.

Arrays are flat float32, aligned element by element: `gradient`, `parameter` and the optimizer's state under torch's names;
scalars are its hyper-parameters, `optimizer`, and `step`, the number of the step about to be taken, from 1.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from gradwire.errors import GradwireError, Unsupported

# torch's names of hyper-parameters, and theirs in a file where those differ.
_SCALARS = {"lr": "learning_rate"} | {
    name: name for name in ("weight_decay", "eps", "alpha", "momentum", "dampening", "nesterov", "lr_decay")
}
_ARRAYS = ("exp_avg", "exp_avg_sq", "momentum_buffer", "square_avg", "sum")


def write_snapshot(path: Path, optimizer: torch.optim.Optimizer, step: int) -> None:
    """Write what `collect_arrays` gives to `path`, its folder made if need be.

    Raises: Unsupported (see there), GradwireError (the file cannot be written).
    """
    arrays = collect_arrays(optimizer, step)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("wb") as file:
            np.savez(file, **arrays)
    except OSError as error:
        raise GradwireError(f"could not write {path}: {error.strerror or error}") from error


def collect_arrays(optimizer: torch.optim.Optimizer, step: int) -> dict[str, Any]:
    """The arrays and scalars of a gradient file, from `optimizer` between backward and its step number `step` (from 1).

    Parameters without a gradient are left out. Before the first step there is no state yet: gradient and parameters
    alone then, unless the optimizer never has any.
    Raises: Unsupported (an optimizer, or an option, that the format has no place for; several parameter groups).
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
        held = [optimizer.state.get(parameter, {}).get(key) for parameter in parameters]
        if any(values is not None for values in held):
            arrays[key] = _flatten(
                [torch.zeros_like(p) if values is None else values for p, values in zip(parameters, held, strict=True)]
            )
    if len(arrays) == 2 and not (name == "sgd" and not group["momentum"]):
        return arrays
    scalars = {_SCALARS[key]: np.float32(value) for key, value in group.items() if key in _SCALARS}
    if "betas" in group:
        scalars["beta1"], scalars["beta2"] = (np.float32(beta) for beta in group["betas"])
    return {**arrays, **scalars, "step": np.int64(step), "optimizer": np.array(name)}


def _flatten(tensors: list[Any]) -> npt.NDArray[np.float32]:
    flat = torch.cat([tensor.detach().reshape(-1).to(device="cpu", dtype=torch.float32) for tensor in tensors])
    return flat.numpy()
