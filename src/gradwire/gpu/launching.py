"""Launches of kernels: threads and blocks, the structures that parameters are handed over in, and error words."""

import ctypes
import functools
import re

import torch
from torch import Tensor

from gradwire.errors import CorruptMessage, GradwireError, IncompatibleVersion, RankMismatch

THREADS = 256
WARP = 32
MOST_BLOCKS = 2112  # 16 for each of an H100's 132 multiprocessors: more threads than that run one after another
SHARED_OF_CHECKSUM = 4 * (4 * 256 + 8)


def parts(n: int, size: int) -> int:
    """n / size, rounded up."""
    return -(-n // size)


def grid(n_threads: int) -> int:
    """Blocks for so many threads, or fewer: each thread then works more than once."""
    return min(parts(n_threads, THREADS), MOST_BLOCKS)


# By error word, which keeps the worst of what was wrong (`Wrong` of source/device.hpp, from the last one on).
_WRONG: dict[int, tuple[type[GradwireError], str]] = {
    1: (CorruptMessage, "it holds codes that no encoder writes"),
    2: (
        CorruptMessage,
        "it was written with other options or another Huffman table, or has flags, scales or indices outside of what "
        "encoders write",
    ),
    3: (CorruptMessage, "a checksum does not match: bytes were changed on the way"),
    4: (CorruptMessage, "it has another length or number of values than expected"),
    5: (IncompatibleVersion, "it is of another format version: use the same gradwire release on every rank"),
    6: (CorruptMessage, "it is of another kind, or its first bytes were lost"),
    7: (
        RankMismatch,
        "the sender derives other importance bytes: load one checkpoint on all ranks, and change learning rates on all of "
        "them alike",
    ),
}


def raise_error(code: int, what: str, device: torch.device) -> None:
    """Raise what the error word of `what` ("gcomp message") says, if anything."""
    if code:
        error, text = _WRONG[code]
        raise error(f"{what} on {device}: {text}")


# Structures, in the words of the structs in `source/`: "fields:kind ..." in their order; p: a pointer, Q: uint64, I: uint32,
# f: float. A struct within another is spelt out; all of them are multiples of 8 bytes, so that nothing moves.
_QUANTISE = (
    "values residual left_out message sums pieces n_bytes turns:p n seed step:Q residual_scale parameter:f"
    " kind dtype rule levels block pad:I"
)
_DEQUANTISE = "message out pieces error turns:p n payload:Q divisor:f kind dtype adds levels block:I"
_GROUPING = "groups:p n_pieces:Q group_values per_group:I"
_FORMAT = "n:Q kind dtype format n_bits partition version:I"

STRUCTS = {
    "Quantise": _QUANTISE,
    "Dequantise": _DEQUANTISE,
    "QuantiseGroups": f"{_QUANTISE} {_GROUPING}",
    "DequantiseGroups": f"{_DEQUANTISE} {_GROUPING}",
    "FloatEncode": f"values message scales turns n_bytes:p seed step:Q {_FORMAT} rounding per_row:I rows:p",
    "FloatDecode": (
        f"message error turns:p {_FORMAT} out:p divisor:f adds:I rows:p source_bytes:Q per_row n_rows n_sources pad:I"
    ),
    "GCompEncode": "values importance table message n_bytes exponents chunks:p n table_id:Q dtype mode kept_bits rounds:I",
    "GCompCount": "values counts:p n:Q dtype pad:I",
    "GCompDecode": (
        "message importance table out exponents stream_is_bad are_headers_right error:p n n_bytes table_id:Q divisor:f"
        " dtype mode kept_bits adds placeholder:I"
    ),
    "Index": "values packed words head largest counts ends:p n n_blocks n_packed:Q dtype facts:I",
    "MultiplyFactors": "left right matrix:p n_rows n_columns:Q rank dtype subtracts pad:I",
    "OrthogonaliseFactors": "factors:p n:Q rank pad:I",
    "Select": (
        "values beside segments samples choices bins pieces n_taken indices taken:p n_segments n_tiles room:Q"
        " shift n_bits round of_samples takes_zeros pad:I"
    ),
    "Scatter": "n_taken indices taken sums error:p n room:Q",
    "Signs": "values words flags:p n:Q dtype n_ranks unit ties_are_positive:I",
    "Ternary": (
        "values sums scales counts spans:p n n_spans n_blocks seed step:Q clip:f dtype n_ranks are_nibbles is_single:I"
    ),
    "Rotated": (
        "values residual left_out norms codes:p n sign_seed sign_step seed step:Q residual_scale clip:f"
        " dtype n_ranks are_wide pad:I"
    ),
}
_KINDS = {"p": ctypes.c_void_p, "Q": ctypes.c_uint64, "I": ctypes.c_uint32, "f": ctypes.c_float}


@functools.cache
def struct_called(name: str) -> type[ctypes.Structure]:
    """The structure of that name in `source/`."""
    fields: list[tuple[str, type]] = []
    for names, kind in re.findall(r"([\w ]+):(\w)", STRUCTS[name]):
        fields += [(field, _KINDS[kind]) for field in names.split()]
    return type(name, (ctypes.Structure,), {"_fields_": fields})


def fill_struct(name: str, **fields: Tensor | float | None) -> ctypes.Structure:
    """A structure with these fields; of a tensor its address. What is not named is 0."""
    values = {key: value.data_ptr() if isinstance(value, Tensor) else value for key, value in fields.items()}
    return struct_called(name)(**values)
