"""Float messages of every released format version stay readable, and version 1 is still written byte for byte."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from float_messages import encode
from gcomp_gradients import tensor_of, words_of
from gradwire import _native, codecs
from gradwire.codecs import Codec

FILES = sorted((Path(__file__).parent / "floats").glob("v*.npz"))
# CRC32C of message and decoded values: a golden file that was itself replaced is noticed.
CHECKSUMS = {
    "v1_embedded_bfloat16_17_special": 0x61C7680A,
    "v1_embedded_float32_32": 0x69874A6A,
    "v1_embedded_float32_5": 0xA7F9E641,
    "v1_truncated_float16_8_stochastic": 0x9A3B736D,
    "v1_truncated_float32_12_native": 0x5CB3DC12,
    "v1_truncated_float32_4_special": 0xBCB7AAA4,
    "v1_truncated_float32_6_native_stochastic": 0xD4625BCC,
}


def load(path: Path) -> tuple[dict[str, np.ndarray], torch.dtype, Codec]:
    with np.load(path) as file:
        arrays = {name: file[name] for name in file.files}
    dtype_name, codec_name, options = (str(setting) for setting in arrays["settings"])
    defaults = {"rounding": "truncate"} if codec_name == "truncated-float" else {}  # when the files were written
    codec = codecs.by_name(codec_name, **defaults | json.loads(options))
    return arrays, getattr(torch, dtype_name.removeprefix("torch.")), codec


def test_every_golden_file_is_there() -> None:
    assert [path.stem for path in FILES] == sorted(CHECKSUMS)


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_golden_message_still_decodes_to_its_values(path: Path) -> None:
    arrays, dtype, codec = load(path)
    crc = _native.crc32c(torch.from_numpy(arrays["message"]))
    assert _native.crc32c(torch.from_numpy(arrays["decoded_bits"].view(np.uint8)), crc) == CHECKSUMS[path.stem]
    decoded = torch.empty(arrays["decoded_bits"].size, dtype=dtype)
    codec.decode(torch.from_numpy(arrays["message"]), decoded)
    np.testing.assert_array_equal(words_of(decoded), arrays["decoded_bits"])


@pytest.mark.parametrize("path", [path for path in FILES if path.stem.startswith("v1_")], ids=lambda path: path.stem)
def test_version_1_is_still_written_byte_for_byte(path: Path) -> None:
    arrays, dtype, codec = load(path)
    message = encode(codec, tensor_of(arrays["gradient_bits"], dtype))
    np.testing.assert_array_equal(message.numpy(), arrays["message"])
