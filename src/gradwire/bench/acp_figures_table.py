"""What `bench acp-figures` measures, as one table: every row is one call of `gradwire bench train`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from gradwire.bench.sweep_table import Row


@dataclass(frozen=True)
class Plan:
    """One figure's rows. `shows`: which of the paper's figures and tables it gives, and how."""

    name: str
    shows: str
    rows: tuple[Row, ...]


@dataclass(frozen=True)
class _Shape:
    """A workload as the rows run it: `rank` of the low-rank methods as in the paper, and whether 2 cores can compute it."""

    workload: str
    rank: int
    is_emulated: bool
    megabytes: int  # of the gradient
    start_s: float  # of four ranks with one method, on 2 cores; measured roughly, as is the next
    step_s: float  # of the slowest of the methods at `rank`, where the network is no bound


_GPT = _Shape("gpt", 4, False, 3, 5, 0.2)
_RESNET = _Shape("resnet", 4, False, 3, 5, 0.2)
_RESNET50 = _Shape("resnet50", 4, True, 102, 5, 1.4)
_BERT = _Shape("bert-base", 32, True, 438, 7, 2.2)

# Ends the key of a row that holds only what the row of the same key without it is compared with.
YARDSTICK_ROW = "-yardstick"

_RATES = {"none": 1e10, "1gbit": 1e9, "500mbit": 5e8, "100mbit": 1e8}


def _methods(rank: int) -> list[str]:
    """Table III's, and PyTorch's own hook."""
    hook = f"ddp-powersgd:rank={rank},start=0"
    return ["ddp", f"acp-sgd:rank={rank}", f"power-sgd:rank={rank}", f"power-sgd-overlap:rank={rank}", hook]


# Warm-up: DDP rebuilds its buckets after the first step, and error feedback touches the second of its two stacks of
# residuals for the first time in the third.
def _row(key: str, shape: _Shape, rate: str, schemes: Sequence[str], steps: int, warmup: int, *more: str,
         slower: float = 1.0) -> Row:  # fmt: skip
    """`slower`: by how much a step takes longer than at the shape's rank and with four ranks."""
    arguments = ["--workload", shape.workload, "--rate", rate, "--steps", str(steps), "--warmup", str(warmup)]
    arguments += ["--compute", "emulate"] * shape.is_emulated + [*more, "--scheme", *schemes]
    # Only DDP sends all of the gradient, a ring's share of it; what the others send is small beside their computation.
    wire_s = 1.5 * 8e6 * shape.megabytes / _RATES[rate]
    n_whole = sum(scheme.partition(":")[0] == "ddp" for scheme in schemes)
    each_s = shape.start_s + (steps + warmup) * shape.step_s * slower
    return Row(key, "train", tuple(arguments), len(schemes) * each_s + n_whole * (steps + warmup) * wire_s)


def _iteration_rows() -> tuple[Row, ...]:
    rows = []
    for shape in (_GPT, _RESNET50, _BERT):
        for rate in _RATES:
            key, methods = f"iteration-{shape.workload}-{rate}", _methods(shape.rank)
            steps, warmup = (15, 5) if not shape.is_emulated else (4, 3) if shape is _RESNET50 else (2, 3)
            if (rate == "100mbit" and shape.is_emulated) or (rate == "500mbit" and shape is _BERT):
                # One step of DDP takes 12 s with ResNet-50's 102 MB at 100 Mb/s, 11 and 53 s with BERT's 438 MB: two are
                # enough, as the network alone decides how long they take.
                rows.append(_row(f"{key}{YARDSTICK_ROW}", shape, rate, methods[:1], 2, 1))
                methods = methods[1:]
            rows.append(_row(key, shape, rate, methods, steps, warmup))
    return tuple(rows)


def _optimisation_rows() -> tuple[Row, ...]:
    r = f"rank={_RESNET50.rank}"
    schemes = ["ddp:bucket_mb=inf", "ddp:bucket_mb=0", "ddp"]
    schemes += [f"power-sgd:{r},buffer_mb=0", f"power-sgd-overlap:{r},buffer_mb=0", f"power-sgd-overlap:{r}"]
    schemes += [f"acp-sgd:{r},overlap=false,buffer_mb=0", f"acp-sgd:{r},buffer_mb=0", f"acp-sgd:{r}"]
    return (_row("optimisations-resnet50", _RESNET50, "1gbit", schemes, 4, 3),)


def _buffer_rows() -> tuple[Row, ...]:
    # A row a size: what ten of these contenders need in one run does not fit four ranks into 24 GB.
    return tuple(
        _row(
            f"buffers-bert-base-r{rank}-{size}", _BERT, "1gbit",
            [f"{name}:rank={rank},buffer_mb={size}" for name in ("acp-sgd", "power-sgd-overlap")],
            2, 3, slower=1 if rank == 32 else 4,
        )
        for rank, sizes in ((32, ("0", "25", "50", "100", "inf")), (256, ("25", "inf")))
        for size in sizes
    )  # fmt: skip


def _batch_rows() -> tuple[Row, ...]:
    return tuple(
        _row(f"batch-resnet-{size}", _RESNET, "1gbit", _methods(4)[:4], 10, 5, "--batch-size", str(size))
        for size in (16, 32, 64)
    )


def _rank_rows() -> tuple[Row, ...]:
    return tuple(
        _row(
            f"ranks-bert-base-{rank}", _BERT, "1gbit",
            ["ddp", f"acp-sgd:rank={rank}", f"power-sgd-overlap:rank={rank}"], 2, 3, slower=slower,
        )
        for rank, slower in ((4, 1), (32, 1), (256, 2))
    )  # fmt: skip


def _world_rows() -> tuple[Row, ...]:
    return tuple(
        _row(f"world-resnet50-{n}", _RESNET50, "1gbit", _methods(4)[:4], 3, 3, "--ranks", str(n), slower=n / 4)
        for n in (2, 4, 8)
    )


def _comparator_rows() -> tuple[Row, ...]:
    return tuple(
        _row(
            f"methods-{shape.workload}", shape, "1gbit", ["ddp", "sign-sgd", "top-k", f"power-sgd:rank={shape.rank}"],
            steps, 3,
        )
        for shape, steps in ((_RESNET50, 4), (_BERT, 2))
    )  # fmt: skip


PLANS: tuple[Plan, ...] = (
    Plan("iteration", "Table III, Figs. 8 and 13: iteration time and its split, by method and bandwidth", _iteration_rows()),
    Plan("methods", "Figs. 2 and 3: the three kinds of compression beside S-SGD", _comparator_rows()),
    Plan("optimisations", "Fig. 9: without and with wait-free backward and tensor fusion", _optimisation_rows()),
    Plan("buffers", "Fig. 10: size of the fused buffers", _buffer_rows()),
    Plan("batch", "Fig. 11a: samples a rank and step", _batch_rows()),
    Plan("ranks", "Fig. 11b: rank of the approximation", _rank_rows()),
    Plan("world", "Fig. 12: ranks in the world", _world_rows()),
)  # fmt: skip


def choose_plans(names: Sequence[str]) -> list[Plan]:
    """The plans of these names, all without any."""
    return [plan for plan in PLANS if not names or plan.name in names]
