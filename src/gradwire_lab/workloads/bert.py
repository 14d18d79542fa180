"""A small BERT on the bytes of Python's standard library: it finds bytes that were masked."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gradwire_lab.workloads.base import Batch, evaluating, step_generator
from gradwire_lab.workloads.gpt import N_BYTES, GptWorkload, Transformer
from gradwire_lab.workloads.text import byte_tokens, crop_batch, spread_crops

_MASK = N_BYTES  # the token that stands for a hidden byte
_MASKED_SHARE = 0.15  # of the bytes, as in BERT
_IGNORED = -100  # what cross_entropy passes over


class SmallBertWorkload(GptWorkload):
    """The small BERT: 1.4 M parameters by default; attention in both directions.

    Args:
        length: bytes of context. **options: those of `GptWorkload`.
    """

    stands_for = "BERT, at a size that trains on a laptop"
    # Few bytes of context and many crops: with 64 bytes it takes thousands of steps to find more than the commonest byte.
    default_batch_size = 16
    learning_rates: ClassVar[dict[str, float]] = {"adam": 2e-3, "adamw": 2e-3}

    def __init__(self, *, length: int = 32, **options: Any) -> None:
        super().__init__(length=length, **options)

    def make_model(self) -> nn.Module:
        return Transformer(self.n_layers, self.width, self.n_heads, self.length, N_BYTES + 1, is_causal=False)

    def batch_at(self, step: int, rank: int, world_size: int, batch_size: int, seed: int) -> Batch:
        crops, _ = crop_batch(byte_tokens()[0], self.length, step, rank, world_size, batch_size, seed)
        drawn = torch.rand(world_size * batch_size, self.length, generator=step_generator(seed, "mask", step))
        return _mask(crops, drawn[rank * batch_size : (rank + 1) * batch_size])

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        masked, targets = batch
        return F.cross_entropy(model(masked).flatten(0, 1), targets.flatten(), ignore_index=_IGNORED)

    def evaluate(self, model: nn.Module) -> dict[str, float]:
        """Loss, in nats a masked byte, and share of masked bytes found, over 128 held-out crops."""
        device = next(model.parameters()).device
        drawn = torch.rand(128, self.length, generator=step_generator("held-out mask"))
        masked, targets = _mask(spread_crops(byte_tokens()[1], self.length, 128)[0], drawn)
        losses, n_found, n_hidden = [], 0, 0
        with evaluating(model):
            for x, y in zip(masked.split(16), targets.split(16), strict=True):
                x, y = x.to(device), y.to(device)
                logits = model(x)
                hidden = y != _IGNORED
                losses.append(F.cross_entropy(logits[hidden], y[hidden], reduction="sum"))
                n_found += int((logits[hidden].argmax(1) == y[hidden]).sum())
                n_hidden += int(hidden.sum())
        return {
            "held_out_loss": float(torch.stack(losses).double().sum()) / n_hidden,
            "accuracy": n_found / n_hidden,
        }


def _mask(crops: Tensor, drawn: Tensor) -> Batch:
    """Crops with bytes hidden by numbers in [0, 1), and these bytes; (batch, length) int64 each. Every crop hides one."""
    hidden = drawn < _MASKED_SHARE
    hidden[:, 0] |= ~hidden.any(1)
    return crops.masked_fill(hidden, _MASK), crops.masked_fill(~hidden, _IGNORED)
