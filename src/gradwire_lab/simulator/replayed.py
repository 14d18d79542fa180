"""The workload of an emulated `bench train`, as the simulator takes it: when which bytes are ready in a backward pass."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch._C import _distributed_c10d as c10d

from gradwire.errors import InvalidArgument
from gradwire.stepping.blocks import find_blocks
from gradwire_lab.simulator.workloads import WorkloadTimes, from_moments
from gradwire_lab.workloads import by_name
from gradwire_lab.workloads.replay import ReplayModel, ReplayWorkload

# DDP's own, which `bench train` leaves as they are.
_BUCKET_BYTES = 25 << 20
# Of the live broadcasts.
_N_BLOCKS = 4


def bucket_workload(name: str, options: dict[str, Any], step_s: float) -> WorkloadTimes:
    """DDP's buckets as blocks, the first to be used first. Raises: InvalidArgument (not an emulated workload)."""
    _, model = _replay(name, options)
    buckets = _buckets(model)
    # Nothing of the next forward pass begins before all buckets are there: it is all in the one that is used last.
    forward_s = [sum(layer.forward_s for layer in model.layers)] + [0.0] * (len(buckets) - 1)
    pieces = [(values, ready_s, forward_s[i]) for i, (values, ready_s, _) in enumerate(buckets)]
    return _in_order(pieces, f"{name}, DDP's buckets", model, step_s)


def block_workload(name: str, options: dict[str, Any], step_s: float) -> WorkloadTimes:
    """The blocks of the schemes that broadcast; each is ready with the last bucket that holds any of it."""
    _, model = _replay(name, options)
    ready_s = {id(parameter): ready for _, ready, members in _buckets(model) for parameter in members}
    blocks = find_blocks(model, model.parameters(), _N_BLOCKS)
    home = {id(parameter): block.index for block in blocks for parameter in block.parameters}
    forward_s = [0.0] * len(blocks)
    index = 0
    for layer in model.layers:
        index = home[id(layer.parameters[0])] if layer.parameters else index
        forward_s[index] += layer.forward_s
    pieces = [
        (block.n_elements, max(ready_s[id(parameter)] for parameter in block.parameters), forward_s[block.index])
        for block in blocks
    ]
    return _in_order(pieces, f"{name}, {len(blocks)} blocks", model, step_s)


def _replay(name: str, options: dict[str, Any]) -> tuple[ReplayWorkload, ReplayModel]:
    workload = by_name(name, compute="emulate", **options)
    if not isinstance(workload, ReplayWorkload):
        raise InvalidArgument(f"{name} cannot be replayed")
    model = workload.make_model()
    assert isinstance(model, ReplayModel)
    return workload, model


def _buckets(model: ReplayModel) -> list[tuple[int, float, list[Any]]]:
    """(values, seconds of backward pass until its gradient is there, parameters) of each bucket, the first one first.

    As DDP rebuilds them after the first step, in the order in which gradients arrive.
    """
    arrivals: list[tuple[Any, float]] = []
    now_s = 0.0
    for layer in reversed(model.layers):
        now_s += layer.backward_s
        arrivals += [(parameter, now_s) for parameter in reversed(layer.parameters)]
    parameters = [parameter for parameter, _ in arrivals]
    limits = [c10d._DEFAULT_FIRST_BUCKET_BYTES, _BUCKET_BYTES]
    is_sparse = [False] * len(parameters)
    indices, _ = c10d._compute_bucket_assignment_by_size(parameters, limits, is_sparse)
    buckets = []
    for members in indices:
        values = sum(parameters[index].numel() for index in members)
        ready_s = max(arrivals[index][1] for index in members)
        buckets.append((values, ready_s, [parameters[index] for index in members]))
    return sorted(buckets, key=lambda bucket: bucket[1])


def _in_order(
    pieces: Sequence[tuple[int, float, float]], origin: str, model: ReplayModel, step_s: float
) -> WorkloadTimes:
    """Blocks of (values, seconds of backward pass until ready, seconds of forward pass), by when they are ready."""
    forward_s = sum(layer.forward_s for layer in model.layers)
    compute_s = forward_s + sum(layer.backward_s for layer in model.layers)
    if compute_s <= 0:
        raise InvalidArgument(f"{origin}: a step without computation cannot be scaled; give step_ms=")
    # Of what is ready at one moment the first to be used comes last.
    moments = [(str(i), n, forward_s + ready_s, of_it_s) for i, (n, ready_s, of_it_s) in reversed([*enumerate(pieces)])]
    return from_moments(origin, moments, compute_s, "emulated bench train").scaled(step_s)
