"""GComp messages written one bit and one value at a time, from docs/format.md alone: what the codec is compared with."""

import struct

import numpy as np

CHUNK = 16384
DTYPES = {"float32": 0, "bfloat16": 1, "float16": 2}
MODES = {"none": 0, "paper": 1, "uniform": 2, "truncate": 3}
EXPONENT_BITS = {"float32": 8, "bfloat16": 8, "float16": 5}
MANTISSA_BITS = {"float32": 23, "bfloat16": 7, "float16": 10}
DROPPED = {"float32": (0, 6, 12, 18), "bfloat16": (0, 2, 4, 6), "float16": (0, 3, 5, 8)}  # by level, in format 1
WORDS = {"float32": np.uint32, "bfloat16": np.uint16, "float16": np.uint16}
LANES = 16
HIGHEST = {"float32": 254, "bfloat16": 254, "float16": 142}  # exponents of finite values, in format 2


def _crc_table() -> list[int]:
    table = []
    for byte in range(256):
        for _ in range(8):
            byte = byte >> 1 ^ (0x82F63B78 if byte & 1 else 0)
        table.append(byte)
    return table


CRC_TABLE = _crc_table()


def crc32c(data: bytes) -> int:
    state = 0xFFFFFFFF
    for byte in data:
        state = state >> 8 ^ CRC_TABLE[(state ^ byte) & 0xFF]
    return state ^ 0xFFFFFFFF


def bytes_of(bits: list[int]) -> bytes:
    """Bit i of the stream is bit i % 8 of byte i // 8."""
    bits = bits + [0] * (-len(bits) % 8)
    return bytes(sum(bit << k for k, bit in enumerate(bits[i : i + 8])) for i in range(0, len(bits), 8))


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


