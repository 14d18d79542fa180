"""A small ResNet on handwritten digits."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from gradwire.checks import choice as check_choice
from gradwire_lab.workloads.digits import DigitsWorkload

_ACTIVATIONS: dict[str, type[nn.Module]] = {"relu": nn.ReLU, "silu": nn.SiLU}


class ResidualBlock(nn.Module):
    """Two 3x3 convolutions and a shortcut (He et al., 2015, basic block)."""

    def __init__(self, n_in: int, n_out: int, stride: int, activation: nn.Module) -> None:
        super().__init__()
        self.conv_1 = nn.Conv2d(n_in, n_out, 3, stride, 1, bias=False)
        self.norm_1 = nn.BatchNorm2d(n_out)
        self.conv_2 = nn.Conv2d(n_out, n_out, 3, 1, 1, bias=False)
        self.norm_2 = nn.BatchNorm2d(n_out)
        self.activation = activation
        self.shortcut = nn.Sequential()
        if stride != 1 or n_in != n_out:
            self.shortcut = nn.Sequential(nn.Conv2d(n_in, n_out, 1, stride, bias=False), nn.BatchNorm2d(n_out))

    def forward(self, x: Tensor) -> Tensor:
        y = self.activation(self.norm_1(self.conv_1(x)))
        out: Tensor = self.activation(self.norm_2(self.conv_2(y)) + self.shortcut(x))
        return out


class DigitsResNet(nn.Module):
    """Four residual blocks, the width doubling as the image halves."""

    def __init__(self, width: int, activation: nn.Module) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(1, width, 3, 1, 1, bias=False), nn.BatchNorm2d(width), activation)
        self.blocks = nn.Sequential(
            ResidualBlock(width, width, 1, activation),
            ResidualBlock(width, 2 * width, 2, activation),
            ResidualBlock(2 * width, 4 * width, 2, activation),
            ResidualBlock(4 * width, 8 * width, 1, activation),
        )
        self.classify = nn.Linear(8 * width, 10)

    def forward(self, images: Tensor) -> Tensor:
        """images: (batch, 1, 8, 8) float32; returns (batch, 10) logits."""
        out: Tensor = self.classify(self.blocks(self.stem(images)).mean((2, 3)))
        return out


class ResNetWorkload(DigitsWorkload):
    """The small ResNet: 1.2 M parameters by default, with batch normalisation.

    Args:
        width: channels of the first block.
        activation: "relu" or "silu". Under ReLU one unit in the last place of one gradient can switch a unit on or off, and
            has grown to 1e-3 of loss 40 steps later; under SiLU it stays at 1e-7, which is what comparing losses needs.
        **options: those of `DigitsWorkload`.
    """

    stands_for = "convolutional networks (ResNet), at a size that trains on a laptop"

    def __init__(self, *, width: int = 32, activation: str = "relu", **options: Any) -> None:
        super().__init__(**options)
        check_choice("activation", activation, _ACTIVATIONS)
        self.width, self.activation = width, activation

    def make_model(self) -> nn.Module:
        return DigitsResNet(self.width, _ACTIVATIONS[self.activation]())
