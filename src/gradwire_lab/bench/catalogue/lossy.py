"""Lossy schemes by optimizer: where the loss goes, and what is sent for it; what chose the defaults beside Adam."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from gradwire_lab.bench.catalogue.schemes import ACCURACY, ITERATION, NATS, PLAIN, RATIO_LAST, against
from gradwire_lab.results.experiment import Column, Experiment, Goal, Plot, Table

_GPT, _DIGITS = "gpt:n_layers=2,width=64,n_heads=4,length=64,batch_size=8", "resnet:width=8"
_GROUPED = ["one-bit:warmup_steps=50,", "two-bit:warmup_steps=50,levels=4,", "one-bit-adam:"]
_BEHIND = Column("held_out_loss", "", 1.0, ".3f", "difference", "plain", spread=True)
_BEHIND_4 = against(NATS, "plain", "plain", ".4f")
_SOONER = Column("seconds_to_loss", "x sooner than DDP", kind="speed-up", against="ddp")


def _compare(key: str, question: str, tables: Mapping[str, Sequence[str]], workload: str = _GPT, *, steps: int,
             seconds: float, loss: Column = NATS, most_nats: Sequence[tuple[float, Sequence[str]]] = (),
             is_long: bool = False, system: str = "lossy", drawn: Sequence[str] = ()) -> Experiment:  # fmt: skip
    """Schemes beside plain, those of `tables` by their titles."""
    schemes = list(dict.fromkeys(["plain", *(spec for specs in tables.values() for spec in specs)]))
    return Experiment(
        key=f"lossy-{key}", system=system, measure="training", seconds=seconds, question=question,
        fixed={"workload": workload, "ranks": 2, "steps": steps, "baseline": "plain"},
        axes={"seed": [0, 1, 2], "scheme": schemes}, over=("seed",), baseline=PLAIN, is_long=is_long,
        goals=[Goal(f"at most {nats} nats behind plain", _BEHIND, "<=", nats, {"scheme": tuple(specs)})
               for nats, specs in most_nats],
        show=[*(Table([loss, against(loss, "plain", "plain"), RATIO_LAST], where={"scheme": ["plain", *specs]}, title=title)
                for title, specs in tables.items()),
              *([Plot("ratio", replace(loss, spread=False), log="x", x_title="bytes / ring", where={"scheme": drawn})]
                if drawn else [])],
    )  # fmt: skip


EXPERIMENTS = [
    _compare("gpt", "Under AdamW, after 500 steps of a small GPT: what does each scheme lose, and send?", {"": [
        "one-bit-adam", "one-bit-adam:codec=two-bit", "one-bit-adam:codec=two-bit,correction=running",
        "one-bit:scale_values=512,warmup_steps=50", "two-bit:scale_values=512,warmup_steps=50",
        "one-bit:scale_values=512,warmup_steps=150", "two-bit:scale_values=512,warmup_steps=150",
        "one-bit-adam:freeze_step=150", "one-bit-adam:codec=two-bit,freeze_step=150", "top-k:share=0.01",
        "dgc:share=0.01,momentum=0", "acp-sgd", "acp-sgd:rank=8", "power-sgd:rank=8",
        "acp-sgd:exempt=none,rank=8,start_step=50", "power-sgd:exempt=none,rank=8,start_step=50", "embedded-float:bits=8",
        "embedded-float:bits=5", "embedded-float:bits=4", "ddp-bf16", "ddp-fp16", "ddp-powersgd:rank=8",
    ]}, steps=500, seconds=950, is_long=True,
             drawn=["plain", "ddp-bf16", "embedded-float:bits=5", "one-bit-adam", "two-bit:scale_values=512,warmup_steps=50",
                    "power-sgd:rank=8"],  # no more lines than can be told apart
             most_nats=[(0.02, ["one-bit-adam", "one-bit-adam:codec=two-bit"]),
                        (0.05, ["one-bit:scale_values=512,warmup_steps=50", "two-bit:scale_values=512,warmup_steps=50",
                                "power-sgd:rank=8"])]),
    _compare("defaults", "A small GPT, 500 steps: plain first steps, levels, and how many values share a scale.", {
        "Plain first steps": ["acp-sgd:start_step=0", "acp-sgd:start_step=50", "acp-sgd:start_step=100",
                              "power-sgd:rank=8,start_step=0", "power-sgd:rank=8,start_step=50",
                              "top-k:share=0.01,warmup_steps=0", "top-k:share=0.01,warmup_steps=50"],
        "Two bits a value: three levels, of which one is zero, or four": [
            "one-bit-adam", "one-bit-adam:codec=two-bit", "one-bit-adam:codec=four-level",
            "two-bit:scale_values=512,warmup_steps=50,levels=3", "two-bit:scale_values=512,warmup_steps=50,levels=4",
            "two-bit:scale_values=512,warmup_steps=150,levels=4"],
        "Values that share a scale": [f"{spec}scale_values={values}" for spec in _GROUPED for values in (64, 512)],
    }, steps=500, seconds=900, is_long=True, system="defaults",
             most_nats=[(0.02, ["one-bit-adam:codec=four-level", "one-bit-adam:scale_values=64"]),
                        (0.05, ["acp-sgd:start_step=100", "two-bit:scale_values=512,warmup_steps=50,levels=4",
                                "one-bit:warmup_steps=50,scale_values=64",
                                "two-bit:warmup_steps=50,levels=4,scale_values=64"])]),
    _compare("auto", "The schemes that `auto` may use under AdamW, after 200 steps.", {"": [
        "gcomp:importance=uniform,bits=12", "bf16", "embedded-float:bits=8", "embedded-float:bits=6",
        "embedded-float:bits=5", "embedded-float:bits=4", "thc", "qsgd", "terngrad",
    ]}, steps=200, seconds=300,
             drawn=["plain", "gcomp:importance=uniform,bits=12", "bf16", "embedded-float:bits=5", "thc", "qsgd", "terngrad"]),
    _compare("gpt-short",
             "After 200 steps: groups, plain first steps, the freeze, exempt embeddings, ranks of low rank.", {
        "What defaults do": [
            "one-bit-adam", "one-bit", "one-bit:scale_values=512", "two-bit", "two-bit:scale_values=512",
            "one-bit-adam:freeze_step=20", "one-bit-adam:correction=running", "power-sgd:rank=8"],
        "Ranks, with embeddings whole and without": ["acp-sgd", "acp-sgd:exempt=none", *(
            f"acp-sgd:{exempt}rank={rank}" for exempt in ("", "exempt=none,") for rank in (8, 16))],
    }, steps=200, seconds=215, system="defaults"),
    _compare("digits", "Under SGD with momentum, a small ResNet on handwritten digits, 200 steps.", {"": [
        "one-bit", "one-bit:scale_values=512", "two-bit", "two-bit:scale_values=512", "acp-sgd",
        "embedded-float:bits=8", "embedded-float:bits=5", "embedded-float:bits=4", "ddp-bf16", "ddp-powersgd:rank=8",
    ]}, _DIGITS, steps=200, seconds=180, loss=ACCURACY),
    _compare("bert-long", "A small BERT after 2,400 steps, when every run has left the first plateau of its loss.", {
        "": ["acp-sgd", "ddp-bf16", "one-bit-adam:freeze_step=300", "one-bit-adam:freeze_step=600",
             "one-bit-adam:codec=four-level,freeze_step=600", "one-bit:scale_values=512,warmup_steps=600",
             "acp-sgd:start_step=600", "ddp-powersgd:rank=8,start=600"],
    }, "bert:n_layers=2,width=64,n_heads=4", steps=2_400, seconds=900, is_long=True),
    Experiment(
        key="lossy-ahead", system="lossy", measure="training", seconds=180, is_long=True, baseline=PLAIN,
        question="What does a step lose that starts before the means of the one before are there?",
        fixed={"ranks": 2, "steps": 300, "baseline": "plain"},
        axes={"workload": {"AdamW": _GPT, "SGD": f"{_GPT},optimizer=momentum"}, "seed": [0, 1, 2],
              "scheme": ["plain", "plain:ahead=1", "acp-sgd", "acp-sgd:ahead=1", "two-bit", "two-bit:ahead=1"]},
        over=("seed",), show=[Table([NATS, _BEHIND_4, RATIO_LAST], across="workload")],
        goals=[Goal("at most 0.02 nats behind plain under AdamW", _BEHIND, "<=", 0.02,
                    {"workload": _GPT, "scheme": "plain:ahead=1"})],
    ),
    Experiment(
        key="lossy-ranks", system="lossy", measure="ranks", seconds=3_000, is_long=True, baseline=PLAIN,
        question="Do the classes hold at more ranks than two? Simulated ranks, a ring of real messages, a global batch of 64.",
        fixed={"workload": _GPT.replace(",batch_size=8", ""), "steps": 200, "global_batch": 64},
        axes={"ranks": [2, 8, 16, 64], "seed": [0, 1, 2], "scheme": {
            "plain": "plain", "plain, disturbed by a rounding": "control", "bf16": "bf16",
            **{f"gcomp, {bits} bits": f"gcomp:importance=uniform,bits={bits}" for bits in (12, 7)},
            **{f"embedded-float, {bits} bits": f"embedded-float:bits={bits}" for bits in (8, 5, 4)},
            **{f"{bits} bits, direct": f"embedded-float:bits={bits},topology=direct" for bits in (8, 5)},
            **{f"{bits} bits, small tensors too": f"embedded-float:bits={bits},exempt=none" for bits in (8, 5, 4)}}},
        over=("seed",), together=("scheme", "seed"), show=[Table([_BEHIND_4, RATIO_LAST, NATS], across="ranks")],
    ),
    Experiment(
        key="lossy-times", system="lossy", measure="training", seconds=600, is_long=True, baseline={"scheme": "ddp"},
        question="How long does a GPT take to DDP's loss?",
        fixed={"workload": "gpt", "ranks": 4, "steps": 200, "baseline": "ddp"},
        axes={"rate": {"100 Mb/s": "100mbit", "1 Gb/s": "1gbit"}, "scheme": [
            "ddp", "ddp-bf16", "ddp-powersgd:rank=8,start=20", "auto:fidelity=close", "thc", "one-bit-adam:freeze_step=20",
            "one-bit:scale_values=512,warmup_steps=20", "power-sgd:exempt=none,rank=8,start_step=20",
            "embedded-float:bits=5", "embedded-float:bits=4", "two-bit:scale_values=512,warmup_steps=50,levels=4"]},
        show=[Table([ITERATION, Column("seconds_to_loss", "s to the loss", form=".1f"), _SOONER,
                     Column("held_out_loss", "held-out loss", form=".3f"), RATIO_LAST], across="rate")],
        goals=[Goal(f"{times} times sooner than DDP at {name}", _SOONER, ">=", times,
                    {"rate": rate, "scheme": "auto:fidelity=close"})  # which is to find the best of these
               for name, rate, times in (("100 Mb/s", "100mbit", 3.0), ("1 Gb/s", "1gbit", 1.15))],
    ),
]  # fmt: skip
