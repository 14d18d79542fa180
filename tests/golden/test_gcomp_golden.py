"""Messages of every released format version stay readable, and is still written byte for byte."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from gcomp_gradients import tensor_of, words_of
from gradwire import _native
from gradwire.codecs.gcomp import GCompCodec, HuffmanTable

FILES = sorted((Path(__file__).parent / "gcomp").glob("v*.npz"))
# CRC32C of message and decoded values: a golden file that was itself replaced is noticed.
CHECKSUMS = {
    "v1_bfloat16_paper": 0x2EF07B8C,
    "v1_float16_truncate": 0xD947C50B,
    "v1_float32_none_special": 0x23BE7053,
    "v1_float32_paper": 0xE414B261,
    "v1_float32_raw_exponents": 0x14527C16,
    "v1_float32_uniform": 0xEB3234E0,
    "v2_bfloat16_paper": 0xD9249F62,
    "v2_bfloat16_uniform": 0xC8C7BCE8,
    "v2_float16_none_subnormals": 0x44B6885D,
    "v2_float16_truncate": 0x31537B70,
    "v2_float32_capped": 0x9DACE239,
    "v2_float32_none_special": 0xFAA0931B,
    "v2_float32_paper": 0x01218482,
    "v2_float32_raw_exponents": 0xF6F0A588,
    "v2_float32_uniform": 0x039CB7A8,
}


def settings_of(version: str) -> dict[str, Any]:
    """Version 1 was released before there was any other rounding."""
    return {"format": 1, "rounding": "truncate"} if version == "v1" else {"format": 2}


def load(path: Path) -> tuple[dict[str, np.ndarray], torch.dtype, GCompCodec]:
    with np.load(path) as file:
        arrays = {name: file[name] for name in file.files}
    dtype_name, importance, bits = arrays["settings"]
    codec = GCompCodec(
        str(importance),
        bits=None if bits == "None" else int(bits),
        table=HuffmanTable.from_bytes(arrays["table"].tobytes()),
        **settings_of(path.stem[:2]),
    )
    return arrays, getattr(torch, str(dtype_name).removeprefix("torch.")), codec


def checksum(arrays: dict[str, np.ndarray]) -> int:
    crc = _native.crc32c(torch.from_numpy(arrays["message"]))
    return _native.crc32c(torch.from_numpy(arrays["decoded_bits"].view(np.uint8)), crc)


def test_every_golden_file_is_there() -> None:
    assert [path.stem for path in FILES] == sorted(CHECKSUMS)


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_golden_message_still_decodes_to_its_values(path: Path) -> None:
    arrays, dtype, codec = load(path)
    assert checksum(arrays) == CHECKSUMS[path.stem]
    decoded = torch.empty(arrays["decoded_bits"].size, dtype=dtype)
    codec.decode(torch.from_numpy(arrays["message"]), decoded, torch.from_numpy(arrays["importance"]))
    np.testing.assert_array_equal(words_of(decoded), arrays["decoded_bits"])


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_golden_message_is_still_written_byte_for_byte(path: Path) -> None:
    arrays, dtype, codec = load(path)
    gradient = tensor_of(arrays["gradient_bits"], dtype)
    out = torch.empty(codec.max_encoded_bytes(gradient.numel(), dtype), dtype=torch.uint8)
    n_bytes = codec.encode(gradient, out, torch.from_numpy(arrays["importance"]))
    np.testing.assert_array_equal(out[:n_bytes].numpy(), arrays["message"])
