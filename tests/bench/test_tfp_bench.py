"""Quantisers at equal bits: errors as float64 gives them, training that means what it says."""

from pathlib import Path

import pytest
import torch
from gradient_files import adamw_arrays, write

from gradwire.errors import InvalidArgument
from gradwire_lab.bench.measures import Call, float_methods
from gradwire_lab.workloads.gradients import load_gradients

WORKLOAD = "resnet:width=4,batch_size=8"


def test_without_quantisation_workers_train_as_one_with_their_mean(tmp_path: Path) -> None:
    """Two seeds differ, one seed repeats, and 32 bits through a codec are the same as none."""
    methods = [("none", 0), ("none", 0), ("embedded-float:bits=32", 0), ("none", 1)]
    cells = [{"seed": seed, "method": method} for method, seed in methods]
    call = Call("k", cells, {}, {"workload": WORKLOAD, "workers": 2, "steps": 3}, tmp_path)
    found = float_methods.measure_training(call)
    assert [cell for cell, _ in found] == cells
    # Of the last step alone: what the first two lost or gained shows in it.
    losses = [record["end_loss"] for _, record in found]
    assert losses[0] == losses[1] == losses[2] != losses[3]
    assert found[0][1]["accuracy"] == found[2][1]["accuracy"]


def test_error_feedback_keeps_what_was_left_out() -> None:
    """Over the steps, what is received adds up to what was computed: with 2 bits only thanks to the residual."""
    method, gradient = float_methods.Method("one-bit+ef"), torch.randn(5000, generator=torch.Generator().manual_seed(0))
    assert method.has_error_feedback
    residual, total = torch.zeros(5000), torch.zeros(5000)
    for step in range(100):
        wanted = gradient + residual
        received, _ = method.quantise(wanted, step, 0)
        residual, total = wanted - received, total + received
    assert (total / 100 - gradient).norm() < 0.15 * gradient.norm()


def test_a_mixture_takes_each_value_from_either_codec_by_chance() -> None:
    gradient = torch.randn(20_000, generator=torch.Generator().manual_seed(0))
    coarse, fine = "truncated-float:bits=2", "truncated-float:bits=16"
    mixed, n_bits = float_methods.Method(f"{coarse}|{fine}").quantise(gradient, 0, 0)
    first, first_bits = float_methods.Method(coarse).quantise(gradient, 0, 0)
    second, second_bits = float_methods.Method(fine).quantise(gradient, 0, 0)
    assert n_bits == pytest.approx((first_bits + second_bits) / 2)
    assert ((mixed == first) | (mixed == second)).all()
    assert 0.48 < (mixed == second).double().mean() < 0.52
    assert not torch.equal(float_methods.Method(f"{coarse}|{fine}").quantise(gradient, 0, 1)[0], mixed)


METHODS = ["none", "truncated-float:bits=4", "qsgd:levels=7", "one-bit+ef"]


def test_errors_are_those_of_float64(tmp_path: Path) -> None:
    file = write(tmp_path / "dense.npz", adamw_arrays())
    cells = [{"gradients": str(file), "method": method} for method in METHODS]
    found = float_methods.measure_errors(Call("k", cells, {}, {}, tmp_path))
    errors = {cell["method"]: record for cell, record in found}
    assert errors["none"]["relative_error"] == 0
    gradient = torch.from_numpy(load_gradients(file).gradient).double()
    received, _ = float_methods.Method("truncated-float:bits=4").quantise(gradient.float(), 0, 0)
    expected = float((received.double() - gradient).norm() / gradient.norm())
    assert errors["truncated-float:bits=4"]["relative_error"] == pytest.approx(expected)


@pytest.mark.parametrize("method", ["no-such-codec", "qsgd|qsgd|qsgd", "truncated-float:bits=99"])
def test_what_cannot_be_measured_is_refused(tmp_path: Path, method: str) -> None:
    call = Call("k", [{"seed": 0, "method": method}], {}, {"workload": WORKLOAD, "steps": 1}, tmp_path)
    with pytest.raises(InvalidArgument):
        float_methods.measure_training(call)
