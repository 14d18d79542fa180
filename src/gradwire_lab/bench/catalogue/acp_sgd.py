"""ACP-SGD's tables and figures: volume from shapes, cost without a network, iteration time, convergence."""

from collections.abc import Sequence
from typing import Any

from gradwire_lab.bench.catalogue.schemes import CODEC, COMPUTE, DDP, EXPOSED, ITERATION, PLAIN, RATIO_MEAN, SENT, X_DDP
from gradwire_lab.results.experiment import Column, Experiment, Goal, Plot, Ref, Table, ms

# Rates of the paper's Fig. 13 that this machine can carry. Large models are emulated: 2 cores cannot compute 4 of them.
_RATES = {"unshaped": "none", "1 Gb/s": "1gbit", "500 Mb/s": "500mbit", "100 Mb/s": "100mbit"}
_SPLIT = [ITERATION, X_DDP, COMPUTE, EXPOSED, CODEC, SENT]


def methods(rank: int) -> list[str]:
    """Table III's, and PyTorch's own hook."""
    own = [f"{name}:rank={rank}" for name in ("acp-sgd", "power-sgd", "power-sgd-overlap")]
    return ["ddp", *own, f"ddp-powersgd:rank={rank},start=0"]


def _iteration(workload: str, rank: int, seconds: float, rates: Sequence[str], more: Sequence[str] = (),
               figures: Sequence[str] = (), **fixed: Any) -> Experiment:  # fmt: skip
    return Experiment(
        key=f"acp-iteration-{workload}", system="acp-sgd", measure="train", seconds=seconds, baseline=DDP,
        question=f"How long does a step of {workload} take under each low-rank method, by the network's rate?",
        of=[Ref("ACP-SGD", figure) for figure in ("Table III", "Fig. 8", "Fig. 13", *figures)],
        fixed={"workload": workload, "ranks": 4, **fixed},
        axes={"rate": {name: _RATES[name] for name in rates}, "scheme": [*methods(rank), *more]},
        show=[Table(_SPLIT[:2], across="rate"), Table(_SPLIT), Plot(
            "rate", ms("iteration_s", "ms a step"), style="bars", log="y", where={"scheme": methods(rank)[:4]})],
        goals=[Goal("ACP-SGD never slower than DDP", X_DDP, "<=", 1.0,
                    {"scheme": lambda spec: str(spec).startswith("acp-sgd")})],
    )  # fmt: skip


def _timed(key: str, question: str, figures: Sequence[str], axes: dict[str, Any], seconds: float, *,
           together: Sequence[str] = ("scheme",), **fixed: Any) -> Experiment:  # fmt: skip
    return Experiment(
        key=f"acp-{key}", system="acp-sgd", measure="train", seconds=seconds, baseline=DDP if "ddp" in axes["scheme"] else {},
        question=question,
        of=[Ref("ACP-SGD", figure) for figure in figures], fixed={"rate": "1gbit", "ranks": 4, **fixed}, axes=axes,
        together=together, show=[Table(_SPLIT if "ddp" in axes["scheme"] else [ITERATION, *_SPLIT[2:]])],
    )  # fmt: skip


