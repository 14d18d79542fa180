"""GComp messages written and read one bit at a time, from docs/format.md alone: what the codec is compared with."""

from __future__ import annotations

import struct
from dataclasses import dataclass

import numpy as np

CHUNK = 16384
DTYPES = {"float32": 0, "bfloat16": 1, "float16": 2}
MODES = {"none": 0, "paper": 1, "uniform": 2, "truncate": 3}
EXPONENT_BITS = {"float32": 8, "bfloat16": 8, "float16": 5}
MANTISSA_BITS = {"float32": 23, "bfloat16": 7, "float16": 10}
DROPPED = {"float32": (0, 6, 12, 18), "bfloat16": (0, 2, 4, 6), "float16": (0, 3, 5, 8)}
WORDS = {"float32": np.uint32, "bfloat16": np.uint16, "float16": np.uint16}


def _crc_table() -> list[int]:
    table = []
    for byte in range(256):
        for _ in range(8):
            byte = byte >> 1 ^ (0x82F63B78 if byte & 1 else 0)
        table.append(byte)
    return table


_CRC = _crc_table()


def crc32c(data: bytes) -> int:
    state = 0xFFFFFFFF
    for byte in data:
        state = state >> 8 ^ _CRC[(state ^ byte) & 0xFF]
    return state ^ 0xFFFFFFFF


def bytes_of(bits: list[int]) -> bytes:
    """Bit i of the stream is bit i % 8 of byte i // 8."""
    bits = bits + [0] * (-len(bits) % 8)
    return bytes(sum(bit << k for k, bit in enumerate(bits[i : i + 8])) for i in range(0, len(bits), 8))


def bits_of(data: bytes) -> list[int]:
    return [byte >> k & 1 for byte in data for k in range(8)]


def number_bits(number: int, n_bits: int) -> list[int]:
    """Lowest bit first."""
    return [number >> k & 1 for k in range(n_bits)]


def table_bytes(lengths: tuple[int, ...]) -> bytes:
    exponent_bits = {257: 8, 33: 5}[len(lengths)]
    nibbles = [*lengths, 0]
    packed = bytes(low | high << 4 for low, high in zip(nibbles[::2], nibbles[1::2], strict=True))
    head = b"GWHT" + bytes((1, exponent_bits, 0, 0)) + packed
    return head + struct.pack("<I", crc32c(head))


def table_id(lengths: tuple[int, ...]) -> int:
    value = 0xCBF29CE484222325
    for byte in table_bytes(lengths):
        value = (value ^ byte) * 0x100000001B3 % 2**64
    return value


def canonical_codes(lengths: tuple[int, ...]) -> dict[int, list[int]]:
    """symbol -> bits of its code in the order in which they are written."""
    codes, code, last = {}, 0, 0
    for length, symbol in sorted((length, symbol) for symbol, length in enumerate(lengths) if length):
        code <<= length - last
        last = length
        codes[symbol] = [code >> k & 1 for k in reversed(range(length))]
        code += 1
    return codes


@dataclass
class Value:
    """One float taken apart, after uniform rounding."""

    exponent: int
    mantissa: int
    sign: int


def take_apart(word: int, dtype: str, mode: str, kept_bits: int, importance: int | None = None) -> Value:
    """`importance`: given where mode paper rounds to nearest."""
    n_mantissa, max_exponent = MANTISSA_BITS[dtype], 2 ** EXPONENT_BITS[dtype] - 1
    value = Value(word >> n_mantissa & max_exponent, word % 2**n_mantissa, word >> (n_mantissa + EXPONENT_BITS[dtype]))
    if mode == "paper" and importance is not None:
        kept_bits = n_mantissa - DROPPED[dtype][level(value, dtype, importance)]
    if (mode == "uniform" or importance is not None) and 0 < value.exponent < max_exponent:
        step = 2 ** (n_mantissa - kept_bits)
        magnitude = value.exponent * 2**n_mantissa + value.mantissa
        below, rest = divmod(magnitude, step)
        up = 2 * rest > step or (2 * rest == step and below % 2 == 1)
        magnitude = (below + up) * step
        if magnitude >= max_exponent * 2**n_mantissa:
            magnitude = max_exponent * 2**n_mantissa - step
        value.exponent, value.mantissa = divmod(magnitude, 2**n_mantissa)
    return value


def level(value: Value, dtype: str, importance: int) -> int:
    if importance == 0 or value.exponent == 2 ** EXPONENT_BITS[dtype] - 1:
        return 0
    exponent = value.exponent + (112 if dtype == "float16" else 0)
    code = 4 * exponent + (value.mantissa >> (MANTISSA_BITS[dtype] - 2))
    return sum(importance + 348 > code + 4 * n for n in DROPPED[dtype][1:])


