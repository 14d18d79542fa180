"""A preamble that is not what the others wrote names the field and the rank; nothing is read wrong."""

import pytest
import torch

from gradwire import errors
from gradwire.telemetry.recorder import Recorder
from gradwire.wire.preamble import FORMAT_VERSION, Preamble, compare_preambles, hash_configuration

PREAMBLE = Preamble(FORMAT_VERSION, 0, "gcomp", 11, 12, 13, 14)


class Gathering:
    """A communicator whose all_gather returns what the ranks of this test sent."""

    def __init__(self, preambles: list[Preamble]) -> None:
        self.world_size = len(preambles)
        self._rows = torch.stack([torch.tensor(list(p.pack()), dtype=torch.uint8) for p in preambles])

    def all_gather(self, mine: torch.Tensor) -> torch.Tensor:
        return self._rows


@pytest.mark.parametrize("field", Preamble._fields)
def test_preamble_names_the_field_and_the_rank_that_differ(field: str) -> None:
    record = Recorder(0, 4).open_bucket(0, 0, 0)
    odd = PREAMBLE._replace(**{field: "zlib" if field == "scheme" else 3})
    for mine in (PREAMBLE, odd):
        with pytest.raises(errors.RankMismatch) as caught:
            compare_preambles(Gathering([PREAMBLE, PREAMBLE, odd, PREAMBLE]), mine, record)  # type: ignore[arg-type]
        message = str(caught.value)
        assert f"disagree on {field}" in message
        assert f"rank 2: {getattr(odd, field)}; the others: {getattr(PREAMBLE, field)}" in message
        assert "What to do:" in message
    compare_preambles(Gathering([PREAMBLE, PREAMBLE]), PREAMBLE, record)  # type: ignore[arg-type]


def test_preamble_comes_back_as_it_was_in_at_most_64_bytes() -> None:
    longest = Preamble(0xFFFF, 0xFFFF, "a-name-of-16-let", *[0xFFFFFFFF] * 3, 2**64 - 1)
    for preamble in (PREAMBLE, longest):
        assert Preamble.unpack(preamble.pack()) == preamble
    assert len(longest.pack()) <= 64


def test_preamble_lies_as_the_format_page_says() -> None:
    name = b"gcomp".ljust(16, b"\0")
    numbers = b"".join(number.to_bytes(size, "little") for number, size in ((11, 4), (12, 4), (13, 4), (14, 8)))
    assert PREAMBLE.pack() == b"\1\0\0\0" + name + numbers
    assert hash_configuration("gcomp", {"a": 1, "b": 2}) == hash_configuration("gcomp", {"b": 2, "a": 1})
