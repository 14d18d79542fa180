"""Kernels compiled for the GPU at hand by NVRTC, which every torch with CUDA brings; the result is kept on disk."""

import contextlib
import ctypes
import hashlib
import os
import stat
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from gradwire.errors import GradwireError, Unsupported

SOURCES = Path(__file__).with_name("source")
LEAST_ARCHITECTURE = 80  # what is compiled in tests: Ampere and newer

_Load = Callable[[str], Any]


def source_files() -> dict[str, bytes]:
    """The kernels' files by name; `kernels.cu` includes the others."""
    return {path.name: path.read_bytes() for path in sorted(SOURCES.iterdir()) if path.suffix in (".cu", ".hpp")}


_OPEN = stat.S_IWGRP | stat.S_IWOTH


class Compiler:
    """NVRTC, opened by `load`; tests bring their own. Raises: Unsupported (there is none)."""

    def __init__(self, load: _Load = ctypes.CDLL) -> None:
        self._library = _load_nvrtc(load)
        major, minor = ctypes.c_int(), ctypes.c_int()
        self._call("nvrtcVersion", ctypes.byref(major), ctypes.byref(minor))
        self.version = f"{major.value}.{minor.value}"

    def architectures(self) -> list[int]:
        """Those that it compiles for: 80 for sm_80."""
        count = ctypes.c_int()
        self._call("nvrtcGetNumSupportedArchs", ctypes.byref(count))
        found = (ctypes.c_int * count.value)()
        self._call("nvrtcGetSupportedArchs", found)
        return sorted(found)

    def target_for(self, architecture: int) -> str:
        """The target to compile for: the device itself, or PTX for a device that is newer than this compiler."""
        if architecture < LEAST_ARCHITECTURE:
            raise Unsupported(
                f"a GPU of compute capability {architecture / 10:.1f}: kernels need {LEAST_ARCHITECTURE / 10:.1f} (A100, "
                "RTX 30) or newer; train without them, through host memory"
            )
        known = self.architectures()
        if architecture in known:
            return f"sm_{architecture}"
        older = [one for one in known if LEAST_ARCHITECTURE <= one < architecture]
        if not older:
            raise Unsupported(
                f"NVRTC {self.version} compiles for none of sm_{LEAST_ARCHITECTURE} to sm_{architecture}: install a newer "
                "nvidia-cuda-nvrtc"
            )
        return f"compute_{older[-1]}"  # the driver makes the rest of it

    def compile(self, target: str) -> bytes:
        """A cubin for `sm_*`, PTX for `compute_*`. Takes seconds."""
        files = source_files()
        main = files.pop("kernels.cu")
        program = ctypes.c_void_p()
        names = (ctypes.c_char_p * len(files))(*(name.encode() for name in files))
        texts = (ctypes.c_char_p * len(files))(*files.values())
        self._call("nvrtcCreateProgram", ctypes.byref(program), main, b"kernels.cu", len(files), texts, names)
        try:
            options = [f"--gpu-architecture={target}".encode(), b"--std=c++17", b"--fmad=false"]
            given = (ctypes.c_char_p * len(options))(*options)
            status = self._library.nvrtcCompileProgram(program, len(options), given)
            if status != 0:
                log = self._text(program, "ProgramLog").decode(errors="replace").strip("\0\n")
                raise GradwireError(
                    f"NVRTC {self.version} does not compile gradwire's kernels for {target}: {log[-2000:]}"
                )
            return self._text(program, "CUBIN" if target.startswith("sm_") else "PTX")
        finally:
            self._library.nvrtcDestroyProgram(ctypes.byref(program))

    def _text(self, program: ctypes.c_void_p, what: str) -> bytes:
        size = ctypes.c_size_t()
        self._call(f"nvrtcGet{what}Size", program, ctypes.byref(size))
        text = ctypes.create_string_buffer(size.value)
        self._call(f"nvrtcGet{what}", program, text)
        return text.raw

    def _call(self, name: str, *arguments: Any) -> None:
        status = getattr(self._library, name)(*arguments)
        if status != 0:
            self._library.nvrtcGetErrorString.restype = ctypes.c_char_p
            raise GradwireError(f"{name}: {self._library.nvrtcGetErrorString(status).decode()}")


def compiled_for(architecture: int, load: _Load = ctypes.CDLL, *, again: bool = False) -> bytes:
    """The module that the driver loads for a device, from the disk where it lies there, by what it is made from, unless it is
    made `again`. Raises: Unsupported, GradwireError."""
    compiler = Compiler(load)
    target = compiler.target_for(architecture)
    key = hashlib.blake2b(repr((source_files(), target, compiler.version)).encode(), digest_size=12).hexdigest()
    kept = _cache_folder() / f"{target}_{key}"
    if not again:
        with contextlib.suppress(OSError):
            if _is_ours_alone(kept):
                return kept.read_bytes()
    image = compiler.compile(target)
    with contextlib.suppress(OSError):  # no home, a full disk: it is compiled in every process then
        kept.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        if _is_ours_alone(kept.parent):
            whole = kept.with_name(f"{kept.name}.{os.getpid()}")
            whole.write_bytes(image)
            whole.chmod(0o600)
            whole.replace(kept)
    return image


def _is_ours_alone(path: Path) -> bool:
    """True if nobody but this user can have written it: what lies there runs with this user's data. Raises: OSError.
    Nor may others have put another in its place: folders above are this user's or the administrator's, and open to
    others only as /tmp is, where each may take away only what is theirs."""
    path = path.resolve()
    found = path.stat()
    if found.st_uid != os.geteuid() or found.st_mode & _OPEN:
        return False
    above = [folder.stat() for folder in path.parents]
    return all(
        one.st_uid in (0, os.geteuid()) and (not one.st_mode & _OPEN or one.st_mode & stat.S_ISVTX) for one in above
    )


def _cache_folder() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "gradwire" / "kernels"


def _load_nvrtc(load: _Load) -> Any:
    """The one of torch's CUDA release first: torch may have loaded it already."""
    major = (torch.version.cuda or "13").split(".")[0]
    releases = [major, *(other for other in ("13", "12") if other != major)]
    names = [f"libnvrtc.so.{release}" for release in releases]
    for folder in sys.path:
        names += [str(path) for path in sorted(Path(folder, "nvidia").glob("*/lib/libnvrtc.so.1[23]"))]
    for name in names:
        with contextlib.suppress(OSError):
            return load(name)
    raise Unsupported(
        "no NVRTC, which compiles gradwire's kernels, was found: install it with "
        f"`pip install nvidia-cuda-nvrtc` (for CUDA {major}), or train without kernels, through host memory"
    )
