"""What `bench codec` times: gradwire's codecs and their baselines behind one face, each judging its own round trips."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import numpy as np
import torch

from gradwire import codecs
from gradwire.errors import CorruptMessage
from gradwire_lab.bench import baselines
from gradwire_lab.workloads.gradients import GradientFile

# Every lane of a buffer that a decoder is to fill, so that one that leaves it alone is found out.
_POISON = np.uint32(0xFFC0DEAD)


class TimedMethod(ABC):
    """One codec with one gradient and one thread count, ready to run; buffers are kept, as a scheme would keep them."""

    name: str
    spec: str  # name and options, as given
    setting: str
    importance: str = ""  # GComp's mode; empty where a codec has none
    guarantee: str = "bits"  # what `verify` holds the result to

    def __init__(self, file: GradientFile, n_threads: int) -> None:
        self.file = file
        self.n_threads = n_threads
        self.n_bytes = file.gradient.nbytes  # of what is encoded
        self.encoded_bytes = 0

    @abstractmethod
    def encode(self) -> None:
        """Gradient to message, with everything that the codec needs computed anew."""

    @abstractmethod
    def decode(self) -> None:
        """Message to values."""

    @abstractmethod
    def decoded(self) -> np.ndarray:
        """The values of the last `decode`, (n,) float32."""

    @abstractmethod
    def poison(self) -> None:
        """Make the output hold nothing that could pass for a result."""

    def exponent_bits(self) -> float | None:
        """Bits a value of the message's exponent part, or None where a message has no such part."""
        return None

    def bound_bytes(self) -> float | None:
        """The sum of the bounds of the message's parts, or None where a message has no such parts."""
        return None

    def verify(self) -> None:
        """Judge the last round trip. Raises: CorruptMessage, with the first value that is wrong."""
        values, decoded = self.file.gradient, self.decoded()
        if decoded.size != values.size:
            raise CorruptMessage(f"{self.name}: decoded {decoded.size} values of {values.size} from {self.file.name}")
        self.complain(values.view(np.uint32) != decoded.view(np.uint32))

    def complain(self, is_wrong: np.ndarray) -> None:
        """Raises: CorruptMessage where any value `is_wrong`."""
        if is_wrong.any():
            first = int(np.flatnonzero(is_wrong)[0])
            raise CorruptMessage(
                f"{self.name}: {int(is_wrong.sum())} of {is_wrong.size} values of {self.file.name} break its promise "
                f"({self.guarantee}); the first is element {first}: {self.file.gradient[first]!r} came back as "
                f"{self.decoded()[first]!r}. Its timing would mean nothing, so the run stops"
            )


class BaselineMethod(TimedMethod):
    """A baseline: bytes in, bytes out, allocated by the package as for any of its users."""

    def __init__(self, name: str, file: GradientFile, n_threads: int) -> None:
        super().__init__(file, n_threads)
        self.name = name
        self._baseline = baselines.by_name(name, n_threads)
        self.setting = self._baseline.setting
        self.is_threaded = self._baseline.is_threaded
        self._message = b""
        self._values = np.zeros(0, np.float32)

    def encode(self) -> None:
        self._message = self._baseline.encode(self.file.gradient)
        self.encoded_bytes = len(self._message)

    def decode(self) -> None:
        self._values = self._baseline.decode(self._message)

    def poison(self) -> None:
        self._values = np.zeros(0, np.float32)

    def decoded(self) -> np.ndarray:
        return self._values


class CodecMethod(TimedMethod):
    """A codec of gradwire's registry, which says nothing of its loss: equal messages must give equal values."""

    def __init__(
        self,
        name: str,
        options: dict[str, Any],
        file: GradientFile,
        n_threads: int,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        super().__init__(file, n_threads)
        self.name = name
        self.codec = codecs.by_name(name.removeprefix("gradwire:"), **options)
        self.setting = ", ".join(f"{key} {value}" for key, value in options.items()) or "default"
        self.gradient = torch.from_numpy(file.gradient).to(dtype)
        self.n_bytes = self.gradient.nbytes
        self._message = torch.empty(self.codec.max_encoded_bytes(file.gradient.size, dtype), dtype=torch.uint8)
        self._values = torch.empty_like(self.gradient)
        self._once: torch.Tensor | None = None

    def encode(self) -> None:
        self.encoded_bytes = int(self.codec.encode(self.gradient, self._message))

    def decode(self) -> None:
        self.codec.decode(self.message(), self._values)

    def message(self) -> torch.Tensor:
        """The last message, exactly."""
        return self._message[: self.encoded_bytes]

    def poison(self) -> None:
        poison = np.array([_POISON], np.uint32).view(np.uint8)[
            -self._values.element_size() :
        ]  # 16 bits: the upper ones
        self._values.view(torch.uint8).numpy().reshape(-1, poison.size)[:] = poison

    def decoded(self) -> np.ndarray:
        return self._values.float().numpy()

    def verify(self) -> None:
        values, decoded = self.file.gradient.view(np.uint32), self.decoded().view(np.uint32)
        if np.array_equal(values, decoded):
            return
        self.guarantee = "repeatable, every value written"
        if self._once is None:
            self._once = self._values.clone()
        self.complain((decoded != self._once.numpy().view(np.uint32)) | (decoded == _POISON))
