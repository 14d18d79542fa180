"""Kernels at work: by a GPU's driver (`CudaKernels`), or in tests by an emulator with the same face."""

import contextlib
import ctypes
import functools
import threading
from collections.abc import Callable, Hashable, Iterator
from typing import Protocol

import torch
from torch import Tensor

from gradwire.errors import Unsupported
from gradwire.gpu.driver import CudaKernels


class Kernels(Protocol):
    """The kernels of `source/kernels.cu` on one device, whose memory parameters point to."""

    @property
    def device(self) -> torch.device: ...

    def launch(self, name: str, n_blocks: int, n_threads: int, shared_bytes: int, parameters: ctypes.Structure) -> None:
        """Enqueue one launch on the device's current stream; waits for nothing. `n_blocks` of 0: nothing is done."""
        ...


# What makes the kernels of a type of device; tests add theirs.
MAKERS: dict[str, Callable[[torch.device], Kernels]] = {"cuda": CudaKernels}
_made: dict[torch.device, Kernels] = {}
_uploads: list[tuple[torch.Event, Tensor]] = []  # pinned memory, and when the device has read it
_uploading = threading.Lock()


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


def kernels_for(device: torch.device) -> Kernels | None:
    """As `kernels_on`; None where native functions do the work, or refuse it."""
    return kernels_on(device) if device.type in MAKERS else _made.get(device)


@contextlib.contextmanager
def using(kernels: Kernels) -> Iterator[None]:
    """Inside, codecs launch these for tensors on their device, in host memory too: for checks against the native core."""
    before = _made.get(kernels.device)
    _made[kernels.device] = kernels
    try:
        yield
    finally:
        del _made[kernels.device]
        if before is not None:
            _made[kernels.device] = before


def upload(values: Tensor, device: torch.device) -> Tensor:
    """The host's `values` on the device, by a copy on the current stream from pinned memory, which is kept until it is read."""
    if device.type == "cpu":
        return values
    pinned = values.pin_memory()
    uploaded = pinned.to(device, non_blocking=True)
    read = torch.Event(device=device)
    read.record(torch.accelerator.current_stream(device))
    with _uploading:
        _uploads[:] = [(event, kept) for event, kept in _uploads if not event.query()] + [(read, pinned)]
    return uploaded


def upload_once(device: torch.device, make: Callable[..., Tensor], *key: Hashable) -> Tensor:
    """The host's `make(*key)` on the device, for launches on its current stream; uploaded once for each stream, and kept."""
    stream = None if device.type == "cpu" else torch.accelerator.current_stream(device)
    return _uploaded(device, stream, make, key)


def zeros_between_launches(device: torch.device, n: int) -> Tensor:
    """(>= n,) int32, for launches on the current stream that leave all of it at 0, as it is before them."""
    if device.type not in MAKERS:  # kernels that run now, of any thread
        return torch.zeros(n, dtype=torch.int32, device=device)
    return upload_once(device, _zeros, 1 << (n - 1).bit_length())


def _zeros(n: int) -> Tensor:
    return torch.zeros(n, dtype=torch.int32, device="cpu")


@functools.lru_cache(maxsize=1024)
def _uploaded(
    device: torch.device, stream: torch.Stream | None, make: Callable[..., Tensor], key: tuple[Hashable, ...]
) -> Tensor:
    return upload(make(*key), device)


def table_of(*rows: tuple[int, ...]) -> Tensor:
    """(n_rows, n) int64."""
    return torch.tensor(rows, dtype=torch.int64, device="cpu")
