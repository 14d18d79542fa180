"""Truncated and embedded float messages that lie, with right checksums."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from kernel_checks import Float as Codec
from torch import Tensor

from gradwire import _native
from gradwire.codecs.truncated_float import TruncatedFloat
from gradwire.errors import GradwireError
from gradwire.gpu.kernels import Kernels, using
from gradwire.gpu.launching import raise_error


def message_of(codec: Codec, values: Tensor) -> Tensor:
    """A message of the CPU's codec in its room, filled up with zeros."""
    room = torch.zeros(codec.max_encoded_bytes(values.numel(), values.dtype), dtype=torch.uint8)
    codec.encode(values, room)
    return room


def error_of(kernels: Kernels, codec: Codec, message: Tensor, out: Tensor) -> int:
    """The error word after decoding into `out`."""
    error = torch.zeros(1, dtype=torch.int32)
    with using(kernels):
        codec.decode(message, out, error=error)
    return int(error)


def lies(codec: Codec, message: Tensor, n_bytes: int) -> Iterator[Tensor]:
    """Every byte of a message of one chunk with its lowest or highest bit changed."""
    for byte in range(n_bytes):
        for flip in (0x01, 0x80):
            lie = message.clone()
            lie[byte] ^= flip
            yield _sealed(codec, lie, n_bytes)


def is_refused(kernels: Kernels, codec: Codec, lie: Tensor, n_bytes: int, out: Tensor) -> bool:
    """Whether kernels refuse a lie: as the CPU's codec does, by the same error; or both read the same.

    A device codec also refuses options that are not its own.
    """
    code = error_of(kernels, codec, lie, out)
    answer = _error_of(lambda: raise_error(code, codec.name, kernels.device))
    expected = torch.empty_like(out)
    on_cpu = _error_of(lambda: codec.decode(lie[:n_bytes].clone(), expected))
    if on_cpu is not None or answer is not None:
        assert answer is not None, f"the CPU says: {on_cpu}"
        is_option = bool((lie[5:8] != message_options(codec, out)).any()) or int(lie[16]) != codec.partition % 256
        assert type(answer) is type(on_cpu) or (on_cpu is None and is_option), (answer, on_cpu)
        assert bool(out.isnan().all()), f"{answer}, and yet there are values"
        return True
    words = {4: torch.int32, 2: torch.int16}[out.element_size()]
    assert torch.equal(out.view(words), expected.view(words)), "other values"
    return False


def message_options(codec: Codec, out: Tensor) -> Tensor:
    """The bytes of a header that tell dtype, format and bits."""
    return message_of(codec, out.new_zeros(0))[5:8]


def _error_of(call: object) -> GradwireError | None:
    try:
        call()  # type: ignore[operator]  # of no arguments
    except GradwireError as error:
        return error
    return None


def _sealed(codec: Codec, message: Tensor, n_bytes: int) -> Tensor:
    """With right checksums, of a message of one chunk."""
    table = 4 if isinstance(codec, TruncatedFloat) else 8
    n_marks = n_bytes - (40 + table + _content_bytes(codec, message))
    end = n_bytes - n_marks
    message[40:44] = _bytes(_native.crc32c(message[40 + table : end].clone()))
    head = torch.cat([message[40 : 40 + table], message[end:n_bytes]])
    message[36:40] = _bytes(_native.crc32c(head, _native.crc32c(message[:36].clone())))
    return message


def _content_bytes(codec: Codec, message: Tensor) -> int:
    """Of its only chunk: the room without the longest marks."""
    if not isinstance(codec, TruncatedFloat):
        return message.numel() - 48
    return message.numel() - 44 - 1  # fewer than eight partitions: one byte of marks


def _bytes(number: int) -> Tensor:
    return torch.tensor(list(number.to_bytes(4, "little")), dtype=torch.uint8)
