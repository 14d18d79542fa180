"""All schemes side by side: in training, in a bare all-reduce, on networks that change."""

from __future__ import annotations

from gradwire import schemes
from gradwire_lab.results.experiment import Column, Experiment, Goal, Plot, Ref, Table, mb, ms

# PyTorch's own: DDP, and its hooks.
HOOKS = ["ddp", "ddp-fp16", "ddp-bf16", "ddp-powersgd", "ddp-quant8"]
# What `auto` loses to each: catalogue/auto.py.
FIXED = [name for name in schemes.names() if name != "auto" and not schemes.needs_momenta(name)]
EVERYTHING = [*HOOKS, *FIXED]
REDUCING = ["ddp", "ddp-bf16", *(name for name in FIXED if not schemes.owns_step(name))]
DDP = {"scheme": "ddp"}
# These send DDP's very bytes by the same all-reduce: `homomorphic` finds dense gradients too dense and sends them plainly.
CONTROLS = ["plain", "homomorphic"]
RATES = {"100 Mb/s": "100mbit", "1 Gb/s": "1gbit", "unshaped": "none"}

ITERATION = ms("iteration_s", "ms a step", spread=True)
X_DDP = Column("iteration_s", "x ddp", kind="ratio")
EXPOSED, CODEC, COMPUTE = ms("exposed_s", "exposed"), ms("codec_s", "codec, busy"), ms("compute_s", "compute")
SENT, LOSS = mb("wire_bytes", "MB sent"), Column("loss", form=".3f")
TIME = ms("time_s", "ms", spread=True)
TIME_X_DDP = Column("time_s", "x ddp", kind="ratio")
CPU_X_DDP = Column("cpu_s", "cpu x ddp", kind="ratio")
RATIO = Column("wire_ratio", "wire ratio", form=".3f")
PARTS = Table([SENT, CODEC, LOSS], where={"rate": "1gbit"}, title="What is sent, and what the loss pays, at 1 Gb/s")
SIZES = {"1 KB": 1024, "64 KB": 65536, "1 MB": 1048576, "5 MB": 5000000, "25 MB": 25000000}

_README = ["ddp", "ddp-bf16", "gcomp", "embedded-float", "one-bit", "acp-sgd"]
README_TABLE = Table([ms("iteration_s", "step, ms"), Column("iteration_s", "x faster than DDP", kind="speed-up"), SENT,
                      LOSS],
                     where={"rate": "100mbit", "scheme": _README})  # fmt: skip
_SPEEDS = [*_README, "power-sgd", "terngrad", "qsgd", "two-bit"]
SPEED_TABLE = Table([ms("iteration_s", "ms"), Column("iteration_s", "x DDP", kind="speed-up")], across="rate",
                    where={"scheme": _SPEEDS})  # fmt: skip


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
_NODE_TABLES = [
    Table([ITERATION, X_DDP, _OUT_OF_NODE, LOSS], where={"scheme": [*_FLAT, *_TWO_LEVEL]}, across="rate",
          title="DDP: flat, and two levels"),
    Table([ITERATION, Column("iteration_s", "x hsdp", kind="ratio", against="hsdp"), _OUT_OF_NODE, LOSS],
          where={"scheme": _FSDP2}, across="rate", title="FSDP2 inside the nodes; hsdp: with torch's own all-reduce between"),
]  # fmt: skip


# Error feedback and an outer momentum do not go together, so with momentum top-k is without, and without momentum with it.
_LOCAL_SCHEMES = {
    "nesterov": ["plain", "embedded-float:bits=4", "two-bit", "top-k:share=0.05,error_feedback=false"],
    "average": ["plain", "embedded-float:bits=4", "two-bit", "top-k:share=0.05,feedback_decay=0.95"],
}
_LOCAL = [
    f"{scheme}{',' if ':' in scheme else ':'}local_sgd={every},outer={outer}"
    for every in (1, 8, 64)
    for outer, schemes in _LOCAL_SCHEMES.items()
    for scheme in schemes
]


def _nodes(key: str, per_node: int, seconds: float) -> Experiment:
    return Experiment(
        key=key, system="schemes", measure="train", seconds=seconds, baseline=DDP,
        question=f"Two nodes of {per_node} ranks, one link a node: what do two levels and FSDP2's door save?",
        fixed={"workload": "gpt", "ranks": 2 * per_node, "ranks_per_node": per_node, "steps": 10, "warmup": 3},
        axes={"rate": {"100 Mb/s": "100mbit", "1 Gb/s": "1gbit"}, "scheme": [*_FLAT, *_TWO_LEVEL, *_FSDP2]},
        show=_NODE_TABLES,
    )  # fmt: skip


# Fewer bytes than bfloat16, and nearer to DDP (gcomp-tolerance).
_TEN_BITS = "gcomp:importance=uniform,bits=10"


def _sizes(*names: str) -> dict[str, int]:
    return {name: SIZES[name] for name in names}


