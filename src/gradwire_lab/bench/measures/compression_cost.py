"""What compressing one step's gradient costs a rank, without any network: methods take turns, step by step."""

from __future__ import annotations

import itertools
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore, _compute_bucket_assignment_by_size
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook

from gradwire import schemes
from gradwire.core.bucket import slot_of
from gradwire.errors import InvalidArgument
from gradwire.reducer import Reducer
from gradwire.registry import parse_spec
from gradwire.telemetry.environment import describe_environment
from gradwire.wire.communicator import Communicator, completed
from gradwire_lab import workloads
from gradwire_lab.bench.measures import Call
from gradwire_lab.bench.measures.shapes import rank_of
from gradwire_lab.bench.timing import Task, threads, time_interleaved
from gradwire_lab.results.experiment import Cell
from gradwire_lab.results.records import write_json
from gradwire_lab.results.store import Record

HOOK = "ddp-powersgd"
_WORLD_SIZE = 4  # what schemes believe; sums do not get longer with it, only what is gathered does
_FIRST_BUCKET_BYTES = 1 << 20  # DDP's own: the first bucket is small, so that communication starts early
_LOW_RANK = ("acp-sgd", "power-sgd", "power-sgd-overlap")


class Gradients:
    """One step's gradient of a workload's shape: random, in flat buckets as DDP fills them, last layers first."""

    def __init__(self, workload: str, bucket_bytes: int, seed: int = 0) -> None:
        with torch.device("meta"):
            model = workloads.by_name(workload).make_model()
        self.parameters = dict(model.named_parameters())
        parameters: list[torch.Tensor] = list(reversed(list(model.parameters())))
        assigned = _compute_bucket_assignment_by_size(  # as DDP does
            [torch.empty(p.shape, device="meta") for p in parameters], [_FIRST_BUCKET_BYTES, bucket_bytes]
        )[0]
        self.buckets = [[parameters[index] for index in indices] for indices in assigned]
        generator = torch.Generator().manual_seed(seed)
        self.values = [
            torch.randn(sum(p.numel() for p in members), generator=generator).mul_(1e-3) for members in self.buckets
        ]
        self.buffers = [torch.empty_like(values) for values in self.values]
        self.n_elements = sum(values.numel() for values in self.values)

    def refill(self) -> None:
        """Put this step's gradient into the buffers, which the method before has overwritten."""
        for buffer, values in zip(self.buffers, self.values, strict=True):
            buffer.copy_(values)


class LoneRank(Communicator):
    """One rank in a world of `world_size` of which all others send what it sends; point to point is not to be had.

    For measuring what a scheme computes and not what it sends: sums are products with the world size.

    Args:
        world_size: how many ranks the scheme is to believe in. The real group has one, this process.
    """

    def __init__(self, world_size: int) -> None:
        super().__init__()
        self.world_size = world_size

    def all_reduce(self, tensor: torch.Tensor, op: Any = dist.ReduceOp.SUM) -> None:
        if op == dist.ReduceOp.SUM:
            tensor.mul_(self.world_size)

    def start_all_reduce(self, tensor: torch.Tensor, op: Any = dist.ReduceOp.SUM) -> torch.futures.Future:
        self.all_reduce(tensor, op)
        return completed([tensor])

    def all_gather(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.repeat(self.world_size, 1)


class SchemeSteps:
    """A gradwire scheme that reduces these buckets in a world of ranks that all send the same."""

    def __init__(self, spec: str, rank: int, gradients: Gradients) -> None:
        self.name, options = parse_spec(spec)
        if self.name in _LOW_RANK:
            options.setdefault("rank", rank)
        self.options = options
        self._gradients = gradients
        self._reducer = Reducer(schemes.by_name(self.name, **options), LoneRank(_WORLD_SIZE), gradients.parameters)
        self.parts: list[tuple[float, float, float]] = []  # encode, decode, commit, in seconds

    def take_step(self) -> None:
        """One step: every bucket, then what the end of the step does."""
        gradients, futures = self._gradients, []
        last = len(gradients.buckets) - 1
        for index, (buffer, members) in enumerate(zip(gradients.buffers, gradients.buckets, strict=True)):
            *offsets, _ = itertools.accumulate((p.numel() for p in members), initial=0)
            futures.append(self._reducer.reduce(buffer, list(map(slot_of, members)), offsets, index, index == last))
        for future in futures:
            future.wait()
        started = time.perf_counter()
        self._reducer.wait_until_idle()
        commit_s = time.perf_counter() - started
        self._reducer.close_pass(self._reducer.step - 1, 0)
        busy_ns = self._reducer.recorder.steps[-1].busy_ns
        self.parts.append((busy_ns["encode"] / 1e9, busy_ns["decode"] / 1e9, commit_s))

    def close(self) -> None:
        """End the lane."""
        self._reducer.close()


class HookSteps:
    """PyTorch's powerSGD_hook on the same buckets, in a real group of one rank."""

    name = HOOK

    def __init__(self, rank: int, gradients: Gradients) -> None:
        self.options: dict[str, Any] = {"rank": rank}
        self._gradients = gradients
        self._state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=rank, start_powerSGD_iter=2)
        self._state.iter = self._state.start_powerSGD_iter
        self.parts: list[tuple[float, float, float]] = []

    def take_step(self) -> None:
        """One step; each bucket is awaited, as one rank has nobody to overlap with."""
        last = len(self._gradients.buckets) - 1
        for index, (buffer, members) in enumerate(zip(self._gradients.buffers, self._gradients.buckets, strict=True)):
            bucket: Any = _HookBucket(buffer, members, index, index == last)
            powerSGD_hook.powerSGD_hook(self._state, bucket).wait()

    def close(self) -> None:
        """Nothing to end."""


