"""Results and messages are those of the exchanges that the engine replaced, bit for bit and byte for byte.

`PYTHONPATH=tests python tests/engine/test_exchange_digests.py` writes the digests anew: only where they are meant to change.
"""

import hashlib
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import gradwire
from gradwire import _native, schemes
from gradwire.core.bucket import Bucket
from gradwire.schemes.aqgb.pacing import Pacing, PacingLimits
from gradwire.schemes.aqgb.scheme import Aqgb, Broadcast
from gradwire.telemetry.recorder import BucketRecord
from ranks import run_ranks
from small_training import GivenParts

# ---- reductions

# GComp's messages as the digests were first made of them.
FORMAT_1, DIRECT = {"format": 1, "rounding": "truncate"}, {"topology": "direct"}
MANY, ONE = [(3, 7), (1,), (5_003,), (70_001,), (64,), (300, 41)], [(100_003,)]
# name: (scheme, options, sizes of the parameters)
REDUCTIONS = {
    "gcomp ring": ("gcomp", {"refresh_every": 50} | FORMAT_1, MANY),
    "gcomp direct": ("gcomp", {"topology": "direct", "refresh_every": 3} | FORMAT_1, MANY),
    "gcomp uniform": ("gcomp", {"importance": "uniform", "bits": 7, "chunk_elements": 5_000} | FORMAT_1, [(300_007,)]),
    "gcomp none": ("gcomp", {"importance": "none", "chunk_elements": 999} | DIRECT | FORMAT_1, [(20_011,)]),
    "truncate": ("truncate", {"bits": 6, "format": 1}, [(400_001,)]),
    "gcomp format 2 ring": ("gcomp", {"chunk_elements": 9_000}, MANY),
    "gcomp format 2 direct": ("gcomp", {"topology": "direct", "refresh_every": 3, "bits": 9}, MANY),
    "gcomp format 2 none": ("gcomp", {"importance": "none", "chunk_elements": 999}, [(20_011,)]),
    "truncate format 2": ("truncate", {"bits": 6}, [(400_001,)]),
    "truncated-float": ("truncated-float", {"rounding": "stochastic", "seed": 5}, ONE),
    "truncated-float direct": ("truncated-float", {"rounding": "stochastic", "chunk_elements": 10_000} | DIRECT, ONE),
    "embedded-float": ("embedded-float", {"bits": 9}, ONE),
    "zlib": ("zlib", {"chunk_elements": 700}, [(5_003,)]),
    "one-bit": ("one-bit", {}, MANY),
    "one-bit raw": ("one-bit", {"pull": "raw", "chunk_elements": 4_000}, MANY),
    "two-bit": ("two-bit", {"chunk_elements": 10_000}, [(200_001,)]),
    "qsgd": ("qsgd", {"levels": 4, "chunk_elements": 10_000}, ONE),
    "slimgc": ("slimgc", {"threshold_bytes": 1_000, "group_elements": 9_000}, MANY),
    "slimgc two-bit raw": ("slimgc", {"codec": "two-bit", "threshold_bytes": 0, "pull": "raw"}, MANY),
    "slimgc ring": ("slimgc", {"threshold_bytes": 0, "topology": "all-reduce", "group_elements": 9_000}, MANY),
    "slimgc gcomp": ("slimgc", {"codec": "gcomp", "threshold_bytes": 0, "group_elements": 9_000} | FORMAT_1, MANY),
    "slimgc gcomp format 2": ("slimgc", {"codec": "gcomp", "threshold_bytes": 0, "group_elements": 9_000}, MANY),
    "slimgc gcomp ring": ("slimgc", {"codec": "gcomp", "threshold_bytes": 0, "topology": "all-reduce"}, MANY),
}
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
N_STEPS = 4
# Of a frame, when the digests were made: what the backend sums has none, but was counted as if it had.
FRAME_BYTES = 32


