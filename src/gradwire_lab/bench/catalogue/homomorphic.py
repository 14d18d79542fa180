"""Homomorphic compression: count sketches against the bound, aggregation of sparse gradients, training."""

from gradwire_lab.bench.catalogue import schemes as shared
from gradwire_lab.results.experiment import Column, Experiment, Goal, Plot, Ref, Table, mb, ms

_SKETCH = "homomorphic:mode=sketch"
_PACKED_SLOW = {"scheme": "homomorphic", "rate": "200mbit"}
_SWITCH = "homomorphic:mode=exact,aggregator=switch"
_X_SWITCH = Column("time_s", "x faster than the dense switch", kind="speed-up", against="dense-switch")
_FASTER = Column("time_s", "x faster than Gloo", kind="speed-up")
_STEP_FASTER = Column("iteration_s", "x faster than DDP", kind="speed-up")
_LOSSY = {
    "ddp": "ddp",
    "a tenth": "homomorphic:mode=lossy,budget=0.1",
    "three tenths": "homomorphic:mode=lossy,budget=0.3",
    # Two ranks gather 8 bytes a chosen value, of the 4 bytes of each that a ring sends.
    "top-k, a tenth of the bytes": "top-k:share=0.05,warmup_steps=0",
}
# VGG19's share of non-zeros (the paper's Table 1: 30.4 % sparse), and sketches around gamma = 1.23 times it.
_VGG19 = 0.696
_EDGE = [round(1.23 * _VGG19 * factor, 4) for factor in (0.8, 0.9, 0.95, 1.0, 1.02, 1.05, 1.1, 1.2)]
_SKETCHES = sorted([0.02, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 1.2, 1.6, 2.0, *_EDGE])
_ERROR = Column("relative_error", "error", form=".1e")

