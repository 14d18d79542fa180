"""Real text that every machine with Python has: the source of its own standard library."""

import functools
import re
import sysconfig
from collections import Counter
from pathlib import Path

import torch
from torch import Tensor

from gradwire.errors import Unsupported
from gradwire_lab.workloads.base import Batch, step_generator

# Every tenth file is held out: whole files, so that no held-out line has a neighbour in the training text.
_HELD_OUT_EVERY = 10


@functools.cache
def read_standard_library() -> tuple[bytes, bytes]:
    """The standard library's top-level modules, by name: (training, held out), 5 MB that depend on Python's version."""
    folder = Path(sysconfig.get_path("stdlib"))
    texts = [path.read_bytes() for path in sorted(folder.glob("*.py"))]
    if len(texts) < 2 * _HELD_OUT_EVERY:
        raise Unsupported(f"{folder} holds {len(texts)} Python files, too few to train on; a Python whose standard "
                          "library is packed in an archive cannot serve this workload")  # fmt: skip
    held_out = [text for index, text in enumerate(texts) if index % _HELD_OUT_EVERY == _HELD_OUT_EVERY - 1]
    training = [text for index, text in enumerate(texts) if index % _HELD_OUT_EVERY != _HELD_OUT_EVERY - 1]
    return b"".join(training), b"".join(held_out)


@functools.cache
def byte_tokens() -> tuple[Tensor, Tensor]:
    """(n,) uint8 each: training and held-out text, one token a byte."""
    training, held_out = (torch.frombuffer(bytearray(text), dtype=torch.uint8) for text in read_standard_library())
    return training, held_out


@functools.cache
def word_tokens(vocabulary_size: int) -> tuple[Tensor, Tensor, int]:
    """((n,) int32 training, (m,) int32 held out, words in use): token 0 is every word outside the vocabulary. Tokens
    are words, single marks and line ends; the vocabulary is the most frequent of the training text, ties in
    alphabetical order."""
    split = re.compile(r"\w+|[^\w\s]|\n")
    training, held_out = (split.findall(text.decode("utf-8", "replace")) for text in read_standard_library())
    counts = sorted(Counter(training).items(), key=lambda item: (-item[1], item[0]))
    index_of = {word: index + 1 for index, (word, _) in enumerate(counts[: vocabulary_size - 1])}

    def number(words: list[str]) -> Tensor:
        return torch.tensor([index_of.get(word, 0) for word in words], dtype=torch.int32)

    return number(training), number(held_out), len(index_of) + 1


def crop_batch(tokens: Tensor, length: int, step: int, rank: int, world_size: int, batch_size: int, seed: int) -> Batch:
    """This rank's slice of `world_size * batch_size` crops at random places: inputs and next tokens, (b, length) int64."""
    generator = step_generator(seed, "crop", step)
    starts = torch.randint(tokens.numel() - length, (world_size * batch_size,), generator=generator)
    return _crop(tokens, length, starts[rank * batch_size : (rank + 1) * batch_size])


def spread_crops(tokens: Tensor, length: int, n_crops: int) -> Batch:
    """`n_crops` crops spread evenly over `tokens`: the same held-out sample in every run."""
    return _crop(tokens, length, torch.linspace(0, tokens.numel() - length - 1, n_crops, dtype=torch.float64).long())


def _crop(tokens: Tensor, length: int, starts: Tensor) -> Batch:
    crops = tokens[starts[:, None] + torch.arange(length + 1)].long()
    return crops[:, :-1].contiguous(), crops[:, 1:].contiguous()
