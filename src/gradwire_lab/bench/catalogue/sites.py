"""Between sites, under FSDP2, and beside Muon: what today's trainings ask of a scheme, and the one long run."""

from typing import Any

from gradwire_lab.bench.catalogue.schemes import DDP, ITERATION, NATS, PLAIN, RATIO_LAST, against, regret
from gradwire_lab.results.experiment import Column, Experiment, Goal, Plot, Table, mb

_GPT = "gpt:n_layers=2,width=64,n_heads=4,length=64,batch_size=8"
_LONGER = "gpt:n_layers=4,width=128,n_heads=4,length=64,batch_size=8"
_LARGE = "gpt:n_layers=6,width=384,n_heads=6"  # 10.7 M parameters
_WHOLE = "factor_dtype=bfloat16,exempt=none,start_step=0"
_GPT_MUON, _FED_BACK = f"{_GPT},optimizer=muon", "slimgc:codec=embedded-float,bits=4,threshold_bytes=0,plain_steps=13"
_SEVENTH = {"workload": _GPT_MUON, "scheme": _FED_BACK}  # of a ring's bytes
_SPARSE = "top-k:share=0.0156,code=chunks,warmup_steps=0,"  # SparseLoCo's share, in about 14 bits a value that is sent

_BEHIND, _BEHIND_DDP = against(NATS, "plain", "plain", ".4f"), against(NATS, "DDP")
_FEWER = Column("wire_bytes", "x fewer bytes", form=",.0f", kind="speed-up")
_SECONDS = Column("elapsed_s", "seconds", form=",.0f")

# ---- lines with a distance
_BUS = Column("bus_gb_per_s", "Mb/s of a line", 8e3, ".0f", spread=True)
_BUS_X = Column("bus_gb_per_s", "x Gloo", form=".2f", kind="ratio")
_LINES = {"200 Mb/s, 40 ms, 0.05 % lost": "200mbit/delay=20ms/loss=0.05%",
          "150 Mb/s, 80 ms, 0.1 % lost": "150mbit/delay=40ms/loss=0.1%"}  # fmt: skip
_RAW = "truncated-float:bits=32"  # float32 as it is, over this library's connections

# ---- local SGD over two sites
_STEPS = 2_000
_ALONE, _DILOCO = f"plain:local_sgd={_STEPS}", "plain:local_sgd=64"
_SPARSE_LOCAL = f"{_SPARSE}local_sgd=64,outer=average,feedback_decay=0.95"
_LOCAL = {"DDP": "ddp", "gradwire, exact": "auto", "gradwire, close": "auto:fidelity=close", "DiLoCo, H 64": _DILOCO,
          "in 4 fragments, 8 steps of overlap": f"{_DILOCO},fragments=4,delay=8", "sparse, H 64": _SPARSE_LOCAL,
          "sparse, in 4 fragments": f"{_SPARSE_LOCAL},fragments=4,delay=8",
          "sparse, Muon inside": f"{_SPARSE_LOCAL},workload.optimizer=muon", "computation alone": _ALONE}  # fmt: skip
_X_ALONE = Column("elapsed_s", "x computation", form=".2f", kind="ratio", against=_ALONE)
# By H: the outer optimizer, its rate, and what becomes of what a sparse code leaves out.
_LAWS = {"DDP, every step": "plain", "plain, average": "plain:outer=average",
         **{f"plain, Nesterov {rate}": f"plain:outer_rate={rate}" for rate in (0.4, 0.7, 1.0)},
         **{f"sparse, {words}Nesterov {rate}": f"{_SPARSE}{option}outer_rate={rate}"
            for words, option in (("", "error_feedback=false,"), ("feedback, ", ""),
                                  ("fading feedback, ", "feedback_decay=0.95,"))
            for rate in (0.4, 0.7)},
         "sparse, feedback, average": f"{_SPARSE}outer=average",
         "sparse, fading feedback, average": f"{_SPARSE}outer=average,feedback_decay=0.95"}  # fmt: skip

