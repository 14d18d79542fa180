"""Kernels through the driver and NVRTC: both are stubs that launch on the emulator; and all that can be wrong with them."""

import ctypes
import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import emulated
import pytest
import torch
from kernel_checks import run

from gradwire.errors import GradwireError, OutOfMemory, Unsupported
from gradwire.gpu import compiler
from gradwire.gpu.driver import CudaKernels
from gradwire_lab.bench import device_checks

HERE = Path(__file__).parent
STREAM = 0x1234


@pytest.fixture(scope="module")
def stub(tmp_path_factory: pytest.TempPathFactory) -> Path:
    library = tmp_path_factory.mktemp("stub") / "stub.so"
    command = ["g++", "-std=c++20", "-O0", "-shared", "-fPIC", HERE / "driver_stub.cpp", "-o", library, "-ldl"]
    subprocess.run(command, check=True)
    return library


class Nothing(ctypes.Structure):
    _fields_ = ()


class Machine:
    """A machine with a GPU, as far as a stub goes; and how many compilations it took. `setenv`: what the stub reads."""

    def __init__(self, stub: Path, setenv: Callable[[str, str], None]) -> None:
        self.library, self.setenv = ctypes.CDLL(str(stub)), setenv
        self.absent: tuple[str, ...] = ()

    def load(self, name: str) -> Any:
        if name.startswith(self.absent) or not name.startswith(("libcuda", "libnvrtc")):
            raise OSError(f"{name}: cannot open shared object file")
        return self.library

    def kernels(self) -> CudaKernels:
        return CudaKernels(torch.device("cpu"), self.load, lambda device: STREAM)


