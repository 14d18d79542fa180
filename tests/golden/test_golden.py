"""Messages of every released format version stay readable, and are still written byte for byte.

`PYTHONPATH=tests python tests/golden/test_golden.py VERSION` writes those of a new version: once, with its rows in FILES;
a file that exists is never written again.
"""

import sys
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

import quantiser_oracles
from float_messages import decode, encode, same_bits
from gcomp_gradients import make_gradient, make_importance, tensor_of, words_of
from gradwire import _native, codecs
from gradwire.codecs.gcomp import HuffmanTable

FOLDER = Path(__file__).parent
N_VALUES, STEP = 700, 12_345
FLOAT32, BFLOAT16, FLOAT16 = torch.float32, torch.bfloat16, torch.float16
FIRST = {"format": 1, "rounding": "truncate"}  # version 1 of gcomp was released before there was any other rounding


class Golden(NamedTuple):
    """A file: the CRC32C of its message and values, which shows that nobody has replaced it; codec, options, values."""

    checksum: int
    codec: str
    options: dict[str, Any]
    dtype: torch.dtype = FLOAT32
    kind: str = "gaussian"
    is_fitted: bool = False  # a Huffman table of these very values, instead of the prior

    @property
    def is_quantiser(self) -> bool:
        return self.codec in ("one-bit", "two-bit", "ternary", "qsgd", "thc")


NATIVE, STOCHASTIC = {"format": "native", "rounding": "truncate"}, {"rounding": "stochastic"}
UNIFORM = {"importance": "uniform", "bits": 9}
FILES = {
    "floats/v1_embedded_bfloat16_17_special": Golden(
        0x61C7680A, "embedded-float", {"bits": 17, "partition": 64, "format": 1}, BFLOAT16, "special"
    ),
    "floats/v1_embedded_float32_32": Golden(0x69874A6A, "embedded-float", {"bits": 32, "format": 1}, FLOAT32, "sparse"),
    "floats/v1_embedded_float32_5": Golden(0xA7F9E641, "embedded-float", {"bits": 5, "format": 1}),
    "floats/v2_embedded_bfloat16_17_special": Golden(
        0x24D7D939, "embedded-float", {"bits": 17, "partition": 64}, BFLOAT16, "special"
    ),
    "floats/v2_embedded_float32_32": Golden(0x7322A1C6, "embedded-float", {"bits": 32}, FLOAT32, "sparse"),
    "floats/v2_embedded_float32_5": Golden(0xACE45134, "embedded-float", {"bits": 5}),
    "floats/v1_truncated_float16_8_stochastic": Golden(
        0x9A3B736D, "truncated-float", {"bits": 8, "seed": 3} | STOCHASTIC, FLOAT16
    ),
    "floats/v1_truncated_float32_12_native": Golden(0x5CB3DC12, "truncated-float", {"bits": 12} | NATIVE),
    "floats/v1_truncated_float32_4_special": Golden(
        0xBCB7AAA4, "truncated-float", {"bits": 4, "partition": 32, "rounding": "truncate"}, FLOAT32, "special"
    ),
    "floats/v1_truncated_float32_6_native_stochastic": Golden(
        0xD4625BCC, "truncated-float", {"bits": 6} | NATIVE | STOCHASTIC
    ),
    "gcomp/v1_bfloat16_paper": Golden(0x2EF07B8C, "gcomp", FIRST, BFLOAT16, is_fitted=True),
    "gcomp/v1_float16_truncate": Golden(0xD947C50B, "gcomp", FIRST | {"importance": "truncate", "bits": 4}, FLOAT16),
    "gcomp/v1_float32_none_special": Golden(0x23BE7053, "gcomp", FIRST | {"importance": "none"}, FLOAT32, "special"),
    "gcomp/v1_float32_paper": Golden(0xE414B261, "gcomp", FIRST, is_fitted=True),
    "gcomp/v1_float32_raw_exponents": Golden(0x14527C16, "gcomp", FIRST, FLOAT32, "random bits"),
    "gcomp/v1_float32_uniform": Golden(0xEB3234E0, "gcomp", FIRST | UNIFORM, FLOAT32, "sparse", True),
    "gcomp/v2_bfloat16_paper": Golden(0xD9249F62, "gcomp", {}, BFLOAT16, is_fitted=True),
    "gcomp/v2_bfloat16_uniform": Golden(0xC8C7BCE8, "gcomp", {"importance": "uniform", "bits": 3}, BFLOAT16),
    "gcomp/v2_float16_none_subnormals": Golden(0x44B6885D, "gcomp", {"importance": "none"}, FLOAT16, "special", True),
    "gcomp/v2_float16_truncate": Golden(0x31537B70, "gcomp", {"importance": "truncate", "bits": 4}, FLOAT16),
    "gcomp/v2_float32_capped": Golden(0x9DACE239, "gcomp", {"bits": 9}, FLOAT32, "special", True),
    "gcomp/v2_float32_none_special": Golden(0xFAA0931B, "gcomp", {"importance": "none"}, FLOAT32, "special"),
    "gcomp/v2_float32_paper": Golden(0x01218482, "gcomp", {}, is_fitted=True),
    "gcomp/v2_float32_raw_exponents": Golden(0xF6F0A588, "gcomp", {}, FLOAT32, "random bits"),
    "gcomp/v2_float32_uniform": Golden(0x039CB7A8, "gcomp", UNIFORM, FLOAT32, "sparse", True),
    "quantised/v1_one-bit_fixed": Golden(0x184AF232, "one-bit", {"scale": "fixed"}),
    "quantised/v1_one-bit_mean": Golden(0x63AAA10F, "one-bit", {}),
    "quantised/v1_one-bit_two-means": Golden(0x6C1370EA, "one-bit", {"scale": "two-means"}),
    "quantised/v1_qsgd_4-bits": Golden(0x3EEDF878, "qsgd", {"block": 128, "seed": 77}),
    "quantised/v1_qsgd_8-bits": Golden(0x56115F49, "qsgd", {"levels": 100, "seed": 77}),
    "quantised/v1_ternary": Golden(0x5777AD8F, "ternary", {"seed": 77}),
    "quantised/v1_thc": Golden(0x035DEF0A, "thc", {"seed": 77}),
    "quantised/v1_two-bit_absolute": Golden(0x44B9D025, "two-bit", {"threshold": 0.003, "relative": False}),
    "quantised/v1_two-bit_relative": Golden(0x0E6C952A, "two-bit", {}),
}


