"""Lossy schemes by optimizer: where the loss goes, and what is sent for it."""

from __future__ import annotations

from collections.abc import Sequence

from gradwire_lab.bench.catalogue.schemes import ITERATION
from gradwire_lab.results.experiment import Column, Experiment, Goal, Plot, Table

_GPT, _DIGITS = "gpt:n_layers=2,width=64,n_heads=4,length=64,batch_size=8", "resnet:width=8"
_BYTES = Column("ratio", "bytes / ring", form=".3f")
LONG = [
    "plain", "one-bit-adam", "one-bit-adam:codec=two-bit", "one-bit-adam:codec=two-bit,correction=running",
    "one-bit:scale_values=512,warmup_steps=50", "two-bit:scale_values=512,warmup_steps=50",
    "one-bit:scale_values=512,warmup_steps=150", "two-bit:scale_values=512,warmup_steps=150",
    "one-bit-adam:freeze_step=150", "one-bit-adam:codec=two-bit,freeze_step=150", "top-k:share=0.01",
    "dgc:share=0.01,momentum=0", "acp-sgd",
    "acp-sgd:rank=8", "power-sgd:rank=8", "acp-sgd:exempt=none,rank=8,start_step=50",
    "power-sgd:exempt=none,rank=8,start_step=50", "embedded-float:bits=8", "embedded-float:bits=5",
    "embedded-float:bits=4", "ddp-bf16", "ddp-fp16", "ddp-powersgd:rank=8",
]  # fmt: skip
FIRST_STEPS = [
    "plain", "acp-sgd:start_step=0", "acp-sgd:start_step=50", "acp-sgd:start_step=100",
    "power-sgd:rank=8,start_step=0", "power-sgd:rank=8,start_step=50", "top-k:share=0.01,warmup_steps=0",
    "top-k:share=0.01,warmup_steps=50",
]  # fmt: skip
SHORT = [
    "plain", "one-bit-adam", "one-bit", "one-bit:scale_values=512", "two-bit", "two-bit:scale_values=512",
    "one-bit-adam:freeze_step=20", "one-bit-adam:correction=running", "acp-sgd", "acp-sgd:exempt=none",
    "power-sgd:rank=8",
]  # fmt: skip
SGD = [
    "plain", "one-bit", "one-bit:scale_values=512", "two-bit", "two-bit:scale_values=512", "acp-sgd",
    "embedded-float:bits=8", "embedded-float:bits=5", "embedded-float:bits=4", "ddp-bf16", "ddp-powersgd:rank=8",
]  # fmt: skip

AUTO = [
    "plain", "gcomp:importance=uniform,bits=12", "bf16", "embedded-float:bits=8", "embedded-float:bits=6",
    "embedded-float:bits=5", "embedded-float:bits=4", "thc", "qsgd", "terngrad", "terngrad:per=bucket",
]  # fmt: skip
LONG_BERT = [
    "plain", "acp-sgd", "ddp-bf16", "one-bit-adam:freeze_step=300", "one-bit-adam:freeze_step=600",
    "one-bit-adam:codec=four-level,freeze_step=600", "one-bit:scale_values=512,warmup_steps=600",
    "acp-sgd:start_step=600", "ddp-powersgd:rank=8,start=600",
]  # fmt: skip
TIMES = [
    "ddp", "ddp-bf16", "ddp-powersgd:rank=8,start=20", "auto:fidelity=close", "thc", "one-bit-adam:freeze_step=20",
    "one-bit:scale_values=512,warmup_steps=20", "power-sgd:exempt=none,rank=8,start_step=20", "embedded-float:bits=5",
    "embedded-float:bits=4", "two-bit:scale_values=512,warmup_steps=50,levels=4",
]  # fmt: skip
LEVELS = [
    "plain", "one-bit-adam", "one-bit-adam:codec=two-bit", "one-bit-adam:codec=four-level",
    "two-bit:scale_values=512,warmup_steps=50,levels=3", "two-bit:scale_values=512,warmup_steps=50,levels=4",
    "two-bit:scale_values=512,warmup_steps=150,levels=4",
]  # fmt: skip
_GROUPED = ["one-bit:warmup_steps=50,", "one-bit:warmup_steps=100,", "one-bit:warmup_steps=150,",
            "two-bit:warmup_steps=50,levels=3,", "two-bit:warmup_steps=50,levels=4,", "one-bit-adam:"]  # fmt: skip
GROUPS = ["plain", *(f"{spec}scale_values={values}" for spec in _GROUPED for values in (64, 512))]
RANKS = [f"acp-sgd:{exempt}rank={rank}" for exempt in ("", "exempt=none,") for rank in (2, 4, 8, 16, 32)]


