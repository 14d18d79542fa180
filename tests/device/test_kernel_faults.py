"""Kernels are clean under AddressSanitizer and UBSan, and a planted fault in them is seen in an order of threads."""

import itertools
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import emulated
import pytest
import torch
from kernel_checks import ORDERS, run
from test_kernels import SOME_FLOATS

from gradwire.gpu.compiler import SOURCES
from ranks import patience

SAID = {
    "quantised": ("quantised 288", "products 35", "signs 12", "ternary 36", "thc 12", "index 63"),
    "floats": ("cases 60, lies",),
    "gcomp": ("cases 12, lies",),
    "selection": ("cases 42, lies 9",),
}


@pytest.mark.parametrize("family", SAID)
def test_kernels_are_clean_under_the_sanitizers(family: str) -> None:
    libraries = [
        subprocess.run(["g++", f"-print-file-name={name}"], capture_output=True, text=True, check=True).stdout.strip()
        for name in ("libasan.so", "libubsan.so")
    ]
    if not all(Path(library).exists() for library in libraries):
        pytest.skip("g++ has no sanitizers here")
    environment = {
        **os.environ,
        "LD_PRELOAD": ":".join(libraries),
        "ASAN_OPTIONS": "detect_leaks=0:detect_stack_use_after_return=0",
        "PYTHONPATH": os.pathsep.join(map(str, (SOURCES.parents[2], emulated.HERE, emulated.HERE.parent))),
    }
    library = emulated.build(emulated.SANITIZED)
    command = [sys.executable, str(emulated.HERE / "sanitized.py"), str(library), "5", family]
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300 * patience())
    assert ended.returncode == 0, ended.stderr[-3000:]
    for words in SAID[family]:
        assert words in ended.stdout


class Fault(NamedTuple):
    header: str
    right: str
    wrong: str


def no_barrier(header: str, before: str, indent: str = "  ") -> Fault:
    return Fault(header, f"{before}\n{indent}__syncthreads();", before)


