"""GComp's level rule in float64 NumPy, straight from the paper's table, and the entropy of exponents: judges of the codec.

Written independently of the library's own importance code on purpose: a slip there must show here.
"""

import math
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from gradwire_lab.workloads.gradients import FloatArray, OptimizerState

# Low mantissa bits dropped at levels 1 to 3 of float32 (level 0 drops none).
LEVEL_BITS = (6, 12, 18)
Float64Array = npt.NDArray[np.float64]


def allowed_scale(state: OptimizerState, n_ranks: int = 1) -> tuple[Float64Array, Float64Array]:
    """S and a bound on what float32 arithmetic may add to it: `n` low bits of s may go where S > 2^n |s|. S = |A / c| N
    / 2^ceil(log2 N), with A what the gradient is added to and c what multiplies it. The slack is 2^-20 of the terms of
    A, not of A: theirs is the rounding error where they cancel."""
    terms = np.array(_numerator_terms(state)) * (n_ranks / 2 ** math.ceil(math.log2(n_ranks)))
    return np.abs(terms.sum(axis=0)), np.abs(terms).sum(axis=0) * 2.0**-20


def _numerator_terms(state: OptimizerState) -> list[Float64Array]:
    """A / c of the seven optimizers, as terms to be added (spec: the table of deltas, without g)."""
    theta = state.parameter.astype(np.float64)
    array = {key: value.astype(np.float64) for key, value in state.arrays.items()}
    hyper = state.hyper
    eta, decay = hyper["learning_rate"], hyper["weight_decay"]
    if state.optimizer == "sgd":
        mu, tau = hyper["momentum"], hyper["dampening"]
        if not mu:
            return [theta / eta, -decay * theta]
        buffer = array["momentum_buffer"]
        if hyper["nesterov"]:
            return [(1 - eta * decay * (1 + mu)) * theta / (eta * (1 + mu)), -(mu**2) * buffer / (1 + mu)]
        return [theta / (eta * (1 - tau)), -decay * theta, -mu * buffer / (1 - tau)]
    step = max(hyper["step"], 1.0)
    if state.optimizer == "adagrad":
        eta = eta / (1 + (step - 1) * hyper["lr_decay"])
        return [theta * (np.sqrt(array["sum"]) + hyper["eps"]) / eta, -decay * theta]
    if state.optimizer == "rmsprop":
        return [theta * (np.sqrt(hyper["alpha"] * array["square_avg"]) + hyper["eps"]) / eta, -decay * theta]
    beta1, beta2 = hyper["beta1"], hyper["beta2"]
    correction1, correction2 = 1 - beta1**step, 1 - beta2**step
    root = np.sqrt(beta2 * array["exp_avg_sq"] / correction2) + hyper["eps"]
    shrink = 1 - eta * decay if state.optimizer == "adamw" else 1.0
    terms = [shrink * theta * root * correction1 / (eta * (1 - beta1)), -beta1 * array["exp_avg"] / (1 - beta1)]
    return terms if state.optimizer == "adamw" else [*terms, -decay * theta]


def dropped_bits(
    values: FloatArray, scale: Float64Array, level_bits: tuple[int, ...] = LEVEL_BITS
) -> npt.NDArray[np.int64]:
    """Low bits that each value (n,) may lose: the largest n of `level_bits` with scale > 2^n |value|, else 0."""
    magnitude = np.abs(values.astype(np.float64))
    dropped = np.zeros(values.size, np.int64)
    finite = np.isfinite(magnitude)
    for n_bits in sorted(level_bits):
        dropped[finite & (scale > np.ldexp(np.where(finite, magnitude, 0.0), n_bits))] = n_bits
    return dropped


def exponent_histogram(values: FloatArray) -> npt.NDArray[np.int64]:
    """(256,) counts of the biased exponent field of `values` (n,) float32; zeros and subnormals are field 0."""
    return np.bincount(values.view(np.uint32) >> 23 & 0xFF, minlength=256).astype(np.int64)


def entropy_bits(histogram: npt.NDArray[np.int64]) -> float:
    """Shannon entropy of one symbol drawn from `histogram`, in bits."""
    share = histogram[histogram > 0] / histogram.sum()
    return float(-(share * np.log2(share)).sum()) if share.size > 1 else 0.0


# ---- a real optimizer with a file's state


def make_optimizer(
    state: OptimizerState, n_elements: int | None = None, dtype: torch.dtype = torch.float32
) -> torch.optim.Optimizer:
    """torch's optimizer, never stepped, over one parameter (n_elements,) of `dtype`; arrays are repeated or cut to it."""

    def stretch(array: FloatArray) -> torch.Tensor:
        return torch.from_numpy(array if n_elements in (None, array.size) else np.resize(array, n_elements)).to(dtype)

    options: dict[str, Any] = {key: value for key, value in state.hyper.items() if key != "step"}
    options["lr"] = options.pop("learning_rate")
    if "beta1" in options:
        options["betas"] = options.pop("beta1"), options.pop("beta2")
    if "nesterov" in options:
        options["nesterov"] = bool(options["nesterov"])
    classes = {"adam": "Adam", "adamw": "AdamW", "adagrad": "Adagrad", "rmsprop": "RMSprop", "sgd": "SGD"}
    parameter = torch.nn.Parameter(stretch(state.parameter))
    optimizer: torch.optim.Optimizer = getattr(torch.optim, classes[state.optimizer])([parameter], **options)
    held = {key: stretch(array) for key, array in state.arrays.items()}
    if held.keys() - {"momentum_buffer"}:  # SGD keeps no step
        # The file's step is the one about to be taken; torch counts those that were.
        held["step"] = torch.tensor(max(state.hyper.get("step", 1.0) - 1.0, 0.0))
    optimizer.state[parameter] = held
    return optimizer
