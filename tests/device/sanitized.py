"""Run as a program, under the sanitizers: the kernels in a library beside the CPU's codecs, in an order of threads."""

from __future__ import annotations

import sys
from pathlib import Path

from emulated import EmulatedKernels

from gradwire_lab.bench import factor_checks, index_checks, kernel_checks, sign_checks, ternary_checks, thc_checks

kernels = EmulatedKernels(Path(sys.argv[1]), int(sys.argv[2]))
print("products", factor_checks.run(kernels))
print("cases", kernel_checks.run(kernels, kernel_checks.CODECS, (33, 4097), ("gradient", "nan")))
print("signs", sign_checks.run(kernels, ((33, 3), (257, 4))))
print("ternary", ternary_checks.run(kernels, (1, 65, 4800), ("gradient",)))
print("thc", thc_checks.run(kernels, (65, 1100), ("gradient",)))
print("indices", index_checks.run(kernels, (33, 1025, 3_000)))
