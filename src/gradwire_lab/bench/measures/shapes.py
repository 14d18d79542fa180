"""What low-rank compression makes of real models, from their shapes alone: ACP-SGD's Tables I and II, and Fig. 5."""

import functools
from collections.abc import Mapping, Sequence

import numpy as np
import torch

from gradwire.schemes.matrices import MatrixShape, matrix_shape
from gradwire_lab import workloads
from gradwire_lab.bench.measures import Call, cell_by_cell
from gradwire_lab.results.records import Record

WORLDS = (4, 8, 32, 64)
_RANKS = {"resnet50": 4, "resnet152": 4, "bert-base": 32, "bert-large": 32}  # of the ACP-SGD paper, section III-A
_DEFAULT_RANK = 4
_MIN_COMPRESSION_RATE = 2.0  # LowRank's default
_TOP_K_SHARE = 0.001
# Fig. 5 says which share of the tensors is small; the paper's own bounds were lost with its numbers.
_SMALL_ELEMENTS = 10_000
_SIZE_LIMITS = (15_000, 2_200_000)  # bytes

Sizes = Sequence[tuple[int, MatrixShape | None]]


@functools.cache  # three tables ask for the same models, and a large one takes seconds to make
def sizes_of(workload: str) -> Sizes:
    """Elements of each parameter of a workload, and the matrix that it is compressed as."""
    with torch.device("meta"):
        return sizes_of_model(workloads.by_name(workload).make_model(), _RANKS.get(workload, _DEFAULT_RANK))


def sizes_of_model(model: torch.nn.Module, rank: int) -> Sizes:
    """The same of any model."""
    return [(p.numel(), matrix_shape(p, rank, _MIN_COMPRESSION_RATE)) for p in model.parameters()]


def sent_elements(sizes: Sizes) -> dict[str, list[int]]:
    """Elements of every tensor that is summed: "original", and in steps for P and for Q; uncompressed ones in all."""
    sent: dict[str, list[int]] = {"original": [], "p": [], "q": []}
    for n_elements, shape in sizes:
        sent["original"].append(n_elements)
        sent["p"].append(n_elements if shape is None else shape.rank * shape.n_rows)
        sent["q"].append(n_elements if shape is None else shape.rank * shape.n_columns)
    return sent


def sums_of(sizes: Sizes) -> dict[str, int]:
    """Elements that a step sums: "original", "p" and "q" (ACP-SGD's two kinds of step), "power": both, and the rest once."""
    sums = {side: sum(elements) for side, elements in sent_elements(sizes).items()}
    return sums | {"power": sums["p"] + sums["q"] - sum(n for n, shape in sizes if shape is None)}


def megabytes_of(n_elements: Mapping[str, int], world: int) -> dict[str, float]:
    """MB that a rank sends in a step, by method; of ACP-SGD the mean of its two kinds of step."""
    ring, gathered, n = 2 * (world - 1) / world * 4, float(world - 1), n_elements["original"]
    sent = {
        "s_sgd": ring * n,
        # Two ranks gather; else a bit a value to its owner, and one back, or two where there may be ties.
        "sign_sgd": n / 8 if world == 2 else (3 - world % 2) * (world - 1) / world * n / 8,
        "top_k": gathered * 8 * _TOP_K_SHARE * n,
        "power_sgd": ring * n_elements["power"],
        "acp_sgd": ring * (n_elements["p"] + n_elements["q"]) / 2,
    }
    return {method: n_bytes / 1e6 for method, n_bytes in sent.items()}


def describe_ratios(workload: str) -> list[Record]:
    """Table I: parameters, and by how much each method shrinks the gradient."""
    sums = sums_of(sizes_of(workload))
    n = sums["original"]
    record: Record = {"parameters": n, "rank": _RANKS.get(workload, _DEFAULT_RANK)}
    record |= {"sign_sgd": 32.0, "top_k": 1 / _TOP_K_SHARE}
    return [{**record, "power_sgd": n / sums["power"], "acp_sgd": 2 * n / (sums["p"] + sums["q"])}]  # one factor a step


def describe_traffic(workload: str) -> list[Record]:
    """Table II in numbers: MB that a rank sends in a step, by method and world."""
    sums = sums_of(sizes_of(workload))
    return [{"world": world, **megabytes_of(sums, world)} for world in WORLDS]


def describe_small_tensors(workload: str) -> list[Record]:
    """Fig. 5: quartiles of the tensors' sizes before and after compression, and the share of small ones."""
    return [
        {"tensors": side, "count": len(elements)}
        | {f"p{q}": int(np.percentile(elements, q)) for q in (25, 50, 75)}
        | {"share_small": float((np.array(elements) < _SMALL_ELEMENTS).mean())}
        for side, elements in sent_elements(sizes_of(workload)).items()
    ]


def describe_sizes(workload: str) -> list[Record]:
    """SlimGC's Fig. 1: which share of the tensors, and of the bytes, is in tensors of fewer bytes than each limit."""
    n_bytes = 4 * np.array([n for n, _ in sizes_of(workload)])
    return [
        {"below_bytes": limit, "tensors_share": float(small.mean())}
        | {"bytes_share": float(n_bytes[small].sum() / n_bytes.sum())}
        for limit in _SIZE_LIMITS
        for small in [n_bytes < limit]
    ]


_TABLES = {"ratios": describe_ratios, "traffic": describe_traffic, "small-tensors": describe_small_tensors,
           "sizes": describe_sizes}  # fmt: skip


@cell_by_cell
def measure(_: Call, of: str, workload: str) -> list[Record]:
    """What `of` says of a workload."""
    return _TABLES[of](workload)