def encode_exponents(exponents: list[int], lengths: tuple[int, ...]) -> tuple[bytes, bool]:
    """The segment, and whether it holds them raw."""
    codes, quarter = canonical_codes(lengths), -(-len(exponents) // 4)
    escape = codes.get(len(lengths) - 1)
    streams = [
        bytes_of([bit for e in exponents[j * quarter : (j + 1) * quarter] for bit in codes.get(e) or escape or []])
        for j in range(4)
    ]
    escapes = bytes(e for e in exponents if e not in codes)
    segment = struct.pack("<5H", *map(len, streams), len(escapes)) + b"".join(streams) + escapes
    return (bytes(exponents), True) if len(segment) >= len(exponents) else (segment, False)


def nearest(magnitude: int, n_dropped: int, infinity: int) -> int:
    """The nearest multiple of 2^n_dropped, ties to even; where that would be infinity, the one before."""
    below, rest = divmod(magnitude, 2**n_dropped)
    up = 2 * rest > 2**n_dropped or (2 * rest == 2**n_dropped and below % 2 == 1)
    rounded = (below + up) * 2**n_dropped
    return rounded if rounded < infinity else infinity - 2**n_dropped


def level_of(magnitude: int, dtype: str, importance: int) -> int:
    """In format 1."""
    exponent, mantissa = divmod(magnitude, 2 ** MANTISSA_BITS[dtype])
    if importance == 0 or exponent == 2 ** EXPONENT_BITS[dtype] - 1:
        return 0
    code = 4 * (exponent + (112 if dtype == "float16" else 0)) + (mantissa >> (MANTISSA_BITS[dtype] - 2))
    return sum(importance + 348 > code + 4 * n for n in DROPPED[dtype][1:])


def kept_bits_of(exponent: int, importance: int, dtype: str, mode: str, kept_bits: int) -> int:
    """In format 2, by the header's byte: at most, and above 5 bits at least."""
    if exponent == 255:
        return MANTISSA_BITS[dtype]
    least, kept = divmod(kept_bits, 32)
    if mode == "paper" and importance > 0:
        kept = min(kept, max(least, exponent - importance // 4 + MANTISSA_BITS[dtype] - 86))
    return min(kept, exponent - 103) if dtype == "float16" else kept


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


def chunk_1(
    words: np.ndarray, dtype: str, mode: str, kept_bits: int, importance: np.ndarray, rounds: bool
) -> tuple[list[int], list[int], list[int], list[int]]:
    """Exponents, bits of levels, bits of mantissas and signs, and the words that these decode to."""
    n_mantissa, infinite = MANTISSA_BITS[dtype], 2 ** EXPONENT_BITS[dtype] - 1
    exponents, level_bits, mantissa_bits, decoded = [], [], [], []
    for word, byte in zip(words.tolist(), importance.tolist(), strict=True):
        sign, magnitude = divmod(word, 2 ** (n_mantissa + EXPONENT_BITS[dtype]))

        def n_dropped(magnitude: int, byte: int = byte) -> int:
            if magnitude >> n_mantissa == infinite:
                return 0
            return DROPPED[dtype][level_of(magnitude, dtype, byte)] if mode == "paper" else n_mantissa - kept_bits

        if rounds and 0 < magnitude >> n_mantissa < infinite:
            magnitude = nearest(magnitude, n_dropped(magnitude), infinite << n_mantissa)
        exponent, mantissa = divmod(magnitude, 2**n_mantissa)
        exponents.append(exponent)
        if exponent == 0:
            decoded.append(0)
            continue
        if mode == "paper":
            level_bits += number_bits(level_of(magnitude, dtype, byte), 2)
        n = n_dropped(magnitude)
        mantissa_bits += [*number_bits(mantissa >> n, n_mantissa - n), sign]
        decoded.append(magnitude >> n << n | sign << (n_mantissa + EXPONENT_BITS[dtype]))
    return exponents, level_bits, mantissa_bits, decoded


def chunk_2(
    words: np.ndarray, dtype: str, mode: str, cap: int, importance: np.ndarray, rounds: bool
) -> tuple[list[int], bytes, list[int]]:
    """Exponents, the run of 32-bit words that the lanes of signs and mantissas make, and the words that these decode to."""
    exponents, lanes, run, decoded = [], [(0, 0)] * LANES, b"", []
    for i, (word, byte) in enumerate(zip(widen(words, dtype).tolist(), importance.tolist(), strict=True)):
        sign, magnitude = divmod(word, 2**31)
        if magnitude >> 23 not in (0, 255):
            n_dropped = 23 - kept_bits_of(magnitude >> 23, byte, dtype, mode, cap)
            infinity = (HIGHEST[dtype] + 1) << 23
            magnitude = nearest(magnitude, n_dropped, infinity) if rounds else magnitude >> n_dropped << n_dropped
        exponents.append(magnitude >> 23)
        if exponents[-1] == 0:
            decoded.append(0)
            continue
        kept = kept_bits_of(exponents[-1], byte, dtype, mode, cap)
        field = magnitude % 2**23 >> (23 - kept) | sign << kept
        bits, n_bits = lanes[i % LANES]
        bits, n_bits = bits << (kept + 1) | field, n_bits + kept + 1
        if n_bits >= 32:
            n_bits -= 32
            run += struct.pack("<I", bits >> n_bits)
            bits %= 1 << n_bits
        lanes[i % LANES] = (bits, n_bits)
        decoded.append(magnitude >> (23 - kept) << (23 - kept) | sign << 31)
    return exponents, run + b"".join(struct.pack("<I", bits | 1 << n_bits) for bits, n_bits in lanes), decoded


def encode(
    words: np.ndarray,
    dtype: str,
    mode: str,
    kept_bits: int,
    importance: np.ndarray,
    lengths: tuple[int, ...],
    rounding: str = "nearest",
    format: int = 2,
) -> tuple[bytes, np.ndarray]:
    """The message of `words` (bit patterns) by a Huffman table of these `lengths`, and the words that it decodes to."""
    rounds = mode == "uniform" or (mode == "paper" and rounding == "nearest")
    infinite = 2 ** EXPONENT_BITS[dtype] - 1 if format == 1 else 255
    n_chunks = -(-len(words) // CHUNK)
    offset, headers, body, nonfinite, decoded = 48 + 32 * n_chunks, b"", b"", False, []
    for first in range(0, len(words), CHUNK):
        chunk = words[first : first + CHUNK], dtype, mode, kept_bits, importance[first : first + CHUNK], rounds
        if format == 1:
            exponents, level_bits, mantissa_bits, of_chunk = chunk_1(*chunk)
            segment, is_raw = encode_exponents(exponents, lengths)
            segments = segment + bytes_of(level_bits) + bytes_of(mantissa_bits)
            numbers = len(level_bits), len(mantissa_bits)
        else:
            exponents, run, of_chunk = chunk_2(*chunk)
            segment, is_raw = encode_exponents(exponents, lengths)
            segments = run + segment
            numbers = crc32c(chunk[4].tobytes()) if mode == "paper" else 0, 8 * len(run)
        headers += struct.pack("<Q4I", offset, len(segment), *numbers, len(exponents))
        headers += struct.pack("<2I", int(is_raw), crc32c(segments))
        body += segments
        offset += len(segments)
        nonfinite = nonfinite or infinite in exponents
        decoded += of_chunk
    start = struct.pack(
        "<4s4BQQQ", b"GWGC", format, DTYPES[dtype], MODES[mode], kept_bits, table_id(lengths), len(words), offset
    )
    start += struct.pack("<3I", n_chunks, int(nonfinite), 0)
    values = np.array(decoded, WORDS[dtype]) if format == 1 else narrow(np.array(decoded, np.uint32), dtype)
    return start + struct.pack("<I", crc32c(start + headers)) + headers + body, values.astype(WORDS[dtype])
