"""AQGB live, on shaped links, and in its paper's own setting by the simulator; and what the simulator predicts else."""

from collections.abc import Sequence
from typing import Any

from gradwire import schemes
from gradwire_lab.bench.catalogue import schemes as shared
from gradwire_lab.results.experiment import Column, Experiment, Goal, Plot, Ref, Table, mb, ms

_B32, _B4 = "broadcast:bits=32,bucket_mb=0.5", "broadcast:bits=4,bucket_mb=0.5"
_LIVE_AQGB = "aqgb:bucket_mb=0.5"
_OWNERS = "aqgb:topology=owners,bucket_mb=0.5"
_LIVE = {"ddp": "ddp", "broadcast, 32 bits": _B32, "broadcast, 4 bits": _B4, "aqgb through owners": _OWNERS,
         "aqgb": _LIVE_AQGB, "aqgb, as in the paper": "aqgb:bucket_mb=0.5,max_contention=1"}  # fmt: skip
_X_B32 = Column("iteration_s", "x faster than 32 bits", kind="speed-up", against=_B32)
# Buckets smaller than a quarter of these small models: one for all would leave AQGB no block to send before others. As in
# the paper, only the network bounds the bits: ranks that share cores would be left with the fixed 4.
_ACCURACY = {"full precision": "plain", "32-bit broadcast": "broadcast:bits=32,bucket_mb=0.05",
             "4-bit broadcast": "broadcast:bits=4,bucket_mb=0.05",
             "AQGB": "aqgb:max_contention=1,bucket_mb=0.05"}  # fmt: skip
# Codecs at equal widths. "none" is 32 bits, `+ef` with error feedback, A|B one of the two for each value, by chance.
_METHODS = ["none", "truncated-float:bits=8", "qsgd:levels=127", "embedded-float:bits=8", "truncated-float:bits=4",
            "truncated-float:bits=4,rounding=stochastic", "qsgd:levels=7", "embedded-float:bits=4", "one-bit+ef",
            "qsgd:levels=1|qsgd:levels=127"]  # fmt: skip

# ---- simulated
_SCHEMES = {"32-bit broadcast": "broadcast-32", "4-bit broadcast": "broadcast-4", "AQGB": "aqgb",
            "AQGB, through owners": "aqgb-owners", "uncompressed ring": "plain"}  # fmt: skip
_ROUNDS = Column("rounds", form=".0f")
_USE = Column("utilisation", "utilisation, %", 100, ".1f")
_MEASURES = [_ROUNDS, _USE, Column("wait_share", "wait / compute", form=".3f"), Column("row", "ROW", form=".2f")]
_AQGB, _FIG_10 = {"scheme": "aqgb", "jitter": "common"}, Ref("AQGB", "Fig. 10")
_NOT_TABLED = ("aqgb", "broadcast", "auto", "one-bit-adam")  # modelled by their control law; beside Adam alone
# What its threshold decides between is measured, and what a step that sends takes: when is the simulator's own.
_TABLED_AS = {"slimgc": "slimgc:threshold_bytes=0", "periodic": "periodic:every=1"}


def _aqgb(figure: str, question: str, axes: dict[str, Any], show: Sequence[Table | Plot], *, goals: Sequence[Goal] = (),
          seconds: float = 20, **fixed: Any) -> Experiment:  # fmt: skip
    return Experiment(
        key=f"aqgb-{figure.lower().replace('. ', '')}", system="simulator", measure="simulate", seconds=seconds,
        question=question, of=[Ref("AQGB", figure)], fixed={"workers": 16, "seconds": 200, "codec": False, **fixed},
        axes=axes, show=show, goals=goals, baseline={"scheme": "broadcast-32"},
    )  # fmt: skip


