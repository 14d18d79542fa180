"""A gradient with the optimizer's state before the step, as an .npz file that `gradwire bench codec` and others read.

Arrays are flat float32, all parameters in the optimizer's order: `gradient` (the mean over the ranks), `parameter` and
the optimizer's state; scalars are its hyper-parameters, `optimizer`, and `step` (from 1, the one about to be taken).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gradwire.errors import Unsupported

# class: (name, state arrays). Subclasses before their bases: torch's AdamW is an Adam.
_OPTIMIZERS: dict[type[torch.optim.Optimizer], tuple[str, tuple[str, ...]]] = {
    torch.optim.AdamW: ("adamw", ("exp_avg", "exp_avg_sq")),
    torch.optim.Adam: ("adam", ("exp_avg", "exp_avg_sq")),
    torch.optim.SGD: ("sgd", ("momentum_buffer",)),
    torch.optim.Adagrad: ("adagrad", ("sum",)),
    torch.optim.RMSprop: ("rmsprop", ("square_avg",)),
}
_HYPER_PARAMETERS = ("weight_decay", "eps", "alpha", "lr_decay", "momentum", "dampening", "nesterov")


def write_snapshot(path: Path, optimizer: torch.optim.Optimizer, step: int) -> None:
    """Write what `optimizer` is about to apply in `step` (from 0), and what it holds, to `path`.

    Before the first step there is no state, and the file holds gradient and parameters alone.
    Raises: Unsupported (an optimizer or an option that the format has no place for, several parameter groups).
    """
    name, keys = next((names for cls, names in _OPTIMIZERS.items() if isinstance(optimizer, cls)), ("", ()))
    group = optimizer.param_groups[0]
    odd = [option for option in ("amsgrad", "centered", "maximize") if group.get(option)]
    if not name or odd or len(optimizer.param_groups) > 1:
        what = f"{type(optimizer).__name__} with {len(optimizer.param_groups)} parameter groups {' '.join(odd)}".strip()
        raise Unsupported(f"a gradient file has no place for {what}: train with a plain optimizer of one group")
    if name == "sgd" and not group["momentum"]:
        keys = ()
    parameters: list[Tensor] = group["params"]
    arrays: dict[str, Any] = {
        "gradient": _join([torch.zeros_like(p) if p.grad is None else p.grad for p in parameters]),
        "parameter": _join(parameters),
    }
    states = [optimizer.state.get(parameter, {}) for parameter in parameters]
    if all(isinstance(state.get(key), Tensor) for state in states for key in keys):
        arrays |= {key: _join([state[key] for state in states]) for key in keys}
        arrays |= {key: float(group[key]) for key in _HYPER_PARAMETERS if key in group}
        if "betas" in group:
            arrays["beta1"], arrays["beta2"] = map(float, group["betas"])
        arrays |= {"optimizer": name, "learning_rate": float(group["lr"]), "step": float(step + 1)}
    path.parent.mkdir(parents=True, exist_ok=True)
    np.savez(path, **arrays)


def _join(tensors: list[Tensor]) -> np.ndarray:
    return torch.cat([tensor.detach().float().cpu().flatten() for tensor in tensors]).numpy()
