"""A small ResNet and a small VGG on scikit-learn's handwritten digits (1,797 images of 8 x 8, inside the package), in folds."""

import functools
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gradwire.checks import choice as check_choice
from gradwire.errors import InvalidArgument, needs_extra
from gradwire_lab.workloads.base import Batch, Workload, draw_from_epochs, evaluating, step_generator
from gradwire_lab.workloads.vision import ResNet, Vgg

_ACTIVATIONS: dict[str, type[nn.Module]] = {"relu": nn.ReLU, "silu": nn.SiLU}


@functools.cache
def load_digits() -> tuple[Tensor, Tensor]:
    """((1797, 1, 8, 8) float32, about -1 to 1; (1797,) int64)."""
    try:
        from sklearn.datasets import load_digits as load
    except ImportError as error:
        raise needs_extra("the digits come with scikit-learn", "bench") from error
    images, labels = load(return_X_y=True)
    # Pixels are 0 to 16.
    return torch.from_numpy(images).float().view(-1, 1, 8, 8) / 8.0 - 1.0, torch.from_numpy(labels).long()


class DigitsWorkload(Workload):
    """A classifier of digits; held out is the `fold`-th of `folds` equal parts of a fixed shuffle."""

    default_optimizer = "momentum"
    default_batch_size = 32
    learning_rates: ClassVar[dict[str, float]] = {"momentum": 0.05, "nesterov": 0.05}

    def __init__(self, *, folds: int = 5, fold: int = 0, **options: Any) -> None:
        super().__init__(**options)
        if folds < 2 or not 0 <= fold < folds:
            raise InvalidArgument(f"fold={fold}, folds={folds}: expected at least 2 folds and 0 <= fold < folds")
        self.folds, self.fold = folds, fold

    @functools.cached_property
    def _split(self) -> tuple[Tensor, Tensor]:
        order = torch.randperm(load_digits()[1].numel(), generator=step_generator("digits", "folds"))
        held_out = torch.arange(order.numel()) % self.folds == self.fold
        return order[~held_out], order[held_out]

    def batch_at(self, step: int, rank: int, world_size: int, batch_size: int, seed: int) -> Batch:
        images, labels = load_digits()
        training = self._split[0]
        chosen = training[draw_from_epochs(training.numel(), step, rank, world_size, batch_size, seed)]
        return images[chosen], labels[chosen]

    def evaluate(self, model: nn.Module) -> dict[str, float]:
        """Accuracy and loss on the held-out fold."""
        with evaluating(model) as device:
            images, labels = (values[self._split[1]].to(device) for values in load_digits())
            logits = model(images)
            accuracy = (logits.argmax(1) == labels).double().mean()
            return {"accuracy": float(accuracy), "held_out_loss": float(F.cross_entropy(logits, labels))}


class ResNetWorkload(DigitsWorkload):
    """The small ResNet: 1.2 M parameters by default, with batch normalisation.

    Args:
        activation: "relu" or "silu". Under ReLU one unit in the last place of one gradient can switch a unit on or off, and
            has grown to 1e-3 of loss 40 steps later; under SiLU it stays at 1e-7, which is what comparing losses needs.
    """

    stands_for = "convolutional networks (ResNet), at a size that trains on a laptop"

    def __init__(self, *, width: int = 32, activation: str = "relu", **options: Any) -> None:
        super().__init__(**options)
        self.width, self.activation = width, check_choice("activation", activation, _ACTIVATIONS)

    def make_model(self) -> nn.Module:
        width, activation = self.width, _ACTIVATIONS[self.activation]()
        stem = nn.Sequential(nn.Conv2d(1, width, 3, 1, 1, bias=False), nn.BatchNorm2d(width), activation)
        # The width doubles as the image halves.
        blocks = [[(n * width, 3, stride), (n * width, 3, 1)] for n, stride in ((1, 1), (2, 2), (4, 2), (8, 1))]
        return ResNet(stem, width, blocks, 10, activation)


class VggWorkload(DigitsWorkload):
    """The small VGG: 0.9 M parameters by default, 0.8 M of them in the dense layers, the first two of which give `dense`."""

    stands_for = "VGG, at a size that trains on a laptop"
    learning_rates: ClassVar[dict[str, float]] = {"momentum": 0.01, "nesterov": 0.01}

    def __init__(self, *, width: int = 32, dense: int = 768, **options: Any) -> None:
        super().__init__(**options)
        self.width, self.dense = width, dense

    def make_model(self) -> nn.Module:
        stages = [(self.width, 2), (2 * self.width, 2)]
        return Vgg(1, stages, 2, self.dense, 10, (nn.Conv2d, nn.Linear))
