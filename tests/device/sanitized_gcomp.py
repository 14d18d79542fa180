"""Run as a program, under the sanitizers: GComp's kernels in a library, with honest messages and with lies."""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from emulated import EmulatedKernels
from gcomp_lies import is_refused, lies, message_of
from kernel_checks import GCOMP, importance_of, run, values_of

kernels = EmulatedKernels(Path(sys.argv[1]), int(sys.argv[2]))
names = ("paper, few codes", "none, every exponent has a code")
dtypes = (torch.float32, torch.float16)
n_cases = run(kernels, "gcomp", codec=names, n=(0, 33, 1_001), content=("nan",), dtype=dtypes)
n_lies = 0
for name in names:
    codec, values, importance = GCOMP[name], values_of("gradient", 90), importance_of(90)
    message = message_of(codec, values, importance)
    for lie in lies(message, step=3):
        is_refused(kernels, codec, message, lie, torch.empty(90), importance)
        n_lies += 1
print(f"cases {n_cases}, lies {n_lies}")
