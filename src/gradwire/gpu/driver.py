"""Kernels on an NVIDIA GPU, loaded and launched through the driver's library: nothing of CUDA is needed to build gradwire.

They run in the context and on the streams that torch uses.
"""

import contextlib
import ctypes
from collections.abc import Callable, Iterator
from typing import Any

import torch

from gradwire.errors import GradwireError, OutOfMemory, Unsupported
from gradwire.gpu.compiler import compiled_for

LEAST_DRIVER = 12_000  # as the driver counts: CUDA 12.0

_OUT_OF_MEMORY = 2
_BAD_IMAGE = (200, 209, 218, 222)  # invalid image, none for this device, invalid PTX, PTX of a newer version
_MAJOR, _MINOR = 75, 76  # of the compute capability
_LOCAL_BYTES, _REGISTERS = 3, 4


class CudaKernels:
    """The kernels on one GPU, compiled at the first use on this machine (some seconds).

    Args:
        device: a CUDA device that torch sees; both count as CUDA_VISIBLE_DEVICES says.
        load: opens a shared library; tests bring their own.
        stream_of: the current stream's handle; torch's.
    Raises: Unsupported (no driver, one older than CUDA 12.0, no NVRTC, a GPU older than sm_80), OutOfMemory, GradwireError.
    """

    def __init__(
        self,
        device: torch.device,
        load: Callable[[str], Any] = ctypes.CDLL,
        stream_of: Callable[[torch.device], int] | None = None,
    ) -> None:
        if device.type == "cuda" and device.index is None:
            device = torch.device("cuda", torch.cuda.current_device())
        self.device = device
        self._stream_of = stream_of or (lambda place: torch.cuda.current_stream(place).cuda_stream)
        try:
            self._cuda = load("libcuda.so.1")
        except OSError as error:
            raise Unsupported(
                f"no NVIDIA driver (libcuda.so.1: {error}): install it, or train without kernels, through host memory"
            ) from error
        self._call("cuInit", 0)
        version = ctypes.c_int()
        self._call("cuDriverGetVersion", ctypes.byref(version))
        self.driver = f"{version.value // 1000}.{version.value % 1000 // 10}"
        if version.value < LEAST_DRIVER:
            raise Unsupported(
                f"the NVIDIA driver is for CUDA {self.driver}; kernels need one for {LEAST_DRIVER // 1000}.0 or newer (525): "
                "update it, or train without kernels, through host memory"
            )
        handle = ctypes.c_int()
        self._call("cuDeviceGet", ctypes.byref(handle), device.index or 0)
        self.architecture = 10 * self._attribute(_MAJOR, handle) + self._attribute(_MINOR, handle)
        self._context = ctypes.c_void_p()
        self._call("cuDevicePrimaryCtxRetain", ctypes.byref(self._context), handle)
        self._functions: dict[str, ctypes.c_void_p] = {}
        self._module = self._load(load)

    def launch(self, name: str, n_blocks: int, n_threads: int, shared_bytes: int, parameters: ctypes.Structure) -> None:
        if n_blocks == 0:
            return
        pointers = (ctypes.c_void_p * 1)(ctypes.addressof(parameters))
        stream = ctypes.c_void_p(self._stream_of(self.device))
        with self._in_context():
            sizes = map(ctypes.c_uint, (n_blocks, 1, 1, n_threads, 1, 1, shared_bytes))
            self._call("cuLaunchKernel", self._function(name), *sizes, stream, pointers, None)

    def resources(self, name: str) -> dict[str, int]:
        """Registers a thread, and bytes that it keeps in memory because there were too few (spills and frames)."""
        found = {}
        with self._in_context():
            for what, code in (("registers", _REGISTERS), ("local_bytes", _LOCAL_BYTES)):
                value = ctypes.c_int()
                self._call("cuFuncGetAttribute", ctypes.byref(value), code, self._function(name))
                found[what] = value.value
        return found

    def _load(self, load: Callable[[str], Any]) -> ctypes.c_void_p:
        module = ctypes.c_void_p()
        with self._in_context():
            for again in (False, True):  # what lay on the disk may be of another time
                image = compiled_for(self.architecture, load, again=again)
                status = self._cuda.cuModuleLoadData(ctypes.byref(module), image)
                if status not in _BAD_IMAGE:
                    self._check("cuModuleLoadData", status)
                    return module
        raise Unsupported(
            f"the NVIDIA driver, which is for CUDA {self.driver}, does not load what NVRTC compiles for "
            f"sm_{self.architecture}: update the driver, or install the nvidia-cuda-nvrtc of its CUDA release"
        )

    def _function(self, name: str) -> ctypes.c_void_p:
        if name not in self._functions:
            function = ctypes.c_void_p()
            self._call("cuModuleGetFunction", ctypes.byref(function), self._module, name.encode())
            self._functions[name] = function
        return self._functions[name]

    @contextlib.contextmanager
    def _in_context(self) -> Iterator[None]:
        """Whatever thread this is and whatever device it worked on."""
        self._call("cuCtxPushCurrent_v2", self._context)
        try:
            yield
        finally:
            self._call("cuCtxPopCurrent_v2", ctypes.byref(ctypes.c_void_p()))

    def _attribute(self, code: int, handle: ctypes.c_int) -> int:
        value = ctypes.c_int()
        self._call("cuDeviceGetAttribute", ctypes.byref(value), code, handle)
        return value.value

    def _call(self, name: str, *arguments: Any) -> None:
        self._check(name, getattr(self._cuda, name)(*arguments))

    def _check(self, name: str, status: int) -> None:
        if status == 0:
            return
        text = ctypes.c_char_p()
        self._cuda.cuGetErrorString(status, ctypes.byref(text))
        said = f"{name}: {text.value.decode() if text.value else f'error {status}'}"
        if status == _OUT_OF_MEMORY:
            raise OutOfMemory(
                f"{self.device} has no memory left for gradwire's kernels: make the model or the batch smaller, or train "
                f"without them. {said}"
            )
        if name == "cuInit":
            raise Unsupported(f"the NVIDIA driver finds no GPU that it can use: {said}")
        raise GradwireError(f"{self.device}: {said}")
