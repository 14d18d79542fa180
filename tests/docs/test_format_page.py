"""The page of formats says what the code writes: magic, version and length of every header."""

import re
import struct
from collections.abc import Callable

import pytest
import torch
from page_text import DOCS, ROOT

from float_messages import encode
from gradwire import _native, codecs
from gradwire.codecs.huffman import HuffmanTable
from gradwire.wire.preamble import Preamble

PAGE = (DOCS / "format.md").read_text()


def section(title: str) -> str:
    found = re.search(rf"^## {re.escape(title)}\n(.*?)(?=^## |\Z)", PAGE, re.DOTALL | re.MULTILINE)
    assert found is not None, f"no section {title}"
    return found[1]


def row(title: str, field: str) -> tuple[int, int, str]:
    """(offset, bytes, value) of the first header that has such a field."""
    found = re.search(rf"^\| (\d+) \| (\d+) \| {field} \| (.*?) \|", section(title), re.MULTILINE)
    assert found is not None, f"{title}: no row {field}"
    return int(found[1]), int(found[2]), found[3]


def number(text: str) -> int:
    found = re.match(r"\d+", text)
    assert found is not None, text
    return int(found[0])


def encoded(codec: codecs.Codec) -> bytes:
    return bytes(encode(codec, torch.randn(100, generator=torch.Generator().manual_seed(1))).tolist())


WRITTEN: dict[str, tuple[str, Callable[[], bytes]]] = {
    "zlib": ("General", lambda: encoded(codecs.by_name("zlib"))),
    "one-bit": ("Quantised", lambda: encoded(codecs.by_name("one-bit"))),
    "qsgd": ("Quantised", lambda: encoded(codecs.by_name("qsgd"))),
    "table": ("Huffman table", lambda: HuffmanTable.from_histogram(torch.ones(256, dtype=torch.int64)).to_bytes()),
    "gcomp": ("GComp", lambda: encoded(codecs.by_name("gcomp", importance="none", format=1))),
    "embedded-float": ("Embedded float", lambda: encoded(codecs.by_name("embedded-float"))),
    "truncated-float": ("Truncated float", lambda: encoded(codecs.by_name("truncated-float"))),
}


@pytest.mark.parametrize("name", WRITTEN)
def test_magic_and_version_are_those_on_the_page(name: str) -> None:
    title, write = WRITTEN[name]
    message = write()
    assert row(title, "magic")[2].startswith(f"`{message[:4].decode()}`")
    offset, n_bytes, value = row(title, "version")
    assert int.from_bytes(message[offset : offset + n_bytes], "little") == number(value)


def test_codecs_write_their_second_format_by_default() -> None:
    for name, magic, options in (("gcomp", b"GWGC", {"importance": "none"}), ("embedded-float", b"GWEF", {})):
        message = encoded(codecs.by_name(name, **options))
        assert (message[:4], message[4]) == (magic, 2)


def test_length_of_a_message_is_where_the_page_has_it() -> None:
    for title, codec in [("Embedded float", "embedded-float"), ("Truncated float", "truncated-float")]:
        message = encoded(codecs.by_name(codec))
        offset, n_bytes, _ = row(title, "message_bytes")
        assert int.from_bytes(message[offset : offset + n_bytes], "little") == len(message)


def test_versions_on_the_wire_are_those_on_the_page() -> None:
    assert number(row("Message header", "version")[2]) == _native.MESSAGE_VERSION
    packet = (ROOT / "native" / "switch" / "udp_socket.hpp").read_text()
    assert f"kVersion = {number(row('Switch packets', 'version')[2])};" in packet


def test_broadcast_heads_are_as_the_page_has_them() -> None:
    """Their version; a peer written from the page is in tests/broadcast/test_broadcast_heads.py."""
    version = number(row("Broadcast", "version")[2])
    assert f"kHeadVersion = {version};" in (ROOT / "native" / "exchange" / "broadcast.hpp").read_text()
    assert f"Version {version}," in section("Broadcast")


def test_preamble_is_as_the_page_has_it() -> None:
    packed = Preamble(1, 2, "gcomp", 3, 4, 5, 6).pack()
    assert len(packed) == 40
    for field, value in [("bucket", 2), ("configuration", 3), ("layout", 4), ("step", 5), ("n_elements", 6)]:
        offset, n_bytes, _ = row("Preamble", field)
        assert int.from_bytes(packed[offset : offset + n_bytes], "little") == value, field
    assert struct.unpack_from("16s", packed, row("Preamble", "scheme")[0])[0].rstrip(b"\0") == b"gcomp"