def write(golden: Golden, gradient: torch.Tensor, importance: torch.Tensor, table: HuffmanTable | None) -> torch.Tensor:
    """The message of this codec and these options, as the file holds it."""
    if golden.codec == "gcomp":
        return encode(codecs.by_name("gcomp", table=table, **golden.options), gradient, importance=importance)
    drawn = {"step": STEP} if golden.is_quantiser else {}
    return encode(codecs.by_name(golden.codec, **golden.options), gradient, **drawn)


def read(golden: Golden, message: torch.Tensor, importance: torch.Tensor, table: HuffmanTable | None) -> torch.Tensor:
    """The values of a message, by a codec that knows nothing of the options."""
    codec: Any = codecs.by_name(golden.codec)
    if table is None:
        return decode(codec, message, N_VALUES, golden.dtype)
    codec.add_table(table)
    return decode(codec, message, N_VALUES, golden.dtype, importance=importance)


def load(name: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, HuffmanTable | None]:
    """Gradient, message, decoded values, importance bytes and table of a file."""
    with np.load(FOLDER / f"{name}.npz") as file:
        gradient, decoded = (tensor_of(file[f"{part}_bits"], FILES[name].dtype) for part in ("gradient", "decoded"))
        importance = torch.from_numpy(file["importance"] if "importance" in file else np.zeros(0, np.uint8))
        table = HuffmanTable.from_bytes(file["table"].tobytes()) if "table" in file else None
        return gradient, torch.from_numpy(file["message"]), decoded, importance, table


def checksum(message: torch.Tensor, decoded: torch.Tensor) -> int:
    return _native.crc32c(decoded.view(torch.uint8), _native.crc32c(message))


each_file = pytest.mark.parametrize("name", FILES)


def test_every_golden_file_is_there_and_no_other() -> None:
    found = (path.relative_to(FOLDER).with_suffix("") for path in FOLDER.rglob("*.npz"))
    assert sorted(map(str, found)) == sorted(FILES)


@each_file
def test_golden_message_still_decodes_to_its_values(name: str) -> None:
    _, message, decoded, *of_gcomp = load(name)
    assert checksum(message, decoded) == FILES[name].checksum
    assert same_bits(read(FILES[name], message, *of_gcomp), decoded)


@each_file
def test_golden_message_is_still_written_byte_for_byte(name: str) -> None:
    gradient, message, _, *of_gcomp = load(name)
    assert torch.equal(write(FILES[name], gradient, *of_gcomp), message)


def main() -> None:
    for name, golden in FILES.items():
        if f"/v{int(sys.argv[1])}_" not in name:
            continue
        path = FOLDER / f"{name}.npz"
        if path.exists():
            sys.exit(f"{path} exists: golden files are never rewritten")
        if golden.is_quantiser:
            gradient = quantiser_oracles.make_gradient(N_VALUES)
        else:
            gradient = make_gradient(golden.kind, N_VALUES, golden.dtype)
        importance, table = make_importance(N_VALUES), None
        if golden.codec == "gcomp":
            codec: Any = codecs.by_name("gcomp", **golden.options)
            table = codec.table_in_use(golden.dtype)
            if golden.is_fitted:
                histogram = torch.zeros(2 ** codec.exponent_bits(golden.dtype), dtype=torch.int64)
                codec.histogram(gradient, histogram)
                table = HuffmanTable.from_histogram(histogram)
        message = write(golden, gradient, importance, table)
        decoded = read(golden, message, importance, table)
        parts = {"message": message.numpy(), "gradient_bits": words_of(gradient), "decoded_bits": words_of(decoded)}
        if table is not None:
            parts |= {"table": np.frombuffer(table.to_bytes(), np.uint8), "importance": importance.numpy()}
        np.savez_compressed(path, **parts)
        print(f"{name}: checksum {checksum(message, decoded):#010x}")


if __name__ == "__main__":
    main()