# ---- shards
_HALF, _ALL_HALF = "param=bfloat16,reduce=float32", "param=bfloat16,reduce=bfloat16"
_FSDP2 = f"fully-shard:{_HALF}"
_SHARDS = {"FSDP2": _FSDP2, "exact": f"fsdp2-shards:gradients=gcomp,weights=exact,{_HALF}",
           "close": f"fsdp2-shards:gradients=embedded-float,weights=close,{_HALF}",
           "FSDP2, all in bfloat16": f"fully-shard:{_ALL_HALF}",
           "lossless": f"fsdp2-shards:gradients=gcomp,importance=none,weights=exact,{_ALL_HALF}"}  # fmt: skip
_SHARDS_AUTO = f"fsdp2-shards:gradients=auto,{_HALF}"
_SHARD_RATES = {"100 Mb/s": "100mbit", "300 Mb/s": "300mbit", "1 Gb/s": "1gbit"}
_SOONER = Column("iteration_s", "x FSDP2", form=".2f", kind="speed-up", against=_FSDP2)
_SOONER_THAN_HALF = Column("iteration_s", "x", form=".2f", kind="speed-up", against=_SHARDS["FSDP2, all in bfloat16"])


def _sooner(scheme: str, least: dict[str, float], ranks: int = 2, column: Column = _SOONER) -> list[Goal]:
    return [Goal(f"{scheme}: {times} times FSDP2 at {rate}, {ranks} ranks", column, ">=", times,
                 {"rate": _SHARD_RATES[rate], "ranks": ranks, "scheme": _SHARDS[scheme]})
            for rate, times in least.items()]  # fmt: skip


# ---- the long run
_LONG_STEPS, _LONG_EVERY = 3_000, 300
_LONG = {"DDP": "ddp", "bf16 hook": "ddp-bf16", "gradwire, exact": "auto", "gradwire, close": "auto:fidelity=close",
         "gradwire, any": "auto:fidelity=any", "one-bit-adam": "one-bit-adam",
         "two-bit, 4 levels": "two-bit:warmup_steps=50,levels=4,scale_values=64"}  # fmt: skip
_RECENT = Column("loss_recent", "loss, last 100 steps", form=".3f", spread=True)

_MUON = {"plain": "plain", "plain, disturbed by a rounding": "control", "bf16": "bf16",
         "gcomp, exact": "gcomp:tolerance=32,least_bits=7",
         **{f"gcomp, {bits} bits": f"gcomp:importance=uniform,bits={bits}" for bits in (12, 7)},
         **{f"embedded-float, {bits} bits": f"embedded-float:bits={bits}" for bits in (8, 7, 6, 5, 4)},
         **{f"{bits} bits, direct": f"embedded-float:bits={bits},topology=direct" for bits in (8, 7)}}  # fmt: skip


def _training(key: str, question: str, system: str, seconds: float, seeds: int, axes: dict[str, Any], **more: Any,
              ) -> Experiment:  # fmt: skip
    return Experiment(key=key, system=system, measure="training", question=question, seconds=seconds, is_long=True,
                      axes={"seed": list(range(seeds)), **axes}, over=("seed",), **more)  # fmt: skip


