"""Reference gradients: .npz files that hold a gradient and, if they can, the optimizer's state just before the step.

Format: a dense file (`gradient`, and aligned with it element by element `parameter` and one optimizer's state, flat float32
under torch's names; `optimizer`, its hyper-parameters and `step`, of the step about to be taken, from 1, as scalars), or a
sparse one (`nonzero_index nonzero_value n_elements`).
"""

import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from gradwire.errors import GradwireError, InvalidArgument, Unsupported

FloatArray = npt.NDArray[np.float32]
AnyArray = npt.NDArray[np.generic]

_SPARSE_KEYS = ("nonzero_index", "nonzero_value", "n_elements")
# Arrays beside the gradient, one value an element; everything else with one value is a hyper-parameter.
_STATE_KEYS = ("parameter", "exp_avg", "exp_avg_sq", "momentum_buffer", "square_avg", "sum")

# optimizer: (state arrays that tell it from the others, hyper-parameters that it cannot do without, those with torch's
# default). The names are torch's, but for `learning_rate`.
_ADAM = (("exp_avg", "exp_avg_sq"), ("learning_rate", "beta1", "beta2", "eps", "step"), {"weight_decay": 0.0})
_OF_SGD = dict.fromkeys(("momentum", "dampening", "nesterov", "weight_decay", "step"), 0.0)
_OPTIMIZERS: dict[str, tuple[tuple[str, ...], tuple[str, ...], dict[str, float]]] = {
    "adamw": _ADAM,
    "adam": _ADAM,
    "sgd": ((), ("learning_rate",), _OF_SGD),
    "adagrad": (("sum",), ("learning_rate", "eps", "step"), {"lr_decay": 0.0, "weight_decay": 0.0}),
    "rmsprop": (("square_avg",), ("learning_rate", "alpha", "eps"), {"weight_decay": 0.0, "step": 0.0}),
}


# torch's names of hyper-parameters that a file has too, beside `lr`, which is its `learning_rate`.
_SCALARS = ("weight_decay", "eps", "alpha", "momentum", "dampening", "nesterov", "lr_decay")


@dataclass(frozen=True)
class OptimizerState:
    """What the optimizer held just before the step: arrays aligned with the gradient, and its hyper-parameters."""

    optimizer: str
    parameter: FloatArray
    arrays: dict[str, FloatArray]
    hyper: dict[str, float]


@dataclass(frozen=True)
class GradientFile:
    """One gradient (n,) float32, and the optimizer's state beside it if the file has one."""

    path: Path
    gradient: FloatArray
    parameter: FloatArray | None = None
    state: OptimizerState | None = None
    missing: str = ""  # why there is no state, for people

    @property
    def name(self) -> str:
        """The file's name without its folder."""
        return self.path.name


def load_gradients(path: str | Path) -> GradientFile:
    """Read and check one file. Raises: InvalidArgument."""
    path = Path(path)
    arrays = _read_arrays(path)
    gradient = _read_gradient(path, arrays)
    parameter = arrays.get("parameter")
    if parameter is None:
        if found := [key for key in _STATE_KEYS if key in arrays]:
            raise InvalidArgument(f"{path}: holds {', '.join(found)} but not 'parameter', which every optimizer needs")
        return GradientFile(path, gradient, missing="the file has no 'parameter' and no optimizer state")
    if not any(key in arrays for key in ("learning_rate", "optimizer", *_STATE_KEYS[1:])):
        parameter = _as_aligned(path, "parameter", parameter, gradient.size)
        return GradientFile(path, gradient, parameter, missing="the file has no 'learning_rate' and no optimizer state")
    state = _read_state(path, arrays, gradient.size)
    return GradientFile(path, gradient, state.parameter, state)


def _read_arrays(path: Path) -> dict[str, AnyArray]:
    if not path.is_file():
        raise InvalidArgument(f"{path}: no such file")
    try:
        with np.load(path, allow_pickle=False) as archive:
            return {key: archive[key] for key in archive.files}
    except (ValueError, OSError, EOFError, MemoryError, zipfile.BadZipFile, AttributeError, TypeError) as error:
        raise InvalidArgument(f"{path}: not a readable .npz file ({error})") from error


def _read_gradient(path: Path, arrays: dict[str, AnyArray]) -> FloatArray:
    if "gradient" in arrays:
        gradient = _as_float32(path, "gradient", arrays["gradient"])
    elif any(key in arrays for key in _SPARSE_KEYS):
        if absent := [key for key in _SPARSE_KEYS if key not in arrays]:
            raise InvalidArgument(f"{path}: a sparse gradient without {', '.join(absent)}")
        gradient = _expand_sparse(path, arrays)
    else:
        raise InvalidArgument(
            f"{path}: holds neither 'gradient' nor {', '.join(_SPARSE_KEYS)}; found: {', '.join(arrays) or 'nothing'}"
        )
    if gradient.size == 0:
        raise InvalidArgument(f"{path}: the gradient has no elements")
    return gradient


