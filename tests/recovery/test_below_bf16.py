"""Fewer bytes than bfloat16 and nearer the truth: gcomp with a fixed number of bits, on gradients of a real training."""

import pytest
import torch
from torch import nn

from float_messages import decode, encode
from gcomp_gradients import fitted_table
from gradwire.codecs.gcomp import GCompCodec


def trained_gradient(optimizer_name: str, steps: int) -> torch.Tensor:
    """(n,) float32: the gradient of a small network after `steps` steps on a task that it can learn."""
    numbers = torch.Generator().manual_seed(3)
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(32, 256), nn.SiLU(), nn.Linear(256, 256), nn.SiLU(), nn.Linear(256, 8))
    options = {"adamw": {"lr": 1e-3}, "sgd": {"lr": 0.05, "momentum": 0.9}}[optimizer_name]
    optimizer = {"adamw": torch.optim.AdamW, "sgd": torch.optim.SGD}[optimizer_name](model.parameters(), **options)
    truth = torch.randn(32, 8, generator=numbers)
    for step in range(steps + 1):
        batch = torch.randn(64, 32, generator=numbers)
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(batch), (batch @ truth).argmax(1)).backward()
        if step < steps:
            optimizer.step()
    return torch.cat([parameter.grad.reshape(-1) for parameter in model.parameters() if parameter.grad is not None])


@pytest.mark.parametrize("bits", [10, 11])
@pytest.mark.parametrize("steps", [5, 60])
@pytest.mark.parametrize("optimizer_name", ["adamw", "sgd"])
def test_ten_and_eleven_bits_send_less_than_bf16_and_are_nearer_the_truth(
    optimizer_name: str, steps: int, bits: int
) -> None:
    """bfloat16 keeps 7 bits of a mantissa, so `bits` of them are nearer by about 2^(bits - 7): here by 0.8 of that."""
    gradient = trained_gradient(optimizer_name, steps)
    codec = GCompCodec("uniform", bits=bits, table=fitted_table(gradient))
    message = encode(codec, gradient)
    decoded = decode(codec, message, gradient.numel())
    rounded, truth = gradient.bfloat16(), gradient.double()
    assert message.numel() < rounded.nbytes
    assert (decoded - truth).norm() <= (rounded.double() - truth).norm() / (0.8 * 2 ** (bits - 7))
