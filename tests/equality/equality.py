"""Every scheme on awkward gradients: the SHA-256 of its results, and the bytes it sends, to be compared with stored ones.

`python tests/equality/equality.py` (with src and tests on the path) writes them anew. A change that says it moves no
result and no byte must leave the file as it is.
"""

import hashlib
import json
import math
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import gradwire
from gradwire import schemes
from gradwire.registry import parse_spec
from ranks import bits_of, run_ranks

GOLDEN = Path(__file__).with_name("golden.json")
WORLDS = (1, 2, 3, 4)
SHAPES = [(), (7, 13), (0,), (64, 33), (300,), (3, 5, 7, 2), (1,), (41, 90), (19,), (0, 4), (120, 17)]
SCALES = [1.0, 1.0, 16.0, 2.0, 2.0, 1.0, 8.0]  # the loss scale of each step
NAN_STEP, ZERO_STEP, UNUSED_STEPS = 4, 2, (1, 3, 5)

# With options only, if at all.
OTHERS = ("aqgb", "auto", "broadcast", "gcomp", "one-bit-adam", "periodic", "power-momentum", "slimgc", "truncate")
SPECS = [
    *(name for name in schemes.names() if name not in OTHERS),
    "acp-sgd:rank=2,min_compression_rate=0,buffer_mb=0",
    "acp-sgd:error_feedback=false,reuse=false",
    "acp-sgd:overlap=false,factor_dtype=bfloat16,start_step=1",
    "dgc:share=0.1,momentum=0.5,max_norm=3.0,warmup_steps=3,per=bucket",
    "dgc:share=0.1,nesterov=true,weight_decay=0.1",
    "embedded-float:bits=12,topology=direct,chunk_elements=1000",
    "gcomp:refresh_every=3",
    "gcomp:importance=none,topology=direct,chunk_elements=1000",
    "homomorphic:mode=exact,integer_bits=64",
    "homomorphic:mode=exact,index=bloom",
    "homomorphic:mode=lossy,budget=0.05,error_feedback=true",
    "homomorphic:mode=lossy,budget=0.05",
    "homomorphic:sparsifier=top-k,density=0.02",
    "homomorphic:sparsifier=top-k,density=0.02,mode=exact,error_feedback=false",
    "one-bit:scale=two-means,chunk_elements=1024",
    "one-bit:error_feedback=false,pull=raw",
    "one-bit:pull=raw",
    "one-bit:scale_values=64,exempt=values.3+*.7",
    "one-bit-adam:freeze_step=2,scale_values=64",
    "one-bit-adam:freeze_step=1,codec=four-level",
    "one-bit-adam:freeze_step=1,codec=two-bit,scale_values=none",
    "periodic:every=2",
    "power-momentum:rank=2,min_compression_rate=0",
    "power-sgd:rank=2,min_compression_rate=0,reuse=false",
    "power-sgd-overlap:buffer_mb=0,error_feedback=false",
    "qsgd:levels=1,block=128,seed=3",
    "sign-sgd:ties=positive",
    "slimgc:threshold_bytes=0",
    "slimgc:threshold_bytes=4000,group_elements=1024",
    "slimgc:threshold_bytes=1000,error_feedback=false,pull=raw",
    "slimgc:threshold_bytes=1000,topology=all-reduce,codec=truncate",
    *(f"slimgc:threshold_bytes=1000,codec={codec}" for codec in ("two-bit", "truncate", "embedded-float", "qsgd")),
    "terngrad:clip=1.5,seed=2,per=bucket",
    "thc:clip=3.0,seed=1,error_feedback=false",
    "top-k:share=0.05,error_feedback=false",
    "top-k:share=0.05",
    "truncate:bits=5",
    "truncated-float:bits=6,rounding=stochastic,topology=direct",
    "two-bit:error_feedback=false,chunk_elements=1024",
    "two-bit:scale_values=128,chunk_elements=1000",
    "two-bit:scale_values=64,levels=4",
]
# They take the step themselves: what counts is the parameters at the end, and what they send is not compared.
STEP_OWNERS = [
    "aqgb:floor=0.25,ceiling=0.25,max_contention=1",
    "aqgb:floor=0.25,ceiling=0.25,max_contention=1,error_feedback=true,topology=ring",
    "broadcast:bits=4,error_feedback=true",
    "broadcast:bits=32",
    "slimgc:threshold_bytes=1000,backup=true",
]
# dtype, whether parameters go unused (DDP then keeps its buckets; otherwise it rebuilds them after the first step).
KINDS = {
    "float32 unused": (torch.float32, True),
    "float32 rebuilt": (torch.float32, False),
    "bfloat16 rebuilt": (torch.bfloat16, False),
    "float16 unused": (torch.float16, True),
}


