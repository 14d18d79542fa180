"""A message that is not what it says gives a typed error, whatever codec reads it: no crash, no hang, nothing written
beside the values."""

import contextlib

import pytest
import torch
from torch import Tensor
from written_messages import WRITTEN, Written

from float_messages import LEVELS, at_level, decode
from gradwire.codecs import embedded_float, gcomp, general, quantised, truncated_float
from gradwire.errors import BufferTooSmall, CorruptMessage, IncompatibleVersion, InvalidArgument, RankMismatch
from sealing import SEALS, put, seal_gcomp, seal_general, seal_quantised

TYPED = (CorruptMessage, IncompatibleVersion, RankMismatch, BufferTooSmall)
DESCRIBE = {
    seal_quantised: quantised.describe,
    seal_general: general.describe,
    SEALS["embedded-float"]: embedded_float.describe,
    SEALS["truncated-float"]: truncated_float.describe,
    seal_gcomp: gcomp.describe,
}
each_written = pytest.mark.parametrize("written", WRITTEN.values(), ids=WRITTEN)


@each_written
def test_every_cut_lengthened_or_altered_message_is_refused(written: Written) -> None:
    message = written.message
    n_bytes, levels = message.numel(), list(LEVELS)
    places = [*range(min(64, n_bytes)), *range(64, n_bytes, 1 + n_bytes // 800), n_bytes - 1]
    for place in places:
        with at_level(levels[place % 3]):
            with pytest.raises(CorruptMessage):
                written.read(message[:place].clone())
            for bit in range(8) if place < 64 else [place % 8]:
                altered = message.clone()
                altered[place] ^= 1 << bit
                with pytest.raises((CorruptMessage, IncompatibleVersion)):
                    written.read(altered)
    with pytest.raises(CorruptMessage):
        written.read(torch.cat([message, torch.zeros(1, dtype=torch.uint8)]))


@each_written
@pytest.mark.parametrize("n_right", [0, 8, 48])
def test_random_bytes_are_refused(written: Written, n_right: int) -> None:
    """Also where the beginning is right."""
    random = torch.Generator().manual_seed(n_right)
    for n_bytes in [0, 1, *range(27, 50), 300, 1_000] * 3:
        noise = torch.randint(0, 256, (n_bytes,), generator=random, dtype=torch.uint8)
        noise[:n_right] = written.message[: min(n_right, n_bytes)]
        with pytest.raises(CorruptMessage):
            written.read(noise)


@each_written
def test_changes_under_right_checksums_give_other_values_or_a_typed_error(written: Written) -> None:
    random = torch.Generator().manual_seed(1)
    assert torch.equal(written.sealed(written.message.clone()), written.message)

    def draw(low: int, high: int, n: int = 1) -> Tensor:
        return torch.randint(low, high, (n,), generator=random)

    for turn in range(300):
        altered = written.message.clone()
        n_changes = int(draw(1, 9))
        altered[draw(0, altered.numel(), n_changes)] = draw(0, 256, n_changes).to(torch.uint8)
        if turn % 3 == 0:
            altered = altered[: int(draw(48, altered.numel() + 1))].clone()
        with at_level(list(LEVELS)[turn % 3]), contextlib.suppress(*TYPED):
            values = written.read(written.sealed(altered))
            if SEALS[written.name] is seal_quantised and written.name != "thc":  # a sum of whose values may overflow
                assert values.isfinite().all() or values.isnan().all()


@each_written
def test_another_size_dtype_codec_or_version_is_refused_by_name(written: Written) -> None:
    is_general = SEALS[written.name] is seal_general
    for n in (0, 1, written.n - 1, written.n + 1):
        error = BufferTooSmall if is_general and n < written.n else CorruptMessage
        with pytest.raises(error, match=rf"(expected|room for) {n}\b") as caught:
            decode(written.codec, written.message, n, written.dtype)
        assert str(written.n) in str(caught.value)
    if SEALS[written.name] is not seal_quantised:  # whose messages are of any dtype
        other = torch.float16 if written.dtype == torch.bfloat16 else torch.bfloat16
        with pytest.raises(CorruptMessage, match=str(other).removeprefix("torch.")):
            decode(written.codec, written.message, written.n, other)
        if is_general:  # as many bytes
            with pytest.raises(CorruptMessage, match="dtype"):
                decode(written.codec, written.message, 2 * written.n, other)
    for foreign in WRITTEN.values():
        if SEALS[foreign.name] is not SEALS[written.name]:
            with pytest.raises(CorruptMessage, match=r"does not begin with|it begins with"):
                written.read(foreign.message)
        elif foreign.name not in (written.name, "raw"):
            with pytest.raises(CorruptMessage, match=rf"(one of|method) {foreign.name}"):
                decode(written.codec, foreign.message, foreign.n, foreign.dtype)
    has_two = SEALS[written.name] in (seal_quantised, seal_gcomp) or written.codec.name == "embedded-float"
    for version in (3, 9) if has_two else (2, 3, 9):
        with pytest.raises(IncompatibleVersion, match=f"version {version}"):
            written.read(written.with_lie(4, "<B", version))


@each_written
def test_what_tells_of_a_message_without_its_values_checks_it_too(written: Written) -> None:
    read = DESCRIBE[SEALS[written.name]]
    described = read(written.message)
    assert described["codec"] in written.name
    assert (described["n_elements"], described["message_bytes"]) == (written.n, written.message.numel())
    foreign = put(written.message.clone(), 0, "<4s", b"GWXX")  # type: ignore[arg-type]
    cut = [written.message[:n_bytes] for n_bytes in (27, 31, 39, 47, -1)]
    for bad in (*cut, foreign, put(written.message.clone(), 8, "<B", 77)):
        with pytest.raises(CorruptMessage):
            read(bad)
    with pytest.raises(InvalidArgument):
        read(torch.zeros(10))
