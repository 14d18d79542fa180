"""`auto`: what choosing a scheme while training costs, against DDP and against who knew it beforehand."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from gradwire_lab.results.experiment import Column, Experiment, Goal, Plot, Table, ms

_X_DDP = Column("x_ddp", "x DDP", form=".3f", spread=True)
_X_BEST = Column("x_best_last_half", "x best, 2nd half", form=".3f", spread=True)
_X_STEP = Column("iteration_s", "x DDP", kind="ratio", form=".3f")
_X_CPU = Column("cpu_s", "CPU, x DDP", kind="ratio", form=".3f")
_GOOD_AFTER = Column("good_after", "good after", form=".0f")
_EXACT, _CLOSE = {"gradwire, exact": "auto:fidelity=exact"}, {"gradwire, close": "auto:fidelity=close"}
_ANY = {"gradwire, any": "auto:fidelity=any"}
_DDP, _BF16 = {"DDP": "ddp"}, {"DDP, bf16 hook": "ddp-bf16"}
_AUTOS = [*_EXACT.values(), *_CLOSE.values(), *_ANY.values()]
_WORKLOADS = ["gpt", "resnet", "ncf", "many-tensors"]
_RATES = {"100 Mb/s": "100mbit", "300 Mb/s": "300mbit", "1 Gb/s": "1gbit", "unshaped": "none"}

README_TABLE = Table(
    [Column("x_ddp", "x DDP's speed", form=".2f")], across="rate", where={"workload": "gpt", "ranks": 2}
)


def _regret(key: str, question: str, axes: dict[str, Any], *, rows: Sequence[str], across: str, takes: float,
            plots: Sequence[Plot] = (), goals: Sequence[Goal] = (), is_long: bool = False,
            **fixed: Any) -> Experiment:  # fmt: skip
    autos = [spec for spec in axes["scheme"].values() if spec in _AUTOS]
    only = {"scheme": autos}
    by = ("phase",) if "then" in fixed else ()
    return Experiment(
        key=key, system="auto", measure="regret", seconds=takes, question=question, is_long=is_long, fixed=fixed, axes=axes,
        baseline={"scheme": "ddp"},
        show=[
            Table([_X_DDP, _X_BEST], rows=rows, across=across, where=only, title="Trials included; above 1 is faster"),
            Table([ms("late_s", "ms a step")], rows=rows, across=across, title="The second half"),
            Table([Column("best"), Column("ends_with", "ends with"), _GOOD_AFTER],
                  rows=rows, across=across, where=only, title="The best fixed scheme, and what auto ends with"),
            Table([Column("model_error", "model off, %", 100, ".0f"), Column("loss_deviation", "loss strays", form=".1e")],
                  rows=rows, across=across, where=only, title="Predictions before any trial, and losses"),
            *plots,
        ],
        goals=[Goal("0.98 of DDP in every cell", _X_DDP, ">=", 0.98, only, by),
               Goal("0.95 of the best fixed scheme in the second half", _X_BEST, ">=", 0.95, only, by), *goals],
    )  # fmt: skip


EXPERIMENTS = [
    _regret(
        "regret", "What does auto lose against DDP, and against the best scheme that it may use, in 300 steps?",
        {"workload": _WORKLOADS, "ranks": [2, 4], "rate": _RATES,
         "scheme": {**_DDP, **_BF16, **_EXACT, **_CLOSE, **_ANY}},
        rows=("workload", "ranks", "scheme"), across="rate", takes=225, is_long=True, steps=300, seconds=60,
        plots=[Plot("rate", Column("x_ddp", "speed, x DDP", form=".3f"), style="bars", x_title="every rank's link",
                    where={"workload": "gpt", "ranks": 2})],
    ),
    _regret(
        "regret-changes", "What does auto make of another network in mid-run: 1 Gb/s (phase 0), 100 Mb/s, 1 Gb/s?",
        {"workload": ["gpt", "resnet"], "scheme": {**_DDP, **_EXACT, **_CLOSE}},
        rows=("workload", "scheme"), across="phase", takes=360, ranks=2, rate="1gbit", then=["100mbit", "1gbit"],
        steps=150, seconds=45,
        goals=[Goal(f"within 6 % of the best after so many steps of a {link} link", _GOOD_AFTER, "<=", steps,
                    {"phase": phase}, ("phase",))
               for phase, link, steps in ((1, "slower", 40), (2, "faster", 150))],
    ),
    Experiment(
        key="auto-cost", system="auto", measure="train", seconds=50, baseline={"scheme": "ddp"},
        question="What do watching and voting cost where nothing is tried, DDP's own all-reduce at work?",
        fixed={"ranks": 2, "rate": "none", "steps": 150},
        axes={"workload": ["gpt", "many-tensors"], "scheme": {**_DDP, "watching": "auto:budget=0"}},
        show=[Table([ms("iteration_s", "ms a step", spread=True), _X_STEP, _X_CPU], rows=("workload", "scheme"))],
        goals=[Goal(f"at most 1.01 of DDP's {what}", column, "<=", 1.01, {"scheme": "auto:budget=0"})
               for what, column in (("time", _X_STEP), ("CPU time", _X_CPU))],
    ),
]  # fmt: skip
