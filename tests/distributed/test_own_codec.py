"""A codec of one's own is one class: here sign, exponent and 3 bits of the mantissa. It works in host memory, in any `Ring`."""

import pytest
import torch

from buckets import Driver, drive
from gradwire.errors import CorruptMessage, InvalidArgument
from gradwire.exchange.ring import Ring
from gradwire.schemes.compressed import Compressed
from gradwire.schemes.slimgc import SlimGC
from ranks import on_ranks

_DROPPED = 32 - 12  # sign, 8 bits of exponent and 3 of the mantissa stay
N = 10_001


class ThreeBits:
    """Float32 cut to 12 bits; two values in three bytes, the first in the lower bits. Values err by less than 2^-3 of them."""

    name = "three-bits"
    feeds_back = True

    def max_encoded_bytes(self, n_elements: int, dtype: torch.dtype) -> int:
        return 3 * -(-n_elements // 2)

    def encode(self, gradient: torch.Tensor, out: torch.Tensor, importance: torch.Tensor | None = None) -> int:
        words = torch.zeros(gradient.numel() + gradient.numel() % 2, dtype=torch.int32)
        words[: gradient.numel()] = (gradient.view(torch.int32) >> _DROPPED) & 0xFFF
        pairs = words[0::2] | words[1::2] << 12
        n_bytes = self.max_encoded_bytes(gradient.numel(), gradient.dtype)
        for place in range(3):
            out[place:n_bytes:3] = (pairs >> 8 * place & 0xFF).to(torch.uint8)
        return n_bytes

    def decode(self, message: torch.Tensor, out: torch.Tensor) -> None:
        if message.numel() != self.max_encoded_bytes(out.numel(), out.dtype):
            raise CorruptMessage(f"{message.numel()} bytes are no {out.numel()} values: restart from a checkpoint")
        low, middle, high = (message[place::3].int() for place in range(3))
        pairs = low | middle << 8 | high << 16
        words = torch.stack([pairs & 0xFFF, pairs >> 12], 1).view(-1)[: out.numel()]
        out.copy_((words << _DROPPED).view(torch.float32))


class ThreeBitsScheme(Compressed):
    name = "three-bits"

    codec: ThreeBits

    def __init__(self, topology: str) -> None:
        super().__init__(collective=Ring(ThreeBits(), topology))

    @property
    def configuration(self) -> dict[str, object]:
        assert self.collective is not None
        return self.collective.configuration


def gradient_of(rank: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(rank)
    return torch.rand(N, generator=generator) + 0.5  # of one sign: cuts add up, and nothing cancels


def cut(values: torch.Tensor) -> torch.Tensor:
    return (values.view(torch.int32) >> _DROPPED << _DROPPED).view(torch.float32)


def test_what_goes_in_comes_out_but_for_what_is_cut() -> None:
    codec, values = ThreeBits(), gradient_of(0)
    message = torch.zeros(codec.max_encoded_bytes(N, values.dtype), dtype=torch.uint8)
    out = torch.empty(N)
    codec.decode(message[: codec.encode(values, message)], out)
    assert torch.equal(out, cut(values))
    assert bool(((values - out).abs() < values.abs() / 8).all())
    with pytest.raises(CorruptMessage):
        codec.decode(message[:-1], out)


@pytest.mark.parametrize("topology", ["ring", "direct"])
@on_ranks([1, 2, 3])
def test_ranks_get_one_mean_and_send_12_bits_a_value(rank: int, world_size: int, topology: str) -> torch.Tensor:
    driver = Driver(ThreeBitsScheme(topology), [torch.zeros(N)], [1])
    (result,) = driver.reduce([gradient_of(rank)])
    exact = torch.stack([gradient_of(rank) for rank in range(world_size)]).double().mean(0)
    n_cuts = world_size if world_size > 1 else 0
    assert bool((result <= exact * (1 + 1e-6)).all())
    assert bool((result >= exact * (1 - 1 / 8) ** n_cuts * (1 - 1e-6)).all())
    sent, payload = driver.last_buckets[0].record.bytes_sent, 2 * (world_size - 1) / world_size * N * 12 / 8
    assert payload <= sent <= payload + 300 + 0.02 * payload if world_size > 1 else sent == 0
    return result


@pytest.mark.parametrize(("feeds", "match"), [(False, "does not go with three-bits"), (None, "attribute feeds_back")])
@on_ranks(1)
def test_error_that_no_codec_wants_is_refused(rank: int, world_size: int, feeds: bool | None, match: str) -> None:
    scheme = ThreeBitsScheme("ring")
    scheme.codec, scheme.error_feedback = ThreeBits(), True
    scheme.codec.feeds_back = feeds  # type: ignore[assignment]
    for door in (lambda: drive(scheme), lambda: SlimGC(scheme.codec, error_feedback=True)):
        with pytest.raises(InvalidArgument, match=match):
            door()
