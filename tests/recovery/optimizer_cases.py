"""Every supported optimizer with every option that changes its arithmetic, and the quantisation metric in float64."""

import copy
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Floats = NDArray[np.float64]
Optimizer = torch.optim.Optimizer
MakeOptimizer = Callable[[list[Tensor]], Optimizer]

MANTISSA_BITS = {torch.float32: 23, torch.float16: 10, torch.bfloat16: 7}
LEVEL_BITS = {torch.float32: (6, 12, 18), torch.float16: (3, 5, 8), torch.bfloat16: (2, 4, 6)}
BYTE_OFFSET = 348

SGD, Adagrad, RMSprop = torch.optim.SGD, torch.optim.Adagrad, torch.optim.RMSprop
Adam, AdamW = torch.optim.Adam, torch.optim.AdamW

CASES: dict[str, MakeOptimizer] = {
    "sgd": partial(SGD, lr=0.1),
    "sgd decay": partial(SGD, lr=0.3, weight_decay=0.1),
    "sgd maximize": partial(SGD, lr=0.1, maximize=True, weight_decay=0.01),
    "momentum": partial(SGD, lr=0.05, momentum=0.9),
    "momentum dampening decay": partial(SGD, lr=0.2, momentum=0.8, dampening=0.3, weight_decay=0.05),
    "momentum maximize foreach": partial(SGD, lr=0.05, momentum=0.9, maximize=True, foreach=True),
    "momentum fused": partial(SGD, lr=0.05, momentum=0.9, dampening=0.5, fused=True),
    "nesterov": partial(SGD, lr=0.05, momentum=0.9, nesterov=True),
    "nesterov decay": partial(SGD, lr=0.1, momentum=0.7, nesterov=True, weight_decay=0.02),
    "adagrad": partial(Adagrad, lr=0.01),
    "adagrad decays": partial(Adagrad, lr=0.05, lr_decay=0.1, weight_decay=0.01, initial_accumulator_value=0.1),
    "adagrad maximize": partial(Adagrad, lr=0.01, maximize=True, foreach=True),
    "rmsprop": partial(RMSprop, lr=0.01),
    "rmsprop decay": partial(RMSprop, lr=0.003, alpha=0.9, eps=1e-4, weight_decay=0.01),
    "rmsprop centered": partial(RMSprop, lr=0.01, centered=True),
    "rmsprop momentum": partial(RMSprop, lr=0.001, momentum=0.9),
    "rmsprop momentum decay": partial(RMSprop, lr=0.001, momentum=0.9, weight_decay=0.01, maximize=True),
    "rmsprop centered momentum": partial(RMSprop, lr=0.001, momentum=0.5, centered=True, alpha=0.9, weight_decay=0.1),
    "adam": partial(Adam, lr=0.001),
    "adam decay": partial(Adam, lr=0.01, betas=(0.8, 0.99), eps=1e-6, weight_decay=0.1),
    "adam amsgrad": partial(Adam, lr=0.001, amsgrad=True, weight_decay=0.01),
    "adam maximize foreach": partial(Adam, lr=0.001, maximize=True, foreach=True),
    "adam tensor lr": partial(Adam, lr=torch.tensor(0.001)),
    "adam without momentum": partial(Adam, lr=0.001, betas=(0.0, 0.9)),
    "adamw": partial(AdamW, lr=0.001),
    "adamw decay": partial(AdamW, lr=0.01, weight_decay=0.5),
    "adamw amsgrad fused": partial(AdamW, lr=0.001, amsgrad=True, fused=True),
}

# Not in the paper's table: without an oracle of their own.
OTHERS: dict[str, MakeOptimizer] = {
    "nadam": partial(torch.optim.NAdam, lr=0.002),
    "nadam decay": partial(torch.optim.NAdam, lr=0.002, betas=(0.8, 0.99), weight_decay=0.1),
    "nadam decoupled": partial(torch.optim.NAdam, lr=0.002, weight_decay=0.1, decoupled_weight_decay=True),
    "radam": partial(torch.optim.RAdam, lr=0.001, betas=(0.9, 0.9)),
    "radam decoupled": partial(
        torch.optim.RAdam, lr=0.001, betas=(0.9, 0.9), weight_decay=0.1, decoupled_weight_decay=True
    ),
    "radam, not rectified yet": partial(torch.optim.RAdam, lr=0.001, betas=(0.9, 0.9999), weight_decay=0.1),
    "adamax": partial(torch.optim.Adamax, lr=0.002, weight_decay=0.01),
}


