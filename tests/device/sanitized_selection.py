"""Run as a program, under the sanitizers: the kernels that select, beside the CPU's selection, and with lies to add."""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from emulated import EmulatedKernels
from kernel_checks import run
from selection_lies import LIES, is_refused

kernels = EmulatedKernels(Path(sys.argv[1]), int(sys.argv[2]))
axes = {"n": (1, 33, 4_800), "share": (0.01, 1.0)}
n_cases = run(kernels, "selection", content=("gradient", "alike"), **axes)
n_cases += run(kernels, "selection", content=("nan",), way=("exact",), **axes)
for lie in LIES.values():
    is_refused(kernels, lie, torch.empty(lie.n_elements))
print(f"cases {n_cases}, lies {len(LIES)}")