# What is run of a family, and the faults that have to be seen in it; none writes outside the memory that it was given.
GRADIENT: dict[str, Any] = {"content": ("gradient",)}
FLOAT32: dict[str, Any] = {**GRADIENT, "dtype": (torch.float32,)}
RUNS: dict[str, dict[str, dict[str, Any]]] = {
    "quantised": {
        "quantised": {"codec": ["one-bit"], "n": (777, 3001, 4097, 9000), **GRADIENT},
        "orthogonal": {},
        "signs": {},
        "thc": {"n": (1100,), **GRADIENT},
        "index": {"n": (1025,), **GRADIENT},
    },
    "floats": {"floats": {"codec": SOME_FLOATS, "n": (300,), **FLOAT32}},
    "gcomp": {"gcomp": {"codec": ["paper"], "n": (100, 16_400), **FLOAT32}},
    "selection": {"selection": {"n": (2049, 9_000), "content": ("gradient", "short"), "share": (0.01, 0.1)}},
}
OF_A_CHECKSUM = no_barrier("checksum", "shared.warps[threadIdx.x / kWarp] = word;")
COUNTED = "    if ((bits ^ leading) >> end_bit == 0) atomicAdd(&bins[bits >> p.shift & mask], 1u);\n  }"
COPIED = "  for (u32 i = threadIdx.x; i < own.exponent_bytes"
ALONE, IS_FINITE = "  if (threadIdx.x != 0) return;\n", "  const bool is_finite = all_finite(p);"
FAULTS = {
    "quantised: a barrier is missing before what all warps found is added up": OF_A_CHECKSUM,
    "quantised: a tie is a majority": Fault("signs", "2 * n_negative > p.n_ranks", "2 * n_negative >= p.n_ranks"),
    "quantised: a warp's last word is left out": Fault(
        "signs", "i < parts_of(p.n, kWarp) * kWarp;", "i < p.n / kWarp * kWarp;"
    ),
    "quantised: a barrier is missing between stages of a transform": Fault(
        "thc", "half *= 2) {\n    __syncthreads();", "half *= 2) {\n    if (half == 1) __syncthreads();"
    ),
    "quantised: a transform in another order of stages": Fault(
        "thc", "for (u32 half = 1; half < size; half *= 2) {", "for (u32 half = size / 2; half > 0; half /= 2) {"
    ),
    "quantised: half of a block's lanes are not added": Fault(
        "quantised", "{sum_of_lanes(own.positive, kLanes),", "{sum_of_lanes(own.positive, kLanes / 2),"
    ),
    "quantised: a barrier that not all threads come to": Fault(
        "quantised", ALONE + IS_FINITE, f"{ALONE}  __syncthreads();\n{IS_FINITE}"
    ),
    "quantised: packed from the block after": Fault("index", "block == 0 ? 0 : p.ends[block - 1]", "p.ends[block]"),
    "quantised: half of a warp's words are not counted": Fault(
        "index", "static_cast<u32>(__popc(word)))", "static_cast<u32>(__popc(word)), kWarp / 2)"
    ),
    "quantised: a barrier is missing after a reflection": no_barrier("low_rank", "row[i] -= tail[i] * weight;\n  }"),
    "floats: a barrier is missing before what all warps found is added up": OF_A_CHECKSUM,
    "floats: half of a warp is not asked for the largest": Fault(
        "embedded", "largest_of_lanes(largest) >> 23;", "largest_of_lanes(largest, kWarp / 2) >> 23;"
    ),
    "floats: streams draw each other's numbers": Fault(
        "truncated", "value / 64 * 8 + value % 8);", "value / 64 * 8 + (value % 8 ^ 1));"
    ),
    "floats: planes in another order": Fault("embedded", "plane = planes + 3 - lane % 4", "plane = planes + lane % 4"),
    "gcomp: a lane takes the word of the one above": Fault(
        "gcomp", "n_words - __popc(taking >> lane)", "n_words - __popc(taking >> lane >> 1)"
    ),
    "gcomp: a barrier is missing before the table is read": no_barrier("gcomp", "look_up[i] = p.table->look_up[i];"),
    "gcomp: bits that share a word are written as if they did not": Fault(
        "gcomp",
        "atomicOr(&shared.stage[at / 32], static_cast<u32>(placed))",
        "shared.stage[at / 32] = static_cast<u32>(placed)",
    ),
    "gcomp: a barrier is missing before exponents are copied": Fault("gcomp", f"  __syncthreads();\n{COPIED}", COPIED),
    "gcomp: the ballot of both halves of a warp is taken for one's own": Fault(
        "gcomp", "taking = ballot_of_segment(takes)", "taking = __ballot_sync(kWholeWarp, takes)"
    ),
    "selection: a barrier is missing before what was counted is given on": no_barrier("selection", COUNTED),
    "selection: a barrier is missing within the sum of what lies before": no_barrier(
        "device", "sums[threadIdx.x - distance] : 0;", "    "
    ),
    "selection: bins are not emptied": Fault(
        "selection", "bins[threadIdx.x * kEach + i] = 0;", "bins[threadIdx.x * kEach + i] += 0;"
    ),
    "selection: of equal ones all are taken": Fault("selection", "(is_equal && n_equal < choice.n_equal)", "is_equal"),
    "selection: a threshold is good too late": Fault("selection", "kFewest = 0.8", "kFewest = 0.99"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_is_seen(name: str, tmp_path: Path) -> None:
    shutil.copytree(SOURCES, tmp_path / "source")
    (header, right, wrong), runs = FAULTS[name], RUNS[name.split(":")[0]]
    path = tmp_path / "source" / f"{header}.hpp"
    text = path.read_text()
    assert text.count(right) == 1
    path.write_text(text.replace(right, wrong))
    library = emulated.build(["-O0"], tmp_path / "source")  # most of the time is the compiler's
    with pytest.raises(AssertionError, match=f"^({'|'.join(runs)}), "):  # noqa: PT012
        for order, (family, axes) in itertools.product(ORDERS, runs.items()):
            run(emulated.EmulatedKernels(library, order), family, **axes)