@dataclass(frozen=True)
class Oracle:
    """In float64.

    `scale` is |delta g|, `rounding` what float32 may lose of it, `gain` what the optimizer multiplies g by, `slack` the
    share by which g's own effect on the second moment may add to its direct effect (rho).
    """

    scale: Floats
    rounding: Floats
    gain: Floats
    slack: Floats


@np.errstate(invalid="ignore", over="ignore")  # float16 parameters that their own optimizer made Inf or NaN
def expected(optimizer: Optimizer, parameter: Tensor, gradient: Tensor) -> Oracle:
    """delta of the specification's table, with g explicit, from the state before the step."""
    group = optimizer.param_groups[0]
    state = optimizer.state.get(parameter, {})
    theta, g = _float64(parameter), _float64(gradient)
    g = np.where(g == 0, 1e-30, g)
    eta, lam = float(group["lr"]), float(group["weight_decay"])
    none = np.zeros_like(theta)
    if isinstance(optimizer, SGD):
        mu, tau, b = group["momentum"], group["dampening"], none
        first = mu == 0 or "momentum_buffer" not in state
        if not first:
            b = _float64(state["momentum_buffer"])
        if group["nesterov"]:
            parts = [(1 - eta * lam * (1 + mu)) * theta / (eta * (1 + mu) * g), -eta * mu**2 * b / (eta * (1 + mu) * g)]
            gain = eta * (1 + mu) + none
        else:
            tau = 0.0 if first else tau
            parts = [theta / (eta * (1 - tau) * g) - lam * theta / g, -eta * mu * b / (eta * (1 - tau) * g)]
            gain = eta * (1 - tau) + none
        return _oracle(parts, g, gain, none)
    if not state:
        return Oracle(none, none, none, none)
    eps, t = group["eps"], float(state["step"]) + 1
    if isinstance(optimizer, Adagrad):
        eta = eta / (1 + (t - 1) * group["lr_decay"])
        v = _float64(state["sum"])
        d = np.sqrt(v) + eps
        return _known(v, _oracle([theta * d / (eta * g), -lam * theta / g], g, eta / d, none))
    if isinstance(optimizer, RMSprop):
        alpha, v, slack = group["alpha"], _float64(state["square_avg"]), none
        if group["centered"]:
            mean = _float64(state["grad_avg"])
            v, slack = v - mean**2 * (1 + (1 - alpha) / 4), none + 2
        d = np.sqrt(np.maximum(alpha * v, 0)) + eps
        moved = theta
        if group["momentum"] > 0:
            moved = theta - eta * group["momentum"] * _float64(state["momentum_buffer"])
        return _known(v, _oracle([moved * d / (eta * g), -lam * theta / g], g, eta / d, slack))
    assert isinstance(optimizer, Adam | AdamW)
    beta1, beta2 = group["betas"]
    if group["amsgrad"]:
        v = _float64(state["max_exp_avg_sq"])
        v_hat = v / (1 - beta2**t)
    else:
        v = _float64(state["exp_avg_sq"])
        v_hat = beta2 * v / (1 - beta2**t)
    m, d = _float64(state["exp_avg"]), np.sqrt(v_hat) + eps
    kept = 1 - eta * lam if isinstance(optimizer, AdamW) else 1
    parts = [theta * d * (1 - beta1**t) * kept / (eta * (1 - beta1) * g), -eta * beta1 * m / (eta * (1 - beta1) * g)]
    if not isinstance(optimizer, AdamW):
        parts.append(-lam * theta / g)
    slack = _adam_slack(group, t, g if isinstance(optimizer, AdamW) else g + lam * theta, m, v_hat, d)
    return _known(v, _oracle(parts, g, eta * (1 - beta1) / ((1 - beta1**t) * d), slack))


def _adam_slack(group: dict[str, Any], t: float, g: Floats, m: Floats, v_hat: Floats, d: Floats) -> Floats:
    """rho = |m_t| |dD/dg| / ((1 - beta1) D), its largest value while 2^-5 of g disappears."""
    beta1, beta2 = group["betas"]
    momentum = beta1 * np.abs(m) + (1 - beta1) * np.abs(g)
    share = (1 - beta2) / (1 - beta2**t)
    slope = share * np.abs(g) / np.sqrt(v_hat + share * (g * (1 - 2.0**-5)) ** 2 + 1e-300)
    return momentum * slope / ((1 - beta1) * d)


