"""GComp: fidelity of training, exponents and their tables, mantissas, load."""

from gradwire_lab.bench.catalogue.schemes import DDP, ITERATION, RATIO_MEAN, STEPS, TO_LOSS, X_DDP
from gradwire_lab.results.experiment import Column, Experiment, Goal, Plot, Ref, Table

BASELINE, DDP_ORDER = "gcomp:importance=none", {"DDP: another order of summation": "ddp"}
_TRUNCATE, _PERIODIC = "truncate:bits=18", "periodic:every=8"
_CONFIGURATIONS = {
    "importance none (baseline)": BASELINE, "gcomp": "gcomp:importance=paper", "truncate 18 bits": _TRUNCATE,
    "periodic, every 8th": _PERIODIC,
    **{f"uniform {bits} bits": f"gcomp:importance=uniform,bits={bits}" for bits in (12, 10)},
    "gcomp, table never refreshed": "gcomp:importance=paper,refresh_every=0", **DDP_ORDER,
}  # fmt: skip
# What `auto` takes for exact.
EXACT_NAME, EXACT = "gcomp, as auto's exact", "gcomp:tolerance=32,least_bits=7"
_TOLERANCES = {f"gcomp, tolerance {one}": f"gcomp:tolerance={one}" for one in (0.25, 1, 4, 8, 16, 32, 128, 512)}
_HOOKS = {f"DDP, {hook} hook": f"ddp-{hook}" for hook in ("bf16", "fp16")}
_UNIFORM = {f"uniform {bits} bits": f"gcomp:importance=uniform,bits={bits}" for bits in (12, 10, 7)}
_FRONTIER = {
    "no mantissa bit dropped (baseline)": BASELINE, **DDP_ORDER, **_HOOKS, **_TOLERANCES, EXACT_NAME: EXACT, **_UNIFORM,
    "gcomp, tolerance 1 for a life": "gcomp:horizon=life", "gcomp, levels, truncated": "gcomp:format=1,rounding=truncate",
}  # fmt: skip
_FRONTIER_WORKLOADS = {
    "GPT, AdamW": "gpt:n_layers=2,width=128,n_heads=4,length=64,batch_size=8",
    "ResNet, momentum": "resnet:width=8,activation=silu",
    "GPT, Muon": "gpt:n_layers=2,width=128,n_heads=4,length=64,batch_size=8,optimizer=muon",
}  # fmt: skip
_TO_BF16 = Column("deviation_mean", kind="ratio", against="ddp-bf16", form=".4f")
# The rows of the frontier that a user chooses from, for docs/systems/gcomp.md.
BESIDE_BF16 = Table([Column("ratio_mean", "bytes / ring", form=".2f"),
                     Column("deviation_mean", "times nearer than bf16", kind="speed-up", against="ddp-bf16")],
                    across="workload", where={"scheme": [*(_FRONTIER[name] for name in (
                        "DDP, bf16 hook", "gcomp, levels, truncated", "gcomp, tolerance 1", "gcomp, tolerance 4",
                        EXACT_NAME, "uniform 10 bits", "gcomp, tolerance 512"))]})  # fmt: skip


def _shares(*names: str) -> list[Column]:
    return [Column(name, name.removesuffix("_ratio").replace("_", " "), form=".3f") for name in names]


