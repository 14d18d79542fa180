"""A small GPT, the demo's workload, and a small BERT, on the bytes of Python's standard library."""

import math
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gradwire.errors import InvalidArgument
from gradwire_lab.workloads.base import Batch, Workload, evaluating, step_generator
from gradwire_lab.workloads.text import byte_tokens, crop_batch, spread_crops

_N_BYTES = 256  # the vocabulary: one token a byte
_MASK = _N_BYTES  # the small BERT's token that stands for a hidden byte
_MASKED_SHARE = 0.15  # of the bytes, as in BERT
_IGNORED = -100  # what cross_entropy passes over by itself


class SelfAttention(nn.Module):
    """Multi-head attention; in a causal one no position sees a later one."""

    def __init__(self, width: int, n_heads: int, is_causal: bool) -> None:
        super().__init__()
        self.n_heads, self.is_causal = n_heads, is_causal
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        q, k, v = self.qkv(x).view(batch, length, 3, self.n_heads, width // self.n_heads).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=self.is_causal)
        return self.out(mixed.transpose(1, 2).reshape(batch, length, width))


class GptBlock(nn.Module):
    """Pre-norm transformer block, as in GPT-2."""

    def __init__(self, width: int, n_heads: int, is_causal: bool = True) -> None:
        super().__init__()
        self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = SelfAttention(width, n_heads, is_causal)
        self.widen, self.narrow = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm_1(x))
        return x + self.narrow(F.gelu(self.widen(self.norm_2(x))))


class Transformer(nn.Module):
    """Over bytes, and tokens that stand for none, with learned positions and a tied output layer."""

    def __init__(
        self, n_layers: int, width: int, n_heads: int, length: int, n_tokens: int = _N_BYTES, is_causal: bool = True
    ) -> None:
        super().__init__()
        self.token = nn.Embedding(n_tokens, width)
        self.position = nn.Embedding(length, width)
        self.blocks = nn.ModuleList(GptBlock(width, n_heads, is_causal) for _ in range(n_layers))
        self.norm = nn.LayerNorm(width)
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:
                # GPT-2's scheme: 0.02, and less for the two layers of each block that end on the residual path.
                on_residual = name.endswith(("out.weight", "narrow.weight"))
                nn.init.normal_(parameter, std=0.02 / math.sqrt(2 * n_layers) if on_residual else 0.02)
            elif name.endswith("bias"):
                nn.init.zeros_(parameter)

    def forward(self, tokens: Tensor) -> Tensor:
        """tokens: (batch, length) int64; returns (batch, length, n_tokens) logits: of the next one, if causal."""
        x = self.token(tokens) + self.position.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        return F.linear(self.norm(x), self.token.weight)


class GptWorkload(Workload):
    """The small GPT: 1.4 M parameters by default, 0.1 to 0.25 s a step for 4 ranks on 2 cores. `length`: bytes of context."""

    stands_for = "GPT language models, at a size that trains on a laptop"
    default_batch_size = 8
    # Adam's usual 1e-3 learns no faster here and makes training chaotic: roundings of 1e-7 grow to 1e-2 of loss.
    learning_rates: ClassVar[dict[str, float]] = {
        "sgd": 0.5,
        "momentum": 0.1,
        "nesterov": 0.1,
        "adam": 3e-4,
        "adamw": 3e-4,
        "amsgrad": 3e-4,
    }

    def __init__(
        self, *, n_layers: int = 3, width: int = 192, n_heads: int = 6, length: int = 64, **options: Any
    ) -> None:
        super().__init__(**options)
        if width % n_heads:
            raise InvalidArgument(f"width={width} is not a multiple of n_heads={n_heads}")
        self.n_layers, self.width, self.n_heads, self.length = n_layers, width, n_heads, length

    def make_model(self) -> nn.Module:
        return Transformer(self.n_layers, self.width, self.n_heads, self.length)

    def batch_at(self, step: int, rank: int, world_size: int, batch_size: int, seed: int) -> Batch:
        return crop_batch(byte_tokens()[0], self.length, step, rank, world_size, batch_size, seed)

    def evaluate(self, model: nn.Module) -> dict[str, float]:
        """Loss in nats per byte over 128 held-out crops."""
        return {"held_out_loss": self.mean_loss(model, spread_crops(byte_tokens()[1], self.length, 128), 16)}


class SmallBertWorkload(GptWorkload):
    """The small BERT: 1.4 M parameters by default; attention in both directions. `options`: the small GPT's."""

    stands_for = "BERT, at a size that trains on a laptop"
    # Few bytes of context and many crops: with 64 bytes it takes thousands of steps to find more than the commonest byte.
    default_batch_size = 16
    learning_rates: ClassVar[dict[str, float]] = {"adam": 2e-3, "adamw": 2e-3}

    def __init__(self, *, length: int = 32, **options: Any) -> None:
        super().__init__(length=length, **options)

    def make_model(self) -> nn.Module:
        return Transformer(self.n_layers, self.width, self.n_heads, self.length, _N_BYTES + 1, is_causal=False)

    def batch_at(self, step: int, rank: int, world_size: int, batch_size: int, seed: int) -> Batch:
        crops, _ = crop_batch(byte_tokens()[0], self.length, step, rank, world_size, batch_size, seed)
        drawn = torch.rand(world_size * batch_size, self.length, generator=step_generator(seed, "mask", step))
        return _mask(crops, drawn[rank * batch_size : (rank + 1) * batch_size])

    def evaluate(self, model: nn.Module) -> dict[str, float]:
        """Loss, in nats a masked byte, and share of masked bytes found, over 128 held-out crops."""
        drawn = torch.rand(128, self.length, generator=step_generator("held-out mask"))
        masked, targets = _mask(spread_crops(byte_tokens()[1], self.length, 128)[0], drawn)
        losses, n_found, n_hidden = [], 0, 0
        with evaluating(model) as device:
            for x, y in zip(masked.to(device).split(16), targets.to(device).split(16), strict=True):
                logits = model(x)
                hidden = y != _IGNORED
                losses.append(F.cross_entropy(logits[hidden], y[hidden], reduction="sum"))
                n_found += int((logits[hidden].argmax(1) == y[hidden]).sum())
                n_hidden += int(hidden.sum())
        return {"held_out_loss": float(torch.stack(losses).double().sum()) / n_hidden, "accuracy": n_found / n_hidden}


def _mask(crops: Tensor, drawn: Tensor) -> Batch:
    """Crops with bytes hidden by numbers in [0, 1), and these bytes; (batch, length) int64 each. Every crop hides one."""
    hidden = drawn < _MASKED_SHARE
    hidden[:, 0] |= ~hidden.any(1)
    return crops.masked_fill(hidden, _MASK), crops.masked_fill(~hidden, _IGNORED)
