"""ACP-SGD's tables and figures: volume from shapes, cost without a network, iteration time, convergence."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from gradwire_lab.bench.catalogue.schemes import CODEC, COMPUTE, DDP, EXPOSED, ITERATION, SENT, X_DDP
from gradwire_lab.results.experiment import Column, Experiment, Goal, Plot, Ref, Table, ms

# Rates of the paper's Fig. 13 that this machine can carry. Large models are emulated: 2 cores cannot compute 4 of them.
_RATES = {"unshaped": "none", "1 Gb/s": "1gbit", "500 Mb/s": "500mbit", "100 Mb/s": "100mbit"}
_SPLIT = [ITERATION, X_DDP, COMPUTE, EXPOSED, CODEC, SENT]
_SHOW = [Table(_SPLIT)]
_NEVER_SLOWER = Goal("ACP-SGD never slower than DDP", X_DDP, "<=", 1.0,
                     {"scheme": lambda spec: str(spec).startswith("acp-sgd")})  # fmt: skip


def methods(rank: int) -> list[str]:
    """Table III's, and PyTorch's own hook."""
    own = [f"{name}:rank={rank}" for name in ("acp-sgd", "power-sgd", "power-sgd-overlap")]
    return ["ddp", *own, f"ddp-powersgd:rank={rank},start=0"]


def _iteration(workload: str, rank: int, seconds: float, **fixed: Any) -> Experiment:
    return Experiment(
        key=f"acp-iteration-{workload}", system="acp-sgd", measure="train", seconds=seconds, baseline=DDP,
        question=f"How long does a step of {workload} take under each low-rank method, by the network's rate?",
        of=[Ref("ACP-SGD", figure) for figure in ("Table III", "Fig. 8", "Fig. 13")],
        fixed={"workload": workload, "ranks": 4, **fixed},
        axes={"rate": _RATES, "scheme": methods(rank)},
        show=[Table(_SPLIT[:2], across="rate"), *_SHOW, Plot("rate", ms("iteration_s", "ms a step"), style="bars",
                                                             log="y")],
        goals=[_NEVER_SLOWER],
    )  # fmt: skip


def _timed(key: str, question: str, figures: Sequence[str], axes: dict[str, Any], seconds: float, *,
           together: Sequence[str] = ("scheme",), **fixed: Any) -> Experiment:  # fmt: skip
    return Experiment(
        key=f"acp-{key}", system="acp-sgd", measure="train", seconds=seconds, baseline=DDP if "ddp" in axes["scheme"] else {},
        question=question,
        of=[Ref("ACP-SGD", figure) for figure in figures], fixed={"rate": "1gbit", "ranks": 4, **fixed}, axes=axes,
        together=together, show=_SHOW if "ddp" in axes["scheme"] else [Table([ITERATION, *_SPLIT[2:]])],
    )  # fmt: skip


def _converging(workload: str, spec: str, rank: int, steps: int) -> Experiment:
    low_rank = "" if rank == 4 else f"rank={rank},"
    schemes = {
        "plain": "plain",
        "power-sgd": f"power-sgd:{low_rank}".rstrip(":,"),
        "acp-sgd": f"acp-sgd:{low_rank}".rstrip(":,"),
        "without error feedback": f"acp-sgd:{low_rank}error_feedback=false",
        "without reuse": f"acp-sgd:{low_rank}reuse=false",
    }
    columns = [Column("loss_last_10", "training loss", form=".4f", spread=True),
               Column("held_out_loss", form=".4f", spread=True), Column("accuracy", form=".4f", spread=True),
               Column("held_out_loss", "against plain", form=".4f", kind="difference", spread=True),
               Column("ratio_mean", "bytes / ring", form=".3f")]  # fmt: skip
    return Experiment(
        key=f"acp-convergence-{workload}", system="acp-sgd", measure="training", seconds=600 / 3, over=("seed",),
        question=f"Where does training of {workload} end under low-rank methods, and without each of their two mechanisms?",
        of=[Ref("ACP-SGD", "Fig. 6"), Ref("ACP-SGD", "Fig. 7")], fixed={"workload": spec, "ranks": 4, "steps": steps,
                                                                        "baseline": "plain"},
        axes={"seed": [0, 1, 2], "scheme": schemes}, baseline={"scheme": "plain"}, show=[Table(columns)],
    )  # fmt: skip


_COST = ["ddp-powersgd", "acp-sgd", "power-sgd", "power-sgd-overlap"]
_MODELS = ["resnet50", "resnet152", "bert-base", "bert-large"]
_r50 = "rank=4"

EXPERIMENTS = [
    Experiment(
        key="acp-ratios", system="acp-sgd", measure="shapes", seconds=20, together=("workload",),
        question="By how much does each method shrink the gradient of real models?",
        of=[Ref("ACP-SGD", "Table I")], fixed={"of": "ratios"}, axes={"workload": _MODELS},
        show=[Table([Column("parameters", form=",.0f"), Column("rank", form=".0f"), Column("sign_sgd", form=".0f"),
                     Column("top_k", form=",.0f"), Column("power_sgd", form=".1f"), Column("acp_sgd", "ACP-SGD, a step",
                                                                                           form=".1f"),
                     Column("rate_p", form=".4f"), Column("rate_q", form=".4f"), Column("buffer_p_mb", form=".3f"),
                     Column("buffer_q_mb", form=".3f")], rows=("workload",))],
    ),
    Experiment(
        key="acp-traffic", system="acp-sgd", measure="shapes", seconds=20, together=("workload", "world"),
        question="How many MB does a rank send in a step, by method and world?",
        of=[Ref("ACP-SGD", "Table II")], fixed={"of": "traffic"}, axes={"workload": _MODELS, "world": [4, 8, 32, 64]},
        show=[Table([Column(name, form=",.1f") for name in ("s_sgd", "sign_sgd", "top_k", "power_sgd", "acp_sgd")],
                    rows=("workload", "world"))],
    ),
    Experiment(
        key="acp-tensors", system="acp-sgd", measure="shapes", seconds=20, together=("workload",),
        question="How large are the tensors before and after compression?",
        of=[Ref("ACP-SGD", "Fig. 5")], fixed={"of": "small-tensors"}, axes={"workload": ["resnet50", "bert-base"]},
        show=[Table([Column("count", form=".0f"), *(Column(f"p{q}", f"{q} %", form=",.0f") for q in (25, 50, 75)),
                     Column("share_small", "below 10,000, %", 100, ".0f")], rows=("workload", "tensors"))],
    ),
    Experiment(
        key="acp-cost", system="acp-sgd", measure="compression-cost", seconds=90, baseline={"scheme": "ddp-powersgd"},
        question="What does compressing one step's gradient cost a rank, beside PyTorch's powerSGD_hook?",
        fixed={"steps": 8, "warmup": 4, "threads": 1}, axes={"workload": ["resnet50", "bert-base"], "scheme": _COST},
        show=[Table([ms("step_s", "ms", spread=True), Column("step_s", "x powerSGD_hook", kind="ratio"),
                     *(ms(f"{part}_s", part) for part in ("encode", "decode", "commit"))])],
        goals=[Goal("ACP-SGD at most 0.6 of the hook", Column("step_s", kind="ratio"), "<=", 0.6,
                    {"scheme": "acp-sgd"})],
    ),
    _iteration("gpt", 4, 70, steps=15, warmup=5),
    _iteration("resnet50", 4, 180, steps=4, warmup=3, compute="emulate"),
    _iteration("bert-base", 32, 400, steps=2, warmup=3, compute="emulate"),
    _timed("methods-resnet50", "Three kinds of compression beside S-SGD, on ResNet-50.", ("Fig. 2", "Fig. 3"),
           {"scheme": ["ddp", "sign-sgd", "top-k", "power-sgd:rank=4"]}, 70,
           workload="resnet50", compute="emulate", steps=4, warmup=3),
    _timed("methods-bert-base", "The same on BERT-base.", ("Fig. 2", "Fig. 3"),
           {"scheme": ["ddp", "sign-sgd", "top-k", "power-sgd:rank=32"]}, 120,
           workload="bert-base", compute="emulate", steps=2, warmup=3),
    _timed("optimisations", "Without and with wait-free backward and tensor fusion, on ResNet-50.", ("Fig. 9",),
           {"scheme": ["ddp", "ddp:bucket_mb=inf", "ddp:bucket_mb=0", f"power-sgd:{_r50},buffer_mb=0",
                       f"power-sgd-overlap:{_r50},buffer_mb=0", f"power-sgd-overlap:{_r50}",
                       f"acp-sgd:{_r50},overlap=false,buffer_mb=0", f"acp-sgd:{_r50},buffer_mb=0", f"acp-sgd:{_r50}"]},
                       160,
           workload="resnet50", compute="emulate", steps=4, warmup=3),
    # A run a size: what ten of these methods need in one run does not fit four ranks into 24 GB.
    _timed("buffers", "How large should the fused buffers be, on BERT-base at rank 32?", ("Fig. 10",),
           {"scheme": [f"{name}:rank=32,buffer_mb={size}" for size in ("0", "25", "50", "100", "inf")
                       for name in ("acp-sgd", "power-sgd-overlap")]}, 35, together=(),
           workload="bert-base", compute="emulate", steps=2, warmup=3),
    _timed("batch", "Samples a rank and step, on the small ResNet.", ("Fig. 11a",),
           {"batch_size": [16, 32, 64], "scheme": methods(4)[:4]}, 40, workload="resnet", steps=10, warmup=5),
    *(_timed(f"rank-{rank}", f"The approximation at rank {rank}, on BERT-base.", ("Fig. 11b",),
             {"scheme": ["ddp", f"acp-sgd:rank={rank}", *([f"power-sgd-overlap:rank={rank}"] if rank < 256 else [])]},
             110,
             workload="bert-base", compute="emulate", steps=2, warmup=3) for rank in (4, 32, 256)),
    _timed("world", "Ranks in the world, on ResNet-50.", ("Fig. 12",), {"ranks": [2, 4, 8], "scheme": methods(4)[:4]},
           100,
           workload="resnet50", compute="emulate", steps=3, warmup=3),
    _converging("resnet", "resnet:schedule=cosine,schedule_steps=300,warmup_steps=30", 4, 300),
    _converging("gpt",
                "gpt:n_layers=2,width=128,n_heads=4,learning_rate=1e-3,schedule=cosine,schedule_steps=500,warmup_steps=50",
                8, 500),
]  # fmt: skip
