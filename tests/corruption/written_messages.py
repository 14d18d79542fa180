"""Messages of every codec, and what a liar makes of them."""

from typing import Any

import torch
from torch import Tensor

from float_messages import DTYPES, decode, encode, finite_gradient
from gcomp_gradients import KINDS, make_importance
from gcomp_gradients import make_gradient as gcomp_gradient
from gradwire import codecs
from quantiser_oracles import make_gradient
from sealing import CHUNK, SEALS, put

N_CHUNKED = CHUNK + 900  # two chunks


class Written:
    """A message, with the codec that wrote it and reads it."""

    def __init__(self, name: str, gradient: Tensor, cuts: tuple[int, ...] = (), **options: Any) -> None:
        self.name, self.codec = name, codecs.by_name(name, **options)
        self.n, self.dtype = gradient.numel(), gradient.dtype
        self._options = {"importance": make_importance(self.n)} if name == "gcomp" else {}
        self.message = encode(self.codec, gradient, **self._options, **({"cuts": cuts} if cuts else {}))

    def read(self, message: Tensor) -> Tensor:
        return decode(self.codec, message, self.n, self.dtype, **self._options)

    def sealed(self, message: Tensor) -> Tensor:
        """`message` with every checksum right, as a liar would send it."""
        SEALS[self.name](message, self.n)
        return message

    def with_lie(self, at: int, layout: str, *values: int) -> Tensor:
        return self.sealed(put(self.message.clone(), at, layout, *values))


def with_infinity(n: int) -> Tensor:
    values = finite_gradient(2 * n, torch.float32)[:n]
    values[n // 7] = float("inf")
    return values


ROUND = torch.randn(300, generator=torch.Generator().manual_seed(3)).round(decimals=1)
WRITTEN = {
    "one-bit": Written("one-bit", make_gradient(300)),
    "two-bit": Written("two-bit", make_gradient(300)),
    "two-bit by groups": Written("two-bit", make_gradient(300), (100, 200), scale_values=64),
    "ternary": Written("ternary", make_gradient(300)),
    "qsgd": Written("qsgd", make_gradient(300), block=128),
    "qsgd wide": Written("qsgd", make_gradient(300), levels=100, block=128),
    "qsgd of 5 levels": Written("qsgd", make_gradient(300), levels=5, block=128),
    "thc": Written("thc", make_gradient(300)),
    **{name: Written(name, ROUND) for name in ("raw", "zlib", "zstd")},
    "embedded-float": Written("embedded-float", with_infinity(N_CHUNKED)),
    "embedded-float whole": Written("embedded-float", finite_gradient(2_000, torch.float32)[:1_000], bits=32),
    "truncated-float": Written("truncated-float", with_infinity(N_CHUNKED), bits=12),
    "truncated-float native": Written("truncated-float", with_infinity(700), bits=9, format="native"),
    **{
        f"gcomp {format}": Written("gcomp", gcomp_gradient("sparse", N_CHUNKED, torch.float32), format=format)
        for format in (1, 2)
    },
    **{
        f"gcomp {format} {mode} {dtype} {kind}": Written(
            "gcomp", gcomp_gradient(kind, 700, dtype), importance=mode, bits=bits, format=format
        )
        for format in (1, 2)
        for dtype in DTYPES
        for (mode, bits), kind in zip(
            (("none", None), ("paper", None), ("uniform", 4), ("truncate", 4)), KINDS[::-1], strict=True
        )
    },
}
GCOMP_1, GCOMP_2 = WRITTEN["gcomp 1"], WRITTEN["gcomp 2"]
