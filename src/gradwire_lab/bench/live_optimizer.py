"""A real torch.optim optimizer holding the state of a gradient file, for code that reads importance from live ones."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from gradwire_lab.workloads.gradients import FloatArray, OptimizerState

_TORCH_NAMES = {"learning_rate": "lr"}
_CLASSES = {"adam": "Adam", "adamw": "AdamW", "adagrad": "Adagrad", "rmsprop": "RMSprop", "sgd": "SGD"}


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
    options: dict[str, Any] = {_TORCH_NAMES.get(name, name): value for name, value in state.hyper.items()}
    options.pop("step", None)
    if "beta1" in options:
        options["betas"] = options.pop("beta1"), options.pop("beta2")
    if "nesterov" in options:
        options["nesterov"] = bool(options["nesterov"])
    cls: type[torch.optim.Optimizer] = getattr(torch.optim, _CLASSES[state.optimizer])
    return cls([parameter], **options)


def _stretch(array: FloatArray, length: int) -> torch.Tensor:
    return torch.from_numpy(array if array.size == length else np.resize(array, length))
