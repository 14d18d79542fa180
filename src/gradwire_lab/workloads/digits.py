"""scikit-learn's handwritten digits (1,797 images of 8 x 8, inside the package: no download), in folds."""

from __future__ import annotations

import functools
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gradwire.errors import InvalidArgument, Unsupported
from gradwire_lab.workloads.base import Batch, Workload, draw_from_epochs, evaluating, step_generator


@functools.cache
def load_digits() -> tuple[Tensor, Tensor]:
    """((1797, 1, 8, 8) float32, about -1 to 1; (1797,) int64)."""
    try:
        from sklearn.datasets import load_digits as load
    except ImportError as error:
        raise Unsupported("the digits come with scikit-learn: pip install 'gradwire[bench]'") from error
    images, labels = load(return_X_y=True)
    # Pixels are 0 to 16.
    pixels = torch.from_numpy(images).float().view(-1, 1, 8, 8) / 8.0 - 1.0
    return pixels, torch.from_numpy(labels).long()


class DigitsWorkload(Workload):
    """A classifier of digits; the model is the subclass's.

    Args:
        folds, fold: held out is the `fold`-th of `folds` equal parts of a fixed shuffle; the rest is for training.
    """

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
