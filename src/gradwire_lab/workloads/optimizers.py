"""The optimizers by name: the seven of the GComp paper, Adam's amsgrad, and Muon with AdamW beside it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from gradwire.errors import InvalidArgument, Unsupported

# name: (class, options, default learning rate, default weight decay)
_OPTIMIZERS: dict[str, tuple[Callable[..., Optimizer], dict[str, Any], float, float]] = {
    "sgd": (torch.optim.SGD, {}, 0.1, 0.0),
    "momentum": (torch.optim.SGD, {"momentum": 0.9}, 0.05, 5e-4),
    "nesterov": (torch.optim.SGD, {"momentum": 0.9, "nesterov": True}, 0.05, 5e-4),
    "adagrad": (torch.optim.Adagrad, {}, 1e-2, 0.0),
    "rmsprop": (torch.optim.RMSprop, {}, 1e-3, 0.0),
    "adam": (torch.optim.Adam, {}, 1e-3, 0.0),
    "adamw": (torch.optim.AdamW, {}, 1e-3, 1e-2),
    "amsgrad": (torch.optim.Adam, {"amsgrad": True}, 1e-3, 0.0),
}
if hasattr(torch.optim, "Muon"):  # from torch 2.9 on; of hidden matrices, with AdamW for the rest
    _OPTIMIZERS["muon"] = (torch.optim.Muon, {}, 0.02, 0.0)


def names() -> list[str]:
    """The optimizers that a workload can be given."""
    return sorted(_OPTIMIZERS)


def check_name(name: str) -> None:
    """Raises: InvalidArgument when no optimizer has this name."""
    if name not in _OPTIMIZERS:
        raise InvalidArgument(f"no optimizer is called {name!r}; there are: {', '.join(names())}")


def default_learning_rate(name: str) -> float:
    """The learning rate used when a workload and its user name none."""
    return _OPTIMIZERS[name][2]


# How a learning rate follows the batch: in proportion to it, or to its square root.
SCALINGS = ("none", "linear", "square-root")


def scale_learning_rate(rate: float, scaling: str, batch_factor: float) -> float:
    """The rate for a global batch `batch_factor` times as large as the one that `rate` was chosen for.

    "linear" keeps what an epoch moves the weights by; "square-root" keeps the variance of a step (SlimGC, section 4.3.1).
    """
    return rate * {"none": 1.0, "linear": batch_factor, "square-root": math.sqrt(batch_factor)}[scaling]


def check_scaling(scaling: str) -> None:
    """Raises: InvalidArgument."""
    if scaling not in SCALINGS:
        raise InvalidArgument(f"rate_scaling={scaling!r}: expected one of {', '.join(SCALINGS)}")


def build(name: str, parameters: Iterable[torch.Tensor], learning_rate: float, weight_decay: float | None) -> Optimizer:
    """A new optimizer over `parameters`; without a `weight_decay` the default of the name."""
    cls, options, _, default_decay = _OPTIMIZERS[name]
    decay = default_decay if weight_decay is None else weight_decay
    return cls(parameters, lr=learning_rate, weight_decay=decay, **options)


def hidden_matrices(model: nn.Module) -> list[torch.Tensor]:
    """What Muon is for: matrices of linear layers, but for a head, the last linear layer of the model's own children."""
    inner = model.module if isinstance(model, DistributedDataParallel) else model
    heads = [child for child in inner.children() if isinstance(child, nn.Linear)][-1:]
    linears = [one for one in inner.modules() if isinstance(one, nn.Linear) and one not in heads]
    embedded = {one.weight for one in inner.modules() if isinstance(one, nn.Embedding)}  # a tied head is one of these
    found = list(dict.fromkeys(one.weight for one in linears if one.weight not in embedded))
    if not found:
        raise Unsupported("Muon is for hidden matrices, and this model has none: take another optimizer")
    return found
