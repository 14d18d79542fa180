"""A real torch.optim optimizer holding the state of a gradient file, for code that reads importance from live ones."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from gradwire_lab.workloads.gradients import FloatArray, OptimizerState


def make_optimizer(
    state: OptimizerState, n_elements: int | None = None, dtype: torch.dtype = torch.float32
) -> torch.optim.Optimizer:
    """The optimizer over one parameter (n_elements,) of `dtype`, with `state`'s arrays repeated or cut to that length.

    Nothing is ever stepped: the parameter and the state only stand there to be read.
    """
    length = state.parameter.size if n_elements is None else n_elements
    parameter = torch.nn.Parameter(_stretch(state.parameter, length).to(dtype))
    optimizer = _construct(state, parameter)
    held: dict[str, Any] = {key: _stretch(array, length).to(dtype) for key, array in state.arrays.items()}
    if held.keys() - {"momentum_buffer"}:  # SGD keeps no step
        # The file's step is the one about to be taken; torch counts those that were.
        held["step"] = torch.tensor(max(state.hyper.get("step", 1.0) - 1.0, 0.0))
    optimizer.state[parameter] = held
    return optimizer


def _construct(state: OptimizerState, parameter: torch.nn.Parameter) -> torch.optim.Optimizer:
    hyper = state.hyper
    rate, decay = hyper["learning_rate"], hyper["weight_decay"]
    if state.optimizer in ("adam", "adamw"):
        cls = torch.optim.AdamW if state.optimizer == "adamw" else torch.optim.Adam
        betas = (hyper["beta1"], hyper["beta2"])
        return cls([parameter], lr=rate, betas=betas, eps=hyper["eps"], weight_decay=decay)
    if state.optimizer == "adagrad":
        return torch.optim.Adagrad(
            [parameter], lr=rate, lr_decay=hyper["lr_decay"], eps=hyper["eps"], weight_decay=decay
        )
    if state.optimizer == "rmsprop":
        return torch.optim.RMSprop([parameter], lr=rate, alpha=hyper["alpha"], eps=hyper["eps"], weight_decay=decay)
    return torch.optim.SGD(
        [parameter],
        lr=rate,
        momentum=hyper["momentum"],
        dampening=hyper["dampening"],
        nesterov=bool(hyper["nesterov"]),
        weight_decay=decay,
    )


def _stretch(array: FloatArray, length: int) -> torch.Tensor:
    return torch.from_numpy(array if array.size == length else np.resize(array, length))
