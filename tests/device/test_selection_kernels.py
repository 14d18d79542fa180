"""The kernels that select elements, run on the host: the CPU's elements in every order of threads; lies."""

from __future__ import annotations

import contextlib

import emulated
import pytest
import torch
from kernel_checks import ORDERS, SELECTED, run
from lies import WRONG_ELEMENTS, assert_reported

from gradwire.codecs.selection import CHECKSUM, OUTSIDE, Sample, raise_error, take_by_sample, take_largest
from gradwire.errors import CorruptMessage, InvalidArgument
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


@pytest.mark.parametrize("name", WRONG_ELEMENTS)
def test_what_no_rank_sends_is_reported_and_not_written_outside(name: str) -> None:
    wrong = WRONG_ELEMENTS[name]
    for kernels in (None, emulated.EmulatedKernels(emulated.build())):
        fenced = torch.zeros(wrong.n_elements + 16)
        assert_reported(kernels, wrong, fenced[8:-8])
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