@pytest.fixture
def machine(stub: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("GW_STUB_EMULATOR", str(emulated.build()))
    return Machine(stub, monkeypatch.setenv)


def test_messages_through_the_driver_are_the_cpu_codecs(machine: Machine) -> None:
    kernels = machine.kernels()
    assert run(kernels, "quantised", codec=["one-bit", "qsgd"], n=(0, 33, 4097), content=("gradient",)) == 36
    assert machine.library.stub_contexts() == 0
    assert kernels.resources("gw_quantised_pack") == {"registers": 40, "local_bytes": 0}
    assert (kernels.driver, kernels.architecture) == ("13.0", 90)


def test_gpu_check_loads_all_kernels_and_refuses_spilt_registers(machine: Machine) -> None:
    found = device_checks.list_kernels(machine.kernels())
    assert len(found["kernels"]) == 48
    assert {"gw_select_write", "gw_gcomp_pack", "gw_multiply_factors", "gw_thc_read"} <= set(found["kernels"])
    with (
        mock.patch.object(CudaKernels, "resources", return_value={"local_bytes": 8}),
        pytest.raises(device_checks.CheckFailed, match="registers in memory"),
    ):
        device_checks.list_kernels(machine.kernels())


def test_what_was_compiled_is_kept_and_what_does_not_load_is_compiled_anew(machine: Machine, tmp_path: Path) -> None:
    before = machine.library.stub_compilations()
    machine.kernels()
    machine.kernels()
    assert machine.library.stub_compilations() == before + 1
    (kept,) = (tmp_path / "gradwire" / "kernels").iterdir()
    assert kept.name.startswith("sm_90_")
    kept.write_bytes(b"of another time")
    machine.kernels()
    assert machine.library.stub_compilations() == before + 2
    assert kept.read_bytes().startswith(b"compiled sm_90")


def test_what_others_may_have_written_is_not_loaded(machine: Machine, tmp_path: Path) -> None:
    folder = tmp_path / "gradwire" / "kernels"
    machine.kernels()
    (kept,) = folder.iterdir()
    assert (folder.stat().st_mode & 0o777, kept.stat().st_mode & 0o777) == (0o700, 0o600)
    for path, mode in ((kept, 0o620), (kept, 0o602), (folder, 0o770), (folder, 0o707)):
        path.chmod(mode)
        before = machine.library.stub_compilations()
        machine.kernels()
        assert machine.library.stub_compilations() == before + 1, (path, oct(mode))
        folder.chmod(0o700)
        kept.chmod(0o600)
    before = machine.library.stub_compilations()
    machine.kernels()
    assert machine.library.stub_compilations() == before
    if os.geteuid() == 0:
        os.chown(kept, 12345, -1)
        machine.kernels()
        assert machine.library.stub_compilations() == before + 1


def test_nor_what_lies_where_others_may_put_another_folder(tmp_path: Path) -> None:
    kept = tmp_path / "open" / "gradwire" / "kernels" / "sm_90"
    kept.parent.mkdir(mode=0o700, parents=True)
    kept.write_bytes(b"compiled")
    kept.chmod(0o600)
    verdicts = {}
    for mode in (0o755, 0o777, 0o1777):
        (tmp_path / "open").chmod(mode)
        verdicts[mode] = compiler._is_ours_alone(kept)
    assert verdicts == {0o755: True, 0o777: False, 0o1777: True}


def test_nothing_is_kept_where_nothing_can_be(machine: Machine, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    machine.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert machine.kernels().architecture == 90


def test_a_gpu_newer_than_the_compiler_gets_ptx(machine: Machine, tmp_path: Path) -> None:
    machine.setenv("GW_STUB_ARCHITECTURE", "103")
    machine.kernels()
    (kept,) = (tmp_path / "gradwire" / "kernels").iterdir()
    assert kept.read_bytes().startswith(b"compiled compute_90")


@pytest.mark.parametrize(
    ("broken", "error", "says"),
    [
        ("libcuda", Unsupported, "no NVIDIA driver"),
        ("libnvrtc", Unsupported, "pip install nvidia-cuda-nvrtc"),
        ("GW_STUB_INIT=100", Unsupported, "no CUDA-capable device"),
        ("GW_STUB_DRIVER=11080", Unsupported, "for CUDA 11.8.*12.0 or newer"),
        ("GW_STUB_ARCHITECTURE=75", Unsupported, "compute capability 7.5.*8.0"),
        ("GW_STUB_COMPILE=6", GradwireError, "does not compile.*line 3: wrong"),
        ("GW_STUB_LOAD=2", OutOfMemory, "no memory left"),
        ("GW_STUB_LOAD=222", Unsupported, "update the driver"),
        ("GW_STUB_LOAD=304", GradwireError, "cuModuleLoadData"),
    ],
)
def test_what_is_wrong_with_a_machine_is_said(machine: Machine, broken: str, error: type[Exception], says: str) -> None:
    name, _, value = broken.partition("=")
    if value:
        machine.setenv(name, value)
    else:
        machine.absent = (name,)
    with pytest.raises(error, match=says):
        machine.kernels()
    assert machine.library.stub_contexts() == 0, "another context than torch's stays current"


def test_a_launch_that_fails_says_so(machine: Machine) -> None:
    kernels = machine.kernels()
    machine.setenv("GW_STUB_LAUNCH", "2")
    with pytest.raises(OutOfMemory):
        kernels.launch("gw_quantised_pack", 1, 256, 0, Nothing())
    machine.setenv("GW_STUB_LAUNCH", "719")
    with pytest.raises(GradwireError, match="cuLaunchKernel"):
        kernels.launch("gw_quantised_pack", 1, 256, 0, Nothing())
    with pytest.raises(GradwireError, match="cuModuleGetFunction"):
        kernels.launch("no_such_kernel", 1, 256, 0, Nothing())
    assert machine.library.stub_contexts() == 0


@pytest.mark.parametrize("architecture", [80, 90, 100, 120])
def test_nvrtc_compiles_the_kernels(architecture: int) -> None:
    try:
        nvrtc = compiler.Compiler()
    except Unsupported as error:
        pytest.skip(str(error))
    if architecture not in nvrtc.architectures():
        pytest.skip(f"NVRTC {nvrtc.version} does not know sm_{architecture}")
    assert nvrtc.compile(f"sm_{architecture}")[:4] == b"\x7fELF"