EXPERIMENTS = [
    Experiment(
        key="acp-shapes", system="acp-sgd", measure="shapes", seconds=5, together=("of",),
        question="By how much does each method shrink the gradient of real models, and what does a rank send?",
        of=[Ref("ACP-SGD", figure) for figure in ("Table I", "Fig. 5")],
        axes={"of": ["ratios", "traffic", "small-tensors"],
              "workload": ["resnet50", "resnet152", "bert-base", "bert-large"]},
        show=[Table([Column("rank", form=".0f"), Column("sign_sgd", "Sign-SGD", form=".0f"),
                     Column("top_k", "Top-k", form=",.0f"), Column("power_sgd", "Power-SGD", form=".1f"),
                     Column("acp_sgd", "ACP-SGD, a step", form=".1f")], rows=("workload",), where={"of": "ratios"}),
              Table([Column(name, name.replace("_", "-"), form=",.1f")
                     for name in ("s_sgd", "sign_sgd", "top_k", "power_sgd", "acp_sgd")],
                    rows=("workload", "world"), where={"of": "traffic"}, title="MB that a rank sends in a step"),
              Table([Column("count", form=".0f"), *(Column(f"p{q}", f"{q} %", form=",.0f") for q in (25, 50, 75)),
                     Column("share_small", "below 10,000, %", 100, ".0f")], rows=("workload", "tensors"),
                    where={"of": "small-tensors"}, title="Elements of tensors")],
    ),
    _iteration("gpt", 4, 70, list(_RATES), steps=15, warmup=5),
    _iteration("resnet50", 4, 250, list(_RATES), ["sign-sgd", "top-k"], ["Fig. 2", "Fig. 3"], steps=4, warmup=3,
               compute="emulate"),
    _iteration("bert-base", 32, 400, ["1 Gb/s", "100 Mb/s"], steps=2, warmup=3, compute="emulate"),
    _timed("optimisations", "Without and with wait-free backward and tensor fusion, on ResNet-50.", ("Fig. 9",),
           {"scheme": ["ddp", "ddp:bucket_mb=inf", "ddp:bucket_mb=0", "power-sgd:rank=4,buffer_mb=0",
                       "power-sgd-overlap:rank=4,buffer_mb=0", "power-sgd-overlap:rank=4",
                       "acp-sgd:rank=4,overlap=false,buffer_mb=0", "acp-sgd:rank=4,buffer_mb=0", "acp-sgd:rank=4"]},
           160, workload="resnet50", compute="emulate", steps=4, warmup=3),
    # A run a size: what ten of these methods need in one run does not fit four ranks into 24 GB.
    _timed("buffers", "How large should the fused buffers be, on BERT-base at rank 32?", ("Fig. 10",),
           {"scheme": [f"{name}:rank=32,buffer_mb={size}" for size in ("0", "25", "50", "100", "inf")
                       for name in ("acp-sgd", "power-sgd-overlap")]}, 35, together=(),
           workload="bert-base", compute="emulate", steps=2, warmup=3),
    _timed("batch", "Samples a rank and step, on the small ResNet.", ("Fig. 11a",),
           {"batch_size": [16, 32, 64], "scheme": methods(4)[:4]}, 40, workload="resnet", steps=10, warmup=5),
    _timed("rank", "The approximation at rank 4, 32 and 256, on BERT-base.", ("Fig. 11b",),
           {"scheme": ["ddp", *(f"acp-sgd:rank={rank}" for rank in (4, 32, 256)), "power-sgd-overlap:rank=4"]}, 150,
           workload="bert-base", compute="emulate", steps=2, warmup=3),
    _timed("world", "Ranks in the world, on ResNet-50.", ("Fig. 12",), {"ranks": [2, 4, 8], "scheme": methods(4)[:4]},
           100, workload="resnet50", compute="emulate", steps=3, warmup=3),
    Experiment(
        key="acp-convergence-resnet", system="acp-sgd", measure="training", seconds=600 / 3, over=("seed",),
        question="Where does training of resnet end under low-rank methods, and without each of their two mechanisms?",
        of=[Ref("ACP-SGD", "Fig. 6"), Ref("ACP-SGD", "Fig. 7")],
        fixed={"workload": "resnet:schedule=cosine,schedule_steps=300,warmup_steps=30", "ranks": 4, "steps": 300,
               "baseline": "plain"},
        axes={"seed": [0, 1, 2], "scheme": {
            "plain": "plain", "power-sgd": "power-sgd", "acp-sgd": "acp-sgd",
            "without error feedback": "acp-sgd:error_feedback=false", "without reuse": "acp-sgd:reuse=false"}},
        baseline=PLAIN,
        show=[Table([Column("loss_last_10", "training loss", form=".4f", spread=True),
                     *(Column(name, form=".4f", spread=True) for name in ("held_out_loss", "accuracy")),
                     Column("held_out_loss", "against plain", form=".4f", kind="difference", spread=True),
                     RATIO_MEAN])],
    ),
]  # fmt: skip