EXPERIMENTS = [
    Experiment(
        key="train-resnet", system="schemes", measure="train", seconds=240, baseline=DDP, controls=CONTROLS,
        question="How long does a training step take under each scheme, and what does the loss pay?",
        of=[Ref("GComp", "Fig. 15")],
        fixed={"workload": "resnet", "ranks": 4, "steps": 20, "warmup": 3},
        axes={"rate": RATES, "scheme": EVERYTHING},
        show=[SPEED_TABLE, PARTS, Plot("rate", ms("iteration_s", "ms a step"), style="bars", where={"scheme": _README})],
        goals=[Goal("GComp faster than DDP at 100 Mb/s", X_DDP, "<=", 0.95, {"rate": "100mbit", "scheme": "gcomp"})],
    ),
    Experiment(
        key="nearly-exact", system="schemes", measure="train", seconds=70, baseline=DDP,
        question="Schemes that leave the loss as it is, two workloads: what do they send, and is it faster?",
        fixed={"steps": 10, "warmup": 3},
        axes={"workload": ["ncf", "gpt"], "ranks": [2, 4],
              "rate": {"100 Mb/s": "100mbit", "1 Gb/s": "1gbit"},
              "scheme": ["ddp", "ddp-bf16", "gcomp", _TEN_BITS, "homomorphic"]},
        show=[Table([ITERATION, X_DDP, SENT, CODEC, LOSS], rows=("ranks", "scheme"), across="rate")],
    ),
    _nodes("nodes-2x2", 2, 90),
    Experiment(
        key="local-sgd", system="schemes", measure="training", seconds=560, baseline={"scheme": "plain"},
        question="Local SGD, with DiLoCo's outer optimizer and without: what is lost and sent when ranks exchange every 1, 8, "
                 "64 steps?",
        fixed={"workload": "gpt", "ranks": 2, "steps": 256, "baseline": "plain"}, axes={"scheme": ["plain", *_LOCAL]},
        show=[Table([Column("held_out_loss", "held-out loss", form=".3f"),
                     Column("held_out_loss", "against DDP", kind="difference", form=".3f"),
                     Column("ratio_mean", "bytes / ring", form=".4f")])],
    ),
    Experiment(
        key="allreduce-quick", system="schemes", measure="allreduce", seconds=110, together=("n_bytes", "scheme"),
        baseline=DDP, controls=CONTROLS, quick=True,
        question="How long does an all-reduce of random values take, by size?",
        fixed={"ranks": 4, "quick": True},
        axes={"rate": {"1 Gb/s": "1gbit", "unshaped": "none"}, "n_bytes": _sizes("1 KB", "64 KB", "1 MB", "25 MB"),
              "scheme": REDUCING},
        show=[Table([ms("time_s", "ms")], across="n_bytes"),
              Table([TIME, TIME_X_DDP, mb("wire_bytes", "MB sent"), RATIO], where={"n_bytes": 25000000}, across="rate",
                    title="25 MB")],
    ),
    Experiment(
        key="allreduce-cpu", system="schemes", measure="allreduce", seconds=40, together=("n_bytes", "scheme"),
        baseline=DDP, controls=["plain"],
        question="What does an all-reduce cost a rank, in time and in processor time (all threads, kernel included)?",
        fixed={"quick": True},
        axes={"ranks": [2, 4], "rate": RATES, "n_bytes": {"4.9 MB": 4900000, "25 MB": 25000000},
              "scheme": ["ddp", "plain", "ddp-bf16", "gcomp", "one-bit", "slimgc"]},
        show=[Table([TIME, TIME_X_DDP, ms("cpu_s", "cpu ms"), CPU_X_DDP], rows=("ranks", "n_bytes", "scheme"),
                    across="rate")],
        goals=[Goal("GComp at most 1.6 x Gloo's processor time", CPU_X_DDP, "<=", 1.6,
                    {"rate": "none", "scheme": "gcomp"}),
               Goal("one-bit at most 0.6 x", CPU_X_DDP, "<=", 0.6, {"rate": "none", "scheme": "one-bit"})],
    ),
    Experiment(
        key="allreduce-chunks", system="schemes", measure="allreduce", seconds=40, together=("n_bytes", "scheme"),
        baseline=DDP,
        question="How large should a message be, in each pattern? Chunks of 2^k values at most (exchange/parts.py).",
        fixed={"quick": True},
        axes={"ranks": [2, 4], "rate": {"1 Gb/s": "1gbit", "unshaped": "none"}, "n_bytes": _sizes("1 MB", "25 MB"),
              "scheme": _CHUNKED},
        show=[Table([Column("time_s", "ms", 1e3, ".1f"), Column("cpu_s", "cpu ms", 1e3, ".1f")],
                    rows=("ranks", "n_bytes", "scheme"), across="rate")],
    ),
    Experiment(
        key="allreduce-gradient", system="schemes", measure="allreduce", seconds=90, baseline=DDP, controls=["plain"],
        quick=True,
        question="How long does an all-reduce of 25 MB of a real gradient take?",
        of=[Ref("GComp", "Fig. 10")],
        fixed={"ranks": 4, "rate": "1gbit", "n_bytes": 25000000, "quick": True},
        axes={"gradients": ["gpt@400", "resnet@400"], "scheme": ["ddp", "ddp-bf16", "plain", "gcomp",
                                                                 "gcomp:importance=none",
              "truncate", "zstd", "one-bit"]},
        show=[Table([TIME, TIME_X_DDP, RATIO], across="gradients")],
        goals=[Goal("`plain` within 5 % of DDP", TIME_X_DDP, "<=", 1.05, {"scheme": "plain"})],
    ),
]  # fmt: skip
