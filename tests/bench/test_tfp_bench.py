"""`gradwire bench tfp-figures`: errors as float64 gives them, training that means what it says, files that are written."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from gradient_files import adamw_arrays, write

from gradwire.bench.figures import tfp_numbers
from gradwire.cli import main
from gradwire.workloads.gradients import load_gradients

WORKLOAD = "resnet:width=4,batch_size=8"


def test_without_quantisation_workers_train_as_one_with_their_mean(tmp_path: Path) -> None:
    """Two seeds differ, one seed repeats, and 32 bits through a codec are the same as none."""
    runs = [
        tfp_numbers.train(WORKLOAD, spec, 2, 3, seed, 0)
        for spec, seed in (("none", 0), ("none", 0), ("embedded-float:bits=32", 0), ("none", 1))
    ]
    losses = [[record["loss"] for record in run] for run in runs]
    assert losses[0] == losses[1] == losses[2] != losses[3]
    assert "accuracy" in runs[0][-1]


def test_error_feedback_keeps_what_was_left_out() -> None:
    """Over the steps, what is received adds up to what was computed: with 2 bits only thanks to the residual."""
    method, gradient = tfp_numbers.Method("one-bit+ef"), torch.randn(5000, generator=torch.Generator().manual_seed(0))
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
    mixed, n_bits = tfp_numbers.Method(f"{coarse}|{fine}").quantise(gradient, 0, 0)
    (first, first_bits), (second, second_bits) = (
        tfp_numbers.Method(s).quantise(gradient, 0, 0) for s in (coarse, fine)
    )
    assert n_bits == pytest.approx((first_bits + second_bits) / 2)
    assert ((mixed == first) | (mixed == second)).all()
    assert 0.48 < (mixed == second).double().mean() < 0.52
    assert not torch.equal(tfp_numbers.Method(f"{coarse}|{fine}").quantise(gradient, 0, 1)[0], mixed)


def test_the_command_writes_numbers_and_plots(tmp_path: Path) -> None:
    file = write(tmp_path / "dense.npz", adamw_arrays())
    methods = ["none", "truncated-float:bits=4", "qsgd:levels=7", "one-bit+ef"]
    arguments = ["--gradients", str(file), "--method", *methods, "--workload", WORKLOAD, "--workers", "2"]
    out = tmp_path / "out"
    assert main(["bench", "tfp-figures", *arguments, "--steps", "3", "--out", str(out)]) == 0
    records = json.loads((out / "tfp.json").read_text())
    errors = {record["method"]: record for record in records if record["figure"] == "errors"}
    assert [record["method"] for record in records if record["figure"] == "training"] == methods
    assert errors["none"]["relative_error"] == 0
    gradient = torch.from_numpy(load_gradients(file).gradient).double()
    received, _ = tfp_numbers.Method("truncated-float:bits=4").quantise(gradient.float(), 0, 0)
    expected = float((received.double() - gradient).norm() / gradient.norm())
    assert errors["truncated-float:bits=4"]["relative_error"] == pytest.approx(expected)
    for name in ("fig02_loss_by_quantiser", "fig02_error_by_quantiser"):
        assert (out / f"{name}.svg").stat().st_size > 1000


@pytest.mark.parametrize(
    "arguments",
    [
        ["--steps", "0"],
        ["--method", "no-such-codec"],
        ["--method", "qsgd|qsgd|qsgd"],
        ["--method", "truncated-float:bits=99"],
        ["--workers", "0"],
    ],
)
def test_what_cannot_be_measured_is_refused(
    tmp_path: Path, arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", "tfp-figures", *arguments, "--out", str(tmp_path)]) == 1
    assert "InvalidArgument" in capsys.readouterr().err
