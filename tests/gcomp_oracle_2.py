"""GComp messages of format 2 written and read one value at a time, from docs/format.md alone."""

from __future__ import annotations

import struct
from fractions import Fraction

import numpy as np

from gcomp_oracle import CHUNK, DTYPES, MANTISSA_BITS, MODES, WORDS, bytes_of, canonical_codes, crc32c, table_id
from gcomp_oracle import _decode_exponents as decode_exponents

LANES = 16
HIGHEST = {"float32": 254, "bfloat16": 254, "float16": 142}


def widen(words: np.ndarray, dtype: str) -> np.ndarray:
    """(n,) uint32: the float32 that each value equals; every bit of a NaN."""
    if dtype == "float32":
        return words.astype(np.uint32)
    if dtype == "bfloat16":
        return words.astype(np.uint32) << 16
    with np.errstate(invalid="ignore"):
        wide = words.view(np.float16).astype(np.float32).view(np.uint32)
    special = (words.astype(np.uint32) & 0x8000) << 16 | 255 << 23 | (words.astype(np.uint32) & 0x3FF) << 13
    return np.where((words & 0x7C00) == 0x7C00, special, wide)


def narrow(words: np.ndarray, dtype: str) -> np.ndarray:
    """The reverse, for words that are values of the dtype."""
    if dtype == "float32":
        return words
    if dtype == "bfloat16":
        return (words >> 16).astype(np.uint16)
    with np.errstate(invalid="ignore", over="ignore"):
        half = words.view(np.float32).astype(np.float16).view(np.uint16)
    special = (words >> 16 & 0x8000 | 0x7C00 | words >> 13 & 0x3FF).astype(np.uint16)
    return np.where((words >> 23 & 255) == 255, special, half)


