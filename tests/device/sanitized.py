"""Run as a program, under the sanitizers: families of kernels beside the CPU's code, in an order of threads."""

from __future__ import annotations

import sys
from pathlib import Path

from emulated import EmulatedKernels
from kernel_checks import run

kernels = EmulatedKernels(Path(sys.argv[1]), int(sys.argv[2]))
print("products", run(kernels, "products") + run(kernels, "orthogonal"))
print("quantised", run(kernels, "quantised", n=(33, 4097), content=("gradient", "nan")))
print("signs", run(kernels, "signs", shape=((33, 3), (257, 4))))
print("ternary", run(kernels, "ternary", n=(1, 65, 4800), content=("gradient",)))
print("thc", run(kernels, "thc", n=(65, 1100), content=("gradient",)))
print("index", run(kernels, "index", n=(33, 1025, 3_000)))
