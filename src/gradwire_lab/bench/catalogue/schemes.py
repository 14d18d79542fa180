"""All schemes side by side, in training and in a bare all-reduce; `auto`, which chooses one; codecs on real gradients."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from gradwire import schemes
from gradwire_lab.results.experiment import Column, Experiment, Goal, Plot, Ref, Table, mb, ms

# PyTorch's own: DDP, and its hooks.
HOOKS = ["ddp", "ddp-fp16", "ddp-bf16", "ddp-powersgd", "ddp-quant8"]
FIXED = [name for name in schemes.names() if name != "auto" and not schemes.needs_momenta(name)]
REDUCING = ["ddp", "ddp-bf16", *(name for name in FIXED if not schemes.owns_step(name))]
DDP, PLAIN = {"scheme": "ddp"}, {"scheme": "plain"}
# These send DDP's very bytes by the same all-reduce: `homomorphic` finds dense gradients too dense and sends them plainly.
CONTROLS = ["plain", "homomorphic"]
RATES = {"100 Mb/s": "100mbit", "1 Gb/s": "1gbit", "unshaped": "none"}

ITERATION = ms("iteration_s", "ms a step", spread=True)
X_DDP = Column("iteration_s", "x ddp", kind="ratio")
EXPOSED, CODEC, COMPUTE = ms("exposed_s", "exposed"), ms("codec_s", "codec, busy"), ms("compute_s", "compute")
SENT, LOSS = mb("wire_bytes", "MB sent"), Column("loss", form=".3f")
TIME, TIME_X_DDP = ms("time_s", "ms", spread=True), Column("time_s", "x ddp", kind="ratio")
RATIO_MEAN, RATIO_LAST = (Column(name, "bytes / ring", form=".3f") for name in ("ratio_mean", "ratio"))
NATS = Column("held_out_loss", "held-out loss", form=".3f", spread=True)
ACCURACY = Column("accuracy", "accuracy, %", 100, ".2f", spread=True)
HELD_OUT, TO_LOSS = Column("held_out_loss", form=".3f"), Column("seconds_to_loss", "s to the loss", form=".1f")
_CPU_X_DDP = Column("cpu_s", "cpu x ddp", kind="ratio")
_RATIO = Column("wire_ratio", "wire ratio", form=".3f")
_SIZES = {"1 KB": 1024, "64 KB": 65536, "1 MB": 1048576, "25 MB": 25000000}
# Gradients of real training.
GRADIENTS = ["gpt@400", "resnet@400"]
STEPS = {name: [f"{name}@{step}" for step in (10, 20, 40, 60)] for name in ("gpt", "resnet")}

_README = ["ddp", "ddp-bf16", "gcomp", "embedded-float", "one-bit", "acp-sgd"]
README_TABLE = Table([ms("iteration_s", "step, ms"), Column("iteration_s", "x faster than DDP", kind="speed-up"), SENT, LOSS],
                     where={"rate": "100mbit", "scheme": _README})  # fmt: skip
SPEED_TABLE = Table([ms("iteration_s", "ms"), Column("iteration_s", "x DDP", kind="speed-up")], across="rate",
                    where={"scheme": [*_README, "power-sgd", "terngrad", "qsgd", "two-bit"]})  # fmt: skip

_CHUNKED = [
    "ddp",
    *(f"gcomp:chunk_elements={1 << power}" for power in (14, 15, 16, 17, 18, 20)),
    *(f"gcomp:topology=direct,chunk_elements={1 << power}" for power in (14, 16, 18, 20)),
    *(f"one-bit:chunk_elements={1 << power}" for power in (16, 18, 20, 22)),
]

_FLAT = ["ddp", "gcomp", "one-bit", "acp-sgd"]
_TWO_LEVEL = ["two-level", *(f"two-level:scheme={name}" for name in _FLAT[1:])]
_FSDP2 = ["hsdp", "fsdp2:scheme=gcomp", "fsdp2:scheme=one-bit"]
_OUT_OF_NODE = mb("kernel_bytes", "MB out of a node")

# Fewer bytes than bfloat16, and nearer to DDP (gcomp-tolerance).
_TEN_BITS = "gcomp:importance=uniform,bits=10"


def against(column: Column, name: str, scheme: str | None = None, form: str = "") -> Column:
    """How far it lies from that of `scheme`, or of the baseline, over the same seeds and folds."""
    return replace(column, title=f"against {name}", kind="difference", against=scheme, form=form or column.form)


# ---- auto
_AUTO_X_DDP = Column("x_ddp", "x DDP", form=".3f", spread=True)
_X_BEST = Column("x_best_last_half", "x best, 2nd half", form=".3f", spread=True)
_X_STEP = Column("iteration_s", "x DDP", kind="ratio", form=".3f")
_X_CPU = Column("cpu_s", "CPU, x DDP", kind="ratio", form=".3f")
_GOOD_AFTER = Column("good_after", "good after", form=".0f")
_DDP, _AUTO = {"DDP": "ddp"}, {f"gradwire, {level}": f"auto:fidelity={level}" for level in ("exact", "close")}
_AUTO_RATES = {"100 Mb/s": "100mbit", "300 Mb/s": "300mbit", "1 Gb/s": "1gbit", "unshaped": "none"}

AUTO_TABLE = Table([Column("x_ddp", "x DDP's speed", form=".2f")], across="rate", where={"workload": "gpt", "ranks": 2})


def regret(key: str, question: str, axes: dict[str, Any], *, takes: float, across: str | None = None,
           plots: Sequence[Plot] = (), goals: Sequence[Goal] = (), is_long: bool = False, system: str = "auto",
           **fixed: Any) -> Experiment:  # fmt: skip
    """`auto` beside what goes without gradwire, the first of the schemes."""
    specs, rows = list(axes["scheme"].values()), tuple(axis for axis in axes if axis != across)
    only = {"scheme": [spec for spec in specs if "auto" in spec]}
    by = ("phase",) if "then" in fixed else ()
    x_base = replace(_AUTO_X_DDP, title="x DDP" if specs[0] == "ddp" else "x FSDP2")
    return Experiment(
        key=key, system=system, measure="regret", seconds=takes, question=question, is_long=is_long, fixed=fixed, axes=axes,
        baseline={"scheme": specs[0]}, show=[
            Table([x_base, _X_BEST], rows=rows, across=across, where=only, title="Trials included; above 1 is faster"),
            Table([ms("late_s", "ms a step")], rows=rows, across=across, title="The second half"),
            Table([Column("best"), Column("ends_with", "ends with"), _GOOD_AFTER],
                  rows=rows, across=across, where=only, title="The best fixed scheme, and what auto ends with"),
            Table([Column("model_error", "model off, %", 100, ".0f"), Column("loss_deviation", "loss strays", form=".1e")],
                  rows=rows, across=across, where=only, title="Predictions before any trial, and losses"),
            *plots,
        ],
        goals=[Goal("0.98 of what goes without it in every cell", x_base, ">=", 0.98, only, by),
               Goal("0.95 of the best fixed scheme in the second half", _X_BEST, ">=", 0.95, only, by), *goals],
    )  # fmt: skip


EXPERIMENTS = [
    regret(
        "regret", "What does auto lose against DDP, and against the best scheme that it may use, in 300 steps?",
        {"workload": ["gpt", "resnet", "many-tensors"], "ranks": [2, 4], "rate": _AUTO_RATES,
         "scheme": {**_DDP, "DDP, bf16 hook": "ddp-bf16", **_AUTO, "gradwire, any": "auto:fidelity=any"}},
        across="rate", takes=450, is_long=True, steps=300, seconds=60,
        plots=[Plot("rate", Column("x_ddp", "speed, x DDP", form=".3f"), style="bars", x_title="every rank's link",
                    where={"workload": "gpt", "ranks": 2})],
    ),
    regret(
        "regret-changes", "What does auto make of another network in mid-run: 1 Gb/s (phase 0), 100 Mb/s, 1 Gb/s?",
        {"scheme": {**_DDP, **_AUTO}}, across="phase", takes=360,
        workload="gpt", ranks=2, rate="1gbit", then=["100mbit", "1gbit"], steps=150, seconds=45,
        goals=[Goal(f"within 6 % of the best after so many steps of a {link} link", _GOOD_AFTER, "<=", steps,
                    {"phase": phase}, ("phase",))
               for phase, link, steps in ((1, "slower", 40), (2, "faster", 150))],
    ),
    regret(
        "regret-muon", "Muon beside AdamW at 100 Mb/s: how much faster is a step than DDP's, and is it the best choice?",
        {"ranks": [2, 4], "scheme": {**_DDP, **_AUTO}}, takes=150,
        workload="gpt:optimizer=muon", rate="100mbit", steps=150, seconds=60,
        goals=[Goal(f"{words}: {times} times DDP, {ranks} ranks", _AUTO_X_DDP, ">=", times,
                    {"ranks": ranks, "scheme": _AUTO[f"gradwire, {words}"]})
               for ranks, words, times in ((2, "exact", 1.6), (2, "close", 2.5), (4, "exact", 1.4), (4, "close", 2.2))],
    ),
    regret(
        "regret-sites", "What does auto lose on a line of 100 Mb/s with a round trip of 40 ms?",
        {"scheme": {**_DDP, **_AUTO}}, takes=200,
        ranks=2, workload="gpt", rate="100mbit/delay=20ms", steps=150, seconds=90,
    ),
    Experiment(
        key="auto-cost", system="auto", measure="train", seconds=40, baseline=DDP,
        question="What do watching and voting cost where nothing is tried, DDP's own all-reduce at work?",
        fixed={"ranks": 2, "rate": "none", "steps": 150},
        axes={"workload": ["gpt", "many-tensors"], "scheme": {**_DDP, "watching": "auto:budget=0"}},
        show=[Table([ms("iteration_s", "ms a step", spread=True), _X_STEP, _X_CPU], rows=("workload", "scheme"))],
        goals=[Goal(f"at most 1.01 of DDP's {what}", column, "<=", 1.01, {"scheme": "auto:budget=0"})
               for what, column in (("time", _X_STEP), ("CPU time", _X_CPU))],
    ),
    Experiment(
        key="train-resnet", system="schemes", measure="train", seconds=240, baseline=DDP, controls=CONTROLS,
        question="How long does a training step take under each scheme, and what does the loss pay?",
        of=[Ref("GComp", "Fig. 15")],
        fixed={"workload": "resnet", "ranks": 4, "steps": 20, "warmup": 3},
        axes={"rate": RATES, "scheme": [*HOOKS, *FIXED]},
        show=[SPEED_TABLE,
              Table([SENT, CODEC, LOSS], where={"rate": "1gbit"}, title="What is sent, and what the loss pays, at 1 Gb/s"),
              Plot("rate", ms("iteration_s", "ms a step"), style="bars", where={"scheme": _README})],
        goals=[Goal("GComp faster than DDP at 100 Mb/s", X_DDP, "<=", 0.95, {"rate": "100mbit", "scheme": "gcomp"})],
    ),
    Experiment(
        key="nodes-2x2", system="schemes", measure="train", seconds=90, baseline=DDP,
        question="Two nodes of 2 ranks, one link a node: what do two levels and FSDP2's door save?",
        fixed={"workload": "gpt", "ranks": 4, "ranks_per_node": 2, "steps": 10, "warmup": 3},
        axes={"rate": {"100 Mb/s": "100mbit", "1 Gb/s": "1gbit"}, "scheme": [*_FLAT, *_TWO_LEVEL, *_FSDP2]},
        show=[Table([ITERATION, X_DDP, _OUT_OF_NODE, LOSS], where={"scheme": [*_FLAT, *_TWO_LEVEL]}, across="rate",
                    title="DDP: flat, and two levels"),
              Table([ITERATION, Column("iteration_s", "x hsdp", kind="ratio", against="hsdp"), _OUT_OF_NODE, LOSS],
                    where={"scheme": _FSDP2}, across="rate",
                    title="FSDP2 inside the nodes; hsdp: with torch's own all-reduce between")],
    ),
    Experiment(
        key="allreduce-quick", system="schemes", measure="allreduce", seconds=110, together=("n_bytes", "scheme"),
        baseline=DDP, controls=CONTROLS, quick=True,
        question="How long does an all-reduce of random values take, by size?",
        fixed={"ranks": 4, "quick": True},
        axes={"rate": {"1 Gb/s": "1gbit", "unshaped": "none"}, "n_bytes": _SIZES, "scheme": REDUCING},
        show=[Table([ms("time_s", "ms")], across="n_bytes"),
              Table([TIME, TIME_X_DDP, mb("wire_bytes", "MB sent"), _RATIO], where={"n_bytes": 25000000}, across="rate",
                    title="25 MB")],
    ),
    Experiment(
        key="allreduce-cpu", system="schemes", measure="allreduce", seconds=40, together=("n_bytes", "scheme"),
        baseline=DDP, controls=["plain"],
        question="What does an all-reduce cost a rank, in time and in processor time (all threads, kernel included)?",
        fixed={"quick": True},
        axes={"ranks": [2, 4], "rate": RATES, "n_bytes": {"4.9 MB": 4900000, "25 MB": 25000000},
              "scheme": ["ddp", "plain", "ddp-bf16", "gcomp", "one-bit", "slimgc"]},
        show=[Table([TIME, TIME_X_DDP, ms("cpu_s", "cpu ms"), _CPU_X_DDP], rows=("ranks", "n_bytes", "scheme"),
                    across="rate")],
        goals=[Goal("GComp at most 1.6 x Gloo's processor time", _CPU_X_DDP, "<=", 1.6,
                    {"rate": "none", "scheme": "gcomp"}),
               Goal("one-bit at most 0.6 x", _CPU_X_DDP, "<=", 0.6, {"rate": "none", "scheme": "one-bit"})],
    ),
    Experiment(
        key="allreduce-chunks", system="schemes", measure="allreduce", seconds=40, together=("n_bytes", "scheme"),
        baseline=DDP,
        question="How large should a message be, in each pattern? Chunks of 2^k values at most (exchange/parts.py).",
        fixed={"quick": True},
        axes={"ranks": [2, 4], "rate": {"1 Gb/s": "1gbit", "unshaped": "none"},
              "n_bytes": {name: _SIZES[name] for name in ("1 MB", "25 MB")}, "scheme": _CHUNKED},
        show=[Table([Column("time_s", "ms", 1e3, ".1f"), Column("cpu_s", "cpu ms", 1e3, ".1f")],
                    rows=("ranks", "n_bytes", "scheme"), across="rate")],
    ),
    Experiment(
        key="allreduce-gradient", system="schemes", measure="allreduce", seconds=90, baseline=DDP, controls=["plain"],
        quick=True,
        question="How long does an all-reduce of 25 MB of a real gradient take?",
        of=[Ref("GComp", "Fig. 10")],
        fixed={"ranks": 4, "rate": "1gbit", "n_bytes": 25000000, "quick": True},
        axes={"gradients": ["gpt@400", "resnet@400"], "scheme": ["ddp", "ddp-bf16", "plain", "gcomp", "gcomp:importance=none",
              "truncate", "zstd", "one-bit"]},
        show=[Table([TIME, TIME_X_DDP, _RATIO], across="gradients")],
        goals=[Goal("`plain` within 5 % of DDP", TIME_X_DDP, "<=", 1.05, {"scheme": "plain"})],
    ),
    Experiment(
        key="codec", system="codecs", measure="codec", seconds=40, together=("codec",), quick=True,
        question="How small does a gradient get without loss that counts, and how fast?",
        fixed={"threads": 1}, axes={"gradients": GRADIENTS, "codec": [
            "gcomp", "gcomp:format=1", "gcomp:importance=none", "gcomp:importance=uniform,bits=10", "gcomp:bits=14",
            "gcomp:table=prior", "truncate", "gradwire:zlib", "gradwire:zstd", "gcomp:dtype=bfloat16", "gcomp:dtype=float16",
            "zstd", "zlib", "lz4", "blosc2", "zipnn", "pcodec"]},
        show=[Table([Column("ratio", "ratio", form=".4f"),
                     *(column for way in ("encode", "decode") for column in (
                         Column(f"{way}_gb_per_s", f"{way} GB/s", form=".2f", spread=True),
                         Column(f"{way}_vs_zstd", "x zstd -1", form=".1f"))),
                     Column("exponent_bits", form=".3f"), Column("exponent_entropy_bits", "entropy", form=".3f")],
                    rows=("codec",)),
              Plot("ratio", Column("encode_gb_per_s", "encode, GB/s"), "codec", log="y", x_title="size / original",
                   where={"gradients": GRADIENTS[0], "codec": ["gcomp", "gcomp:importance=none", _TEN_BITS, "truncate", "zstd",
                                                               "lz4", "zipnn"]})],
        goals=[Goal("decode at least 2.5 times as fast as zstd -1", Column("decode_vs_zstd", form=".1f"), ">=", 2.5,
                    {"codec": "gcomp"}),
               Goal("encode at least 3 times as fast", Column("encode_vs_zstd", form=".1f"), ">=", 3.0, {"codec": "gcomp"}),
               *(Goal(f"{way} at least {rate:g} GB/s", Column(f"{way}_gb_per_s", form=".2f"), ">=", rate,
                      {"codec": ["gcomp", _TEN_BITS]}) for way, rate in (("encode", 3.0), ("decode", 4.5)))],
    ),
]  # fmt: skip
