"""What runs kernels: a GPU's driver (`CudaKernels`), or in tests an emulator with the same face."""

from __future__ import annotations

import ctypes
from typing import Protocol

import torch


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
