"""The kernels that select elements, run on the host: the CPU's elements in every order of threads; lies; planted faults."""

from __future__ import annotations

import contextlib
import shutil
from pathlib import Path

import emulated
import pytest
import torch
from kernel_checks import ORDERS, SELECTED, run
from sanitizing import run_sanitized
from selection_lies import LIES, is_refused

from gradwire.codecs.selection import CHECKSUM, OUTSIDE, Sample, raise_error, take_by_sample, take_largest
from gradwire.errors import CorruptMessage, InvalidArgument
from gradwire.gpu.compiler import SOURCES
from gradwire.gpu.kernels import using


@pytest.mark.parametrize("content", [*SELECTED, "nan"])
def test_elements_are_the_cpus(content: str) -> None:
    kernels = emulated.EmulatedKernels(emulated.build())
    ways = ("exact",) if content == "nan" else ("exact", "whole", "spans")
    assert run(kernels, "selection", n=(1, 33, 2049, 5_000), content=[content], way=ways) == 3 * 4 * len(ways)


@pytest.mark.parametrize("order", ORDERS)
def test_elements_are_the_cpus_in_every_order_of_threads(order: int) -> None:
    kernels = emulated.EmulatedKernels(emulated.build(), order)
    contents = ("gradient", "alike", "short")
    assert run(kernels, "selection", n=(33, 2047, 17_000), content=contents, share=(0.01,)) == 27


def test_more_pieces_than_a_block_adds_up_at_once() -> None:
    n = 33 * 16_384 + 5  # 272 pieces: the sums before them take two rounds of 256 threads
    kernels = emulated.EmulatedKernels(emulated.build())
    assert run(kernels, "selection", n=[n], content=["short"], share=[0.02], way=["exact"]) == 1


def test_more_tensors_than_a_block_adds_up_at_once() -> None:
    kernels = emulated.EmulatedKernels(emulated.build())
    assert run(kernels, "selection", n=[900], content=["gradient"], share=[0.4], way=["threes"]) == 1


@pytest.mark.parametrize("name", LIES)
def test_what_no_rank_sends_is_reported_and_not_written_outside(name: str) -> None:
    lie = LIES[name]
    for kernels in (None, emulated.EmulatedKernels(emulated.build())):
        fenced = torch.zeros(lie.n_elements + 16)
        is_refused(kernels, lie, fenced[8:-8])
        assert not fenced[:8].any()
        assert not fenced[-8:].any()


def test_error_words_are_told() -> None:
    raise_error(0)
    for code, says in ((CHECKSUM, "checksum does not match"), (OUTSIDE, "outside of the bucket"), (9, "error word 9")):
        with pytest.raises(CorruptMessage, match=says):
            raise_error(code)


def test_more_values_than_indices_can_tell_are_refused() -> None:
    values = torch.empty(1 << 31, device="meta")
    for take in (lambda: take_largest(values, 1), lambda: take_by_sample(values, [], [], [])):
        with pytest.raises(InvalidArgument, match="at most 2147483647"):
            take()


def test_nothing_is_taken_of_no_tensors() -> None:
    for kernels in (None, emulated.EmulatedKernels(emulated.build())):
        values = torch.ones(7)
        with contextlib.nullcontext() if kernels is None else using(kernels):
            n_taken, indices, taken = take_by_sample(values, [(0, 0), (7, 7)], [0, 0], [Sample(None, 0)] * 2)
        assert (int(n_taken), indices.numel(), taken.numel()) == (0, 0, 0)
        assert bool((values == 1).all())


def test_kernels_are_clean_under_the_sanitizers() -> None:
    assert f"cases 42, lies {len(LIES)}" in run_sanitized("sanitized_selection.py", 5)


# A planted fault, which an order of threads shows.
FAULTS = {
    "a barrier is missing before what was counted is given on": (
        "    if ((bits ^ leading) >> end_bit == 0) atomicAdd(&bins[bits >> p.shift & mask], 1u);\n  }\n"
        "  __syncthreads();",
        "    if ((bits ^ leading) >> end_bit == 0) atomicAdd(&bins[bits >> p.shift & mask], 1u);\n  }",
    ),
    "a barrier is missing within the sum of what lies before": (
        "sums[threadIdx.x - distance] : 0;\n    __syncthreads();",
        "sums[threadIdx.x - distance] : 0;",
    ),
    "bins are not emptied": ("bins[threadIdx.x * kEach + i] = 0;", "bins[threadIdx.x * kEach + i] += 0;"),
    "of equal magnitudes all are taken": ("(is_equal && n_equal < choice.n_equal)", "is_equal"),
    "a threshold is good too late": ("kFewest = 0.8", "kFewest = 0.99"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_seen(fault: str, tmp_path: Path) -> None:
    shutil.copytree(SOURCES, tmp_path / "source")
    right, wrong = FAULTS[fault]
    (path,) = (path for path in (tmp_path / "source").iterdir() if right in path.read_text())
    text = path.read_text()
    assert text.count(right) == 1
    path.write_text(text.replace(right, wrong))
    library = emulated.build(source=tmp_path / "source")

    def run_in_all_orders() -> None:
        for order in ORDERS:
            kernels = emulated.EmulatedKernels(library, order)
            run(kernels, "selection", n=(2049, 9_000), content=("gradient", "short"), share=(0.01, 0.1))

    with pytest.raises(AssertionError, match="selection, "):
        run_in_all_orders()
