"""The simulator: AQGB's paper in its own setting, and predictions against the test network."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from gradwire import schemes
from gradwire_lab.results.experiment import Column, Experiment, Goal, Plot, Ref, Table, ms

_SCHEMES = {
    "32-bit broadcast": "broadcast-32",
    "4-bit broadcast": "broadcast-4",
    "AQGB": "aqgb",
    "AQGB, through owners": "aqgb-owners",
    "uncompressed ring": "plain",
}
_ROUNDS = Column("rounds", form=".0f")
_USE = Column("utilisation", "utilisation, %", 100, ".1f")
_WAIT, _ROW = Column("wait_share", "wait / compute", form=".3f"), Column("row", "ROW", form=".2f")
_MEASURES = [_ROUNDS, _USE, _WAIT, _ROW]
_AQGB = {"scheme": "aqgb", "jitter": "common"}
_NOT_TABLED = ("aqgb", "broadcast")  # modelled by their control law
# What its threshold decides between is measured; the threshold is the simulator's own.
_TABLED_AS = {"slimgc": "slimgc:threshold_bytes=0"}


def _aqgb(figure: str, question: str, axes: dict[str, Any], show: Sequence[Table | Plot], *, goals: Sequence[Goal] = (),
          seconds: float = 20, **fixed: Any) -> Experiment:  # fmt: skip
    return Experiment(
        key=f"aqgb-{figure.lower().replace('. ', '')}", system="simulator", measure="simulate", seconds=seconds,
        question=question,
        of=[Ref("AQGB", figure)],
        fixed={"workers": 16, "seconds": 200, "codec": False, **fixed}, axes=axes, show=show, goals=goals,
        baseline={"scheme": "broadcast-32"},
    )  # fmt: skip


def _reality(
    key: str, workload: str, rates: Sequence[str], steps: int, seconds: float, worlds: Sequence[int]
) -> Experiment:
    error = Column("error_size", "error", 100, ".1f")
    return Experiment(
        key=key, system="simulator", measure="reality", seconds=seconds,
        question=f"Does the simulator predict the test network, on {workload}?",
        fixed={"workload": workload, "compute": "emulate", "steps": steps, "warmup": 4},
        axes={"ranks": worlds, "rate": rates,
              "scheme": ["ddp", "plain", "gcomp", "acp-sgd", "broadcast", "broadcast:bits=32", "aqgb"]},
        show=[Table([ms("predicted_s", "predicted, ms"), ms("measured_s", "measured, ms", spread=True), Column("error",
                                                                                                               "error, %",
                                                                                                               100, "+.1f")],
                    rows=("scheme", "ranks", "rate")),
              Plot("measured_s", Column("predicted_s", "predicted, s"), log="xy", x_title="measured, s")],
        goals=[Goal("within 10 %", error, "<=", 10.0)],
    )  # fmt: skip


EXPERIMENTS = [
    Experiment(
        key="aqgb-fig8", system="simulator", measure="stragglers", seconds=5, together=("sigma",),
        question="How long does a round compute with stragglers? The tail's shape (sigma) is not in the paper.",
        of=[Ref("AQGB", "Fig. 8")], fixed={"rounds": 2000}, axes={"sigma": [1.0, 1.5, 2.0]},
        show=[Table([Column(f"{name}_s", name.replace("p", "") + (" %" if name[0] == "p" else ""), form=".3f")
                     for name in ("mean", "median", "p95", "p99", "slowest")], rows=("sigma",))],
    ),
    Experiment(
        key="aqgb-fig9", system="simulator", measure="simulate-rates", seconds=10,
        question="Does the ratio follow the rate? Eight workers, floor 0.375; the paper does not print its rates.",
        of=[Ref("AQGB", "Fig. 9")],
        fixed={"workers": 8, "seconds": 100, "codec": False, "floor": 0.375,
               "changes": {0: 2.5, 20: 1.5, 40: 4.0, 60: 0.75, 80: 2.5}},
        axes={"scheme": ["aqgb"]},
        show=[Table([Column("rate_bps", "Gb/s", 1e-9, ".2f"), Column("first_stage_ratio", "first stage", form=".3f"),
                     Column("bits_per_value", "bits a value", form=".2f")], rows=("from_s",))],
    ),
    _aqgb("Fig. 10", "Rounds, utilisation, waiting and overlap of AQGB's setting, by the jitter of computation. "
          "The paper: 39, 130, 127 rounds.",
          {"jitter": ["common", "per-worker"], "scheme": _SCHEMES},
          [Table(_MEASURES),
           Plot("jitter", _ROUNDS, style="bars")],
          goals=[Goal("AQGB's 127 rounds, to 5 %: at least", _ROUNDS, ">=", 0.95 * 127, _AQGB),
                 Goal("and at most", _ROUNDS, "<=", 1.05 * 127, _AQGB),
                 Goal("utilisation within 5 points of 77 %", _USE, ">=", 72.0, _AQGB)]),
    _aqgb("Fig. 12", "The same by link rate.", {"gbit_per_s": [2, 2.5, 3, 4, 6, 8, 10], "scheme": _SCHEMES},
          [Table(_MEASURES, rows=("gbit_per_s",)), Plot("gbit_per_s", _ROUNDS, x_title="link rate, Gb/s")],
          seconds=5),
    _aqgb("Fig. 13", "The same with stragglers. The paper: 4 bits +125.6 %, AQGB +118.0 % more rounds than 32 bits.",
          {"sigma": [1.0, 1.5, 2.0], "scheme": _SCHEMES},
          [Table([*_MEASURES, Column("more_rounds", "more rounds, %", 100, "+.0f")])], jitter="stragglers", seconds=60),
    _aqgb("Fig. 14", "The same by the number of blocks.",
          {"workload": {f"{n} blocks": f"resnet50-{n}blocks" for n in (1, 3, 4, 5, 6)},
           "scheme": {name: _SCHEMES[name] for name in ("AQGB", "4-bit broadcast", "32-bit broadcast")}},
          [Table(_MEASURES, rows=("workload",))], seconds=5),
    Experiment(
        key="aqgb-workers", system="simulator", measure="simulate", seconds=10,
        question="The same at 0.5 Gb/s by the number of workers: a broadcast grows with them, an all-reduce does not. Codecs "
        "as measured on two cores, and as the paper has them, which take no time.",
        fixed={"seconds": 200, "gbit_per_s": 0.5},
        axes={"codec": {"measured": True, "none": False}, "workers": [16, 64, 256, 1_024],
              "scheme": {name: _SCHEMES[name] for name in ("AQGB", "AQGB, through owners", "uncompressed ring")}},
        show=[Table([_ROUNDS, Column("bits_per_value", "bits a value", form=".1f"), _USE], rows=("workers",))],
        goals=[Goal("more rounds than an uncompressed ring at 1,024 workers: at least", _ROUNDS, ">=", 52,
                    {"scheme": "aqgb-owners", "workers": 1_024})],
    ),
    # A small model at rates that make it wait as a large one does at ten times these; then the large one.
    _reality("simulator-reality", "gpt:step_ms=100", ["50mbit", "100mbit", "200mbit"], 9, 110, [2, 4]),
    Experiment(
        key="simulator-sizes", system="simulator", measure="simulator-sizes", seconds=110,
        question="Bytes and codec times of every scheme, from which the simulator predicts; running this rewrites its table.",
        fixed={"compute": "emulate", "steps": 4, "warmup": 2},
        axes={"workload": ["resnet50:step_ms=50", "gpt"], "ranks": [2, 3, 4],
              "scheme": [_TABLED_AS.get(name, name) for name in schemes.names() if name not in _NOT_TABLED]},
        show=[Table([Column("wire_bytes", "MB sent", 1e-6, ",.2f"), ms("codec_s", "codec, ms"), ms("decode_s",
                                                                                                   "of it decoding")],
                    across="ranks")],
    ),
]  # fmt: skip
