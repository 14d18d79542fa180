"""Run as a program, under the sanitizers: the kernels of truncated and embedded floats, with honest messages and with lies."""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from emulated import EmulatedKernels
from float_lies import is_refused, lies, message_of
from kernel_checks import FLOATS, WIDE_FLOATS, run, values_of

kernels = EmulatedKernels(Path(sys.argv[1]), int(sys.argv[2]))
names = ("truncated 3", "truncated 8", "fp4-e2m1 4 stochastic", "embedded 7", "embedded 31 by 1024, format 2")
n_cases = run(kernels, "floats", codec=names, n=(0, 33, 300), content=("nan",))
n_cases += run(kernels, "floats", codec=WIDE_FLOATS, n=(257,), content=("gradient",), dtype=(torch.float32,))
n_lies = 0
for name in names[1:4]:
    message = message_of(FLOATS[name], values_of("gradient", 90))
    n_bytes = int(message[24])
    for lie in lies(FLOATS[name], message, n_bytes):
        is_refused(kernels, FLOATS[name], lie, n_bytes, torch.empty(90))
        n_lies += 1
print(f"cases {n_cases}, lies {n_lies}")
