"""Trainings through the broadcast schemes whose results and bytes must never change, whatever moves the messages."""

import hashlib
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import gradwire
from gradwire.schemes.aqgb.pacing import Pacing, PacingLimits
from gradwire.schemes.aqgb.scheme import Aqgb, Broadcast

SIZES = [(150, 151), (7,), (40_003,), (64, 33)]
N_STEPS = 4


class InTwoStages(Broadcast):
    """Of every block `bits` first and then 5 more: what aqgb does when it has the time, at any speed."""

    def _make_pacing(self, *arguments: Any) -> Pacing:
        self.limits = PacingLimits(self.bits / 32, (self.bits + 5) / 32, max_contention=1)
        pacing = super()._make_pacing(*arguments)
        pacing.first_bits = lambda unsent_elements: self.bits  # type: ignore[method-assign]
        pacing.more_bits = lambda block, sent_bits, extra_bytes=0: self.bits + 5 - sent_bits  # type: ignore[method-assign]
        return pacing


# name: (scheme, options, dtype, ranks)
CASES: dict[str, tuple[type, dict[str, Any], torch.dtype, tuple[int, ...]]] = {
    "2 bits": (Broadcast, {"bits": 2}, torch.float32, (2, 3)),
    "8 bits": (Broadcast, {"bits": 8}, torch.float32, (2, 3, 4)),
    "8 bits, ring": (Broadcast, {"bits": 8, "topology": "ring"}, torch.float32, (2, 3, 4)),
    "31 bits": (Broadcast, {"bits": 31, "partition": 64}, torch.float32, (2,)),
    "32 bits": (Broadcast, {"bits": 32}, torch.float32, (2, 3)),
    "32 bits, ring": (Broadcast, {"bits": 32, "topology": "ring"}, torch.float32, (3,)),
    "5 bits, feedback": (Broadcast, {"bits": 5, "error_feedback": True}, torch.float32, (2, 3)),
    "6 bits, bfloat16": (Broadcast, {"bits": 6}, torch.bfloat16, (2, 3)),
    "32 bits, bfloat16": (Broadcast, {"bits": 32}, torch.bfloat16, (3,)),
    "9 bits, float16": (Broadcast, {"bits": 9, "topology": "ring"}, torch.float16, (3,)),
    "one block": (Broadcast, {"bits": 4, "blocks": 1}, torch.float32, (2,)),
    "clipped": (Broadcast, {"bits": 7, "max_grad_norm": 0.01}, torch.float32, (2,)),
    "two stages": (InTwoStages, {"bits": 3}, torch.float32, (2, 3)),
    "two stages, ring": (InTwoStages, {"bits": 3, "topology": "ring"}, torch.float32, (3,)),
    "to the last bit": (InTwoStages, {"bits": 27, "error_feedback": True}, torch.float32, (2,)),
    "aqgb": (Aqgb, {"floor": 0.25, "ceiling": 0.25, "max_contention": 1}, torch.float32, (2, 3)),
}


class Weighted(nn.Module):
    """A parameter whose gradient is what the forward pass is given: no arithmetic that depends on the machine."""

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(shape, dtype=dtype))

    def forward(self, gradient: torch.Tensor) -> torch.Tensor:
        return (self.weight * gradient).sum()


class Model(nn.Module):
    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.parts = nn.ModuleList(Weighted(shape, dtype) for shape in SIZES)

    def forward(self, gradients: list[torch.Tensor]) -> torch.Tensor:
        return torch.stack([part(gradient) for part, gradient in zip(self.parts, gradients, strict=True)]).sum()


def train_case(rank: int, world_size: int, name: str) -> tuple[str, int]:
    """SHA-256 of the parameters after every step, and the bytes that this rank sent."""
    make, options, dtype, _ = CASES[name]
    torch.set_num_threads(1)
    ddp = DistributedDataParallel(Model(dtype), bucket_cap_mb=0.05)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.5)
    options = {"blocks": [[f"parts.{index}"] for index in range(len(SIZES))]} | options
    attachment = gradwire.attach(ddp, optimizer, make(**options), timeout_s=60)
    digest, mine = hashlib.sha256(), np.random.default_rng(100 + rank)
    for step in range(N_STEPS):
        gradients = []
        for shape in SIZES:
            values = mine.standard_normal(shape) * np.exp(2 * mine.standard_normal(shape)) * 1e-3
            values.reshape(-1)[:: 11 + rank + step] = 0
            gradients.append(torch.from_numpy(values.astype(np.float32)).to(dtype))
        optimizer.zero_grad()
        ddp(gradients).backward()
        optimizer.step()
        attachment.flush()
        for parameter in ddp.parameters():
            digest.update(parameter.detach().view(-1).view(torch.uint8).numpy().tobytes())
    attachment.close()
    return digest.hexdigest(), attachment.stats()["bytes_sent"]