def reduce_case(rank: int, world_size: int, name: str, dtype_name: str) -> tuple[str, int]:
    """SHA-256 of the results of a few steps, and the bytes that this rank sent, headers of messages not counted."""
    n_sums = 0
    count_sent = BucketRecord.count_sent

    def count_sum(record: BucketRecord, n_bytes: int, n_received: int = 0) -> None:
        nonlocal n_sums
        n_sums += 1
        count_sent(record, n_bytes, n_received)

    BucketRecord.count_sent = count_sum  # type: ignore[method-assign]
    header_bytes = _native.MESSAGE_HEADER_BYTES
    scheme_name, options, shapes = REDUCTIONS[name]
    dtype = DTYPES[dtype_name]
    draw = np.random.default_rng(7)
    parameters = [nn.Parameter(torch.from_numpy(draw.standard_normal(shape).astype(np.float32))) for shape in shapes]
    optimizer = torch.optim.Adam(parameters, lr=1e-3, weight_decay=0.01)
    for parameter in parameters:
        first, second = (draw.standard_normal(parameter.shape).astype(np.float32) for _ in range(2))
        optimizer.state[parameter] = {
            "step": torch.tensor(3.0),
            "exp_avg": torch.from_numpy(first * np.float32(1e-3)),
            "exp_avg_sq": torch.from_numpy(np.square(second) * np.float32(1e-6)),
        }
    offsets = np.cumsum([0, *(p.numel() for p in parameters)]).tolist()
    scheme = schemes.by_name(scheme_name, **schemes.as_published(scheme_name, options))
    state = gradwire.HookState(scheme, optimizer=optimizer, timeout_s=60)
    digest, payload = hashlib.sha256(), 0
    mine = np.random.default_rng(100 + rank)
    for step in range(N_STEPS):
        values = mine.standard_normal(offsets[-1]) * np.exp(mine.standard_normal(offsets[-1])) * 1e-3
        values[:: 11 + rank] = 0
        gradient = torch.from_numpy(values.astype(np.float32)).to(dtype)
        record = state.recorder.open_bucket(step, 0, gradient.numel() * gradient.element_size())
        bucket = Bucket(gradient, parameters, offsets[:-1], index=0, step=step, is_last=True, record=record)
        state.scheme.reduce(bucket).wait()
        state.communicator.submit(state.scheme.end_step, step).wait()
        digest.update(gradient.view(torch.uint8).numpy().tobytes())
        payload += record.bytes_sent - header_bytes * record.n_messages
    state.close()
    return digest.hexdigest(), payload + (header_bytes - FRAME_BYTES) * n_sums


# ---- trainings through the broadcast schemes

SIZES = [(150, 151), (7,), (40_003,), (64, 33)]


class InTwoStages(Broadcast):
    """Of every block `bits` first and then 5 more: what aqgb does when it has the time, at any speed."""

    def _make_pacing(self, *arguments: Any) -> Pacing:
        self.limits = PacingLimits(self.bits / 32, (self.bits + 5) / 32, max_contention=1)
        pacing = super()._make_pacing(*arguments)
        pacing.first_bits = lambda unsent_elements: self.bits  # type: ignore[method-assign]
        pacing.more_bits = lambda block, sent_bits, extra_bytes=0: self.bits + 5 - sent_bits  # type: ignore[method-assign]
        return pacing


# name: (scheme, options, dtype, ranks)
BROADCASTS: dict[str, tuple[type, dict[str, Any], torch.dtype, tuple[int, ...]]] = {
    "2 bits": (Broadcast, {"bits": 2}, torch.float32, (2, 3)),
    "8 bits": (Broadcast, {"bits": 8}, torch.float32, (2, 3, 4)),
    "8 bits, ring": (Broadcast, {"bits": 8, "topology": "ring"}, torch.float32, (2, 3, 4)),
    "31 bits": (Broadcast, {"bits": 31, "partition": 64}, torch.float32, (2,)),
    "32 bits": (Broadcast, {"bits": 32}, torch.float32, (2, 3)),
    "32 bits, ring": (Broadcast, {"bits": 32, "topology": "ring"}, torch.float32, (3,)),
    "5 bits, feedback": (Broadcast, {"bits": 5, "error_feedback": True}, torch.float32, (2, 3)),
    "6 bits, bfloat16": (Broadcast, {"bits": 6}, torch.bfloat16, (2, 3)),
    "32 bits, bfloat16": (Broadcast, {"bits": 32}, torch.bfloat16, (3,)),
    "9 bits, float16": (Broadcast, {"bits": 9, "topology": "ring"}, torch.float16, (3,)),
    "one block": (Broadcast, {"bits": 4, "blocks": 1}, torch.float32, (2,)),
    "clipped": (Broadcast, {"bits": 7, "max_grad_norm": 0.01}, torch.float32, (2,)),
    "two stages": (InTwoStages, {"bits": 3}, torch.float32, (2, 3)),
    "two stages, ring": (InTwoStages, {"bits": 3, "topology": "ring"}, torch.float32, (3,)),
    "to the last bit": (InTwoStages, {"bits": 27, "error_feedback": True}, torch.float32, (2,)),
    "aqgb": (Aqgb, {"floor": 0.25, "ceiling": 0.25, "max_contention": 1}, torch.float32, (2, 3)),
}