def _expand_sparse(path: Path, arrays: dict[str, AnyArray]) -> FloatArray:
    index, value = arrays["nonzero_index"].ravel(), _as_float32(path, "nonzero_value", arrays["nonzero_value"])
    n_elements = int(_as_number(path, "n_elements", arrays["n_elements"]))
    is_index = np.issubdtype(index.dtype, np.integer) and np.unique(index).size == index.size == value.size
    if not is_index or (index.size and not 0 <= index.min() <= index.max() < n_elements):
        raise InvalidArgument(f"{path}: nonzero_index must hold {value.size} different integers below {n_elements}")
    dense = np.zeros(n_elements, np.float32)
    dense[index] = value
    return dense


def _read_state(path: Path, arrays: dict[str, AnyArray], n_elements: int) -> OptimizerState:
    state = {key: _as_aligned(path, key, arrays[key], n_elements) for key in _STATE_KEYS if key in arrays}
    optimizer = _name_optimizer(path, arrays)
    required_arrays, required, defaults = _OPTIMIZERS[optimizer]
    hyper = {key: _as_number(path, key, arrays[key]) for key in (*required, *defaults) if key in arrays}
    absent = [key for key in required_arrays if key not in state] + [key for key in required if key not in hyper]
    if optimizer == "sgd" and hyper.get("momentum") and "momentum_buffer" not in state:
        absent.append("momentum_buffer")
    if absent:
        raise InvalidArgument(f"{path}: looks like {optimizer}, but without {', '.join(absent)}")
    parameter = state.pop("parameter")
    return OptimizerState(optimizer, parameter, state, {**defaults, **hyper})


def _name_optimizer(path: Path, arrays: dict[str, AnyArray]) -> str:
    """The array `optimizer`, if the file names it, else what the state arrays belong to (both betas: AdamW)."""
    if "optimizer" in arrays:
        name = str(arrays["optimizer"].reshape(-1)[0]).lower()
        if name not in _OPTIMIZERS:
            raise InvalidArgument(f"{path}: optimizer {name!r} is not one of {', '.join(_OPTIMIZERS)}")
        return name
    own = ((name, key) for name, (keys, *_) in _OPTIMIZERS.items() for key in keys)
    return next((name for name, key in own if key in arrays), "sgd")


def _as_float32(path: Path, key: str, array: AnyArray) -> FloatArray:
    if array.dtype != np.float32:
        raise InvalidArgument(f"{path}: '{key}' is {array.dtype}, expected float32")
    return np.ascontiguousarray(array.ravel(), np.float32)


def _as_aligned(path: Path, key: str, array: AnyArray, n_elements: int) -> FloatArray:
    flat = _as_float32(path, key, array)
    if flat.size != n_elements:
        raise InvalidArgument(f"{path}: '{key}' has {flat.size} elements, the gradient {n_elements}")
    return flat


def _as_number(path: Path, key: str, array: AnyArray) -> float:
    if array.size != 1 or not (np.issubdtype(array.dtype, np.number) or array.dtype == np.bool_):
        raise InvalidArgument(f"{path}: '{key}' must be a single number")
    return float(array.reshape(())[()])


# ---- writing


def write_snapshot(path: Path, optimizer: torch.optim.Optimizer, step: int) -> None:
    """Write what `collect_arrays` gives to `path`, its folder made if need be. Raises: Unsupported, GradwireError."""
    arrays = collect_arrays(optimizer, step)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("wb") as file:
            np.savez(file, **arrays)
    except OSError as error:
        raise GradwireError(f"could not write {path}: {error.strerror or error}") from error


def collect_arrays(optimizer: torch.optim.Optimizer, step: int) -> dict[str, Any]:
    """A gradient file's arrays, from `optimizer` between backward and its step number `step` (from 1). Raises:
    Unsupported. Before the first step there is no state yet: gradient and parameters alone then, unless the optimizer
    never has any."""
    group = optimizer.param_groups[0]
    name = type(optimizer).__name__.lower()
    if name not in _OPTIMIZERS:
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
    for key in _STATE_KEYS[1:]:
        held = [optimizer.state.get(parameter, {}).get(key) for parameter in parameters]
        if any(one is not None for one in held):
            pairs = zip(parameters, held, strict=True)
            arrays[key] = _flatten([torch.zeros_like(p) if one is None else one for p, one in pairs])
    if len(arrays) == 2 and not (name == "sgd" and not group["momentum"]):
        return arrays
    scalars = {"learning_rate": np.float32(group["lr"])}
    scalars |= {key: np.float32(value) for key, value in group.items() if key in _SCALARS}
    if "betas" in group:
        scalars["beta1"], scalars["beta2"] = (np.float32(beta) for beta in group["betas"])
    return {**arrays, **scalars, "step": np.int64(step), "optimizer": np.array(name)}


def _flatten(tensors: list[Any]) -> npt.NDArray[np.float32]:
    return torch.cat([one.detach().reshape(-1).to(device="cpu", dtype=torch.float32) for one in tensors]).numpy()