BY_RANKS = {
    "plain": "plain",
    "plain, disturbed by a rounding": "control",
    "bf16": "bf16",
    "gcomp, 12 bits": "gcomp:importance=uniform,bits=12",
    "gcomp, 7 bits": "gcomp:importance=uniform,bits=7",
    "embedded-float, 8 bits": "embedded-float:bits=8",
    "embedded-float, 5 bits": "embedded-float:bits=5",
    "embedded-float, 4 bits": "embedded-float:bits=4",
}

# By optimizer: low rank of gradients, and behind the optimizer, at equal bytes, embeddings included; and a step ahead.
_OPTIMIZERS = {"AdamW": _GPT, "Muon": f"{_GPT},optimizer=muon"}
_WHOLE = "factor_dtype=bfloat16,exempt=none,start_step=0"
BEHIND = [
    "plain",
    f"power-sgd:rank=8,{_WHOLE}",
    f"acp-sgd:rank=16,{_WHOLE}",
    "power-momentum",
    "power-momentum:rank=12",
]
STALE = {"AdamW": _GPT, "SGD": f"{_GPT},optimizer=momentum"}
AHEAD = ["plain", "plain:ahead=1", "acp-sgd", "acp-sgd:ahead=1", "two-bit", "two-bit:ahead=1"]

# What chose the defaults beside Adam, on a page of their own.
_DEFAULTS = ("first-steps", "levels", "groups", "gpt-short", "rank")


def _compare(key: str, question: str, schemes: Sequence[str], workload: str, *, steps: int, seconds: float,
             loss: Column, goals: list[Goal], is_long: bool = False,
             drawn: Sequence[str] = ()) -> Experiment:  # fmt: skip
    behind = Column(loss.field, "against plain", loss.scale, loss.form, "difference", "plain", spread=True)
    return Experiment(
        key=f"lossy-{key}", system="defaults" if key in _DEFAULTS else "lossy", measure="training",
        seconds=seconds, question=question,
        fixed={"workload": workload, "ranks": 2, "steps": steps, "baseline": "plain"},
        axes={"seed": [0, 1, 2], "scheme": schemes}, over=("seed",), together=("scheme",),
        baseline={"scheme": "plain"}, goals=goals, is_long=is_long, show=[Table([loss, behind, _BYTES]), *([Plot(
            "ratio", Column(loss.field, loss.heading, loss.scale, loss.form), log="x", x_title="bytes / ring",
            where={"scheme": drawn})] if drawn else [])],
    )  # fmt: skip


def _at_most(nats: float, *specs: str) -> Goal:
    return Goal(f"at most {nats} nats behind plain", _BEHIND, "<=", nats, {"scheme": specs})


# No more lines than can be told apart.
_DRAWN = ["plain", "ddp-bf16", "embedded-float:bits=5", "one-bit-adam", "two-bit:scale_values=512,warmup_steps=50",
          "power-sgd:rank=8"]  # fmt: skip
