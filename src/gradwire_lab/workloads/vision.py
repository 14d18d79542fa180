"""ResNet-50 and -152, VGG-16 and -19: the papers' convolutional networks, with their exact parameter counts."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gradwire_lab.workloads.base import Batch, Workload, step_generator
from gradwire_lab.workloads.vgg import Vgg

# Blocks per stage (He et al., 2015, table 1).
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


class Bottleneck(nn.Module):
    """1x1, 3x3, 1x1 convolutions and a shortcut; the stride sits on the 3x3 ("v1.5"), as in common use."""

    def __init__(self, n_in: int, n_mid: int, stride: int) -> None:
        super().__init__()
        n_out = 4 * n_mid
        self.conv_1, self.norm_1 = nn.Conv2d(n_in, n_mid, 1, bias=False), nn.BatchNorm2d(n_mid)
        self.conv_2, self.norm_2 = nn.Conv2d(n_mid, n_mid, 3, stride, 1, bias=False), nn.BatchNorm2d(n_mid)
        self.conv_3, self.norm_3 = nn.Conv2d(n_mid, n_out, 1, bias=False), nn.BatchNorm2d(n_out)
        self.shortcut = nn.Sequential()
        if stride != 1 or n_in != n_out:
            self.shortcut = nn.Sequential(nn.Conv2d(n_in, n_out, 1, stride, bias=False), nn.BatchNorm2d(n_out))

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.norm_1(self.conv_1(x)))
        y = F.relu(self.norm_2(self.conv_2(y)))
        return F.relu(self.norm_3(self.conv_3(y)) + self.shortcut(x))


class ResNet(nn.Module):
    """ResNet of bottleneck blocks; any image size from 32 on."""

    def __init__(self, stages: tuple[int, ...], n_classes: int) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(3, 64, 7, 2, 3, bias=False), nn.BatchNorm2d(64), nn.ReLU(), nn.MaxPool2d(3, 2, 1)
        )
        blocks: list[nn.Module] = []
        n_in = 64
        for stage, n_blocks in enumerate(stages):
            n_mid = 64 << stage
            for block in range(n_blocks):
                blocks.append(Bottleneck(n_in, n_mid, 2 if stage > 0 and block == 0 else 1))
                n_in = 4 * n_mid
        self.blocks = nn.Sequential(*blocks)
        self.classify = nn.Linear(n_in, n_classes)

    def forward(self, images: Tensor) -> Tensor:
        out: Tensor = self.classify(self.blocks(self.stem(images)).mean((2, 3)))
        return out


class VisionWorkload(Workload):
    """One of the papers' image classifiers, on noise with random labels: the right shapes, nothing to learn.

    Args:
        shape: "resnet50", "resnet152", "vgg16" or "vgg19" (set by the workload's name).
        image_size: pixels a side (the papers: 224; 64 keeps a step of the large networks to seconds on one core).
        n_classes: outputs of the last layer; 1,000 keeps the published parameter counts.
    """

    default_optimizer = "momentum"
    data = "shape-only"

    def __init__(
        self, *, shape: str, image_size: int = 64, n_classes: int = 1000, batch_size: int | None = None, **options: Any
    ) -> None:
        super().__init__(batch_size=batch_size or _BATCH_SIZES[shape], **options)
        self.shape, self.image_size, self.n_classes = shape, image_size, n_classes
        self.stands_for = _STANDS_FOR[shape]

    def make_model(self) -> nn.Module:
        if self.shape in _RESNET_STAGES:
            return ResNet(_RESNET_STAGES[self.shape], self.n_classes)
        # Without batch normalisation, and pooled to 7x7, so that any image size from 32 on will do.
        stages = [(min(64 << stage, 512), n_layers) for stage, n_layers in enumerate(_VGG_STAGES[self.shape])]
        return Vgg(3, stages, 7, 4096, self.n_classes, nn.Conv2d)

    def batch_at(self, step: int, rank: int, world_size: int, batch_size: int, seed: int) -> Batch:
        generator = step_generator(seed, "random images", step, rank, world_size)
        images = torch.randn(batch_size, 3, self.image_size, self.image_size, generator=generator)
        return images, torch.randint(self.n_classes, (batch_size,), generator=generator)

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        return F.cross_entropy(model(batch[0]), batch[1])