EXPERIMENTS = [
    Experiment(
        key="sketch-formulas", system="homomorphic", measure="sketch-formulas", seconds=5, together=("value_bits", "density"),
        question="How large is a sketch with its index beside the bound, by the formulas?",
        of=[Ref("Homomorphic", "Fig. 2")],
        axes={"value_bits": [4, 8, 16, 32],
              "density": [*(round(10 ** (exponent / 10), 8) for exponent in range(-40, 0, 2)), 0.9, 0.99]},
        show=[Plot("density", Column("best_over_bound", "best / bound"), "value_bits", log="x",
                   x_title="share of non-zeros"),
              Table([Column("bound_share", "bound", form=".5f"), Column("bitmap_share", "bitmap", form=".4f"),
                     Column("bloom_share", "filter", form=".4f"), Column("best_over_bound", "best / bound", form=".2f")],
                    rows=("density",), where={"value_bits": 32}, title="Values of 32 bits, as shares of the values'")],
        goals=[Goal("at most 1.6 times the bound", Column("best_over_bound", form=".2f"), "<=", 1.6, {"density": 0.01}, (),
                    "1.6", Ref("Homomorphic", "Fig. 2"))],
    ),
    Experiment(
        key="sketch-recovery", system="homomorphic", measure="sketch-recovery", seconds=5, together=("sketch_size",),
        question="What is recovered from a sketch, by its size? Random values of VGG19's density.",
        of=[Ref("Homomorphic", "Fig. 3")], fixed={"n_elements": 1 << 20, "density": _VGG19},
        axes={"sketch_size": _SKETCHES},
        show=[Plot("sketch_share", Column("recovery_rate", "share recovered"), "pattern", x_title="sketch / gradient"),
              Table([Column("recovery_rate", "recovered, %", 100, ".1f"), Column("rounds", form=".0f"), _ERROR,
                     Column("cells_a_nonzero", "cells a non-zero", form=".3f")], rows=("sketch_size",))],
    ),
    Experiment(
        key="homomorphic-allreduce", system="homomorphic", measure="allreduce", seconds=60, baseline=shared.DDP,
        question="How much faster than Gloo is an all-reduce of 40 MB of which few values are not 0?",
        of=[Ref("Homomorphic", "Fig. 5"), Ref("Homomorphic", "Fig. 6")],
        fixed={"ranks": 4, "rate": "200mbit", "n_bytes": 40_000_000, "rounds": 3, "warmup": 2},
        axes={"density": [0.01, 0.05, 0.1, 0.3], "scheme": ["ddp", "dense-switch", _SKETCH, _SWITCH]},
        show=[Table([shared.TIME, _FASTER, _X_SWITCH, mb("wire_bytes", "MB sent"), _ERROR])],
        goals=[Goal("6.33 times as fast as Gloo at 1 %", _FASTER, ">=", 6.33, {"density": 0.01, "scheme": _SKETCH}, (), "4.97",
                    Ref("Homomorphic", "Fig. 5")),
               Goal("over a switch 6.33 times as fast as the switch without compression at 1 %", _X_SWITCH, ">=", 6.33,
                    {"density": 0.01, "scheme": _SWITCH}, (), "6.33", Ref("Homomorphic", "Fig. 6")),
               Goal("never slower than Gloo by more than 5 %", shared.TIME_X_DDP, "<=", 1.05, {"scheme": _SKETCH})],
    ),
    Experiment(
        key="homomorphic-packed", system="homomorphic", measure="allreduce", seconds=50, baseline=shared.DDP,
        question="How much faster than Gloo are packed sums of 100 MB, by density?",
        fixed={"ranks": 4, "n_bytes": 100_000_000, "rounds": 3, "warmup": 2},
        axes={"rate": {"200 Mb/s": "200mbit", "1 Gb/s": "1gbit"}, "density": [0.01, 0.3, _VGG19],
              "scheme": ["ddp", "homomorphic"]},
        show=[Table([shared.TIME, _FASTER, mb("wire_bytes", "MB sent"),
                     Column("wire_bytes", "of DDP's bytes", kind="ratio", form=".3f"), _ERROR], across="rate")],
        goals=[Goal("24 times as fast as Gloo at 1 %, 200 Mb/s", _FASTER, ">=", 24, {"density": 0.01, **_PACKED_SLOW}),
               Goal("2.8 times as fast at 30 %, 200 Mb/s", _FASTER, ">=", 2.8, {"density": 0.3, **_PACKED_SLOW}),
               Goal("at VGG19's density at most 0.74 of DDP's bytes", Column("wire_bytes", kind="ratio", form=".3f"), "<=",
                    0.74, {"density": _VGG19, "scheme": "homomorphic"}),
               Goal("faster than DDP at VGG19's density, 1 Gb/s", shared.TIME_X_DDP, "<=", 1.0,
                    {"density": _VGG19, "rate": "1gbit", "scheme": "homomorphic"})],
    ),
    Experiment(
        key="homomorphic-cpu", system="homomorphic", measure="allreduce", seconds=20, baseline={"scheme": _SKETCH},
        question="What do packed sums cost a rank in processor time (all threads, kernel included), beside sketches?",
        fixed={"ranks": 2, "rate": "none", "n_bytes": 40_000_000, "rounds": 7, "warmup": 3},
        axes={"density": [0.01, 0.05, 0.2, 0.5], "scheme": [_SKETCH, "homomorphic"]},
        show=[Table([shared.TIME, ms("cpu_s", "cpu ms"), Column("cpu_s", "x the sketch's", kind="ratio"),
                     mb("wire_bytes", "MB sent")])],
        goals=[Goal(f"at most {bound:g} times the sketch's at {100 * density:g} %", Column("cpu_s", kind="ratio", form=".2f"),
                    "<=", bound, {"density": density, "scheme": "homomorphic"})
               for density, bound in ((0.01, 0.5), (0.2, 0.15))],
    ),
    Experiment(
        key="homomorphic-shapes", system="homomorphic", measure="train", seconds=150, baseline=shared.DDP,
        question="How long does a step of VGG19 and BERT-base take with a lossy sketch of a tenth, computation emulated?",
        of=[Ref("Homomorphic", "Fig. 7")], fixed={"ranks": 4, "rate": "1gbit", "compute": "emulate", "steps": 4, "warmup": 2},
        axes={"workload": ["vgg19", "bert-base"], "scheme": ["ddp", "homomorphic:mode=lossy,budget=0.1"]},
        show=[Table([shared.ITERATION, _STEP_FASTER, shared.EXPOSED, shared.SENT])],
    ),
    *(Experiment(
        key=f"homomorphic-time-{workload}", system="homomorphic", measure="training", seconds=seconds, baseline=shared.DDP,
        question=f"How long does training of {workload} take to DDP's loss at {rate}?",
        of=[Ref("Homomorphic", "Fig. 7"), Ref("Homomorphic", "Fig. 8")],
        fixed={"workload": workload, "ranks": 4, "rate": rate, "steps": steps, "baseline": "ddp"},
        axes={"scheme": ["ddp", _SKETCH, "homomorphic:mode=exact", "auto"]},
        show=[Table([shared.ITERATION, _STEP_FASTER, shared.TO_LOSS, Column("loss_last_10", "loss", form=".4f"),
                     shared.HELD_OUT, shared.RATIO_MEAN])],
      ) for workload, rate, steps, seconds in (("ncf", "100mbit", 50, 240), ("lstm", "200mbit", 40, 320))),
    *(Experiment(
        key=f"homomorphic-lossy-{name}", system="homomorphic", measure="training", seconds=seconds, over=("seed",),
        question=f"What do lossy sketches of a tenth and three tenths cost {name}?", baseline=shared.DDP,
        of=[Ref("Homomorphic", "Fig. 4")], fixed={"workload": workload, "steps": steps, "baseline": "ddp", "ranks": 2},
        axes={"seed": [0, 1, 2], "scheme": _LOSSY},
        show=[Table([metric, shared.against(metric, "DDP"), shared.RATIO_MEAN, ms("iteration_s", "ms a step"),
                     Column("seconds_to_loss", "s to DDP's loss", form=".1f")])],
      ) for name, workload, metric, steps, seconds in (
          ("vgg", "vgg", shared.ACCURACY, 150, 120),
          ("bert", "bert:n_layers=2,width=64,n_heads=4", shared.NATS, 300, 200))),
]  # fmt: skip