_BEHIND = Column("held_out_loss", "", 1.0, ".3f", "difference", "plain", spread=True)
_NATS = Column("held_out_loss", "held-out loss", 1.0, ".3f", spread=True)
_SOONER = Column("seconds_to_loss", "x sooner than DDP", kind="speed-up", against="ddp")
_ACCURACY = Column("accuracy", "accuracy, %", 100.0, ".2f", spread=True)
EXPERIMENTS = [
    _compare("gpt", "Under AdamW, after 500 steps of a small GPT: what does each scheme lose, and send?", LONG, _GPT,
             steps=500, seconds=950, is_long=True, loss=_NATS, drawn=_DRAWN,
             goals=[_at_most(0.02, "one-bit-adam", "one-bit-adam:codec=two-bit"),
                    _at_most(0.05, "one-bit:scale_values=512,warmup_steps=50", "two-bit:scale_values=512,warmup_steps=50",
                             "power-sgd:rank=8")]),
    _compare("first-steps",
             "What do plain first steps give low rank and sparse schemes, and what do they cost?",
             FIRST_STEPS, _GPT, steps=500, seconds=500, is_long=True, loss=_NATS,
             goals=[_at_most(0.05, "acp-sgd:start_step=100")]),
    _compare("levels",
             "A small GPT with two bits a value: three levels, of which one is zero, or four?", LEVELS, _GPT, steps=500,
             seconds=330, is_long=True, loss=_NATS,
             goals=[_at_most(0.02, "one-bit-adam:codec=four-level"),
                    _at_most(0.05, "two-bit:scale_values=512,warmup_steps=50,levels=4")]),
    _compare("groups", "How many values should share a scale?", GROUPS, _GPT, steps=500, seconds=470,
             is_long=True, loss=_NATS,
             goals=[_at_most(0.02, "one-bit-adam:scale_values=64"),
                    _at_most(0.05, "one-bit:warmup_steps=50,scale_values=64", "one-bit:warmup_steps=150,scale_values=64",
                             "two-bit:warmup_steps=50,levels=4,scale_values=64")]),
    _compare("gpt-short", "After 200 steps: what groups, plain first steps, the freeze and exempt embeddings do.",
             SHORT, _GPT, steps=200, seconds=240, is_long=True, loss=_NATS, goals=[]),
    _compare("auto", "The schemes that `auto` may use under AdamW, after 200 steps.", AUTO, _GPT, steps=200, seconds=330,
             drawn=["plain", "gcomp:importance=uniform,bits=12", "bf16", "embedded-float:bits=5", "thc", "qsgd", "terngrad"],
             loss=_NATS, goals=[]),
    _compare("rank", "Under AdamW, after 200 steps: which rank does low rank want, with embeddings whole and without?",
             ["plain", *RANKS], _GPT, steps=200, seconds=90, loss=_NATS, goals=[]),
    _compare("digits", "Under SGD with momentum, a small ResNet on handwritten digits, 200 steps.", SGD, _DIGITS, steps=200,
             seconds=180, loss=_ACCURACY, goals=[]),
    _compare("bert-long", "A small BERT after 2,400 steps, when every run has left the first plateau of its loss.", LONG_BERT,
             "bert:n_layers=2,width=64,n_heads=4", steps=2_400, seconds=900, is_long=True, loss=_NATS, goals=[]),
    *(Experiment(
        key=f"lossy-{key}", system="lossy", measure="training", seconds=seconds, is_long=True, baseline={"scheme": "plain"},
        question=question, fixed={"ranks": 2, "steps": 300, "baseline": "plain"},
        axes={"workload": workloads, "seed": [0, 1, 2], "scheme": specs}, over=("seed",), together=("scheme",),
        show=[Table([_NATS, Column("held_out_loss", "against plain", 1.0, ".4f", "difference", "plain", spread=True),
                     _BYTES], across="workload")],
        goals=[Goal(f"at most {nats} nats behind plain under {name}", _BEHIND, "<=", nats,
                    {"workload": workloads[name], "scheme": spec}) for name, nats, spec in goals],
    ) for key, question, workloads, specs, seconds, goals in (
        ("momentum", "Low rank of gradients, and of what they differ from the optimizer's momentum: what does each lose?",
         _OPTIMIZERS, BEHIND, 150, [("AdamW", 0.02, "power-momentum"), ("Muon", 0.005, "power-momentum:rank=12")]),
        ("ahead", "What does a step lose that starts before the means of the one before are there?",
         STALE, AHEAD, 180, [("AdamW", 0.02, "plain:ahead=1")]),
    )),
    Experiment(
        key="lossy-ranks", system="lossy", measure="ranks", seconds=3_600, is_long=True, baseline={"scheme": "plain"},
        question="Do the classes hold at more ranks than two? Simulated ranks, a ring of real messages, a global batch of 64.",
        fixed={"workload": _GPT.replace(",batch_size=8", ""), "steps": 200, "global_batch": 64},
        axes={"ranks": [2, 8, 16, 64], "seed": [0, 1, 2], "scheme": BY_RANKS}, over=("seed",), together=("scheme", "seed"),
        show=[Table([_NATS, Column("held_out_loss", "against plain", 1.0, ".4f", "difference", "plain", spread=True),
                     _BYTES], across="ranks")],
    ),
    Experiment(
        key="lossy-times", system="lossy", measure="training", seconds=600, is_long=True, baseline={"scheme": "ddp"},
        question="How long does a GPT take to DDP's loss?",
        fixed={"workload": "gpt", "ranks": 4, "steps": 200, "baseline": "ddp"},
        axes={"rate": {"100 Mb/s": "100mbit", "1 Gb/s": "1gbit"}, "scheme": TIMES}, together=("scheme",),
        show=[Table([ITERATION, Column("seconds_to_loss", "s to the loss", form=".1f"), _SOONER,
                     Column("held_out_loss", "held-out loss", form=".3f"), _BYTES], across="rate")],
        goals=[Goal(f"{times} times sooner than DDP at {name}", _SOONER, ">=", times,
                    {"rate": rate, "scheme": "auto:fidelity=close"})  # which is to find the best of these
               for name, rate, times in (("100 Mb/s", "100mbit", 3.0), ("1 Gb/s", "1gbit", 1.15))],
    ),
]  # fmt: skip
