"""Writes the golden messages of the float codecs for one format version. Run once for a new version; never over an old one.

python tests/golden/make_floats.py VERSION
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

from float_messages import encode
from gcomp_gradients import make_gradient, words_of
from gradwire import codecs

FOLDER = Path(__file__).parent / "floats"
N_VALUES = 700
# name: dtype, codec, its options, kind of values
CASES = {
    "embedded_float32_5": (torch.float32, "embedded-float", {"bits": 5}, "gaussian"),
    "embedded_bfloat16_17_special": (torch.bfloat16, "embedded-float", {"bits": 17, "partition": 64}, "special"),
    "embedded_float32_32": (torch.float32, "embedded-float", {"bits": 32}, "sparse"),
    "truncated_float32_12_native": (torch.float32, "truncated-float", {"bits": 12, "format": "native"}, "gaussian"),
    "truncated_float32_4_special": (torch.float32, "truncated-float", {"bits": 4, "partition": 32}, "special"),
    "truncated_float16_8_stochastic": (
        torch.float16,
        "truncated-float",
        {"bits": 8, "rounding": "stochastic", "seed": 3},
        "gaussian",
    ),
    "truncated_float32_6_native_stochastic": (
        torch.float32,
        "truncated-float",
        {"bits": 6, "format": "native", "rounding": "stochastic"},
        "gaussian",
    ),
}


def main() -> None:
    version = int(sys.argv[1])
    FOLDER.mkdir(exist_ok=True)
    for name, (dtype, codec_name, options, kind) in CASES.items():
        path = FOLDER / f"v{version}_{name}.npz"
        if path.exists():
            sys.exit(f"{path} exists: golden files are never rewritten")
        gradient, codec = make_gradient(kind, N_VALUES, dtype), codecs.by_name(codec_name, **options)
        message, decoded = encode(codec, gradient), torch.empty_like(gradient)
        codec.decode(message, decoded)
        np.savez_compressed(
            path,
            message=message.numpy(),
            gradient_bits=words_of(gradient),
            decoded_bits=words_of(decoded),
            settings=np.array([str(dtype), codec_name, json.dumps(options)]),
        )


if __name__ == "__main__":
    main()
