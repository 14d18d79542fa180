"""Image data: the user's own CIFAR-10 or ImageNet-like folder."""

import io
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gradwire.errors import CorruptMessage, InvalidArgument, Unsupported

DEFAULT_IMAGE_SIZE = 64  # the papers use 224; 64 keeps a step of the large networks to seconds on one core

_SUFFIXES = {".jpg", ".jpeg", ".png", ".bmp", ".webp"}

# What an unpickled CIFAR-10 batch is made of, and nothing else: arrays, lists, dictionaries, strings.
_SAFE_NAMES = {
    ("numpy.core.multiarray", "_reconstruct"),
    ("numpy._core.multiarray", "_reconstruct"),
    ("numpy.core.numeric", "_frombuffer"),
    ("numpy._core.numeric", "_frombuffer"),
    ("numpy", "ndarray"),
    ("numpy", "dtype"),
    ("_codecs", "encode"),
}


class Cifar10:
    """The "python version" of CIFAR-10, scaled bilinearly to `image_size` unless it is None. Raises: CorruptMessage."""

    def __init__(self, folder: Path, image_size: int | None) -> None:
        self.image_size = image_size
        training = [_read_cifar_batch(path) for path in sorted(folder.glob("data_batch_*"))]
        self._images = np.concatenate([images for images, _ in training])
        self._labels = torch.cat([labels for _, labels in training])
        self._held_out = _read_cifar_batch(folder / "test_batch") if (folder / "test_batch").exists() else None
        self.n_training = len(self._images)

    def training(self, indices: Tensor) -> tuple[Tensor, Tensor]:
        """((b, 3, h, w) float32, (b,) int64) of the training images at `indices`."""
        return self._to_float(self._images[indices.numpy()]), self._labels[indices]

    def held_out(self, n_images: int) -> tuple[Tensor, Tensor] | None:
        """Up to `n_images` held-out images, or None when there are none."""
        if self._held_out is None:
            return None
        images, labels = self._held_out
        return self._to_float(images[:n_images]), labels[:n_images]

    def _to_float(self, images: np.ndarray) -> Tensor:
        floats = (torch.from_numpy(images).float() - 127.5) / 63.75  # about zero mean, unit variance
        if self.image_size not in (None, 32):
            size = (self.image_size, self.image_size)
            floats = torch.nn.functional.interpolate(floats, size, mode="bilinear")
        return floats


class ImageFolder:
    """`train/CLASS/*.jpg` and `val/CLASS/*.jpg`, or `CLASS/*.jpg`. Raises: Unsupported, InvalidArgument, CorruptMessage.

    Images are scaled to 8/7 of `image_size` on their short side and cropped in the middle.
    """

    def __init__(self, folder: Path, image_size: int) -> None:
        try:
            import PIL.Image
        except ImportError as error:
            raise Unsupported("reading an image folder needs Pillow: pip install pillow") from error
        self._open = PIL.Image.open
        self.image_size = image_size
        training = folder / "train" if (folder / "train").is_dir() else folder
        self.classes = sorted(path.name for path in training.iterdir() if path.is_dir())
        self._training = self._list(training)
        if not self._training:
            raise InvalidArgument(
                f"{folder} holds neither CIFAR-10 batches (data_batch_1 ...) nor CLASS/*.jpg or train/CLASS/*.jpg"
            )
        self._held_out = self._list(folder / "val") if (folder / "val").is_dir() else []
        self.n_training = len(self._training)

    def training(self, indices: Tensor) -> tuple[Tensor, Tensor]:
        """((b, 3, h, w) float32, (b,) int64) of the training images at `indices`."""
        return self._read([self._training[index] for index in indices.tolist()])

    def held_out(self, n_images: int) -> tuple[Tensor, Tensor] | None:
        """Up to `n_images` held-out images, or None when there are none."""
        # Spread over the list, which is sorted by class.
        stride = max(1, len(self._held_out) // n_images)
        return self._read(self._held_out[::stride][:n_images]) if self._held_out else None

    def _list(self, folder: Path) -> list[tuple[Path, int]]:
        return [
            (path, label)
            for label, name in enumerate(self.classes)
            for path in sorted((folder / name).glob("*"))
            if path.suffix.lower() in _SUFFIXES
        ]

    def _read(self, files: list[tuple[Path, int]]) -> tuple[Tensor, Tensor]:
        return torch.stack([self._read_one(path) for path, _ in files]), torch.tensor([label for _, label in files])

    def _read_one(self, path: Path) -> Tensor:
        try:
            with self._open(path) as image:
                scale = self.image_size * 8 / 7 / min(image.size)
                width, height = (max(self.image_size, round(length * scale)) for length in image.size)
                left, top = (width - self.image_size) // 2, (height - self.image_size) // 2
                scaled = image.convert("RGB").resize((width, height))
                pixels = np.asarray(scaled.crop((left, top, left + self.image_size, top + self.image_size)))
        except (OSError, SyntaxError, ValueError) as error:  # Pillow raises each of these for damaged files
            raise CorruptMessage(f"{path}: not an image that Pillow can read ({error})") from error
        return (torch.from_numpy(pixels.copy()).permute(2, 0, 1).float() - 127.5) / 63.75


def open_images(data_dir: str, image_size: int | None, n_classes: int) -> Cifar10 | ImageFolder:
    """The images in `data_dir`, recognised by its files. Raises: InvalidArgument."""
    folder = Path(data_dir).expanduser()
    if not folder.is_dir():
        raise InvalidArgument(f"data_dir={data_dir!r}: there is no such folder")
    for candidate in (folder, folder / "cifar-10-batches-py"):
        if (candidate / "data_batch_1").is_file():
            return Cifar10(candidate, image_size)
    source = ImageFolder(folder, image_size or DEFAULT_IMAGE_SIZE)
    if len(source.classes) > n_classes:
        raise InvalidArgument(f"{folder} has {len(source.classes)} classes, the model {n_classes}: pass n_classes=...")
    return source


class _SafeUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in _SAFE_NAMES:
            raise pickle.UnpicklingError(f"{module}.{name} has no place in a CIFAR-10 batch")
        return super().find_class(module.replace("numpy.core", "numpy._core"), name)


def _read_cifar_batch(path: Path) -> tuple[np.ndarray, Tensor]:
    """((n, 3, 32, 32) uint8, (n,) int64) of one batch file, unpickled with nothing but arrays allowed."""
    try:
        content = _SafeUnpickler(io.BytesIO(path.read_bytes()), encoding="bytes").load()
        images, labels = content[b"data"], content[b"labels"]
        whole = isinstance(images, np.ndarray) and images.dtype == np.uint8 and images.shape == (len(labels), 3072)
        numbers = torch.tensor(labels, dtype=torch.int64)
    # A damaged pickle can raise nearly anything; whatever it is, the file is at fault.
    except Exception as error:
        raise CorruptMessage(f"{path}: not a CIFAR-10 batch of the Python version ({error})") from error
    if not whole or len(labels) == 0 or not bool(((numbers >= 0) & (numbers < 10)).all()):
        raise CorruptMessage(f"{path}: expected (n, 3072) uint8 images and n labels from 0 to 9")
    return images.reshape(-1, 3, 32, 32), numbers
