"""Everything that the sweep measures, as one table: a row is one call of a benchmark."""

from __future__ import annotations

from dataclasses import dataclass

# In arguments: the sweep's own folder, where its gradient files and figures go.
OUT = "{out}"

_GPT = tuple(f"{OUT}/gradients/gpt_adamw_step{step}.npz" for step in (10, 20, 40, 60))
_RESNET = tuple(f"{OUT}/gradients/resnet_momentum_step{step}.npz" for step in (10, 20, 40, 60))


@dataclass(frozen=True)
class Row:
    """One call: `gradwire bench BENCH ARGUMENTS`. `estimate_s`: on two cores of 2 GHz, for the time that is left."""

    key: str
    bench: str
    arguments: tuple[str, ...]
    estimate_s: float
    in_quick: bool = False
    in_full: bool = True


def _dump(workload: str) -> Row:
    steps = ("10", "20", "40", "60")
    arguments = ("--workload", workload, "--steps", *steps, "--out", f"{OUT}/gradients")
    return Row(f"gradients-{workload}", "dump-gradients", arguments, 60, in_quick=True)


def _allreduce(key: str, *arguments: str, estimate_s: float, quick: bool = False, full: bool = True) -> Row:
    return Row(f"allreduce-{key}", "allreduce", arguments, estimate_s, quick, full)


def _train(key: str, *arguments: str, estimate_s: float, quick: bool = False, full: bool = True) -> Row:
    return Row(f"train-{key}", "train", arguments, estimate_s, quick, full)


_SLOW_SIZES = ("--n-bytes", "1024", "65536", "1048576", "5000000")
_STRAGGLER = "1gbit,1gbit,1gbit,100mbit"

ROWS: tuple[Row, ...] = (
    _dump("gpt"),
    _dump("resnet"),
    Row("codec-1-thread", "codec", ("--gradients", _GPT[-1], _RESNET[-1], "--threads", "1"), 60, True, False),
    Row("codec", "codec", ("--gradients", *_GPT, *_RESNET), 600),
    Row("figures-gpt", "gcomp-figures", ("--gradients", *_GPT, "--out", f"{OUT}/figures-gpt"), 15, True),
    Row("figures-resnet", "gcomp-figures", ("--gradients", *_RESNET, "--out", f"{OUT}/figures-resnet"), 15, True),
    _allreduce("quick-none", "--quick", estimate_s=80, quick=True, full=False),
    _allreduce("quick-1gbit", "--quick", "--rate", "1gbit", estimate_s=110, quick=True, full=False),
    _allreduce("quick-100mbit", "--quick", "--rate", "100mbit", *_SLOW_SIZES, estimate_s=120, quick=True, full=False),
    _allreduce(
        "gradient-1gbit-quick",
        "--quick",
        "--rate",
        "1gbit",
        "--gradients",
        _GPT[-1],
        "--n-bytes",
        "25000000",
        estimate_s=90,
        quick=True,
        full=False,
    ),
    # Two networks where compression decides; unshaped, ranks on one machine compete for its cores more than for a link.
    *(
        _train(
            f"{name}-{rate}-quick",
            "--workload",
            name,
            "--rate",
            rate,
            "--steps",
            "5",
            "--warmup",
            "3",
            estimate_s=seconds,
            quick=True,
            full=False,
        )
        for name, rate, seconds in (
            ("gpt", "1gbit", 130),
            ("gpt", "100mbit", 200),
            ("resnet", "1gbit", 70),
            ("resnet", "100mbit", 100),
        )
    ),
    _allreduce("gradient-1gbit", "--rate", "1gbit", "--gradients", _GPT[-1], "--n-bytes", "25000000", estimate_s=300),
    *(_allreduce(rate, "--rate", rate, estimate_s=1500) for rate in ("none", "1gbit", "100mbit")),
    *(
        _allreduce(
            f"sparse-{pattern}-{density}",
            "--rate",
            "1gbit",
            "--n-bytes",
            "25000000",
            "--density",
            density,
            "--pattern",
            pattern,
            estimate_s=120,
        )
        for pattern in ("element", "row", "batch")
        for density in ("0.01", "0.1")
    ),
    _allreduce("8-ranks-1gbit", "--ranks", "8", "--rate", "1gbit", "--n-bytes", "1048576", "25000000", estimate_s=300),
    _allreduce("straggler", "--rate", _STRAGGLER, "--n-bytes", "1048576", "25000000", estimate_s=300),
    *(
        _train(f"{name}-{rate}", "--workload", name, "--rate", rate, "--steps", "50", estimate_s=600)
        for name in ("gpt", "resnet", "lstm", "ncf")
        for rate in ("none", "1gbit", "100mbit")
    ),
    *(
        _train(
            f"{name}-{rate}-emulated",
            "--workload",
            name,
            "--rate",
            rate,
            "--steps",
            "5",
            "--warmup",
            "2",
            "--compute",
            "emulate",
            estimate_s=1800,
        )
        for name in ("bert-base", "resnet50", "vgg16", "gpt2", "bert-large", "resnet152")
        for rate in ("none", "1gbit")
    ),
    _train("gpt-8-ranks", "--workload", "gpt", "--ranks", "8", "--rate", "1gbit", "--steps", "20", estimate_s=900),
    _train(
        "resnet-changes",
        "--workload",
        "resnet",
        "--rate",
        "1gbit",
        "--then",
        "100mbit",
        "1gbit,1gbit,1gbit,100mbit",
        "--steps",
        "10",
        estimate_s=400,
    ),
    _train("gpt-straggler", "--workload", "gpt", "--rate", _STRAGGLER, "--steps", "20", estimate_s=600),
)


def choose_rows(quick: bool, only: tuple[str, ...] = ()) -> list[Row]:
    """The rows of the quick or the full set, in order; `only`: those whose keys begin with one of these words."""
    rows = [row for row in ROWS if (row.in_quick if quick else row.in_full)]
    return [row for row in rows if not only or row.key.startswith(only)]
