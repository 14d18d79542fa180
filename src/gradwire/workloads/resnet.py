"""A small ResNet on scikit-learn's handwritten digits (1,797 images of 8 x 8, inside the package: no download)."""

from __future__ import annotations

import functools
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gradwire.errors import InvalidArgument, Unsupported
from gradwire.workloads.base import Batch, Workload, draw_from_epochs, evaluating, step_generator

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


@functools.cache
def load_digits() -> tuple[Tensor, Tensor]:
    """((1797, 1, 8, 8) float32, about -1 to 1; (1797,) int64)."""
    try:
        from sklearn.datasets import load_digits as load
    except ImportError as error:
        raise Unsupported(
            "the resnet workload needs scikit-learn for its digits: pip install 'gradwire[bench]'"
        ) from error
    images, labels = load(return_X_y=True)
    # Pixels are 0 to 16.
    pixels = torch.from_numpy(images).float().view(-1, 1, 8, 8) / 8.0 - 1.0
    return pixels, torch.from_numpy(labels).long()


class ResNetWorkload(Workload):
    """The small ResNet: 1.2 M parameters by default, with batch normalisation.

    Args:
        width: channels of the first block.
        activation: "relu" or "silu". Under ReLU one unit in the last place of one gradient can switch a unit on or off, and
            has grown to 1e-3 of loss 40 steps later; under SiLU it stays at 1e-7, which is what comparing losses needs.
        folds, fold: held out is the `fold`-th of `folds` equal parts of a fixed shuffle; the rest is for training.
    """

    stands_for = "convolutional networks (ResNet), at a size that trains on a laptop"
    default_optimizer = "momentum"
    default_batch_size = 32
    learning_rates: ClassVar[dict[str, float]] = {"momentum": 0.05, "nesterov": 0.05}

    def __init__(
        self, *, width: int = 32, activation: str = "relu", folds: int = 5, fold: int = 0, **options: Any
    ) -> None:
        super().__init__(**options)
        if activation not in _ACTIVATIONS:
            raise InvalidArgument(f"activation is one of {', '.join(_ACTIVATIONS)}, not {activation!r}")
        if folds < 2 or not 0 <= fold < folds:
            raise InvalidArgument(f"fold={fold}, folds={folds}: expected at least 2 folds and 0 <= fold < folds")
        self.width, self.activation, self.folds, self.fold = width, activation, folds, fold

    @functools.cached_property
    def _split(self) -> tuple[Tensor, Tensor]:
        order = torch.randperm(load_digits()[1].numel(), generator=step_generator("digits", "folds"))
        held_out = torch.arange(order.numel()) % self.folds == self.fold
        return order[~held_out], order[held_out]

    def make_model(self) -> nn.Module:
        return DigitsResNet(self.width, _ACTIVATIONS[self.activation]())

    def batch_at(self, step: int, rank: int, world_size: int, batch_size: int, seed: int) -> Batch:
        images, labels = load_digits()
        training = self._split[0]
        chosen = training[draw_from_epochs(training.numel(), step, rank, world_size, batch_size, seed)]
        return images[chosen], labels[chosen]

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        return F.cross_entropy(model(batch[0]), batch[1])

    def evaluate(self, model: nn.Module) -> dict[str, float]:
        """Accuracy and loss on the held-out fold."""
        device = next(model.parameters()).device
        images, labels = (values[self._split[1]].to(device) for values in load_digits())
        with evaluating(model):
            logits = model(images)
            accuracy = (logits.argmax(1) == labels).double().mean()
            return {"accuracy": float(accuracy), "held_out_loss": float(F.cross_entropy(logits, labels))}
