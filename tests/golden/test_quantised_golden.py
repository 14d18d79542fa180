"""Quantised messages of every released format version stay readable, and version 1 is still written byte for byte."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from make_quantised import CASES, STEP

from gradwire import _native, codecs
from quantiser_oracles import decode, encode

FILES = sorted((Path(__file__).parent / "quantised").glob("v*.npz"))
# CRC32C of message and decoded values: a golden file that was itself replaced is noticed.
CHECKSUMS = {
    "v1_one-bit_fixed": 0x184AF232,
    "v1_one-bit_mean": 0x63AAA10F,
    "v1_one-bit_two-means": 0x6C1370EA,
    "v1_qsgd_4-bits": 0x3EEDF878,
    "v1_qsgd_8-bits": 0x56115F49,
    "v1_ternary": 0x5777AD8F,
    "v1_thc": 0x035DEF0A,
    "v1_two-bit_absolute": 0x44B9D025,
    "v1_two-bit_relative": 0x7616489F,
}


def load(path: Path) -> dict[str, np.ndarray]:
    with np.load(path) as file:
        return {name: file[name] for name in file.files}


def test_every_golden_file_is_there() -> None:
    assert [path.stem for path in FILES] == sorted(CHECKSUMS)


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_golden_message_still_decodes_to_its_values(path: Path) -> None:
    arrays = load(path)
    crc = _native.crc32c(torch.from_numpy(arrays["message"]))
    assert _native.crc32c(torch.from_numpy(arrays["decoded_bits"].view(np.uint8)), crc) == CHECKSUMS[path.stem]
    codec = codecs.by_name(CASES[path.stem.removeprefix("v1_")][0])  # options are not needed to decode
    decoded = decode(codec, torch.from_numpy(arrays["message"]), arrays["decoded_bits"].size)
    np.testing.assert_array_equal(decoded.numpy().view(np.uint32), arrays["decoded_bits"])


@pytest.mark.parametrize("path", [path for path in FILES if path.stem.startswith("v1_")], ids=lambda path: path.stem)
def test_version_1_is_still_written_byte_for_byte(path: Path) -> None:
    arrays = load(path)
    name, options = CASES[path.stem.removeprefix("v1_")]
    gradient = torch.from_numpy(arrays["gradient_bits"].view(np.float32))
    message = encode(codecs.by_name(name, **options), gradient, step=STEP)
    np.testing.assert_array_equal(message.numpy(), arrays["message"])
