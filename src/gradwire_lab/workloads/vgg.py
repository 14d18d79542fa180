"""A small VGG on handwritten digits: most of its parameters lie in dense layers, behind ReLU."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

from torch import Tensor, nn

from gradwire_lab.workloads.digits import DigitsWorkload


class Vgg(nn.Module):
    """Stages of 3x3 convolutions, each halving the image, then three dense layers; no normalisation.

    Args:
        n_in: channels of the images. stages: outputs and number of convolutions of each.
        n_pooled: pixels a side that the dense layers see. started: the kinds of layer that begin as ReLU needs it.
    """

    def __init__(
        self, n_in: int, stages: Sequence[tuple[int, int]], n_pooled: int, dense: int, n_classes: int, started: Any
    ) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        for n_out, n_layers in stages:
            for _ in range(n_layers):
                layers += [nn.Conv2d(n_in, n_out, 3, 1, 1), nn.ReLU()]
                n_in = n_out
            layers.append(nn.MaxPool2d(2))
        self.features = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(n_pooled))
        self.classify = nn.Sequential(
            nn.Linear(n_in * n_pooled**2, dense),
            nn.ReLU(),
            nn.Linear(dense, dense),
            nn.ReLU(),
            nn.Linear(dense, n_classes),
        )
        # Without normalisation torch's own start is too small for many layers of ReLU: no gradient would arrive.
        for module in self.modules():
            if isinstance(module, started):
                nn.init.kaiming_normal_(module.weight, nonlinearity="relu")
                nn.init.zeros_(module.bias)

    def forward(self, images: Tensor) -> Tensor:
        """images: (batch, n_in, h, w) float32; returns (batch, n_classes) logits."""
        out: Tensor = self.classify(self.features(images).flatten(1))
        return out


class VggWorkload(DigitsWorkload):
    """The small VGG: 0.9 M parameters by default, 0.8 M of them in the dense layers.

    Args:
        width: channels of the first stage. dense: outputs of the first two dense layers.
        **options: those of `DigitsWorkload`.
    """

    stands_for = "VGG, at a size that trains on a laptop"
    learning_rates: ClassVar[dict[str, float]] = {"momentum": 0.01, "nesterov": 0.01}

    def __init__(self, *, width: int = 32, dense: int = 768, **options: Any) -> None:
        super().__init__(**options)
        self.width, self.dense = width, dense

    def make_model(self) -> nn.Module:
        stages = [(self.width, 2), (2 * self.width, 2)]
        return Vgg(1, stages, 2, self.dense, 10, (nn.Conv2d, nn.Linear))
