"""GComp messages that lie, with right checksums; and what kernels and the CPU's codec say to them."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from gradwire import _native
from gradwire.codecs.gcomp import GCompCodec
from gradwire.errors import GradwireError
from gradwire.gpu.kernels import Kernels, using
from gradwire.gpu.launching import raise_error


def message_of(codec: GCompCodec, values: Tensor, importance: Tensor) -> Tensor:
    """A message of the CPU's codec, in memory of exactly its length."""
    out = torch.empty(codec.max_encoded_bytes(values.numel(), values.dtype), dtype=torch.uint8)
    return out[: codec.encode(values, out, importance)].clone()


def error_of(kernels: Kernels, codec: GCompCodec, message: Tensor, out: Tensor, importance: Tensor) -> int:
    """The error word after decoding into `out`."""
    error = torch.zeros(1, dtype=torch.int32)
    with using(kernels):
        codec.decode(message, out, importance, error=error)
    return int(error)


def sealed(message: Tensor) -> Tensor:
    """With right checksums, wherever its chunks say that they lie."""
    n_chunks = min(int(message[32:36].view(torch.int32)), (message.numel() - 48) // 32)
    for chunk in range(n_chunks):
        header = message[48 + 32 * chunk : 80 + 32 * chunk]
        offset, n_bits = int(header[:8].view(torch.int64)), int(header[16:20].view(torch.int32))
        end = offset + n_bits // 8 + int(header[8:12].view(torch.int32))
        if 0 <= offset < end <= message.numel():
            header[28:] = _bytes(_native.crc32c(message[offset:end].clone()), 4)
    headers = message[48 : 48 + 32 * max(n_chunks, 0)].clone()
    message[44:48] = _bytes(_native.crc32c(headers, _native.crc32c(message[:44].clone())), 4)
    return message


def lies(message: Tensor, step: int = 1) -> Iterator[Tensor]:
    """Every `step`-th byte with its lowest or highest bit changed; lengths and offsets that are huge; cut short."""
    for byte in range(4, message.numel(), step):
        for flip in (0x01, 0x80):
            lie = message.clone()
            lie[byte] ^= flip
            yield sealed(lie)
    for begin, end in ((16, 24), (24, 32), (32, 36), (48, 56), (56, 60), (64, 68), (68, 72)):
        for number in ((1 << 8 * (end - begin)) - 1, (1 << (8 * (end - begin) - 1)) - 32, 0, 1 << 24):
            lie = message.clone()
            lie[begin:end] = _bytes(number, end - begin)
            yield sealed(lie)
    for n_bytes in (0, 1, 47, 48, 79, message.numel() - 1):
        lie = message[:n_bytes].clone()
        if n_bytes >= 48:
            lie[24:32] = _bytes(n_bytes, 8)
            lie = sealed(lie)
        yield lie


def is_refused(
    kernels: Kernels, codec: GCompCodec, message: Tensor, lie: Tensor, out: Tensor, importance: Tensor
) -> bool:
    """Whether kernels refuse what became of `message`: as the CPU's codec does, by the same error; or both read the same.

    A device codec also refuses options that are not its own.
    """
    expected = torch.empty_like(out)
    code = error_of(kernels, codec, lie, out, importance)
    answer: GradwireError | None = None
    on_cpu: GradwireError | None = None
    try:
        raise_error(code, codec.name, kernels.device)
    except GradwireError as error:
        answer = error
    if not torch.equal(lie[4:8], message[4:8]):
        assert answer is not None
        return True
    try:
        codec.decode(lie, expected, importance)
    except GradwireError as error:
        on_cpu = error
    assert type(answer) is type(on_cpu), (answer, on_cpu)
    if answer is not None:
        assert bool(out.isnan().all()), f"{answer}, and yet there are values"
        return True
    words = {4: torch.int32, 2: torch.int16}[out.element_size()]
    assert torch.equal(out.view(words), expected.view(words)), "other values"
    return False


def _bytes(number: int, n: int) -> Tensor:
    return torch.tensor(list(number.to_bytes(n, "little")), dtype=torch.uint8)
