"""Convolutional networks, and the papers' own with their exact parameter counts: ResNet-50 and -152, VGG-16 and -19."""

import functools
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gradwire_lab.workloads.base import Batch, Workload, draw_from_epochs, evaluating, step_generator
from gradwire_lab.workloads.images import DEFAULT_IMAGE_SIZE, Cifar10, ImageFolder, open_images

Convolution = tuple[int, int, int]  # outputs, pixels a side of the kernel, stride


class Residual(nn.Module):
    """Convolutions without bias, each normalised, and a shortcut round them (He et al., 2015)."""

    def __init__(self, n_in: int, convolutions: Sequence[Convolution], activation: nn.Module) -> None:
        super().__init__()
        self.activation, self.n_layers = activation, len(convolutions)
        n, stride = n_in, 1
        for number, (n_out, kernel, step) in enumerate(convolutions, 1):
            self.add_module(f"conv_{number}", nn.Conv2d(n, n_out, kernel, step, kernel // 2, bias=False))
            self.add_module(f"norm_{number}", nn.BatchNorm2d(n_out))
            n, stride = n_out, stride * step
        self.shortcut = nn.Sequential()
        if stride != 1 or n_in != n:
            self.shortcut = nn.Sequential(nn.Conv2d(n_in, n, 1, stride, bias=False), nn.BatchNorm2d(n))

    def forward(self, x: Tensor) -> Tensor:
        y = x
        for number in range(1, self.n_layers + 1):
            y = self.get_submodule(f"norm_{number}")(self.get_submodule(f"conv_{number}")(y))
            y = self.activation(y + self.shortcut(x) if number == self.n_layers else y)
        return y


class ResNet(nn.Module):
    """`stem`, with `n_stem` outputs, then residual blocks, the mean over the image, and a dense layer."""

    def __init__(
        self,
        stem: nn.Sequential,
        n_stem: int,
        blocks: Sequence[Sequence[Convolution]],
        n_classes: int,
        activation: nn.Module,
    ) -> None:
        super().__init__()
        self.stem = stem
        sizes = [n_stem, *(convolutions[-1][0] for convolutions in blocks)]
        self.blocks = nn.Sequential(*(Residual(n, one, activation) for n, one in zip(sizes, blocks, strict=False)))
        self.classify = nn.Linear(sizes[-1], n_classes)

    def forward(self, images: Tensor) -> Tensor:
        """images: (batch, channels, h, w) float32; returns (batch, n_classes) logits."""
        return self.classify(self.blocks(self.stem(images)).mean((2, 3)))


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
        return self.classify(self.features(images).flatten(1))


# Blocks of a stage: 1x1, 3x3 and 1x1 convolutions, the stride on the 3x3 ("v1.5"), as in common use (He et al., table 1).
_RESNET_STAGES = {"resnet50": (3, 4, 6, 3), "resnet152": (3, 8, 36, 3)}
# Convolutions per stage, each stage followed by a 2x2 pooling (Simonyan and Zisserman, 2014, columns D and E).
_VGG_STAGES = {"vgg16": (2, 2, 3, 3, 3), "vgg19": (2, 2, 4, 4, 4)}

_BATCH_SIZES = {"resnet50": 4, "resnet152": 2, "vgg16": 2, "vgg19": 2}  # a few seconds a step on one core
_STANDS_FOR = {
    "resnet50": "ResNet-50, 25.6 M parameters: GComp (ImageNet), ACP-SGD (batch 64)",
    "resnet152": "ResNet-152, 60.2 M parameters: ACP-SGD (batch 32)",
    "vgg16": "VGG-16, 138 M parameters: ACP-SGD (CIFAR-10)",
    "vgg19": "VGG-19, 144 M parameters: homomorphic compression (CIFAR-10, batch 128)",
}


class VisionWorkload(Workload):
    """One of the papers' image classifiers; `name`: "resnet50", "resnet152", "vgg16" or "vgg19".

    Args:
        data_dir: CIFAR-10 or an ImageNet-like folder; without it the images are random and the run is shape-only.
        image_size: pixels a side; default 64 for random images and folders, 32 for CIFAR-10 (the papers: 224).
        n_classes: outputs of the last layer; 1,000 keeps the published parameter counts with any data.
    """

    default_optimizer = "momentum"

    def __init__(
        self,
        *,
        name: str,
        data_dir: str | None = None,
        image_size: int | None = None,
        n_classes: int = 1000,
        batch_size: int | None = None,
        **options: Any,
    ) -> None:
        super().__init__(name=name, batch_size=_BATCH_SIZES[name] if batch_size is None else batch_size, **options)
        self.data_dir, self.image_size, self.n_classes = data_dir, image_size, n_classes
        self.stands_for = _STANDS_FOR[name]
        self.data = "shape-only" if data_dir is None else "real"

    @functools.cached_property
    def _images(self) -> Cifar10 | ImageFolder | None:
        return None if self.data_dir is None else open_images(self.data_dir, self.image_size, self.n_classes)

    def make_model(self) -> nn.Module:
        if self.name in _VGG_STAGES:
            # Without batch normalisation, and pooled to 7x7, so that any image size from 32 on will do.
            stages = [(min(64 << stage, 512), n_layers) for stage, n_layers in enumerate(_VGG_STAGES[self.name])]
            return Vgg(3, stages, 7, 4096, self.n_classes, nn.Conv2d)
        stem = nn.Sequential(
            nn.Conv2d(3, 64, 7, 2, 3, bias=False), nn.BatchNorm2d(64), nn.ReLU(), nn.MaxPool2d(3, 2, 1)
        )
        blocks = [
            [(64 << stage, 1, 1), (64 << stage, 3, 2 if stage and not block else 1), (256 << stage, 1, 1)]
            for stage, n_blocks in enumerate(_RESNET_STAGES[self.name])
            for block in range(n_blocks)
        ]
        return ResNet(stem, 64, blocks, self.n_classes, nn.ReLU())

    def batch_at(self, step: int, rank: int, world_size: int, batch_size: int, seed: int) -> Batch:
        if found := self._images:
            return found.training(draw_from_epochs(found.n_training, step, rank, world_size, batch_size, seed))
        generator = step_generator(seed, "random images", step, rank, world_size)
        side = self.image_size or DEFAULT_IMAGE_SIZE
        images = torch.randn(batch_size, 3, side, side, generator=generator)
        return images, torch.randint(self.n_classes, (batch_size,), generator=generator)

    def evaluate(self, model: nn.Module) -> dict[str, float]:
        """Accuracy and loss on up to 512 held-out images of the user's folder."""
        held_out = self._images.held_out(512) if self._images else None
        if held_out is None:
            return {}
        images, labels = held_out
        n_correct, loss_sum = 0, 0.0
        with evaluating(model) as device:
            for x, y in zip(images.split(32), labels.to(device).split(32), strict=True):
                logits = model(x.to(device))
                n_correct += int((logits.argmax(1) == y).sum())
                loss_sum += float(F.cross_entropy(logits, y, reduction="sum"))
        return {"accuracy": n_correct / len(labels), "held_out_loss": loss_sum / len(labels)}