def kept_bits_of(exponent: int, importance: int, dtype: str, mode: str, cap: int) -> int:
    if exponent == 255:
        return MANTISSA_BITS[dtype]
    kept = cap
    if mode == "paper" and importance > 0:
        kept = min(kept, max(0, exponent - importance // 4 + MANTISSA_BITS[dtype] - 86))
    return min(kept, exponent - 103) if dtype == "float16" else kept


def value_of(word: int) -> Fraction:
    """Of a finite, normal float32."""
    return Fraction(2**23 + word % 2**23) * Fraction(2) ** ((word >> 23 & 255) - 150)


def round_word(word: int, kept: int, highest: int, rounds: bool) -> int:
    """To the nearest of the numbers with `kept` mantissa bits, ties to even, found by looking at both neighbours."""
    step = 1 << (23 - kept)
    below = word - word % step
    if not rounds or below == word:
        return below
    above = below + step
    if above >> 23 & 255 > highest:
        return below
    value, low, high = value_of(word), value_of(below), value_of(above)
    if value - low != high - value:
        return below if value - low < high - value else above
    return below if below // step % 2 == 0 else above


def encode(
    words: np.ndarray,
    dtype: str,
    mode: str,
    cap: int,
    importance: np.ndarray,
    lengths: tuple[int, ...],
    rounding: str = "nearest",
) -> bytes:
    codes, escape = canonical_codes(lengths), len(lengths) - 1
    rounds = mode == "uniform" or (mode == "paper" and rounding == "nearest")
    n_chunks = -(-len(words) // CHUNK)
    offset, headers, body, nonfinite = 48 + 32 * n_chunks, b"", b"", False
    for first in range(0, len(words), CHUNK):
        bytes_here = importance[first : first + CHUNK]
        exponents, lanes, run = [], [(0, 0)] * LANES, b""
        for i, word in enumerate(widen(words[first : first + CHUNK], dtype).tolist()):
            exponent = word >> 23 & 255
            if exponent not in (0, 255):
                kept = kept_bits_of(exponent, int(bytes_here[i]), dtype, mode, cap)
                word = round_word(word % 2**31, kept, HIGHEST[dtype], rounds) | word >> 31 << 31
                exponent = word >> 23 & 255
            nonfinite = nonfinite or exponent == 255
            exponents.append(exponent)
            if exponent == 0:
                continue
            kept = kept_bits_of(exponent, int(bytes_here[i]), dtype, mode, cap)
            field = word % 2**23 >> (23 - kept) | word >> 31 << kept
            bits, n_bits = lanes[i % LANES]
            bits, n_bits = bits << (kept + 1) | field, n_bits + kept + 1
            if n_bits >= 32:
                n_bits -= 32
                run += struct.pack("<I", bits >> n_bits)
                bits %= 1 << n_bits
            lanes[i % LANES] = (bits, n_bits)
        run += b"".join(struct.pack("<I", bits | 1 << n_bits) for bits, n_bits in lanes)
        quarter = -(-len(exponents) // 4)
        streams = [
            bytes_of([bit for e in exponents[j * quarter : (j + 1) * quarter] for bit in codes.get(e) or codes[escape]])
            for j in range(4)
        ]
        escapes = bytes(e for e in exponents if e not in codes)
        segment = struct.pack("<5H", *map(len, streams), len(escapes)) + b"".join(streams) + escapes
        is_raw = len(segment) >= len(exponents)
        segment = bytes(exponents) if is_raw else segment
        checksum = crc32c(bytes(bytes_here.tolist())) if mode == "paper" else 0
        headers += struct.pack("<Q4I", offset, len(segment), checksum, 8 * len(run), len(exponents))
        headers += struct.pack("<2I", int(is_raw), crc32c(run + segment))
        body += run + segment
        offset += len(run) + len(segment)
    start = struct.pack("<4s4BQQQ", b"GWGC", 2, DTYPES[dtype], MODES[mode], cap, table_id(lengths), len(words), offset)
    start += struct.pack("<3I", n_chunks, int(nonfinite), 0)
    return start + struct.pack("<I", crc32c(start + headers)) + headers + body


def decode(message: bytes, importance: np.ndarray, lengths: tuple[int, ...]) -> np.ndarray:
    """The values' bit patterns."""
    _, _, dtype_code, mode_code, cap, _, _, _, n_chunks = struct.unpack_from("<4s4BQQQI", message)
    dtype = {code: name for name, code in DTYPES.items()}[dtype_code]
    mode = {code: name for name, code in MODES.items()}[mode_code]
    symbols = {tuple(code): symbol for symbol, code in canonical_codes(lengths).items()}
    words: list[int] = []
    for chunk in range(n_chunks):
        offset, n_bytes, _, n_mantissa_bits, n_values, is_raw, _ = struct.unpack_from("<Q6I", message, 48 + 32 * chunk)
        at_exponents = offset + n_mantissa_bits // 8
        segment = message[at_exponents : at_exponents + n_bytes]
        exponents = list(segment) if is_raw else decode_exponents(segment, n_values, symbols, len(lengths) - 1)
        run = list(struct.unpack(f"<{n_mantissa_bits // 32}I", message[offset:at_exponents]))
        run, tail = run[:-LANES], run[-LANES:]
        lanes = [(word - (1 << word.bit_length() - 1), word.bit_length() - 1) for word in tail]
        values = [0] * n_values
        for i in reversed(range(n_values)):
            if exponents[i] == 0:
                continue
            kept = kept_bits_of(exponents[i], int(importance[chunk * CHUNK + i]), dtype, mode, cap)
            bits, n_bits = lanes[i % LANES]
            if n_bits < kept + 1:
                bits, n_bits = run.pop() << n_bits | bits, n_bits + 32
            field = bits % 2 ** (kept + 1)
            lanes[i % LANES] = (bits >> (kept + 1), n_bits - kept - 1)
            values[i] = field >> kept << 31 | exponents[i] << 23 | field % 2**kept << (23 - kept)
        assert not run
        assert all(lane == (0, 0) for lane in lanes)
        words += values
    return narrow(np.array(words, np.uint32), dtype).astype(WORDS[dtype])
