"""`gradwire gpu check`: its sections on the late device, its honesty without a device, its record."""

import argparse
import functools
import json
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import emulated
import late
import pytest
import torch
from late_cases import begin_with_kernels

import gradwire
from gradwire.core.staging import StagedBucket
from gradwire.schemes.auto import costs
from gradwire_lab.bench import device_checks
from gradwire_lab.bench.device_checks import CheckFailed
from gradwire_lab.cli import gpu
from ranks import on_ranks, patience

pytestmark = pytest.mark.usefixtures("warm_interpreters")


@on_ranks(1)
def test_sections_pass_on_the_late_device_and_see_faults(rank: int, world_size: int, library: Path) -> None:
    functions = late.load(library)
    functions.set_lateness_us(500)
    device = torch.device("late", 0)
    found = device_checks.measure_kernels(emulated.LateKernels(emulated.build(), functions, device), 5_000, 1)
    assert found["gb_s"].keys() == found["of_copy"].keys()
    assert min(found["gb_s"].values()) > 0
    assert found["message_bytes"]["one-bit"] == 32 + 4 * 157
    assert "nvidia" in found["nvcomp_ans"]
    assert device_checks.why_no_device() is None
    assert device_checks.describe_devices(device)["n_devices"] == 2
    assert all(rate > 0 for rate in device_checks.measure_copies(device, 1 << 16).values())
    with mock.patch.object(torch, "equal", return_value=False), pytest.raises(CheckFailed, match="came back"):
        device_checks.measure_copies(device, 1 << 16)


@on_ranks(2)
def test_schemes_are_compared_with_the_cpu(rank: int, world_size: int, library: Path) -> None:
    _, place = begin_with_kernels(library, 500)
    check = functools.partial(device_checks.check_schemes, place.device, place.group, note=lambda _: None)
    assert check()["n_schemes"] > 15
    with mock.patch.object(costs, "_DEVICE_SAMPLE", 1 << 12):  # of kernels that are emulated
        found = check(placement="device")
    assert set(found["seconds"]) == {
        "acp-sgd", "auto", "bf16", "dgc", "embedded-float", "gcomp", "homomorphic", "one-bit", "plain", "power-sgd",
        "power-sgd-overlap", "qsgd", "sign-sgd", "slimgc", "terngrad", "thc", "top-k", "truncated-float",
        "two-bit",
    }  # fmt: skip
    with mock.patch.object(StagedBucket, "send_back"), pytest.raises(CheckFailed, match=r"other bits.*one-bit"):
        check()


def test_without_a_device_nothing_is_claimed(tmp_path: Path) -> None:
    if torch.accelerator.is_available():
        pytest.skip("this machine has a device")
    command = [sys.executable, "-m", "gradwire", "gpu", "check", "--json", str(tmp_path / "gpu.json")]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60 * patience())
    assert ended.returncode == 1
    assert "nothing was checked" in ended.stderr
    record = json.loads((tmp_path / "gpu.json").read_text())
    assert {section["status"] for section in record["sections"].values()} == {"not run"}
    assert record["device"] is None
    (tmp_path / "gpu.json").write_text("[]")
    with pytest.raises(gradwire.InvalidArgument, match="name another"):
        gpu._read(tmp_path / "gpu.json")


def test_reasons_for_no_device() -> None:
    with mock.patch.object(torch.accelerator, "is_available", return_value=False):
        with mock.patch.object(torch.version, "cuda", None):
            assert "build for CPUs" in str(device_checks.why_no_device())
        with mock.patch.object(torch.version, "cuda", "13.0"):
            with mock.patch.dict("os.environ", {"CUDA_VISIBLE_DEVICES": ""}):
                assert "CUDA_VISIBLE_DEVICES" in str(device_checks.why_no_device())
            for told in ("Found no NVIDIA driver on your system.", "The NVIDIA driver on your system is too old"):
                with (
                    mock.patch.dict("os.environ", {"CUDA_VISIBLE_DEVICES": "0"}),
                    mock.patch.object(torch.cuda, "init", side_effect=RuntimeError(told)),
                ):
                    assert told in str(device_checks.why_no_device())


def test_sections_are_resumed(tmp_path: Path) -> None:
    path = tmp_path / "gpu.json"
    calls: list[str] = []

    def fail() -> dict[str, Any]:
        calls.append("bad")
        raise CheckFailed("two bytes differ")

    sections = {"good": lambda: calls.append("good") or {"figure": 3}, "bad": fail, "last": lambda: {}}
    arguments = argparse.Namespace(section=None, again=False, json=path)
    assert gpu.run_sections(sections, {"benchmark": "gpu-check", "key": "a"}, arguments) == 1
    record = json.loads(path.read_text())
    assert [record["sections"][name]["status"] for name in sections] == ["passed", "failed", "passed"]
    assert record["sections"]["good"]["figure"] == 3
    assert "two bytes differ" in record["sections"]["bad"]["error"]
    assert gpu.run_sections(sections, gpu._read(path), arguments) == 1
    assert calls == ["good", "bad", "bad"], "what has passed is not repeated"
    assert gpu.run_sections(sections, {**gpu._read(path), "key": "another commit"}, arguments) == 1
    assert calls == ["good", "bad", "bad", "good", "bad"]
    arguments.section = ["last"]
    assert gpu.run_sections(sections, gpu._read(path), arguments) == 0