EXPERIMENTS = [
    Experiment(
        key="aqgb-live", system="aqgb", measure="train", seconds=60, baseline=shared.DDP,
        question="How long does a step take under fixed and adaptive bits, beside DDP's ring?",
        fixed={"workload": "gpt", "steps": 10, "warmup": 4},
        axes={"ranks": [2, 4], "rate": {"100 Mb/s": "100mbit", "1 Gb/s": "1gbit"}, "scheme": _LIVE},
        show=[Table([shared.ITERATION, shared.X_DDP, _X_B32, shared.EXPOSED, shared.CODEC, shared.SENT, shared.LOSS])],
        goals=[Goal("3.15 times as fast as 32 bits at 100 Mb/s (the paper)", _X_B32, ">=", 3.15,
                    {"rate": "100mbit", "scheme": _LIVE_AQGB}, (), "3.15", Ref("AQGB", "Table 2")),
               Goal("through owners ahead of DDP", shared.X_DDP, "<=", 1.0, {"scheme": _OWNERS}),
               Goal("within 5 % of DDP at 1 Gb/s", shared.X_DDP, "<=", 1.05, {"rate": "1gbit", "scheme": _LIVE_AQGB})],
    ),
    Experiment(
        key="aqgb-adaptation", system="aqgb", measure="adaptation", seconds=70,
        question="How do the bits follow a network of 500 Mb/s that falls to 100 and comes back?",
        of=[Ref("AQGB", "Fig. 9")],
        fixed={"ranks": 4, "rate": "500mbit", "at": {22: "100mbit", 42: "500mbit"}, "workload": "gpt", "steps": 220,
               "bucket_mb": 0.5, "window_s": 4},
        axes={"scheme": ["aqgb:max_contention=1"]},
        show=[Table([Column("n_steps", "steps", form=".0f"), Column("bits_per_value", "bits a value", form=".1f"),
                     Column("first_bits_per_value", "first stage", form=".1f"), Column("q_ratio", "Q", form=".3f"),
                     Column("acknowledged_bps", "acknowledged, Mb/s", 1e-6, ".0f"), ms("iteration_s", "ms a step")],
                    rows=("from_s",)),
              Plot("from_s", Column("bits_per_value", "bits a value"), x_title="seconds of training")],
    ),
    Experiment(
        key="aqgb-accuracy", system="aqgb", measure="training", seconds=130, over=("seed", "fold"),
        baseline=shared.PLAIN, together=("fold", "scheme"),
        question="What do fixed and adaptive bits cost in accuracy: digits, 5 folds, 3 seeds?",
        of=[Ref("AQGB", "Table 2")],
        fixed={"workload": "resnet:width=8,folds=5", "ranks": 2, "rate": "100mbit", "steps": 150},
        axes={"seed": [0, 1, 2], "fold": list(range(5)), "scheme": _ACCURACY},
        show=[Table([shared.ACCURACY, shared.against(shared.ACCURACY, "full precision"), shared.RATIO_LAST,
                     ms("iteration_s", "ms a step")])],
        goals=[Goal("AQGB's accuracy beside full precision", Column("accuracy", "", 100, ".2f", "difference"), ">=",
                    -0.7, {"scheme": _ACCURACY["AQGB"]}, (), "-0.67", Ref("AQGB", "Table 2"))],
    ),
    Experiment(
        key="aqgb-times", system="aqgb", measure="training", seconds=110, baseline=shared.DDP,
        question="How long does training take to a loss?",
        of=[Ref("AQGB", "Fig. 11")],
        fixed={"workload": "gpt", "ranks": 4, "steps": 60, "baseline": "ddp"},
        axes={"rate": {"100 Mb/s": "100mbit", "500 Mb/s": "500mbit", "1 Gb/s": "1gbit"},
              "scheme": {name: _LIVE[name] for name in ("ddp", "broadcast, 32 bits", "broadcast, 4 bits", "aqgb")}},
        show=[Table([shared.ITERATION, shared.TO_LOSS, shared.HELD_OUT], across="rate")],
        goals=[Goal("never slower than DDP beyond 5 %", shared.X_DDP, "<=", 1.05, {"scheme": _LIVE_AQGB})],
    ),
    Experiment(
        key="aqgb-errors", system="aqgb", measure="float-errors", seconds=20, together=("method",),
        question="How far from one gradient is what is received of it, at equal bits?",
        axes={"gradients": shared.GRADIENTS, "method": _METHODS},
        show=[Table([Column("bits_a_value", "bits", form=".2f"), Column("relative_error", "error", form=".3f"),
                     Column("shrinkage", form=".3f"), Column("zeros_share", "made 0, %", 100, ".1f")],
                     rows=("method",))],
    ),
    Experiment(
        key="aqgb-float-training", system="aqgb", measure="float-training", seconds=450, together=("method",),
        over=("seed",), baseline={"method": "none"},
        question="Where does training end under each of these?",
        of=[Ref("AQGB", "Fig. 2")], fixed={"workload": "resnet", "workers": 4, "steps": 150},
        axes={"seed": [0], "method": _METHODS},
        show=[Table([Column("bits_a_value", "bits", form=".2f"), Column("end_loss", "loss", form=".4f", spread=True),
                     Column("accuracy", form=".4f")], rows=("method",))],
    ),
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
          [Table(_MEASURES), Plot("jitter", _ROUNDS, style="bars")],
          goals=[Goal("AQGB's 127 rounds, to 5 %: at least", _ROUNDS, ">=", 0.95 * 127, _AQGB, (), "127", _FIG_10),
                 Goal("and at most", _ROUNDS, "<=", 1.05 * 127, _AQGB),
                 Goal("utilisation within 5 points of 77 %", _USE, ">=", 72.0, _AQGB, (), "77", _FIG_10)]),
    _aqgb("Fig. 12", "The same by link rate.", {"gbit_per_s": [2, 2.5, 3, 4, 6, 8, 10], "scheme": _SCHEMES},
          [Table(_MEASURES, rows=("gbit_per_s",)), Plot("gbit_per_s", _ROUNDS, x_title="link rate, Gb/s")],
          seconds=5),
    _aqgb("Fig. 13", "The same with stragglers. The paper: 4 bits +125.6 %, AQGB +118.0 % more rounds than 32 bits.",
          {"sigma": [1.0, 1.5, 2.0], "scheme": _SCHEMES},
          [Table([*_MEASURES, Column("more_rounds", "more rounds, %", 100, "+.0f")])], jitter="stragglers", seconds=5),
    _aqgb("Fig. 14", "The same by the number of blocks.",
          {"workload": {f"{n} blocks": f"resnet50-{n}blocks" for n in (1, 3, 4, 5, 6)},
           "scheme": {name: _SCHEMES[name] for name in ("AQGB", "4-bit broadcast", "32-bit broadcast")}},
          [Table(_MEASURES, rows=("workload",))], seconds=5),
    Experiment(
        key="aqgb-workers", system="simulator", measure="simulate", seconds=1,
        question="The same at 0.5 Gb/s by the number of workers: a broadcast grows with them, an all-reduce does not. Codecs "
        "as measured on two cores, and as the paper has them, which take no time.",
        fixed={"seconds": 200, "gbit_per_s": 0.5},
        axes={"codec": {"measured": True, "none": False}, "workers": [16, 64, 256, 1_024],
              "scheme": {name: _SCHEMES[name] for name in ("AQGB", "AQGB, through owners", "uncompressed ring")}},
        show=[Table([_ROUNDS, Column("bits_per_value", "bits a value", form=".1f"), _USE], rows=("workers",))],
        goals=[Goal("more rounds than an uncompressed ring at 1,024 workers: at least", _ROUNDS, ">=", 52,
                    {"scheme": "aqgb-owners", "workers": 1_024})],
    ),
    Experiment(  # a small model at rates that make it wait as a large one does at ten times these
        key="simulator-reality", system="simulator", measure="reality", seconds=110,
        question="Does the simulator predict the test network, on gpt:step_ms=100?",
        fixed={"workload": "gpt:step_ms=100", "compute": "emulate", "steps": 9, "warmup": 4},
        axes={"ranks": [2, 4], "delay": ["0ms", "2500us", "20ms"], "rate": ["50mbit", "200mbit"],
              "scheme": ["ddp", "plain", "gcomp", "acp-sgd", "broadcast", "broadcast:bits=32", "aqgb"]},
        show=[Table([Column("error", "error, %", 100, "+.1f")], rows=("scheme", "ranks", "rate"), across="delay"),
              Plot("measured_s", Column("predicted_s", "predicted, s"), log="xy", x_title="measured, s")],
        goals=[Goal("within 10 %", Column("error_size", "error", 100, ".1f"), "<=", 10.0)],
    ),
    Experiment(
        key="simulator-sizes", system="simulator", measure="simulator-sizes", seconds=110,
        question="Bytes and codec times of every scheme, from which the simulator predicts; running this rewrites its table.",
        fixed={"compute": "emulate", "steps": 4, "warmup": 2},
        axes={"workload": ["resnet50:step_ms=50", "gpt"], "ranks": [2, 3, 4],
              "scheme": [_TABLED_AS.get(name, name) for name in schemes.names() if name not in _NOT_TABLED]},
        show=[Table([mb("wire_bytes", "MB sent"), ms("codec_s", "codec, ms"), ms("decode_s", "decoding")], across="ranks")],
    ),
]  # fmt: skip
