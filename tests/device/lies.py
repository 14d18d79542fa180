"""What no rank sends: messages that lie under right checksums, and elements; what kernels and the CPU's codecs say to them."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from kernel_checks import Float
from torch import Tensor

from gradwire.codecs.gcomp import GCompCodec
from gradwire.codecs.quantised import Quantised
from gradwire.codecs.selection import OUTSIDE, add_elements
from gradwire.errors import GradwireError
from gradwire.gpu.kernels import Kernels, using
from gradwire.gpu.launching import raise_error
from sealing import SEALS, put

Coded = Float | GCompCodec | Quantised
N_VALUES = 90  # of every message here: one chunk, and fewer than eight partitions


def message_of(codec: Coded, values: Tensor, importance: Tensor | None = None, **cuts: tuple[int, ...]) -> Tensor:
    """A message of the CPU's codec in memory of exactly its length."""
    out = torch.zeros(1 << 12, dtype=torch.uint8)
    return out[: codec.encode(values, out, importance, **cuts)].clone()


def error_of(
    kernels: Kernels, codec: Coded, message: Tensor, out: Tensor, importance: Tensor | None = None, **cuts: Any
) -> int:
    """The error word after decoding into `out`; a message of floats is in the codec's room, filled up with zeros."""
    if isinstance(codec, Float):
        n_zeros = codec.max_encoded_bytes(out.numel(), out.dtype) - message.numel()
        message = torch.cat([message, message.new_zeros(n_zeros)])
    error = torch.zeros(1, dtype=torch.int32)
    with using(kernels):
        codec.decode(message, out, importance, error=error, **cuts)
    return int(error)


def is_refused(
    kernels: Kernels, codec: Coded, message: Tensor, lie: Tensor, out: Tensor, importance: Tensor | None = None
) -> bool:
    """Whether kernels refuse what became of `message`: as the CPU's codec does, by the same error; or both read the
    same. A device codec also refuses options that are not its own."""
    code = error_of(kernels, codec, lie, out, importance)
    answer = _error_of(lambda: raise_error(code, codec.name, kernels.device))
    expected = torch.empty_like(out)
    on_cpu = _error_of(lambda: codec.decode(lie, expected, importance))
    if on_cpu is not None or answer is not None:
        assert answer is not None, f"the CPU says: {on_cpu}"
        options = [4, 5, 6, 7] if isinstance(codec, GCompCodec) else [5, 6, 7, 16]
        is_option = lie.numel() > max(options) and not torch.equal(lie[options], message[options])
        # GComp's kernels look at the options first: another error may come of them than the CPU's.
        may_differ = is_option and (on_cpu is None or isinstance(codec, GCompCodec))
        assert type(answer) is type(on_cpu) or may_differ, (answer, on_cpu)
        assert bool(out.isnan().all()), f"{answer}, and yet there are values"
        return True
    words = {4: torch.int32, 2: torch.int16}[out.element_size()]
    assert torch.equal(out.view(words), expected.view(words)), "other values"
    return False


def _error_of(call: Callable[[], object]) -> GradwireError | None:
    try:
        call()
    except GradwireError as error:
        return error
    return None


def lies_of(codec: Coded, message: Tensor, step: int = 1) -> Iterator[Tensor]:
    """Every `step`-th byte with its lowest or highest bit changed; of GComp, lengths and offsets that are huge; cut short."""
    is_gcomp = isinstance(codec, GCompCodec)
    for byte in range(4 if is_gcomp else 0, message.numel(), step):
        for flip in (0x01, 0x80):
            lie = message.clone()
            lie[byte] ^= flip
            yield sealed(codec, lie)
    if not is_gcomp:
        return
    for at, layout in ((16, "<Q"), (24, "<Q"), (32, "<I"), (48, "<Q"), (56, "<I"), (64, "<I"), (68, "<I")):
        n_bits = 64 if layout == "<Q" else 32
        for number in ((1 << n_bits) - 1, (1 << (n_bits - 1)) - 32, 0, 1 << 24):
            yield sealed(codec, put(message.clone(), at, layout, number))
    for n_bytes in (0, 1, 47, 48, 79, message.numel() - 1):
        lie = message[:n_bytes].clone()
        yield sealed(codec, put(lie, 24, "<Q", n_bytes)) if n_bytes >= 48 else lie


def sealed(codec: Coded, message: Tensor) -> Tensor:
    SEALS[codec.name](message, N_VALUES)
    return message


class Elements(NamedTuple):
    indices: list[int]
    n_taken: int | None = None
    n_elements: int = 90


WRONG_ELEMENTS = {
    "an index past the end": Elements([3, 7, 90]), "a negative index": Elements([-1, 3, 7]),
    "an index far outside": Elements([3, 1 << 30]), "the least index": Elements([-(1 << 31)]),
    "an index twice": Elements([3, 7, 7]), "indices that fall": Elements([3, 9, 7]),
    "more than there is room for": Elements([3, 7, 9], 4), "a negative number": Elements([3, 7, 9], -1),
    "an index for no values": Elements([0], 1, 0),
}  # fmt: skip


def assert_reported(kernels: Kernels | None, wrong: Elements, sums: Tensor) -> None:
    """Add them to `sums` (n,) float32, on the CPU without kernels. Raises: AssertionError (it was not reported)."""
    indices = torch.tensor(wrong.indices, dtype=torch.int32)
    error = torch.zeros(1, dtype=torch.int32)
    n_taken = None if wrong.n_taken is None else torch.tensor([wrong.n_taken], dtype=torch.int32)
    with contextlib.nullcontext() if kernels is None else using(kernels):
        add_elements(indices, torch.ones(len(wrong.indices)), sums, error, n_taken)
    assert int(error) == OUTSIDE
