"""Codecs on gradients of real training: how small, how fast, beside general compressors."""

from __future__ import annotations

from gradwire_lab.results.experiment import Column, Experiment, Goal, Plot, Table

GRADIENTS = ["gpt@400", "resnet@400"]
STEPS = {name: [f"{name}@{step}" for step in (10, 20, 40, 60)] for name in ("gpt", "resnet")}
_RATIO = Column("ratio", "ratio", form=".4f")
_SPEED = [
    Column("encode_gb_per_s", "encode GB/s", form=".2f", spread=True),
    Column("encode_vs_zstd", "x zstd -1", form=".1f"),
    Column("decode_gb_per_s", "decode GB/s", form=".2f", spread=True),
    Column("decode_vs_zstd", "x zstd -1", form=".1f"),
]
_COMPETITORS = ["zstd", "zlib", "lz4", "blosc2", "zipnn", "pcodec"]
_OWN = [
    "gcomp",
    "gcomp:format=1",
    "gcomp:importance=none",
    "gcomp:importance=uniform,bits=10",
    "gcomp:bits=14",
    "gcomp:table=prior",
    "truncate",
    "gradwire:zlib",
    "gradwire:zstd",
]
_DRAWN = ["gcomp", "gcomp:importance=none", "gcomp:importance=uniform,bits=10", "truncate", "zstd", "lz4", "zipnn"]
_SHORT = [f"gcomp:dtype={dtype}" for dtype in ("bfloat16", "float16")]
_ENCODE, _DECODE = (Column(f"{way}_gb_per_s", form=".2f") for way in ("encode", "decode"))
_FORMAT_2 = ["gcomp", "gcomp:importance=uniform,bits=10"]

EXPERIMENTS = [
    Experiment(
        key="codec", system="codecs", measure="codec", seconds=60, together=("codec",), quick=True,
        question="How small does a gradient get without loss that counts, and how fast?",
        fixed={"threads": 1}, axes={"gradients": GRADIENTS, "codec": [*_OWN, *_SHORT, *_COMPETITORS]},
        show=[Table([_RATIO, *_SPEED, Column("exponent_bits", form=".3f"), Column("exponent_entropy_bits", "entropy",
                                                                                  form=".3f")],
                    rows=("codec",)),
              Plot("ratio", Column("encode_gb_per_s", "encode, GB/s"), "codec", log="y", x_title="size / original",
                   where={"gradients": GRADIENTS[0], "codec": _DRAWN})],
        goals=[Goal("decode at least 2.5 times as fast as zstd -1", Column("decode_vs_zstd", form=".1f"), ">=", 2.5,
                    {"codec": "gcomp"}),
               Goal("encode at least 3 times as fast", Column("encode_vs_zstd", form=".1f"), ">=", 3.0,
                    {"codec": "gcomp"}),
               Goal("encode at least 3 GB/s", _ENCODE, ">=", 3.0, {"codec": _FORMAT_2}),
               Goal("decode at least 4.5 GB/s", _DECODE, ">=", 4.5, {"codec": _FORMAT_2})],
    ),
]  # fmt: skip
