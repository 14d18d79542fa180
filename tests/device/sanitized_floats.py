"""Run as a program, under the sanitizers: the kernels of truncated and embedded floats, with honest messages and with lies."""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from emulated import EmulatedKernels
from float_lies import is_refused, lies, message_of

from gradwire_lab.bench.float_kernel_checks import CODECS, WIDE, run
from gradwire_lab.bench.kernel_checks import values_of

kernels = EmulatedKernels(Path(sys.argv[1]), int(sys.argv[2]))
names = ("truncated 3", "truncated 8", "fp4-e2m1 4 stochastic", "embedded 7", "embedded 31 by 1024")
n_cases = run(kernels, {name: CODECS[name] for name in names}, (0, 33, 300), ("nan",))
n_cases += run(kernels, WIDE, (257,), ("gradient",), (torch.float32,))
n_lies = 0
for name in names[1:4]:
    message = message_of(CODECS[name], values_of("gradient", 90, torch.float32))
    n_bytes = int(message[24])
    for lie in lies(CODECS[name], message, n_bytes):
        is_refused(kernels, CODECS[name], lie, n_bytes, torch.empty(90))
        n_lies += 1
print(f"cases {n_cases}, lies {n_lies}")
