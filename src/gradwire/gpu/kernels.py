"""What runs kernels: a GPU's driver (`CudaKernels`), or in tests an emulator with the same face."""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Callable, Iterator
from typing import Protocol

import torch

from gradwire.errors import Unsupported
from gradwire.gpu.driver import CudaKernels


class Kernels(Protocol):
    """The kernels of `source/kernels.cu` on one device."""

    @property
    def device(self) -> torch.device:
        """Where they run, and where the memory is that parameters point to."""
        ...

    def launch(self, name: str, n_blocks: int, n_threads: int, shared_bytes: int, parameters: ctypes.Structure) -> None:
        """Enqueue one launch on the device's current stream; waits for nothing. `n_blocks` of 0: nothing is done.

        Raises: Unsupported, OutOfMemory, GradwireError (what the driver says).
        """
        ...


# What makes the kernels of a type of device; tests add theirs.
MAKERS: dict[str, Callable[[torch.device], Kernels]] = {"cuda": CudaKernels}
_made: dict[torch.device, Kernels] = {}


def kernels_on(device: torch.device) -> Kernels:
    """The kernels of a device, loaded once in a process. Raises: Unsupported, and what `CudaKernels` raises."""
    if device not in _made:
        if device.type not in MAKERS:
            raise Unsupported(
                f"there are kernels for {', '.join(MAKERS)}, and none for {device.type!r}: leave placement out, and gradients "
                "travel through host memory"
            )
        _made[device] = MAKERS[device.type](device)
    return _made[device]


def has_kernels(device: torch.device) -> bool:
    """Whether kernels take what lies there; otherwise native functions do, or refuse it."""
    return device in _made or device.type in MAKERS


@contextlib.contextmanager
def using(kernels: Kernels) -> Iterator[None]:
    """Inside, what lies on the device of these kernels is theirs, in host memory too: for checks of kernels."""
    before = _made.get(kernels.device)
    _made[kernels.device] = kernels
    try:
        yield
    finally:
        del _made[kernels.device]
        if before is not None:
            _made[kernels.device] = before
