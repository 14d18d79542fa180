"""Messages of every released format version stay readable, and are still written byte for byte."""

import golden_files as golden
import pytest
import torch

from float_messages import same_bits

each_file = pytest.mark.parametrize("name", golden.FILES)


def test_every_golden_file_is_there_and_no_other() -> None:
    found = (path.relative_to(golden.FOLDER).with_suffix("") for path in golden.FOLDER.rglob("*.npz"))
    assert sorted(map(str, found)) == sorted(golden.FILES)


@each_file
def test_golden_message_still_decodes_to_its_values(name: str) -> None:
    _, message, decoded, *of_gcomp = golden.load(name)
    assert golden.checksum(message, decoded) == golden.FILES[name].checksum
    assert same_bits(golden.read(golden.FILES[name], message, *of_gcomp), decoded)


@each_file
def test_golden_message_is_still_written_byte_for_byte(name: str) -> None:
    gradient, message, _, *of_gcomp = golden.load(name)
    assert torch.equal(golden.write(golden.FILES[name], gradient, *of_gcomp), message)