def train_case(rank: int, world_size: int, name: str) -> tuple[str, int]:
    """SHA-256 of the parameters after every step, and the bytes that this rank sent."""
    make, options, dtype, _ = BROADCASTS[name]
    torch.set_num_threads(1)
    ddp = DistributedDataParallel(GivenParts(SIZES, dtype, 0.0), bucket_cap_mb=0.05)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.5)
    options = {"blocks": [[f"parts.{index}"] for index in range(len(SIZES))]} | options
    attachment = gradwire.attach(ddp, optimizer, make(**options), timeout_s=60)
    digest, mine = hashlib.sha256(), np.random.default_rng(100 + rank)
    for step in range(N_STEPS):
        gradients = []
        for shape in SIZES:
            values = mine.standard_normal(shape) * np.exp(2 * mine.standard_normal(shape)) * 1e-3
            values.reshape(-1)[:: 11 + rank + step] = 0
            gradients.append(torch.from_numpy(values.astype(np.float32)).to(dtype))
        optimizer.zero_grad()
        ddp(gradients).backward()
        optimizer.step()
        attachment.flush()
        for parameter in ddp.parameters():
            digest.update(parameter.detach().view(-1).view(torch.uint8).numpy().tobytes())
    attachment.close()
    return digest.hexdigest(), attachment.stats()["bytes_sent"]


# ---- what they come to

OF_REDUCTIONS, OF_BROADCASTS = (Path(__file__).with_name(f"{name}.json") for name in ("digests", "broadcast_digests"))
RUNS: dict[Path, Callable[..., Any]] = {OF_REDUCTIONS: reduce_case, OF_BROADCASTS: train_case}


def cases_of(path: Path) -> Iterator[str]:
    """Arguments and number of ranks: "one-bit; bfloat16; 2", "8 bits, ring; 3"."""
    if path == OF_BROADCASTS:
        for name, (_, _, _, world_sizes) in BROADCASTS.items():
            yield from (f"{name}; {world_size}" for world_size in world_sizes)
        return
    for name in REDUCTIONS:
        for dtype in DTYPES if name.startswith(("gcomp ", "one-bit")) else ["float32"]:
            yield from (f"{name}; {dtype}; {world_size}" for world_size in (2, 3))


def digest_of(path: Path, case: str) -> list[Any]:
    """The digest of what all ranks hold in the end, and the bytes that each has sent."""
    *arguments, world_size = case.split("; ")
    results = run_ranks(RUNS[path], int(world_size), *arguments)
    ((digest,), n_bytes) = {found for found, _ in results}, [n for _, n in results]
    return [digest, n_bytes]


EXPECTED = {(path, case): found for path in RUNS for case, found in json.loads(path.read_text()).items()}


@pytest.mark.parametrize(("path", "case"), EXPECTED, ids=[case for _, case in EXPECTED])
def test_results_and_bytes_are_those_of_before(path: Path, case: str) -> None:
    assert digest_of(path, case) == EXPECTED[path, case]


if __name__ == "__main__":
    for path in RUNS:
        path.write_text(json.dumps({case: digest_of(path, case) for case in cases_of(path)}, indent=1) + "\n")
