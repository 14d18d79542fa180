"""Run as a program, under the sanitizers: the kernels that select, beside the CPU's selection, and with lies to add."""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from emulated import EmulatedKernels
from selection_lies import LIES, is_refused

from gradwire_lab.bench import selection_checks

kernels = EmulatedKernels(Path(sys.argv[1]), int(sys.argv[2]))
n_cases = selection_checks.run(kernels, (1, 33, 4_800), ("gradient", "alike", "nan"), (0.01, 1.0))
for lie in LIES.values():
    is_refused(kernels, lie, torch.empty(lie.n_elements))
print(f"cases {n_cases}, lies {len(LIES)}")