def _oracle(parts: list[Floats], g: Floats, gain: Floats, slack: Floats) -> Oracle:
    magnitude = sum(np.abs(part * g) for part in parts)
    return Oracle(np.abs(sum(parts) * g), 2.0**-20 * magnitude, gain, slack)


def _known(v: Floats, oracle: Oracle) -> Oracle:
    """v = 0: level 0."""
    return Oracle(np.where(v > 0, oracle.scale, 0), np.where(v > 0, oracle.rounding, 0), oracle.gain, oracle.slack)


def finite(*values: Tensor) -> NDArray[np.bool_]:
    return np.logical_and.reduce([value.isfinite().numpy() for value in values])


def byte_of(scale: Floats) -> NDArray[np.int64]:
    """The importance byte of a scale, as the format defines it."""
    code = scale.astype(np.float32).view(np.uint32).astype(np.int64) >> 21
    return np.clip(code - BYTE_OFFSET, 0, 255)


def truncate(values: Tensor, importance: Tensor) -> tuple[Tensor, NDArray[np.int64]]:
    """`values` (n,) with the low mantissa bits of their level zeroed, and the bits dropped."""
    mantissa_bits = MANTISSA_BITS[values.dtype]
    as_float32 = values.detach().float().numpy()
    code = (as_float32.view(np.uint32) & 0x7FFFFFFF).astype(np.int64) >> 21
    dropped = np.zeros(values.numel(), dtype=np.int64)
    for n in LEVEL_BITS[values.dtype]:
        dropped = np.where(importance.numpy().astype(np.int64) + BYTE_OFFSET > code + 4 * n, n, dropped)
    dropped[importance.numpy() == 0] = 0
    mask = ~((1 << (dropped + 23 - mantissa_bits)) - 1) & 0xFFFFFFFF
    truncated = (as_float32.view(np.uint32) & mask.astype(np.uint32)).view(np.float32)
    return torch.from_numpy(truncated).to(values.dtype), dropped


def trained(
    case: str, n_steps: int, n_elements: int, dtype: torch.dtype, seed: int
) -> tuple[Optimizer, Tensor, Tensor]:
    """An optimizer that has taken `n_steps`, its parameter, and the next gradient; magnitudes over many octaves."""
    random = torch.Generator().manual_seed(seed)

    def spread(octaves: float) -> Tensor:
        return torch.randn(n_elements, generator=random) * 2 ** (octaves * torch.rand(n_elements, generator=random))

    parameter = torch.nn.Parameter((spread(12) / 64).to(dtype))
    typical_gradient = spread(-24).abs() + (0.05 if dtype == torch.float16 else 0)  # whose squares float16 can hold

    def next_gradient() -> Tensor:
        return (typical_gradient * torch.randn(n_elements, generator=random) * 2 ** spread(-2)).to(dtype)

    optimizer = (CASES | OTHERS)[case]([parameter])
    for _ in range(n_steps):
        parameter.grad = next_gradient()
        optimizer.step()
    return optimizer, parameter, next_gradient()


def stepped(
    optimizer: Optimizer, parameter: Tensor, gradient: Tensor, dtype: torch.dtype | None = None, n_more: int = 0
) -> Tensor:
    """What a copy of `optimizer`, its parameter and state in `dtype`, makes of `gradient`, and of none in `n_more` steps."""
    dtype = dtype or parameter.dtype
    clone = torch.nn.Parameter(parameter.detach().to(dtype, copy=True))
    group = {key: value for key, value in optimizer.param_groups[0].items() if key != "params"}
    known = inspect.signature(type(optimizer)).parameters.keys() - {"params"}  # decoupled_weight_decay is not AdamW's
    twin = type(optimizer)([clone], **{key: copy.deepcopy(value) for key, value in group.items() if key in known})
    for name, value in optimizer.state.get(parameter, {}).items():
        twin.state[clone][name] = value.clone() if value.dim() == 0 else value.detach().to(dtype, copy=True)
    clone.grad = gradient.to(dtype)
    twin.step()
    clone.grad = torch.zeros_like(clone)
    for _ in range(n_more):
        twin.step()
    return clone.detach()


def _float64(values: Tensor) -> Floats:
    return values.detach().double().numpy()
