"""Writes the golden messages of the quantisers for one format version. Run once for a new version; never over an old one.

python tests/golden/make_quantised.py VERSION
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))

from gradwire import codecs
from quantiser_oracles import decode, encode, make_gradient

FOLDER = Path(__file__).parent / "quantised"
N_VALUES = 700
CASES = {
    "one-bit_mean": ("one-bit", {}),
    "one-bit_two-means": ("one-bit", {"scale": "two-means"}),
    "one-bit_fixed": ("one-bit", {"scale": "fixed"}),
    "two-bit_relative": ("two-bit", {}),
    "two-bit_absolute": ("two-bit", {"threshold": 0.003, "relative": False}),
    "ternary": ("ternary", {"seed": 77}),
    "qsgd_4-bits": ("qsgd", {"block": 128, "seed": 77}),
    "qsgd_8-bits": ("qsgd", {"levels": 100, "seed": 77}),
    "thc": ("thc", {"seed": 77}),
}
STEP = 12_345


def main() -> None:
    version = int(sys.argv[1])
    FOLDER.mkdir(exist_ok=True)
    for name, (codec_name, options) in CASES.items():
        path = FOLDER / f"v{version}_{name}.npz"
        if path.exists():
            sys.exit(f"{path} exists: golden files are never rewritten")
        codec, gradient = codecs.by_name(codec_name, **options), make_gradient(N_VALUES)
        message = encode(codec, gradient, step=STEP)
        np.savez_compressed(
            path,
            message=message.numpy(),
            gradient_bits=gradient.numpy().view(np.uint32),
            decoded_bits=decode(codec, message, N_VALUES).numpy().view(np.uint32),
        )


if __name__ == "__main__":
    main()
