"""The terms of GComp's quantisation metric, from what each optimizer does with a gradient.

Every supported optimizer adds gain x g to its parameter, for a gain that the size of g hardly changes. With A = what
gain x g is added to,

    S = |A| / gain = |theta (a sqrt(v) + b) + c m|

says how large g may be before a bit of it reaches the parameter's last place: the low n bits of g cannot matter while
S > 2^n |g|. The functions below are Table 2 of the paper (Li et al., GComp, SoCC 2024; appendix A has its derivation)
with both sides multiplied out, written for PyTorch's own state. lambda is the weight decay, eta the learning rate.

What the table leaves open:
- v_t contains the gradient of this step, not known yet. Its smallest value stands for it: beta2 v_{t-1} (Adam),
  alpha v_{t-1} (RMSprop), r_{t-1} (Adagrad), the largest v so far (amsgrad).
- g also moves v_t, and so its own gain. For SGD there is no v; for Adagrad and RMSprop the step is a monotone function
  of g with a slope below 1/D, so that the bound below holds as it stands; for Adam the slope is at most (1 + rho)/D
  with rho = |m_t| D' / ((1 - beta1) D) <= x / sqrt(1 - beta1^2 / beta2), x^2 <= 1 the share of g in v_t: 2.3 x by
  default. Dropping n bits of g moves the parameter by less than (1 + rho) 2^-23 |A| (float32).
- `maximize` negates g, and so only the sign of the gain: S is the same. `foreach`, `fused` and `capturable` are the
  same arithmetic in another order.
- eta = 0 (a warm-up's first step, a frozen group) or a dampening of 1: the gain is 0, S has no value, and the gradient
  may still enter the optimizer's state. `None`: nothing may be dropped.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

__all__ = ["TERMS_BY_OPTIMIZER", "Terms"]

Group = Mapping[str, Any]
State = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Terms:
    """S = |P (a sqrt(v) + b) + c m|, element by element.

    P is the parameter, plus weight x tensor of `shift` where given. v is `second_moment`, less weight x tensor^2 of
    `mean` where given. Tensors are the optimizer's own, shaped like the parameter.
    """

    a: float
    b: float
    c: float = 0.0
    second_moment: Tensor | None = None
    first_moment: Tensor | None = None
    mean: tuple[float, Tensor] | None = None
    shift: tuple[float, Tensor] | None = None


def sgd(parameter: Tensor, group: Group, state: State) -> Terms | None:
    """theta - eta (g + lambda theta); with momentum, b_t takes g by (1 - tau), and PyTorch's first b is g itself."""
    eta, decay = float(group["lr"]), float(group["weight_decay"])
    buffer = state.get("momentum_buffer") if group["momentum"] != 0 else None
    if group["nesterov"]:
        return _nesterov(eta, decay, float(group["momentum"]), buffer)
    if buffer is not None:
        return _momentum(eta, decay, float(group["momentum"]), float(group["dampening"]), buffer)
    if eta == 0:
        return None
    return Terms(a=0.0, b=1 / eta - decay)


def _momentum(eta: float, decay: float, mu: float, tau: float, buffer: Tensor) -> Terms | None:
    """theta - eta (mu b + (1 - tau) (g + lambda theta))"""
    gain = eta * (1 - tau)
    if gain == 0:
        return None
    return Terms(a=0.0, b=1 / gain - decay, c=-mu / (1 - tau), first_moment=buffer)


def _nesterov(eta: float, decay: float, mu: float, buffer: Tensor | None) -> Terms | None:
    """theta - eta (1 + mu) (g + lambda theta) - eta mu^2 b, where the first b_{t-1} counts as 0"""
    gain = eta * (1 + mu)
    if gain == 0:
        return None
    return Terms(a=0.0, b=1 / gain - decay, c=-mu * mu / (1 + mu), first_moment=buffer)


def adagrad(parameter: Tensor, group: Group, state: State) -> Terms | None:
    """theta - eta~ (g + lambda theta) / (sqrt(r) + eps), eta~ = eta / (1 + (t - 1) lr_decay)"""
    if not state:
        return None
    eta = float(group["lr"]) / (1 + float(state["step"]) * float(group["lr_decay"]))
    if eta == 0:
        return None
    return Terms(a=1 / eta, b=group["eps"] / eta - float(group["weight_decay"]), second_moment=state["sum"])


def rmsprop(parameter: Tensor, group: Group, state: State) -> Terms | None:
    """theta - eta (mu b + (g + lambda theta) / D), D = sqrt(v) + eps

    With momentum, A / gain = (theta - eta mu b) D / eta - lambda theta: theta stands where others have a first moment.
    """
    eta, mu, alpha = float(group["lr"]), float(group["momentum"]), float(group["alpha"])
    if not state or eta == 0:
        return None
    eps, decay = float(group["eps"]), float(group["weight_decay"])
    a, v = math.sqrt(alpha) / eta, state["square_avg"]
    # Centered, D's v is v_t - mean_t^2 = alpha (v - mean^2) + alpha (1 - alpha) (g - mean)^2, of which the first part
    # is known. Where gradients hardly vary, one that does moves D by more than it moves the numerator; a quarter of
    # (1 - alpha) mean^2 less, and byte 0 where nothing is left, keeps that (rho, as for Adam) below 2.
    mean = (1 + (1 - alpha) / 4, state["grad_avg"]) if group["centered"] else None
    if mu > 0:
        shift = (-eta * mu, state["momentum_buffer"])
        return Terms(a, b=eps / eta, c=-decay, second_moment=v, first_moment=parameter, mean=mean, shift=shift)
    return Terms(a, b=eps / eta - decay, second_moment=v, mean=mean)


def adam(parameter: Tensor, group: Group, state: State) -> Terms | None:
    """theta - eta (beta1 m + (1 - beta1) (g + lambda theta)) / ((1 - beta1^t) D), D = sqrt(v / (1 - beta2^t)) + eps

    AdamW (`decoupled_weight_decay`): theta (1 - eta lambda) for theta, and no lambda beside g.
    """
    eta, decay = float(group["lr"]), float(group["weight_decay"])
    if not state or eta == 0:
        return None
    beta1, beta2 = (float(beta) for beta in group["betas"])
    t = float(state["step"]) + 1
    corrected_gain = eta * (1 - beta1) / (1 - beta1**t)
    if group["amsgrad"]:
        a, v = math.sqrt(1 / (1 - beta2**t)) / corrected_gain, state["max_exp_avg_sq"]
    else:
        a, v = math.sqrt(beta2 / (1 - beta2**t)) / corrected_gain, state["exp_avg_sq"]
    b, c = float(group["eps"]) / corrected_gain, -beta1 / (1 - beta1)
    if group.get("decoupled_weight_decay", False):
        a, b = a * (1 - eta * decay), b * (1 - eta * decay)
    else:
        b -= decay
    return Terms(a, b, c, second_moment=v, first_moment=state["exp_avg"])


def adamw(parameter: Tensor, group: Group, state: State) -> Terms | None:
    """`adam` with decoupled weight decay: before torch 2.7 the group does not say so itself."""
    return adam(parameter, {**group, "decoupled_weight_decay": True}, state)


# The classes whose `step` the functions above describe, subclasses before their bases.
TERMS_BY_OPTIMIZER: dict[type[torch.optim.Optimizer], Callable[[Tensor, Group, State], Terms | None]] = {
    torch.optim.AdamW: adamw,
    torch.optim.Adam: adam,
    torch.optim.RMSprop: rmsprop,
    torch.optim.Adagrad: adagrad,
    torch.optim.SGD: sgd,
}
