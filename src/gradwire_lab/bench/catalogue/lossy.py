"""Lossy schemes by optimizer: where the loss goes, and what is sent for it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from gradwire_lab.bench.catalogue.schemes import ITERATION
from gradwire_lab.results.experiment import Column, Experiment, Goal, Plot, Table

_GPT, _DIGITS = "gpt:n_layers=2,width=64,n_heads=4,length=64,batch_size=8", "resnet:width=8"
_WARM = "scale_values=512,warmup_steps=50"
_BYTES = Column("ratio", "bytes / ring", form=".3f")
LONG = {
    "plain": "plain",
    "one-bit-adam": "one-bit-adam",
    "one-bit-adam, two bits": "one-bit-adam:codec=two-bit",
    "one-bit-adam, two bits, running correction": "one-bit-adam:codec=two-bit,correction=running",
    "one-bit, groups, 50 plain": f"one-bit:{_WARM}",
    "two-bit, groups, 50 plain": f"two-bit:{_WARM}",
    "one-bit, groups, 150 plain": "one-bit:scale_values=512,warmup_steps=150",
    "two-bit, groups, 150 plain": "two-bit:scale_values=512,warmup_steps=150",
    "one-bit-adam, frozen after 150": "one-bit-adam:freeze_step=150",
    "one-bit-adam, two bits, frozen after 150": "one-bit-adam:codec=two-bit,freeze_step=150",
    "top-k-adam, share 0.01": "top-k-adam",
    "top-k-adam, share 0.05": "top-k-adam:share=0.05",
    "top-k-adam, share 0.01, frozen after 20": "top-k-adam:freeze_step=20",
    "top-k, share 0.01": "top-k:share=0.01",
    "dgc, share 0.01": "dgc:share=0.01,momentum=0",
    "acp-sgd": "acp-sgd",
    "acp-sgd, rank 8": "acp-sgd:rank=8",
    "power-sgd, rank 8": "power-sgd:rank=8",
    "acp-sgd, rank 8, embeddings too, 50 plain": "acp-sgd:exempt=none,rank=8,start_step=50",
    "power-sgd, rank 8, embeddings too, 50 plain": "power-sgd:exempt=none,rank=8,start_step=50",
    "embedded-float, 8 bits": "embedded-float:bits=8",
    "embedded-float, 5 bits": "embedded-float:bits=5",
    "embedded-float, 4 bits": "embedded-float:bits=4",
    "PyTorch's bf16 hook": "ddp-bf16",
    "PyTorch's fp16 hook": "ddp-fp16",
    "PyTorch's PowerSGD hook, rank 8": "ddp-powersgd:rank=8",
}
FIRST_STEPS = {
    "plain": "plain",
    "acp-sgd, none plain": "acp-sgd:start_step=0",
    "acp-sgd, 50 plain": "acp-sgd:start_step=50",
    "acp-sgd, 100 plain": "acp-sgd:start_step=100",
    "power-sgd, rank 8, none plain": "power-sgd:rank=8,start_step=0",
    "power-sgd, rank 8, 50 plain": "power-sgd:rank=8,start_step=50",
    "top-k, share 0.01, none plain": "top-k:share=0.01,warmup_steps=0",
    "top-k, share 0.01, 50 plain": "top-k:share=0.01,warmup_steps=50",
    "random-k, share 0.05, none plain": "random-k:share=0.05,warmup_steps=0",
    "random-k, share 0.05, 50 plain": "random-k:share=0.05,warmup_steps=50",
}
SHORT = {
    "plain": "plain",
    "one-bit-adam": "one-bit-adam",
    "one-bit": "one-bit",
    "one-bit, groups": "one-bit:scale_values=512",
    "two-bit": "two-bit",
    "two-bit, groups": "two-bit:scale_values=512",
    "one-bit-adam, frozen after 20": "one-bit-adam:freeze_step=20",
    "one-bit-adam, running correction": "one-bit-adam:correction=running",
    "acp-sgd": "acp-sgd",
    "acp-sgd, embeddings too": "acp-sgd:exempt=none",
    "power-sgd, rank 8": "power-sgd:rank=8",
}
SGD = {
    "plain": "plain",
    "one-bit": "one-bit",
    "one-bit, groups": "one-bit:scale_values=512",
    "two-bit": "two-bit",
    "two-bit, groups": "two-bit:scale_values=512",
    "acp-sgd": "acp-sgd",
    "embedded-float, 8 bits": "embedded-float:bits=8",
    "embedded-float, 5 bits": "embedded-float:bits=5",
    "embedded-float, 4 bits": "embedded-float:bits=4",
    "PyTorch's bf16 hook": "ddp-bf16",
    "PyTorch's PowerSGD hook, rank 8": "ddp-powersgd:rank=8",
}

AUTO = {
    "plain": "plain",
    "gcomp, 12 bits": "gcomp:importance=uniform,bits=12",
    "bf16": "bf16",
    "embedded-float, 8 bits": "embedded-float:bits=8",
    "embedded-float, 6 bits": "embedded-float:bits=6",
    "embedded-float, 5 bits": "embedded-float:bits=5",
    "embedded-float, 4 bits": "embedded-float:bits=4",
    "thc": "thc",
    "qsgd": "qsgd",
    "terngrad": "terngrad",
    "terngrad, by bucket": "terngrad:per=bucket",
}
LONG_BERT = {name: LONG[name] for name in ("plain", "acp-sgd", "PyTorch's bf16 hook")} | {
    "one-bit-adam, frozen after 300": "one-bit-adam:freeze_step=300",
    "one-bit-adam, frozen after 600": "one-bit-adam:freeze_step=600",
    "one-bit-adam, four levels, frozen after 600": "one-bit-adam:codec=four-level,freeze_step=600",
    "one-bit, groups, 600 plain": "one-bit:scale_values=512,warmup_steps=600",
    "acp-sgd, 600 plain": "acp-sgd:start_step=600",
    "PyTorch's PowerSGD hook, rank 8, 600 plain": "ddp-powersgd:rank=8,start=600",
}  # fmt: skip
TIMES = {  # a tenth of 200 steps is plain where a scheme asks for plain first steps, unless a row says otherwise
    "DDP": "ddp",
    "PyTorch's bf16 hook": "ddp-bf16",
    "PyTorch's PowerSGD hook, rank 8": "ddp-powersgd:rank=8,start=20",
    "auto, close": "auto:fidelity=close",
    "thc": "thc",
    "one-bit-adam": "one-bit-adam:freeze_step=20",
    "one-bit, groups": "one-bit:scale_values=512,warmup_steps=20",
    "power-sgd, rank 8, embeddings too": "power-sgd:exempt=none,rank=8,start_step=20",
    "embedded-float, 5 bits": "embedded-float:bits=5",
    "embedded-float, 4 bits": "embedded-float:bits=4",
    "two-bit, four levels, 50 plain": f"two-bit:{_WARM},levels=4",
}
LEVELS = {
    "plain": "plain",
    "one-bit-adam": "one-bit-adam",
    "one-bit-adam, three levels": "one-bit-adam:codec=two-bit",
    "one-bit-adam, four levels": "one-bit-adam:codec=four-level",
    "two-bit, three levels, 50 plain": f"two-bit:{_WARM},levels=3",
    "two-bit, four levels, 50 plain": f"two-bit:{_WARM},levels=4",
    "two-bit, four levels, 150 plain": "two-bit:scale_values=512,warmup_steps=150,levels=4",
}
GROUPS = {"plain": "plain"} | {
    f"{name}, groups of {values}": f"{spec}scale_values={values}"
    for name, spec in (
        ("one-bit, 50 plain", "one-bit:warmup_steps=50,"),
        ("one-bit, 100 plain", "one-bit:warmup_steps=100,"),
        ("one-bit, 150 plain", "one-bit:warmup_steps=150,"),
        ("two-bit, three levels, 50 plain", "two-bit:warmup_steps=50,levels=3,"),
        ("two-bit, four levels, 50 plain", "two-bit:warmup_steps=50,levels=4,"),
        ("one-bit-adam", "one-bit-adam:"),
    )
    for values in (64, 512)
}
RANKS = {
    f"acp-sgd, rank {rank}{name}": f"acp-sgd:{exempt}rank={rank}"
    for name, exempt in (("", ""), (", embeddings too", "exempt=none,"))
    for rank in (2, 4, 8, 16, 32)
}


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

# What chose the defaults beside Adam, on a page of their own.
_DEFAULTS = ("first-steps", "levels", "groups", "gpt-short", "rank")


def _compare(key: str, question: str, schemes: Mapping[str, str], workload: str, *, steps: int, seconds: float,
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
            where={"scheme": [schemes[name] for name in drawn]})] if drawn else [])],
    )  # fmt: skip


def _at_most(nats: float, *names: str, of: Mapping[str, str] = LONG) -> Goal:
    column = Column("held_out_loss", "", 1.0, ".3f", "difference", "plain", spread=True)
    return Goal(f"at most {nats} nats behind plain", column, "<=", nats, {"scheme": [of[name] for name in names]})


# No more lines than can be told apart.
_DRAWN = ["plain", "PyTorch's bf16 hook", "embedded-float, 5 bits", "one-bit-adam", "two-bit, groups, 50 plain",
          "power-sgd, rank 8", "top-k-adam, share 0.05"]  # fmt: skip
_NATS = Column("held_out_loss", "held-out loss", 1.0, ".3f", spread=True)
_SOONER = Column("seconds_to_loss", "x sooner than DDP", kind="speed-up", against="ddp")
_ACCURACY = Column("accuracy", "accuracy, %", 100.0, ".2f", spread=True)
EXPERIMENTS = [
    _compare("gpt", "Under AdamW, after 500 steps of a small GPT: what does each scheme lose, and send?", LONG, _GPT,
             steps=500, seconds=950, is_long=True, loss=_NATS, drawn=_DRAWN,
             goals=[_at_most(0.02, "one-bit-adam", "one-bit-adam, two bits"),
                    _at_most(0.05, "one-bit, groups, 50 plain", "two-bit, groups, 50 plain", "power-sgd, rank 8")]),
    _compare("first-steps",
             "What do plain first steps give low rank and sparse schemes, and what do they cost?",
             FIRST_STEPS, _GPT, steps=500, seconds=500, is_long=True, loss=_NATS,
             goals=[_at_most(0.05, "acp-sgd, 100 plain", of=FIRST_STEPS)]),
    _compare("levels",
             "A small GPT with two bits a value: three levels, of which one is zero, or four?", LEVELS, _GPT, steps=500,
             seconds=330, is_long=True, loss=_NATS,
             goals=[_at_most(0.02, "one-bit-adam, four levels", of=LEVELS),
                    _at_most(0.05, "two-bit, four levels, 50 plain", of=LEVELS)]),
    _compare("groups", "How many values should share a scale?", GROUPS, _GPT, steps=500, seconds=470,
             is_long=True, loss=_NATS,
             goals=[_at_most(0.02, "one-bit-adam, groups of 64", of=GROUPS),
                    _at_most(0.05, "one-bit, 50 plain, groups of 64", "one-bit, 150 plain, groups of 64",
                             "two-bit, four levels, 50 plain, groups of 64", of=GROUPS)]),
    _compare("gpt-short", "After 200 steps: what groups, plain first steps, the freeze and exempt embeddings do.",
             SHORT, _GPT, steps=200, seconds=240, is_long=True, loss=_NATS, goals=[]),
    _compare("auto", "The schemes that `auto` may use under AdamW, after 200 steps.", AUTO, _GPT, steps=200, seconds=330,
             drawn=["plain", "gcomp, 12 bits", "bf16", "embedded-float, 5 bits", "thc", "qsgd", "terngrad"],
             loss=_NATS, goals=[]),
    _compare("rank", "Under AdamW, after 200 steps: which rank does low rank want, with embeddings whole and without?",
             {"plain": "plain"} | RANKS, _GPT, steps=200, seconds=90, loss=_NATS, goals=[]),
    _compare("digits", "Under SGD with momentum, a small ResNet on handwritten digits, 200 steps.", SGD, _DIGITS, steps=200,
             seconds=180, loss=_ACCURACY, goals=[]),
    _compare("bert-long", "A small BERT after 2,400 steps, when every run has left the first plateau of its loss.", LONG_BERT,
             "bert:n_layers=2,width=64,n_heads=4", steps=2_400, seconds=900, is_long=True, loss=_NATS, goals=[]),
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
                    {"rate": rate, "scheme": TIMES["auto, close"]})  # which is to find the best of these
               for name, rate, times in (("100 Mb/s", "100mbit", 3.0), ("1 Gb/s", "1gbit", 1.15))],
    ),
]  # fmt: skip