def encode(
    words: np.ndarray,
    dtype: str,
    mode: str,
    kept_bits: int,
    importance: np.ndarray,
    lengths: tuple[int, ...],
    rounding: str = "nearest",
) -> bytes:
    """`words`: bit patterns; `lengths`: of the Huffman table."""
    codes, escape = canonical_codes(lengths), len(lengths) - 1
    n_mantissa, max_exponent = MANTISSA_BITS[dtype], 2 ** EXPONENT_BITS[dtype] - 1
    n_chunks = -(-len(words) // CHUNK)
    offset, headers, body, nonfinite = 48 + 32 * n_chunks, b"", b"", False
    for first in range(0, len(words), CHUNK):
        values = []
        for word, byte in zip(words[first : first + CHUNK], importance[first : first + CHUNK], strict=True):
            rounds = mode == "paper" and rounding == "nearest"
            values.append(take_apart(int(word), dtype, mode, kept_bits, int(byte) if rounds else None))
        nonfinite = nonfinite or any(value.exponent == max_exponent for value in values)
        quarter = -(-len(values) // 4)
        streams = []
        for j in range(4):
            bits: list[int] = []
            for value in values[j * quarter : (j + 1) * quarter]:
                bits += codes.get(value.exponent) or codes[escape]
            streams.append(bytes_of(bits))
        escapes = bytes(value.exponent for value in values if value.exponent not in codes)
        segment = struct.pack("<5H", *map(len, streams), len(escapes)) + b"".join(streams) + escapes
        is_raw = len(segment) >= len(values)
        if is_raw:
            segment = bytes(value.exponent for value in values)
        level_bits: list[int] = []
        mantissa_bits: list[int] = []
        for i, value in enumerate(values):
            if value.exponent == 0:
                continue
            dropped = 0 if value.exponent == max_exponent else n_mantissa - kept_bits
            if mode == "paper":
                own_level = level(value, dtype, int(importance[first + i]))
                level_bits += number_bits(own_level, 2)
                dropped = DROPPED[dtype][own_level]
            mantissa_bits += [*number_bits(value.mantissa >> dropped, n_mantissa - dropped), value.sign]
        segments = segment + bytes_of(level_bits) + bytes_of(mantissa_bits)
        headers += struct.pack("<Q4I", offset, len(segment), len(level_bits), len(mantissa_bits), len(values))
        headers += struct.pack("<2I", int(is_raw), crc32c(segments))
        body += segments
        offset += len(segments)
    start = struct.pack(
        "<4s4BQQQ", b"GWGC", 1, DTYPES[dtype], MODES[mode], kept_bits, table_id(lengths), len(words), offset
    )
    start += struct.pack("<3I", n_chunks, int(nonfinite), 0)
    return start + struct.pack("<I", crc32c(start + headers)) + headers + body


def decode(message: bytes, lengths: tuple[int, ...]) -> np.ndarray:
    """The values' bit patterns."""
    _, _, dtype_code, mode_code, kept_bits, _, _, _, n_chunks = struct.unpack_from("<4s4BQQQI", message)
    dtype = {code: name for name, code in DTYPES.items()}[dtype_code]
    mode = {code: name for name, code in MODES.items()}[mode_code]
    symbols = {tuple(code): symbol for symbol, code in canonical_codes(lengths).items()}
    n_mantissa, max_exponent = MANTISSA_BITS[dtype], 2 ** EXPONENT_BITS[dtype] - 1
    words = []
    for chunk in range(n_chunks):
        offset, n_bytes, n_level_bits, n_mantissa_bits, n_values, is_raw, _ = struct.unpack_from(
            "<Q6I", message, 48 + 32 * chunk
        )
        segment = message[offset : offset + n_bytes]
        exponents = list(segment) if is_raw else _decode_exponents(segment, n_values, symbols, len(lengths) - 1)
        at_levels = offset + n_bytes
        at_mantissas = at_levels + -(-n_level_bits // 8)
        levels = iter(bits_of(message[at_levels:at_mantissas]))
        bits = iter(bits_of(message[at_mantissas : at_mantissas + -(-n_mantissa_bits // 8)]))
        for exponent in exponents:
            if exponent == 0:
                words.append(0)
                continue
            dropped = 0 if exponent == max_exponent else n_mantissa - kept_bits
            if mode == "paper":
                dropped = DROPPED[dtype][next(levels) + 2 * next(levels)]
            mantissa = sum(next(bits) << k for k in range(dropped, n_mantissa))
            sign = next(bits)
            words.append(mantissa | exponent << n_mantissa | sign << (n_mantissa + EXPONENT_BITS[dtype]))
    return np.array(words, WORDS[dtype])


def _decode_exponents(segment: bytes, n_values: int, symbols: dict[tuple[int, ...], int], escape: int) -> list[int]:
    *n_bytes, n_escapes = struct.unpack_from("<5H", segment)
    escapes = iter(segment[len(segment) - n_escapes :])
    quarter, at, exponents = -(-n_values // 4), 10, []
    for j in range(4):
        bits = iter(bits_of(segment[at : at + n_bytes[j]]))
        at += n_bytes[j]
        for _ in range(min(n_values, (j + 1) * quarter) - min(n_values, j * quarter)):
            code: tuple[int, ...] = ()
            while code not in symbols:
                code += (next(bits),)
            exponents.append(symbols[code])
    return [next(escapes) if exponent == escape else exponent for exponent in exponents]
