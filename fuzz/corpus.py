"""A corpus as one file of text, an input a line in base64: `corpus.py unpack FILE FOLDER`, `corpus.py pack FOLDER FILE`."""

import base64
import sys
from pathlib import Path


def unpack(file: Path, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for number, line in enumerate(file.read_text().splitlines()):
        (folder / str(number)).write_bytes(base64.b64decode(line))


def pack(folder: Path, file: Path) -> None:
    inputs = sorted((path.read_bytes() for path in folder.iterdir()), key=lambda one: (len(one), one))
    file.write_text("".join(base64.b64encode(one).decode() + "\n" for one in inputs))


if __name__ == "__main__":
    {"unpack": unpack, "pack": pack}[sys.argv[1]](Path(sys.argv[2]), Path(sys.argv[3]))