EXPERIMENTS = [
    Experiment(
        key="gcomp-fidelity", system="gcomp", measure="training", seconds=270,
        question="How far does each way of compressing move the loss, and what does it send?",
        of=[Ref("GComp", figure) for figure in ("Fig. 9", "Fig. 13a", "Fig. 18", "Fig. 19")],
        fixed={"ranks": 4, "steps": 160, "baseline": BASELINE, "dump_every": 40},
        # With ReLU instead of SiLU training is chaotic: one unit in the last place grows to 1e-3 of loss in 40 steps.
        axes={"workload": ["gpt", "resnet:activation=silu"], "scheme": _CONFIGURATIONS},
        baseline={"scheme": BASELINE},
        show=[Table([Column("deviation_mean", "deviation, mean", form=".1e"), Column("deviation_max", "max", form=".1e"),
                     Column("ratio_mean", "volume, mean", form=".3f"), Column("ratio_last_10", "volume, last 10", form=".3f"),
                     Column("loss_last_10", "loss", form=".4f"), Column("held_out_loss", form=".4f"),
                     Column("accuracy", form=".4f"), Column("replicas_equal")]),
              Table(_shares("static_bits", "refreshed_bits", "entropy_bits"), rows=("workload",),
                    where={"scheme": BASELINE},
                    title="Bits an exponent, built-in and refreshed table, means over the run")],
        goals=[Goal(f"95 % below {name}", Column("deviation_mean", kind="ratio", against=spec, form=".1e"), "<=", 0.05,
                    {"scheme": "gcomp:importance=paper"}, (), paper, Ref("GComp", "Fig. 18"))
               for name, spec, paper in (("truncate", _TRUNCATE, "0.07 to 0.26"),
                                         ("periodic", _PERIODIC, "0.03 to 0.23"))],
    ),
    Experiment(
        key="gcomp-tolerance", system="gcomp", measure="training", seconds=90,
        question="Bytes against closeness: what does each tolerance move the loss, beside PyTorch's hooks and fixed bits?",
        fixed={"ranks": 4, "steps": 60, "baseline": BASELINE}, over=("seed",), baseline={"scheme": BASELINE},
        axes={"workload": _FRONTIER_WORKLOADS, "seed": [0, 1, 2], "scheme": _FRONTIER},
        show=[Table([RATIO_MEAN, Column("deviation_mean", "deviation, mean", form=".1e", spread=True),
                     Column("deviation_mean", "x bf16's", kind="ratio", against="ddp-bf16", form=".3g")]),
              Plot("ratio_mean", Column("deviation_mean", "deviation of the loss", form=".1e"), log="y",
                   x_title="bytes / a float32 ring's", title="GPT, AdamW", where={
                       "workload": _FRONTIER_WORKLOADS["GPT, AdamW"],
                       "scheme": [_FRONTIER[name] for name in (
                           "DDP, bf16 hook", "gcomp, tolerance 1", "gcomp, tolerance 4", "gcomp, tolerance 32",
                           "gcomp, tolerance 512", "uniform 10 bits", "uniform 7 bits")]})],
        goals=[Goal("a hundred times closer than bf16", _TO_BF16, "<=", 0.01, {"scheme": "gcomp:tolerance=1"}),
               Goal("fifty times closer than bf16, at its bytes", _TO_BF16, "<=", 0.02, {"scheme": "gcomp:tolerance=4"}),
               Goal("as close as bf16", _TO_BF16, "<=", 1, {"scheme": "gcomp:tolerance=512"}),
               Goal("0.30 of a float32 ring's bytes", Column("ratio_mean", form=".3f"), "<=", 0.3,
                    {"scheme": "gcomp:tolerance=512"})],
    ),
    Experiment(
        key="gcomp-load", system="gcomp", measure="training", seconds=120,
        question="How busy are the cores, and how long does training take to a loss, at 1 Gb/s?",
        of=[Ref("GComp", "Fig. 11"), Ref("GComp", "Fig. 20")],
        fixed={"ranks": 4, "rate": "1gbit", "steps": 100, "baseline": "ddp"}, baseline=DDP,
        axes={"workload": ["gpt", "resnet:activation=silu"], "scheme": ["ddp", BASELINE, "gcomp:importance=paper"]},
        show=[Table([ITERATION, X_DDP, Column("machine_load", "cores busy, %", 100, ".0f"),
                     Column("cores_per_rank", form=".2f"), TO_LOSS, Column("steps_to_loss", "steps", form=".0f")])],
    ),
    Experiment(
        key="gcomp-spread", system="gcomp", measure="gradient-spread", seconds=20, together=("gradients",), quick=True,
        question="How many values have which size, which exponent, and which share of their parameter?",
        of=[Ref("GComp", "Fig. 2"), Ref("GComp", "Fig. 3"), Ref("SlimGC", "Fig. 5")],
        axes={"gradients": [STEPS["gpt"][0], STEPS["gpt"][-1], STEPS["resnet"][-1]]},
        show=[Table([Column("at", "|g| / |p|", form=".1e")], rows=("share",), across="gradients",
                    where={"of": "ratio", "share": [0.1, 0.5, 0.9]}, title="So many are below"),
              Plot("at", Column("share", "share of values"), "gradients", log="y", where={"of": "value"},
                   x_title="value / standard deviation, zeros left out")],
    ),
    Experiment(
        key="gcomp-cross-tables", system="gcomp", measure="cross-tables", seconds=20, together=("gradients",),
        quick=True,
        question="What does an exponent cost under the table made from another gradient?",
        of=[Ref("GComp", "Fig. 12")], axes={"gradients": [*STEPS["gpt"][::3], *STEPS["resnet"][::3]]},
        show=[Table(_shares("native_ratio", "escaped_ratio", "gradwire_ratio", "entropy_ratio"), 
                    rows=("gradients", "table_from"))],
    ),
    Experiment(
        key="gcomp-decoders", system="gcomp", measure="decoders", seconds=15, together=("spread",), quick=True,
        question="How much faster is a look-up table than a tree at decoding?",
        of=[Ref("GComp", "Fig. 13b")], fixed={"rounds": 7},
        axes={"spread": [0.25, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0]},
        show=[Table([Column("code_bits", form=".2f"), Column("table_ns", "table, ns", form=".2f", spread=True),
                     Column("tree_ns", "tree, ns", form=".1f", spread=True),
                     Column("tree_over_table", "tree / table", form=".1f")],
                    rows=("spread",))],
    ),
    Experiment(
        key="gcomp-mantissa", system="gcomp", measure="mantissa", seconds=20, together=("gradients",), quick=True,
        question="What do levels and pruned zeros leave of sign and mantissa?",
        of=[Ref("GComp", "Fig. 14")], axes={"gradients": [*STEPS["gpt"], *STEPS["resnet"]]},
        show=[Table(_shares("zero_prune", "single_quant", "multi_quant", "single_quant_zero_prune", "multi_quant_zero_prune"),
                    rows=("gradients",))],
    ),
    Experiment(
        key="gcomp-scaling", system="gcomp", measure="simulate", seconds=2, together=("workers", "scheme", "codec"),
        question="How would throughput scale to 128 workers at 10 Gb/s, by measured sizes, with the codec and with a free one?",
        of=[Ref("GComp", "Fig. 16"), Ref("GComp", "Fig. 17")],
        fixed={"gbit_per_s": 10, "rounds": 50, "jitter": "per-worker",
               "measured_on": {"resnet50": "resnet50", "bert-base": "gpt"}},
        axes={"workload": ["resnet50", "bert-base"], "workers": [1, 2, 4, 8, 16, 32, 64, 128], "scheme": ["plain", "gcomp"],
              "codec": {"measured codec times": True, "codec free": False}},
        baseline={"scheme": "plain"},
        show=[Table([Column("samples_per_s", "samples/s", form=",.0f"), Column("round_s", "x ring", kind="speed-up")],
                    rows=("workers", "codec"), where={"scheme": "gcomp", "workers": [4, 128]}),
              Plot("workers", Column("samples_per_s", "samples/s"), "scheme", log="xy",
                   where={"workload": "resnet50", "codec": True})],
    ),
]  # fmt: skip
