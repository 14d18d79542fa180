"""A small VGG on handwritten digits: most of its parameters lie in dense layers, behind ReLU."""

from __future__ import annotations

from typing import Any, ClassVar

from torch import Tensor, nn

from gradwire_lab.workloads.digits import DigitsWorkload


def start_for_relu(model: nn.Module, *kinds: type[nn.Conv2d] | type[nn.Linear]) -> None:
    """Without normalisation torch's own start is too small for many layers of ReLU: no gradient would arrive."""
    for module in model.modules():
        if isinstance(module, kinds):
            nn.init.kaiming_normal_(module.weight, nonlinearity="relu")
            if module.bias is not None:
                nn.init.zeros_(module.bias)


class DigitsVgg(nn.Module):
    """Two stages of two 3x3 convolutions, each halving the image, then three dense layers; no normalisation."""

    def __init__(self, width: int, dense: int) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        n_in = 1
        for n_out in (width, 2 * width):
            layers += [nn.Conv2d(n_in, n_out, 3, 1, 1), nn.ReLU(), nn.Conv2d(n_out, n_out, 3, 1, 1), nn.ReLU()]
            layers.append(nn.MaxPool2d(2))
            n_in = n_out
        self.features = nn.Sequential(*layers)
        self.classify = nn.Sequential(
            nn.Linear(2 * width * 2 * 2, dense), nn.ReLU(), nn.Linear(dense, dense), nn.ReLU(), nn.Linear(dense, 10)
        )
        start_for_relu(self, nn.Conv2d, nn.Linear)

    def forward(self, images: Tensor) -> Tensor:
        """images: (batch, 1, 8, 8) float32; returns (batch, 10) logits."""
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
        return DigitsVgg(self.width, self.dense)