class _HookBucket:
    """What powerSGD_hook asks of a GradBucket, which only DDP can make."""

    def __init__(self, buffer: torch.Tensor, members: list[torch.Tensor], index: int, is_last: bool) -> None:
        self._buffer, self._members, self._index, self._is_last = buffer, members, index, is_last

    def buffer(self) -> torch.Tensor:
        return self._buffer

    def index(self) -> int:
        return self._index

    def is_last(self) -> bool:
        return self._is_last

    def gradients(self) -> list[torch.Tensor]:
        pieces = self._buffer.split([p.numel() for p in self._members])
        return [piece.view(p.shape) for piece, p in zip(pieces, self._members, strict=True)]


@dataclass(frozen=True)
class Asked:
    """What is timed: `rank` of all low-rank methods, 0 the paper's; buckets as DDP cuts them. Raises: InvalidArgument."""

    workload: str
    schemes: Sequence[str]
    rank: int = 0
    steps: int = 8
    warmup: int = 4
    threads: int = 1
    bucket_mb: float = 25.0

    def __post_init__(self) -> None:
        if self.steps < 1 or self.warmup < 2:
            raise InvalidArgument("steps count from 1 and warmup from 2 (each of ACP-SGD's two kinds of step once)")
        if not 1 <= self.threads <= (os.cpu_count() or 1):
            raise InvalidArgument(f"{self.threads} threads: expected 1 to {os.cpu_count()}")
        if self.rank < 0 or not self.bucket_mb > 0:
            raise InvalidArgument(f"rank {self.rank}, bucket_mb {self.bucket_mb}: expected at least 0, and above 0")
        workloads.check_name(self.workload)
        for spec in self.schemes:
            name, options = parse_spec(spec)
            schemes.by_name(name, **options)


def measure(call: Call) -> list[tuple[Cell, Record]]:
    """Axis `scheme`, `ddp-powersgd` among them; in a process of its own, which gets its threads before torch starts."""
    from gradwire_lab.ranks.launch import start_ranks
    from gradwire_lab.ranks.supervisor import end_on_signals

    specs = [spec for spec in call.values("scheme") if spec != HOOK]
    given = {key: value for key, value in {**call.fixed, **call.shared}.items() if key != "scheme"}
    asked = Asked(schemes=specs, **given)
    with tempfile.TemporaryDirectory(prefix="gradwire-bench-") as folder:
        plan, out = Path(folder) / "asked.json", Path(folder) / "records.json"
        plan.write_text(json.dumps(asdict(asked)), encoding="utf-8")
        # PyTorch's hook computes on the backend's threads, where OpenMP has its own idea of how many threads there are.
        environment = {"OMP_NUM_THREADS": str(asked.threads), "MKL_NUM_THREADS": str(asked.threads)}
        command = [sys.executable, "-m", __name__, str(plan), str(out)]
        with end_on_signals(), start_ranks(command, 1, env=environment) as launch:
            launch.wait().raise_if_failed()
        records: list[Record] = json.loads(out.read_text(encoding="utf-8"))
    by_spec = dict(zip([HOOK, *specs], records, strict=True))
    return [(cell, by_spec[cell["scheme"]]) for cell in call.cells]


def time_methods(asked: Asked) -> list[dict[str, Any]]:
    """Flat records of all methods, PyTorch's hook first."""
    workload, rank = asked.workload, asked.rank or rank_of(asked.workload)
    own_group = not dist.is_initialized()
    if own_group:
        dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    try:
        gradients = Gradients(workload, int(asked.bucket_mb * (1 << 20)))
        methods: list[HookSteps | SchemeSteps] = [HookSteps(rank, gradients)]
        methods += [SchemeSteps(spec, rank, gradients) for spec in asked.schemes]
        tasks = {str(number): Task(method.take_step, gradients.refill) for number, method in enumerate(methods)}
        with threads(asked.threads):
            timings = list(time_interleaved(tasks, asked.steps, asked.warmup, min_sample_s=0.0).values())
        for method in methods:
            method.close()
    finally:
        if own_group:
            dist.destroy_process_group()
    environment = describe_environment()
    return [
        {
            "workload": workload,
            "scheme": method.name,
            "options": ",".join(f"{key}={value}" for key, value in method.options.items() if key != "rank"),
            "rank": method.options.get("rank"),
            "n_elements": gradients.n_elements,
            "n_buckets": len(gradients.buckets),
            "n_threads": asked.threads,
            "n_steps": asked.steps,
            "step_s": timing.median_s,
            "step_s_low": timing.low_s,
            "step_s_high": timing.high_s,
            "ratio": timing.median_s / timings[0].median_s,
            **_split(method.parts[-asked.steps :]),
            **environment,
        }
        for method, timing in zip(methods, timings, strict=True)
    ]


def _split(parts: list[tuple[float, float, float]]) -> dict[str, float | None]:
    keys = ("encode_s", "decode_s", "commit_s")
    if not parts:
        return dict.fromkeys(keys)
    return {key: statistics.median(column) for key, column in zip(keys, zip(*parts, strict=True), strict=True)}


if __name__ == "__main__":
    write_json(Path(sys.argv[2]), time_methods(Asked(**json.loads(Path(sys.argv[1]).read_text(encoding="utf-8")))))
