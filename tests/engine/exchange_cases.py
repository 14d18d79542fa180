"""Reductions whose results and bytes must never change, whatever moves the messages."""

import hashlib

import numpy as np
import torch
from torch import nn

import gradwire
from gradwire import _native, schemes
from gradwire.core.bucket import Bucket
from gradwire.telemetry.recorder import BucketRecord

# GComp's messages as the digests were first made of them.
FORMAT_1 = {"format": 1, "rounding": "truncate"}
# name: (scheme, options, sizes of the parameters)
MANY = [(3, 7), (1,), (5_003,), (70_001,), (64,), (300, 41)]
CASES = {
    "gcomp ring": ("gcomp", {"refresh_every": 50} | FORMAT_1, MANY),
    "gcomp direct": ("gcomp", {"topology": "direct", "refresh_every": 3} | FORMAT_1, MANY),
    "gcomp uniform": ("gcomp", {"importance": "uniform", "bits": 7, "chunk_elements": 5_000} | FORMAT_1, [(300_007,)]),
    "gcomp none": (
        "gcomp",
        {"importance": "none", "topology": "direct", "chunk_elements": 999} | FORMAT_1,
        [(20_011,)],
    ),
    "truncate": ("truncate", {"bits": 6, "format": 1}, [(400_001,)]),
    "gcomp format 2 ring": ("gcomp", {"chunk_elements": 9_000}, MANY),
    "gcomp format 2 direct": ("gcomp", {"topology": "direct", "refresh_every": 3, "bits": 9}, MANY),
    "gcomp format 2 none": ("gcomp", {"importance": "none", "chunk_elements": 999}, [(20_011,)]),
    "truncate format 2": ("truncate", {"bits": 6}, [(400_001,)]),
    "truncated-float": ("truncated-float", {"rounding": "stochastic", "seed": 5}, [(100_003,)]),
    "truncated-float direct": (
        "truncated-float",
        {"rounding": "stochastic", "topology": "direct", "chunk_elements": 10_000},
        [(100_003,)],
    ),
    "embedded-float": ("embedded-float", {"bits": 9}, [(100_003,)]),
    "zlib": ("zlib", {"chunk_elements": 700}, [(5_003,)]),
    "one-bit": ("one-bit", {}, MANY),
    "one-bit raw": ("one-bit", {"pull": "raw", "chunk_elements": 4_000}, MANY),
    "two-bit": ("two-bit", {"chunk_elements": 10_000}, [(200_001,)]),
    "qsgd": ("qsgd", {"levels": 4, "chunk_elements": 10_000}, [(100_003,)]),
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
    scheme_name, options, shapes = CASES[name]
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
    state = gradwire.HookState(
        schemes.by_name(scheme_name, **schemes.as_published(scheme_name, options)), optimizer=optimizer, timeout_s=60
    )
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
