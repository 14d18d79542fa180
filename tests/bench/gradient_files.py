"""Small gradient files in the format of the benchmarks."""

from pathlib import Path
from typing import Any

import numpy as np

from gradwire_lab.workloads.gradients import GradientFile, load_gradients


def adamw_arrays(n_elements: int = 3000, seed: int = 0) -> dict[str, Any]:
    numbers = np.random.default_rng(seed)
    gradient = (numbers.standard_normal(n_elements) * 1e-3).astype(np.float32)
    gradient[::17] = 0
    return {
        "gradient": gradient,
        "parameter": numbers.standard_normal(n_elements).astype(np.float32),
        "exp_avg": (numbers.standard_normal(n_elements) * 1e-4).astype(np.float32),
        "exp_avg_sq": (numbers.random(n_elements) * 1e-6).astype(np.float32),
        "learning_rate": np.float32(1e-3), "weight_decay": np.float32(0.01), "eps": np.float32(1e-8),
        "beta1": np.float32(0.9), "beta2": np.float32(0.999), "step": np.int64(100),
    }  # fmt: skip


def sparse_arrays(n_elements: int = 5000) -> dict[str, Any]:
    index = np.arange(3, n_elements, 50, dtype=np.int32)
    return {
        "nonzero_index": index,
        "nonzero_value": np.linspace(-1, 1, index.size, dtype=np.float32) + np.float32(2),
        "n_elements": np.int64(n_elements),
    }


def write(path: Path, arrays: dict[str, Any]) -> Path:
    np.savez(path, **arrays)
    return path


def load(folder: Path, arrays: dict[str, Any]) -> GradientFile:
    return load_gradients(write(folder / "a.npz", arrays))
