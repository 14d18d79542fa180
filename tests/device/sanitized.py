"""Run as a program, under the sanitizers: a family of kernels beside the CPU's code, and with lies, in an order of threads."""

import sys
from pathlib import Path

import torch
from emulated import EmulatedKernels
from kernel_checks import FLOATS, GCOMP, WIDE_FLOATS, importance_of, run, values_of
from lies import N_VALUES, WRONG_ELEMENTS, assert_reported, is_refused, lies_of, message_of

_, library, order, family = sys.argv
kernels = EmulatedKernels(Path(library), int(order))


def tell_lies(codecs: list, step: int, importance: torch.Tensor | None = None) -> int:
    n_lies = 0
    for codec in codecs:
        message = message_of(codec, values_of("gradient", N_VALUES), importance)
        for lie in lies_of(codec, message, step):
            is_refused(kernels, codec, message, lie, torch.empty(N_VALUES), importance)
            n_lies += 1
    return n_lies


if family == "quantised":
    print("products", run(kernels, "products") + run(kernels, "orthogonal"))
    print("quantised", run(kernels, "quantised", n=(33, 4097), content=("gradient", "nan")))
    print("signs", run(kernels, "signs", shape=((33, 3), (257, 4))))
    print("ternary", run(kernels, "ternary", n=(1, 65, 4800), content=("gradient",)))
    print("thc", run(kernels, "thc", n=(65, 1100), content=("gradient",)))
    print("index", run(kernels, "index", n=(33, 1025, 3_000)))
elif family == "floats":
    names = ("truncated 3", "truncated 8", "fp4-e2m1 4 stochastic", "embedded 7", "embedded 31 by 1024, format 2")
    n_cases = run(kernels, "floats", codec=names, n=(0, 33, 300), content=("nan",))
    n_cases += run(kernels, "floats", codec=WIDE_FLOATS, n=(257,), content=("gradient",), dtype=(torch.float32,))
    print(f"cases {n_cases}, lies {tell_lies([FLOATS[name] for name in names[1:4]], 1)}")
elif family == "gcomp":
    names = ("paper, few codes", "none, every exponent has a code")
    dtypes = (torch.float32, torch.float16)
    n_cases = run(kernels, "gcomp", codec=names, n=(0, 33, 1_001), content=("nan",), dtype=dtypes)
    print(f"cases {n_cases}, lies {tell_lies([GCOMP[name] for name in names], 3, importance_of(N_VALUES))}")
else:
    axes = {"n": (1, 33, 4_800), "share": (0.01, 1.0)}
    n_cases = run(kernels, "selection", content=("gradient", "alike"), **axes)
    n_cases += run(kernels, "selection", content=("nan",), way=("exact",), **axes)
    for wrong in WRONG_ELEMENTS.values():
        assert_reported(kernels, wrong, torch.empty(wrong.n_elements))
    print(f"cases {n_cases}, lies {len(WRONG_ELEMENTS)}")
