"""The kernels on the host: their source compiled with g++, block by block, threads in an order of the test's choosing."""

import ctypes
import fcntl
import functools
import hashlib
import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from gradwire.gpu.compiler import SOURCES

HERE = Path(__file__).parent
# As the CPU's codecs are compiled, and as the kernels are for devices: no fused multiply-add. Fortified, the library
# would take a jump to another stack for a fault.
FLAGS = ["-std=c++20", "-O2", "-g1", "-U_FORTIFY_SOURCE", "-ffp-contract=off", "-Wall", "-Wextra", "-fPIC", "-shared",
         "-x", "c++"]  # fmt: skip
SANITIZED = ["-O1", "-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-fno-omit-frame-pointer"]


def build(extra_flags: list[str] | None = None, source: Path = SOURCES) -> Path:
    """The kernels as a shared library. `source`: where the kernels are; tests that plant faults have some of their own."""
    files = {path.name: path.read_bytes() for path in sorted(source.iterdir())}
    names = re.findall(r"^GW_KERNEL\w*\((gw_\w+),", b"\n".join(files.values()).decode(), re.MULTILINE)
    flags = [*FLAGS, "-DGW_ENTRIES=" + " ".join(f"GW_ENTRY({name})" for name in names), *(extra_flags or [])]
    own = {name: (HERE / name).read_bytes() for name in ("emulated.cpp", "emulation.hpp")}

    def compile_it(library: Path) -> None:
        unfinished = library.with_suffix(".unfinished")
        compiler = shutil.which("g++") or "c++"
        command = [compiler, *flags, f"-I{source}", f"-I{HERE}", HERE / "emulated.cpp", "-o", unfinished]
        subprocess.run(command, check=True)
        unfinished.replace(library)

    return kept("kernels", (files, own, flags), compile_it)


def kept(name: str, made_from: object, compile_it: Callable[[Path], None]) -> Path:
    """The library that `compile_it` writes to the path that it is given, in build/, by the hash of what it is made from."""
    key = hashlib.blake2b(repr(made_from).encode(), digest_size=8).hexdigest()
    library = HERE.parents[1] / "build" / name / f"{name}_{key}.so"
    library.parent.mkdir(parents=True, exist_ok=True)
    with library.with_suffix(".one-at-a-time").open("w") as lock:  # ".lock" may be torch's own
        fcntl.flock(lock, fcntl.LOCK_EX)  # of all who want it now, one compiles it
        if not library.exists():
            compile_it(library)
    return library


class EmulatedKernels:
    """`gradwire.gpu.kernels.Kernels` on host memory. `seed`: the order of blocks and threads: 0 forward, 1 backward,
    others by chance."""

    def __init__(self, library: Path, seed: int = 0) -> None:
        self.device = torch.device("cpu")
        self._library = ctypes.CDLL(str(library))
        self._library.gw_last_error.restype = ctypes.c_char_p
        self.seed = seed
        self.launched: list[str] = []

    def launch(self, name: str, n_blocks: int, n_threads: int, shared_bytes: int, parameters: ctypes.Structure) -> None:
        self.launched.append(name)
        if n_blocks:
            self._run(name, n_blocks, n_threads, shared_bytes, parameters)

    def _run(self, name: str, n_blocks: int, n_threads: int, shared_bytes: int, parameters: ctypes.Structure) -> None:
        sizes = (ctypes.c_uint(size) for size in (n_blocks, n_threads, shared_bytes))
        if self._library.gw_emulate(name.encode(), *sizes, ctypes.c_uint64(self.seed), ctypes.byref(parameters)):
            raise RuntimeError(self._library.gw_last_error().decode())
        turns = getattr(parameters, "turns", None)
        if turns is not None and ctypes.c_uint64.from_address(turns).value:
            raise RuntimeError(f"{name} left what counts blocks at another number than 0")


def kernels(order: int = 0) -> EmulatedKernels:
    """Of the library's own source."""
    return EmulatedKernels(build(), order)


class LateKernels(EmulatedKernels):
    """The same on the late device: each launch in its turn on the stream that is current, with the parameters of now."""

    def __init__(self, library: Path, late: Any, device: torch.device) -> None:
        super().__init__(library)
        self.device = device
        self._late = late

    def _run(self, name: str, n_blocks: int, n_threads: int, shared_bytes: int, parameters: ctypes.Structure) -> None:
        kept = type(parameters).from_buffer_copy(parameters)
        run = functools.partial(super()._run, name, n_blocks, n_threads, shared_bytes, kept)
        self._late.enqueue(self.device.index, torch.accelerator.current_stream(self.device).stream_id, run)
