"""SQuAD v1.1 from the user's own folder: questions and paragraphs as hashed words, answers as word spans."""

import json
import re
import zlib
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gradwire.errors import CorruptMessage, InvalidArgument

# BERT's own special tokens; words are hashed into what lies above them.
_CLS, _SEP, _FIRST_WORD = 101, 102, 1000
_WORD = re.compile(r"\w+|[^\w\s]")


class Squad:
    """The answerable questions of one file, cut to `length` tokens round its answer. Raises: CorruptMessage, InvalidArgument.

    Tokens are words and marks in lower case, hashed (CRC-32) into BERT's vocabulary: sparsity is real without a checkpoint's.
    """

    def __init__(self, path: Path, length: int, vocabulary_size: int) -> None:
        try:
            examples = [
                example
                for article in json.loads(path.read_text("utf-8"))["data"]
                for paragraph in article["paragraphs"]
                for question in paragraph["qas"]
                if (example := _encode(paragraph["context"], question, length, vocabulary_size))
            ]
        except (ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
            raise CorruptMessage(f"{path}: not SQuAD v1.1 ({type(error).__name__}: {error})") from error
        if not examples:
            raise InvalidArgument(f"{path}: no question fits into {length} tokens; pass a larger length=...")
        # (n, 2, length): token ids (0 pads) and token types; (n, 2): first and last word.
        self.inputs = torch.tensor([inputs for inputs, _ in examples], dtype=torch.int32)
        self.targets = torch.tensor([targets for _, targets in examples])

    def rows(self, indices: Tensor) -> tuple[Tensor, Tensor]:
        """((b, 2, length) int64, (b, 2) int64) of the questions at `indices`."""
        return self.inputs[indices].long(), self.targets[indices]


def open_squad(data_dir: str, length: int, vocabulary_size: int) -> tuple[Squad, Squad | None]:
    """(training, held out or None) in `data_dir`. Raises: InvalidArgument when there is no training file."""
    folder = Path(data_dir).expanduser()
    training, held_out = folder / "train-v1.1.json", folder / "dev-v1.1.json"
    if not training.is_file():
        raise InvalidArgument(f"data_dir={data_dir!r} holds no train-v1.1.json (SQuAD v1.1)")
    squad = Squad(training, length, vocabulary_size)
    return squad, Squad(held_out, length, vocabulary_size) if held_out.is_file() else None


def _encode(
    context: str, question: dict[str, Any], length: int, vocabulary_size: int
) -> tuple[list[list[int]], list[int]] | None:
    """One example, or None when its question and answer do not fit."""
    asked = [match.group() for match in _WORD.finditer(question["question"])][: length // 3]
    words = list(_WORD.finditer(context))
    begin = question["answers"][0]["answer_start"]
    end = begin + len(question["answers"][0]["text"])
    inside = [index for index, word in enumerate(words) if word.start() < end and word.end() > begin]
    n_room = length - len(asked) - 3  # [CLS] question [SEP] paragraph [SEP]
    if not inside or inside[-1] - inside[0] >= n_room:
        return None
    # A window that begins at the paragraph's start where it can, else the last one that still holds the answer.
    first = max(0, min(inside[-1] + 1 - n_room, inside[0]))
    window = [word.group() for word in words[first : first + n_room]]
    n_words = vocabulary_size - _FIRST_WORD
    numbers = [[_FIRST_WORD + zlib.crc32(word.lower().encode()) % n_words for word in part] for part in (asked, window)]
    ids = [_CLS, *numbers[0], _SEP, *numbers[1], _SEP]
    types = [0] * (len(asked) + 2) + [1] * (len(window) + 1)
    n_padding = length - len(ids)
    offset = len(asked) + 2 - first
    return [ids + [0] * n_padding, types + [0] * n_padding], [inside[0] + offset, inside[-1] + offset]
