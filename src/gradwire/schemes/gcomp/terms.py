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
- With momentum a gradient goes on acting: all that it adds in the end is `life` times what its own step adds,
  1 / (1 - mu) or 1 / (1 - beta1). The table looks at its own step alone.
- eta = 0 (a warm-up's first step, a frozen group) or a dampening of 1: the gain is 0, S has no value, and the gradient
  may still enter the optimizer's state. `None`: nothing may be dropped.

Optimizers that the paper does not have come after its own; `register_update` takes those of a user.
"""

import inspect
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gradwire.core.bucket import local_of
from gradwire.errors import InvalidArgument

__all__ = ["Terms", "register_update", "rule_of"]

Group = Mapping[str, Any]
State = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Terms:
    """S = |P (a sqrt(v) + b) + c m|, element by element.

    P is the parameter, or what `stands_for` it, plus weight x tensor of `shift` where given. v is `second_moment`, less
    weight x tensor^2 of `mean` where given. Tensors are shaped like the parameter. `life`: all that a gradient adds, of
    what its own step adds.
    """

    a: float
    b: float
    c: float = 0.0
    second_moment: Tensor | None = None
    first_moment: Tensor | None = None
    mean: tuple[float, Tensor] | None = None
    shift: tuple[float, Tensor] | None = None
    life: float = 1.0
    stands_for: Tensor | None = None


def _life_of(momentum: float) -> float:
    return 1 / (1 - momentum) if momentum < 1 else math.inf


def sgd(parameter: Tensor, group: Group, state: State) -> Terms | None:
    """theta - eta (g + lambda theta); with momentum theta - eta (mu b + (1 - tau) (g + lambda theta)), and PyTorch's first b
    is g itself; Nesterov's: theta - eta (mu^2 b + (1 + mu) (g + lambda theta)), where the first b counts as 0."""
    eta, decay, mu = float(group["lr"]), float(group["weight_decay"]), float(group["momentum"])
    buffer = state.get("momentum_buffer") if mu != 0 else None
    of_buffer, of_gradient, life = 0.0, 1.0, _life_of(mu)
    if group["nesterov"]:
        of_buffer, of_gradient, life = mu * mu, 1 + mu, life / (1 + mu)
    elif buffer is not None:
        of_buffer, of_gradient = mu, 1 - float(group["dampening"])
    gain = eta * of_gradient
    if gain == 0:
        return None
    return Terms(a=0.0, b=1 / gain - decay, c=-of_buffer / of_gradient, first_moment=buffer, life=life)


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
        life = _life_of(mu)
        return Terms(a, eps / eta, -decay, second_moment=v, first_moment=parameter, mean=mean, shift=shift, life=life)
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
    least, v = (1.0, state["max_exp_avg_sq"]) if group["amsgrad"] else (beta2, state["exp_avg_sq"])
    a = math.sqrt(least / (1 - beta2**t)) / corrected_gain
    b, c = float(group["eps"]) / corrected_gain, -beta1 / (1 - beta1)
    if group["decoupled_weight_decay"]:
        a, b = a * (1 - eta * decay), b * (1 - eta * decay)
    else:
        b -= decay
    return Terms(a, b, c, second_moment=v, first_moment=state["exp_avg"], life=_life_of(beta1))


# ---- not in the paper


def nadam(parameter: Tensor, group: Group, state: State) -> Terms | None:
    """theta - eta ((1 - mu_t) g / (1 - M_t) + mu_{t+1} m / (1 - M_{t+1})) / D, M_t the product of all mu up to t"""
    eta, decay = float(group["lr"]), float(group["weight_decay"])
    if not state or eta == 0:
        return None
    beta1, beta2 = (float(beta) for beta in group["betas"])
    t = float(state["step"]) + 1
    mu, mu_next = (beta1 * (1 - 0.5 * 0.96 ** (s * float(group["momentum_decay"]))) for s in (t, t + 1))
    product = float(state["mu_product"]) * mu
    of_moment = eta * mu_next / (1 - product * mu_next)
    gain = eta * (1 - mu) / (1 - product) + of_moment * (1 - beta1)
    kept = 1 - eta * decay if group["decoupled_weight_decay"] else 1.0
    a, b = kept * math.sqrt(beta2 / (1 - beta2**t)) / gain, kept * float(group["eps"]) / gain
    if not group["decoupled_weight_decay"]:
        b -= decay
    life = max(1.0, eta / gain)
    return Terms(a, b, -of_moment * beta1 / gain, state["exp_avg_sq"], state["exp_avg"], life=life)


def radam(parameter: Tensor, group: Group, state: State) -> Terms | None:
    """`adam` with the step rectified, or without D while the moving average is short"""
    if not state:
        return None
    beta1, beta2 = (float(beta) for beta in group["betas"])
    t = float(state["step"]) + 1
    longest = 2 / (1 - beta2) - 1
    length = longest - 2 * t * beta2**t / (1 - beta2**t)
    if length > 5:
        rect = (length - 4) * (length - 2) * longest / ((longest - 4) * (longest - 2) * length)
        eta, eps = float(group["lr"]) * math.sqrt(rect), float(group["eps"]) / math.sqrt(1 - beta2**t)
        # The weights decay by eta itself.
        decay = float(group["weight_decay"]) / (math.sqrt(rect) if group["decoupled_weight_decay"] else 1.0)
        return adam(parameter, {**group, "lr": eta, "eps": eps, "weight_decay": decay, "amsgrad": False}, state)
    eta, decay = float(group["lr"]), float(group["weight_decay"])
    if eta == 0:
        return None
    gain = eta * (1 - beta1) / (1 - beta1**t)
    b = (1 - eta * decay) / gain if group["decoupled_weight_decay"] else 1 / gain - decay
    return Terms(0.0, b, -beta1 / (1 - beta1), first_moment=state["exp_avg"], life=_life_of(beta1))


def adamax(parameter: Tensor, group: Group, state: State) -> Terms | None:
    """theta - eta (beta1 m + (1 - beta1) g) / ((1 - beta1^t) u), u the largest |g| so far, which decays by beta2"""
    eta, decay = float(group["lr"]), float(group["weight_decay"])
    if not state or eta == 0:
        return None
    beta1, beta2 = (float(beta) for beta in group["betas"])
    gain = eta * (1 - beta1) / (1 - beta1 ** (float(state["step"]) + 1))
    largest = state["exp_inf"].square()
    return Terms(beta2 / gain, -decay, -beta1 / (1 - beta1), largest, state["exp_avg"], life=_life_of(beta1))


def lion(parameter: Tensor, group: Group, state: State) -> Terms | None:
    """theta - eta sign(beta1 m + (1 - beta1) g): A is beta1 m, whose last place decides no sign but its own"""
    if not state:
        return None
    beta1 = float(group["betas"][0])
    return Terms(0.0, 0.0, beta1 / (1 - beta1) if beta1 < 1 else 0.0, first_moment=state["exp_avg"])


def muon(parameter: Tensor, group: Group, state: State) -> Terms | None:
    """theta - eta' O(beta b + (1 - beta) g): one S for a matrix, as O mixes its elements. O(X) moves by about sqrt(r) /
    |X| times as much as X does (Frobenius norms, r the smaller side), in the mean square over a matrix; twice that is
    taken, as small singular values move more. A is the mean square of theta. Of a shard: as if the others were like it,
    which keeps the mean square over all of them."""
    eta, mu = float(group["lr"]), float(group["momentum"])
    buffer = state.get("momentum_buffer")
    if buffer is None or eta == 0:
        return None
    rows, columns = parameter.shape
    by_shape = {"match_rms_adamw": 0.2 * math.sqrt(max(rows, columns))}
    eta *= by_shape.get(group.get("adjust_lr_fn") or "", math.sqrt(max(1.0, rows / columns)))
    power = 2 if group["nesterov"] else 1
    gain = 2 * eta * (1 - mu**power) * math.sqrt(min(rows, columns)) / mu**power
    own = local_of(parameter.detach())
    whole_norm = local_of(buffer).float().norm() * math.sqrt(parameter.numel() / max(1, own.numel()))
    size = own.float().square().mean().sqrt() * whole_norm
    life = _life_of(mu) * (1 - mu) / (1 - mu**power)
    return Terms(0.0, 1 / gain, stands_for=size.expand_as(own), life=life)


Rule = Callable[[Tensor, Group, State], Terms | None]

# By the class whose `step` a function above describes, subclasses before their bases; by name where it is not torch's.
_RULES: dict[type[torch.optim.Optimizer] | str, Rule | str] = {
    torch.optim.Adam: adam,
    torch.optim.RMSprop: rmsprop,
    torch.optim.Adagrad: adagrad,
    torch.optim.SGD: sgd,
    torch.optim.NAdam: nadam,
    torch.optim.RAdam: radam,
    torch.optim.Adamax: adamax,
    "Muon": muon,
    "Lion": lion,
}


def register_update(optimizer: type[torch.optim.Optimizer] | str, rule: Rule | str) -> None:
    """Tell GComp how an optimizer uses a gradient, before it is attached; on all ranks alike.

        def sgd(parameter, group, state):  # theta - lr g: g is added to theta, multiplied by lr
            return Terms(a=0.0, b=1 / group["lr"])

        gradwire.register_update(MySgd, sgd)

    Args:
        optimizer: the class whose `step` it is, or its name. Subclasses with a step of their own are not meant.
        rule: a function of (parameter, its group, its state before the step), which gives `Terms` (terms.py), or None where
            nothing may be let go of. It is called for every parameter before every step. Of a wrapper: the name of the
            attribute that holds the optimizer within, if that one's step is all that changes parameters.
    Raises: InvalidArgument.
    """
    is_class = isinstance(optimizer, type) and issubclass(optimizer, torch.optim.Optimizer)
    if not (is_class or (isinstance(optimizer, str) and optimizer)):
        raise InvalidArgument(f"register_update takes an optimizer's class or its name, not {optimizer!r}")
    if not (callable(rule) or (isinstance(rule, str) and rule.isidentifier())):
        raise InvalidArgument(
            f"a rule is a function of (parameter, group, state), or the name of a wrapper's attribute, not {rule!r}"
        )
    _RULES[optimizer] = rule


def rule_of(optimizer: torch.optim.Optimizer) -> tuple[torch.optim.Optimizer, Rule | None]:
    """The optimizer, or the one within a wrapper, and what is registered for the code that its `step` runs. Raises:
    InvalidArgument (a wrapper has no optimizer where its rule says)."""
    # torch wraps `step` anew in every class that is instantiated; what is inside tells whether it is the same.
    code = inspect.unwrap(type(optimizer).step)
    names = getattr(code, "__qualname__", "").split(".")[-2:]
    for known, rule in _RULES.items():
        is_it = names == [known, "step"] if isinstance(known, str) else inspect.unwrap(known.step) is code
        if not is_it or (isinstance(known, type) and not isinstance(optimizer, known)):
            continue
        if not isinstance(rule, str):
            return optimizer, rule
        within = getattr(optimizer, rule, None)
        if not isinstance(within, torch.optim.Optimizer) or within is optimizer:
            raise InvalidArgument(
                f"{type(optimizer).__name__} is registered as a wrapper, but its attribute {rule!r} is no optimizer: {within!r}"
            )
        return rule_of(within)
    return optimizer, None
