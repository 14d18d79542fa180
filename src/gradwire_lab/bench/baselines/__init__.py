"""General and numeric compressors that gradwire's codecs are measured against: one small file each, one interface."""

from __future__ import annotations

import importlib
from abc import ABC, abstractmethod
from typing import ClassVar

import numpy as np
import numpy.typing as npt

from gradwire.errors import InvalidArgument, Unsupported

__all__ = ["Baseline", "by_name", "names"]

# name: "module:class". A new baseline is one file and one line here. The first is the reference of every table.
_REGISTRY: dict[str, str] = {
    "zstd": "gradwire_lab.bench.baselines.zstd:Zstd",
    "zlib": "gradwire_lab.bench.baselines.zlib:Zlib",
    "lz4": "gradwire_lab.bench.baselines.lz4:Lz4",
    "blosc2": "gradwire_lab.bench.baselines.blosc2:Blosc2",
    "zipnn": "gradwire_lab.bench.baselines.zipnn:ZipNN",
    "pcodec": "gradwire_lab.bench.baselines.pcodec:Pcodec",
}
# The package that a baseline needs, where the names differ.
_PACKAGES = {"zstd": "zstandard"}


class Baseline(ABC):
    """A compressor of float arrays, with the setting that its authors recommend where speed matters."""

    name: ClassVar[str]
    setting: ClassVar[str]
    is_threaded: ClassVar[bool] = False  # whether `n_threads` above 1 changes anything

    def __init__(self, n_threads: int = 1) -> None:
        """Prepare contexts that a real user would keep between calls, so that they are not timed."""
        self.n_threads = n_threads

    @abstractmethod
    def encode(self, array: npt.NDArray[np.float32]) -> bytes:
        """One message that holds `array` (n,) float32."""

    @abstractmethod
    def decode(self, message: bytes) -> npt.NDArray[np.float32]:
        """The array (n,) float32 that `message` holds; may be read-only."""


def names() -> list[str]:
    """The baselines in the order of the tables."""
    return list(_REGISTRY)


def by_name(name: str, n_threads: int = 1) -> Baseline:
    """A new baseline.

    Raises: InvalidArgument (unknown name), Unsupported (its package is not installed).
    """
    if name not in _REGISTRY:
        raise InvalidArgument(f"no baseline is called {name!r}; there are: {', '.join(names())}")
    module_path, class_name = _REGISTRY[name].split(":")
    try:
        cls: type[Baseline] = getattr(importlib.import_module(module_path), class_name)
    except ImportError as error:
        package = _PACKAGES.get(name, name)
        raise Unsupported(
            f"baseline {name!r} needs the package {package!r} ({error}); pip install 'gradwire[bench]'"
        ) from error
    return cls(n_threads)