EXPERIMENTS = [
    Experiment(
        key="sites-lines", system="sites", measure="allreduce", seconds=90, baseline=DDP,
        question="How much of a long line does an all-reduce of 25 MB fill?",
        fixed={"n_bytes": [25_000_000]},
        axes={"ranks": [2, 4], "rate": _LINES, "scheme": ["ddp", _RAW, "gcomp:importance=none", "embedded-float:bits=4"]},
        show=[Table([_BUS, _BUS_X], rows=("ranks", "scheme"), across="rate")],
        goals=[Goal("85 % of a line of 200 Mb/s, 40 ms", _BUS, ">=", 0.85 * 200,
                    {"rate": "200mbit/delay=20ms/loss=0.05%", "scheme": _RAW}),
               Goal("5 times one Gloo connection at 80 ms", _BUS_X, ">=", 5.0,
                    {"rate": "150mbit/delay=40ms/loss=0.1%", "scheme": _RAW})],
    ),
    _training(
        "sites", "GPT, 2,000 steps, 4 ranks over two sites of 50 Mb/s and 40 ms apart: loss against bytes and seconds.",
        "sites", 1_500, 3, {"scheme": _LOCAL}, baseline=DDP,
        fixed={"workload": _GPT, "ranks": 4, "steps": _STEPS, "baseline": "ddp", "rate": "50mbit/sites=2x2/site-delay=20ms"},
        show=[Table([NATS, _BEHIND_DDP, _FEWER, _SECONDS, _X_ALONE]),
              Plot("elapsed_s", Column("held_out_loss", "held-out loss"), log="x", x_title="seconds")],
        goals=[Goal("100 times fewer bytes than DDP", _FEWER, ">=", 100.0, {"scheme": _SPARSE_LOCAL}),
               Goal("no more than 0.01 nats behind DDP", _BEHIND_DDP, "<=", 0.01, {"scheme": _SPARSE_LOCAL}),
               Goal("at most 1.15 of computation alone", _X_ALONE, "<=", 1.15, {"scheme": _SPARSE_LOCAL})],
    ),
    _training(
        "sites-laws", "What do error feedback and an outer momentum do to each other, by H?", "sites", 1_400, 3,
        {"local_sgd": [8, 30, 64], "scheme": _LAWS}, together=("local_sgd", "scheme"), baseline=PLAIN,
        fixed={"workload": _GPT, "ranks": 2, "steps": _STEPS, "baseline": "plain"},
        show=[Table([NATS, _BEHIND], across="local_sgd")],
    ),
    Experiment(
        key="shards-speed", system="shards", measure="train", seconds=123, baseline={"scheme": _FSDP2},
        question="FSDP2 over all ranks, bfloat16 weights: how long does a step of a GPT of 10.7 M parameters take?",
        fixed={"workload": _LARGE, "steps": 6, "warmup": 3},
        axes={"ranks": [2, 4], "rate": _SHARD_RATES, "scheme": _SHARDS},
        show=[Table([ITERATION, _SOONER], rows=("ranks", "scheme"), across="rate"),
              Table([mb("wire_bytes", "MB sent a step")], where={"rate": "100mbit"}, rows=("ranks", "scheme"))],
        goals=[*_sooner("exact", {"100 Mb/s": 2.1, "300 Mb/s": 1.9, "1 Gb/s": 1.65}), *_sooner("exact", {"100 Mb/s": 2.0}, 4),
               *_sooner("close", {"100 Mb/s": 3.4, "1 Gb/s": 1.9}), 
               *_sooner("lossless", {"100 Mb/s": 1.55, "1 Gb/s": 1.3}, column=_SOONER_THAN_HALF)],
    ),
    Experiment(
        key="shards-losses", system="shards", measure="training", seconds=110, baseline={"scheme": _FSDP2}, over=("seed",),
        question="A small GPT under FSDP2, 500 steps: what do coded weights and gradients lose?", together=("scheme",),
        fixed={"workload": _GPT, "ranks": 2, "steps": 500, "baseline": _FSDP2},
        axes={"seed": [0, 1, 2], "scheme": {name: _SHARDS[name] for name in ("FSDP2", "exact", "close")}},
        show=[Table([NATS, against(NATS, "FSDP2", form=".4f"), RATIO_LAST])],
        goals=[Goal(f"{name}: within 0.5 % of FSDP2's held-out loss", Column("held_out_loss", form=".4f", kind="ratio"),
                    "<=", 1.005, {"scheme": _SHARDS[name]}) for name in ("exact", "close")],
    ),
    regret(
        "shards-auto", "What does the default lose against FSDP2, and against the best pair of codings, its trials included?",
        {"rate": {"100 Mb/s": "100mbit", "unshaped": "none"}, "scheme": {"FSDP2": _FSDP2, "gradwire": _SHARDS_AUTO}},
        across="rate", takes=280, system="shards", workload=_LARGE, ranks=4, steps=60, seconds=200,
        goals=[Goal("the default: 1.8 times FSDP2 at 100 Mb/s, 4 ranks", Column("x_ddp", form=".2f"), ">=", 1.8,
                    {"rate": "100mbit", "scheme": _SHARDS_AUTO})],
    ),
    _training(
        "long-run", "A small GPT, 3,000 steps at 100 Mb/s: loss by steps and by seconds.", "optimizers", 3_000, 2,
        {"scheme": _LONG, "step": list(range(_LONG_EVERY, _LONG_STEPS + 1, _LONG_EVERY))}, together=("scheme", "step"),
        baseline=DDP, fixed={"workload": _LONGER, "ranks": 2, "rate": "100mbit", "steps": _LONG_STEPS, "baseline": "ddp"},
        show=[Plot("elapsed_s", _RECENT, x_title="seconds"), Plot("step", _RECENT),
              Table([NATS, _BEHIND_DDP, RATIO_LAST, _SECONDS], where={"step": _LONG_STEPS})],
        goals=[Goal(f"{words}: within 0.5 % of DDP's held-out loss",
                    Column("held_out_loss", form=".4f", kind="ratio"), "<=", 1.005, {"scheme": spec, "step": _LONG_STEPS})
               for words, spec in (("exact", "auto"), ("close", "auto:fidelity=close"))],
    ),
    Experiment(
        key="muon-ranks", system="optimizers", measure="ranks", seconds=900, is_long=True, baseline=PLAIN,
        question="Muon for matrices and AdamW for the rest, 500 steps: what does each class lose, by the number of ranks?",
        fixed={"workload": f"{_GPT.replace(',batch_size=8', '')},optimizer=muon", "steps": 500, "global_batch": 16},
        axes={"ranks": [2, 4, 8], "seed": [0, 1, 2], "scheme": _MUON}, over=("seed",), together=("scheme", "seed"),
        show=[Table([_BEHIND, RATIO_LAST, NATS], across="ranks")],
    ),
    _training(
        "muon-bytes", "AdamW and Muon, 1,000 steps, a seventh of the bytes: what does each scheme lose?",
        "optimizers", 340, 5, {"workload": {"AdamW": _GPT, "Muon": _GPT_MUON}, "scheme": {
            "plain": "plain", "plain, disturbed: 30 of 32 bits": "truncated-float:bits=30",  # its control
            "power-sgd, rank 8": f"power-sgd:rank=8,{_WHOLE}",
            "acp-sgd, rank 16": f"acp-sgd:rank=16,{_WHOLE}", "power-momentum, rank 8": "power-momentum",
            "power-momentum, rank 12": "power-momentum:rank=12", "4-bit floats": "embedded-float:bits=4",
            "4 bits, error feedback": _FED_BACK, "8 bits, local SGD, H 4": "embedded-float:local_sgd=4,outer=average"}},
        baseline=PLAIN, fixed={"ranks": 2, "steps": 1_000, "baseline": "plain"},
        show=[Table([NATS, _BEHIND, RATIO_LAST], across="workload")],
        goals=[Goal("AdamW: 0.02 nats behind plain", _BEHIND, "<=", 0.02, {"workload": _GPT, "scheme": "power-momentum"}),
               Goal("Muon: 0.005 nats behind plain", _BEHIND, "<=", 0.005, _SEVENTH),
               Goal("Muon: a seventh of a ring's bytes", Column("ratio_mean", form=".3f"), "<=", 1 / 7, _SEVENTH)],
    ),
]  # fmt: skip
