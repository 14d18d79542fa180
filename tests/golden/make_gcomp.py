"""Writes the golden GComp messages of one format version (1: with truncation, as it was released).

Run once for a new version; never over an old one.

python tests/golden/make_gcomp.py VERSION
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

from gcomp_gradients import make_gradient, make_importance, words_of
from gradwire.codecs.gcomp import GCompCodec, HuffmanTable

FOLDER = Path(__file__).parent / "gcomp"
N_VALUES = 700
SETTINGS: dict[int, dict[str, Any]] = {1: {"format": 1, "rounding": "truncate"}, 2: {"format": 2}}
# name: dtype, importance, bits, kind of values, whether a fitted table is used (else the prior)
CASES = {
    "float32_paper": (torch.float32, "paper", None, "gaussian", True),
    "float32_none_special": (torch.float32, "none", None, "special", False),
    "float32_uniform": (torch.float32, "uniform", 9, "sparse", True),
    "bfloat16_paper": (torch.bfloat16, "paper", None, "gaussian", True),
    "float16_truncate": (torch.float16, "truncate", 4, "gaussian", False),
    "float32_raw_exponents": (torch.float32, "paper", None, "random bits", False),
}
CASES_2 = {
    "float32_capped": (torch.float32, "paper", 9, "special", True),
    "float16_none_subnormals": (torch.float16, "none", None, "special", True),
    "bfloat16_uniform": (torch.bfloat16, "uniform", 3, "gaussian", False),
}


def main() -> None:
    version = int(sys.argv[1])
    for name, (dtype, importance, bits, kind, is_fitted) in (CASES | (CASES_2 if version == 2 else {})).items():
        path = FOLDER / f"v{version}_{name}.npz"
        if path.exists():
            sys.exit(f"{path} exists: golden files are never rewritten")
        gradient, codec = make_gradient(kind, N_VALUES, dtype), GCompCodec(importance, bits, **SETTINGS[version])
        if is_fitted:
            histogram = torch.zeros(256, dtype=torch.int64)
            codec.histogram(gradient, histogram)
            codec.use_table(HuffmanTable.from_histogram(histogram))
        out = torch.empty(codec.max_encoded_bytes(N_VALUES, dtype), dtype=torch.uint8)
        message, decoded = out[: codec.encode(gradient, out, make_importance(N_VALUES))], torch.empty_like(gradient)
        codec.decode(message, decoded, make_importance(N_VALUES))
        np.savez_compressed(
            path,
            message=message.numpy(),
            table=np.frombuffer(codec.table_in_use(dtype).to_bytes(), np.uint8),
            gradient_bits=words_of(gradient),
            importance=make_importance(N_VALUES).numpy(),
            decoded_bits=words_of(decoded),
            settings=np.array([str(dtype), importance, str(bits)]),
        )


if __name__ == "__main__":
    main()