class Numbers(nn.Module):
    """Parameters whose gradients are given."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.values = nn.ParameterList(torch.full(shape, 0.5, dtype=dtype) for shape in SHAPES)

    def forward(self, gradients: list[Tensor | None]) -> Tensor:
        used = [(value * g).sum() for value, g in zip(self.values, gradients, strict=True) if g is not None]
        return torch.stack(used).sum()


def gradients_of(
    rank: int, world_size: int, step: int, dtype: torch.dtype, is_sparse: bool, has_unused: bool, has_nan: bool
) -> Iterator[Tensor | None]:
    generator = torch.Generator().manual_seed(1_000 * rank + step)
    for place, shape in enumerate(SHAPES):
        values = torch.randn(shape, generator=generator) * 10.0 ** -(place % 4)
        chance = torch.rand(shape, generator=generator)
        if is_sparse or step == ZERO_STEP:
            values[chance > (0.03 if is_sparse else 0.5)] = 0
        if step == NAN_STEP and has_nan and rank == world_size - 1 and place == 3:
            values[5, 5] = math.nan
        on_nobody = place == 4 and step in UNUSED_STEPS
        on_one = place == 7 and step in UNUSED_STEPS and rank == 0
        yield None if has_unused and (on_nobody or on_one) else values.to(dtype) * SCALES[step]


def run_case(rank: int, world_size: int, spec: str, kind: str) -> list[Any]:
    """[SHA-256 of this rank's results, bytes sent, messages, fallbacks] of seven steps."""
    dtype, has_unused = KINDS[kind]
    name, options = parse_spec(spec)
    torch.manual_seed(0)
    ddp = DistributedDataParallel(Numbers(dtype), bucket_cap_mb=0.008, find_unused_parameters=has_unused)
    optimizer: Any = torch.optim.SGD(ddp.parameters(), lr=0.01, momentum=0.0 if name == "dgc" else 0.9)
    if schemes.needs_momenta(name):
        optimizer = torch.optim.AdamW(ddp.parameters(), lr=0.01, foreach=False)
    scale, owns_step = 1.0, spec in STEP_OWNERS
    scaler = None if owns_step else SimpleNamespace(get_scale=lambda: scale)  # all that is asked of it
    attachment = gradwire.attach(ddp, optimizer, schemes.by_name(name, **options), scaler, timeout_s=60)
    seen = hashlib.sha256()
    for step, scale in enumerate(SCALES):
        optimizer.zero_grad()
        is_sparse, has_nan = name == "homomorphic", not owns_step and name != "periodic"
        ddp(list(gradients_of(rank, world_size, step, dtype, is_sparse, has_unused, has_nan))).backward()
        if not owns_step:
            for parameter in ddp.parameters():
                gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
                seen.update(bits_of(gradient))
                gradient.div_(scale)
        if step != NAN_STEP or owns_step:
            optimizer.step()
    attachment.flush()
    for parameter in ddp.parameters():
        seen.update(bits_of(parameter))
    attachment.close()
    stats = attachment.stats()
    if owns_step:  # what they say beside the gradients, and in how many messages, hangs on who is first
        return [seen.hexdigest()[:16], None, None, stats["n_fallbacks"]]
    return [seen.hexdigest()[:16], stats["bytes_sent"], stats["n_messages"], stats["n_fallbacks"]]


def is_compared(spec: str, kind: str) -> bool:
    """What step owners do with unused parameters and other dtypes: tests/stepping, tests/broadcast. Momenta refuse them."""
    if spec.startswith("power-momentum"):
        return "unused" not in kind
    return spec not in STEP_OWNERS or kind == "float32 rebuilt"


def run_all(rank: int, world_size: int, only: str, kinds: list[str]) -> dict[str, list[Any]]:
    found = {}
    for spec in [*SPECS, *STEP_OWNERS]:
        for kind in kinds:
            if only in spec and is_compared(spec, kind):
                found[f"{spec} | {kind}"] = run_case(rank, world_size, spec, kind)
    return found


def measure(world_size: int, only: str = "", kinds: tuple[str, ...] = tuple(KINDS)) -> dict[str, list[list[Any]]]:
    """{"spec | kind": [of rank 0, of rank 1, ...]}, or only one where all ranks are alike."""
    of_ranks = run_ranks(run_all, world_size, only, list(kinds), timeout_s=1_500)
    cases = {case: [of_rank[case] for of_rank in of_ranks] for case in of_ranks[0]}
    return {case: found[:1] if all(one == found[0] for one in found) else found for case, found in cases.items()}


def arithmetic() -> str:
    """What torch's own products and sums come to on this machine: low rank, momentum and the optimizer rest on them."""
    generator = torch.Generator().manual_seed(0)
    a, b = torch.randn(3, 37, 41, generator=generator), torch.randn(3, 41, 5, generator=generator)
    seen = hashlib.sha256(bits_of(torch.bmm(a, b)))
    seen.update(bits_of(torch.add(a[0, 0], a[0, 1], alpha=0.9)))
    return seen.hexdigest()[:16]


def main() -> None:
    """Arguments: file to write (default: the golden one), part of the specs' names."""
    target = Path(sys.argv[1]) if len(sys.argv) > 1 else GOLDEN
    only = sys.argv[2] if len(sys.argv) > 2 else ""
    found = {str(world): measure(world, only) for world in map(int, os.environ.get("WORLDS", "1 2 3 4").split())}
    lines = [
        f"{json.dumps(world)}: {{\n" + ",\n".join(f"{json.dumps(k)}: {json.dumps(v)}" for k, v in cases.items()) + "\n}"
        for world, cases in found.items()
    ]
    target.write_text(f'{{"arithmetic": {json.dumps(arithmetic())},\n' + ",\n".join(lines) + "\n}\n")


if __name__ == "__main__":
    main()
