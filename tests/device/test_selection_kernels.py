"""The kernels that select elements, run on the host: what they refuse."""

import contextlib

import pytest
import torch
from emulated import kernels
from lies import WRONG_ELEMENTS, assert_reported

from gradwire.codecs.selection import CHECKSUM, OUTSIDE, Sample, raise_error, take_by_sample, take_largest
from gradwire.errors import CorruptMessage, InvalidArgument
from gradwire.gpu.kernels import using


@pytest.mark.parametrize("name", WRONG_ELEMENTS)
def test_what_no_rank_sends_is_reported_and_not_written_outside(name: str) -> None:
    wrong = WRONG_ELEMENTS[name]
    for used in (None, kernels()):
        fenced = torch.zeros(wrong.n_elements + 16)
        assert_reported(used, wrong, fenced[8:-8])
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
    for used in (None, kernels()):
        values = torch.ones(7)
        with contextlib.nullcontext() if used is None else using(used):
            n_taken, indices, taken = take_by_sample(values, [(0, 0), (7, 7)], [0, 0], [Sample(None, 0)] * 2)
        assert (int(n_taken), indices.numel(), taken.numel()) == (0, 0, 0)
        assert bool((values == 1).all())
