"""AQGB live: quantised broadcasts on shaped links, how bits follow the network, what they cost in accuracy."""

from __future__ import annotations

from gradwire_lab.bench.catalogue.codecs import GRADIENTS
from gradwire_lab.bench.catalogue.schemes import CODEC, COMPUTE, DDP, EXPOSED, ITERATION, LOSS, SENT, X_DDP
from gradwire_lab.results.experiment import Column, Experiment, Goal, Plot, Ref, Table, ms

_B32, _B4 = "broadcast:bits=32,bucket_mb=0.5", "broadcast:bits=4,bucket_mb=0.5"
_LIVE = {"ddp": "ddp", "ddp, buckets of 0.5 MB": "ddp:bucket_mb=0.5", "broadcast, 32 bits": _B32,
         "broadcast, 4 bits": _B4,
         "aqgb": "aqgb:bucket_mb=0.5", "aqgb, as in the paper": "aqgb:bucket_mb=0.5,max_contention=1"}  # fmt: skip
_X_B32 = Column("iteration_s", "x faster than 32 bits", kind="speed-up", against=_B32)
_SPLIT = [ITERATION, X_DDP, _X_B32, COMPUTE, EXPOSED, CODEC, ms("cpu_s", "cpu"), SENT, LOSS]
# Buckets smaller than a quarter of these small models: one for all would leave AQGB no block to send before others. As in
# the paper, only the network bounds the bits: ranks that share cores would be left with the fixed 4.
_ACCURACY = {"full precision": "plain", "32-bit broadcast": "broadcast:bits=32,bucket_mb=0.05",
             "4-bit broadcast": "broadcast:bits=4,bucket_mb=0.05",
             "AQGB": "aqgb:max_contention=1,bucket_mb=0.05"}  # fmt: skip
# Codecs at equal widths. "none" is 32 bits, `+ef` with error feedback, A|B one of the two for each value, by chance.
_METHODS = ["none", "truncated-float:bits=8", "qsgd:levels=127", "embedded-float:bits=8", "truncated-float:bits=4",
            "truncated-float:bits=4,rounding=stochastic", "qsgd:levels=7", "embedded-float:bits=4", "one-bit+ef",
            "qsgd:levels=1|qsgd:levels=127"]  # fmt: skip

EXPERIMENTS = [
    Experiment(
        key="aqgb-live", system="aqgb", measure="train", seconds=60, baseline=DDP,
        question="How long does a step take under fixed and adaptive bits, beside DDP's ring?",
        fixed={"workload": "gpt", "steps": 10, "warmup": 4},
        axes={"ranks": [2, 4], "rate": {"100 Mb/s": "100mbit", "1 Gb/s": "1gbit"}, "scheme": _LIVE},
        show=[Table(_SPLIT)],
        goals=[Goal("3.15 times as fast as 32 bits at 100 Mb/s (the paper)", _X_B32, ">=", 3.15,
                    {"rate": "100mbit", "scheme": "aqgb:bucket_mb=0.5"}),
               Goal("within 5 % of DDP at 1 Gb/s", X_DDP, "<=", 1.05, {"rate": "1gbit",
                                                                       "scheme": "aqgb:bucket_mb=0.5"})],
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
        baseline={"scheme": "plain"}, together=("fold", "scheme"),
        question="What do fixed and adaptive bits cost in accuracy: digits, 5 folds, 3 seeds?",
        of=[Ref("AQGB", "Table 2")],
        fixed={"workload": "resnet:width=8,folds=5", "ranks": 2, "rate": "100mbit", "steps": 150},
        axes={"seed": [0, 1, 2], "fold": list(range(5)), "scheme": _ACCURACY},
        show=[Table([Column("accuracy", "accuracy, %", 100, ".2f", spread=True),
                     Column("accuracy", "against full precision", 100, ".2f", "difference", spread=True),
                     Column("ratio", "bytes / ring", form=".3f"), ms("iteration_s", "ms a step")])],
        goals=[Goal("AQGB's accuracy beside full precision", Column("accuracy", "", 100, ".2f", "difference"), ">=",
                    -0.7, {"scheme": _ACCURACY["AQGB"]})],
    ),
    Experiment(
        key="aqgb-times", system="aqgb", measure="training", seconds=110, baseline=DDP,
        question="How long does training take to a loss?",
        of=[Ref("AQGB", "Fig. 11")],
        fixed={"workload": "gpt", "ranks": 4, "steps": 60, "baseline": "ddp"},
        axes={"rate": {"100 Mb/s": "100mbit", "500 Mb/s": "500mbit", "1 Gb/s": "1gbit"},
              "scheme": {name: _LIVE[name] for name in ("ddp", "broadcast, 32 bits", "broadcast, 4 bits", "aqgb")}},
        show=[Table([ITERATION, Column("seconds_to_loss", "s to the loss", form=".1f"), Column("held_out_loss", form=".3f")],
                    across="rate")],
        goals=[Goal("never slower than DDP beyond 5 %", X_DDP, "<=", 1.05, {"scheme": "aqgb:bucket_mb=0.5"})],
    ),
    Experiment(
        key="aqgb-errors", system="aqgb", measure="float-errors", seconds=20, together=("method",),
        question="How far from one gradient is what is received of it, at equal bits?",
        axes={"gradients": GRADIENTS, "method": _METHODS},
        show=[Table([Column("bits_a_value", "bits", form=".2f"), Column("relative_error", "error", form=".3f"),
                     Column("shrinkage", form=".3f"), Column("zeros_share", "made 0, %", 100, ".1f")],
                     rows=("method",))],
    ),
    Experiment(
        key="aqgb-float-training", system="aqgb", measure="float-training", seconds=450, together=("method",),
        over=("seed",),
        baseline={"method": "none"},
        question="Where does training end under each of these?",
        of=[Ref("AQGB", "Fig. 2")], fixed={"workload": "resnet", "workers": 4, "steps": 150},
        axes={"seed": [0], "method": _METHODS},
        show=[Table([Column("bits_a_value", "bits", form=".2f"), Column("end_loss", "loss", form=".4f", spread=True),
                     Column("accuracy", form=".4f")], rows=("method",))],
    ),
]  # fmt: skip
