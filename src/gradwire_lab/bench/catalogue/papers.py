"""The papers beside what is measured: their numbers, what differs from their conditions, and what nothing here gives."""

from typing import Any

from gradwire_lab.results.experiment import Column, Coverage, Goal, Ref

# By experiment: what differs from the paper where it does; those that are not here are in the paper's own setting.
DIFFERS = {
    "train-resnet": "a small ResNet, 4 ranks on 2 cores; the paper: ResNet-50, 4 A100, 10 Gb/s",
    "allreduce-gradient": "gradients of small models at 1 Gb/s; the paper: 10 Gb/s",
    "gcomp-fidelity": "a GPT of 1.4 M and a small ResNet; the paper: ResNet-50, BERT-base",
    "gcomp-tolerance": "a GPT of 0.4 M, a ResNet of 78 K, 60 steps; few zeros",
    "gcomp-load": "ranks share 2 cores; the paper: 12 cores a rank",
    "gcomp-spread": "small models: few zeros, gradients 1e-2 of their parameters; the paper: 1e-3 to 1e-5",
    "gcomp-cross-tables": "small models; long codes pay only for ResNet under the GPT's tables",
    "gcomp-mantissa": "small models, 2 % zeros at most; single: 0 or 18 bits, and one that says which",
    "gcomp-scaling": "simulated; BERT from the sizes of a small GPT, and without moments",
    "acp-iteration-resnet50": "4 emulated ranks on 2 cores, at most 1 Gb/s; the paper: 32 GPUs, 10 Gb/s",
    "acp-batch": "a small ResNet",
    "acp-world": "2 to 8 ranks on 2 cores; the paper: 8 to 64 GPUs",
    "acp-convergence-resnet": "a small ResNet on digits; the paper: VGG-16 and ResNet-18 on CIFAR-10",
    "aqgb-live": "a small GPT, 2 and 4 ranks on 2 cores; the paper: 16 simulated workers",
    "aqgb-adaptation": "live on 4 ranks; the paper: 8 simulated workers",
    "aqgb-accuracy": "digits; the paper: CIFAR-10",
    "aqgb-float-training": "a small ResNet and 150 steps; the paper: ResNeXt101",
    "slimgc-accuracy": "digits; the paper: CIFAR and ImageNet",
    "slimgc-accuracy-gpt": "a small GPT",
    "slimgc-speed-resnet50": "4 emulated ranks on 2 cores, 0.1 and 1 Gb/s; the paper: 16 V100, 10 and 100 Gb/s",
    "slimgc-rivals": "ResNet-50 at 1 Gb/s; the paper: VGG-16 at 100 Gb/s",
    "homomorphic-allreduce": "over loopback at 200 Mb/s, an emulated switch; the paper: NCCL at 100 Gb/s, a Tofino",
    "homomorphic-lossy-vgg": "a small VGG on digits",
    "homomorphic-lossy-bert": "a small BERT",
    **dict.fromkeys(("slimgc-accuracy-rates", "slimgc-compression", "slimgc-communication"), "digits"),
    **dict.fromkeys(("acp-iteration-gpt", "aqgb-times", "homomorphic-time-ncf", "homomorphic-time-lstm"),
                    "small models, 4 ranks on 2 cores"),
    **dict.fromkeys(("acp-iteration-bert-base", "acp-optimisations", "acp-buffers", "acp-rank", "slimgc-speed-large",
                     "homomorphic-shapes"), "4 ranks on 2 cores, computation emulated, links of 0.1 to 1 Gb/s"),
}  # fmt: skip

_CANNOT, _AS, _DIFFERS = "cannot be here", "as in the paper", "differs"
_MESSAGE = Coverage(_DIFFERS, "no levels are sent, `docs/format.md`; `format=1` has them, behind gradwire's header")
_LOW_RANK = Coverage(_AS, "the method, proven against transcriptions: `tests/distributed/test_low_rank_oracles.py`")
_STATS = Coverage(_DIFFERS, "in `stats()` and the report of every run of `slimgc`")
_BROADCAST = Coverage(_AS, "the method, `docs/systems/aqgb.md`; proven in `tests/broadcast` and `tests/control`")
_SLIM = Coverage(_AS, "the method, `docs/systems/slimgc.md`; proven in `tests/distributed/test_slimgc.py`")
# Figures and tables that no experiment gives: what stands for them, or why nothing can.
LEFT_OUT = {
    ("GComp", "Fig. 1"): Coverage(_CANNOT, "scaling of large models on its authors' cluster"),
    ("GComp", "Fig. 6"): Coverage(_AS, "the method, `src/gradwire/schemes/gcomp/terms.py`"),
    ("GComp", "Fig. 8"): Coverage(_DIFFERS, "a ring, in gradwire's own engine: `docs/architecture.md`"),
    **{("GComp", f"Fig. {n}"): _MESSAGE for n in (4, 7)},
    ("GComp", "Fig. 5"): Coverage(_AS, "the method, `src/gradwire/codecs/huffman.py` and its native decoder"),
    ("GComp", "Table 1"): Coverage(_DIFFERS, "another escape; the paper's: `gcomp-cross-tables`, column escaped"),
    ("GComp", "Table 2"): Coverage(
        _DIFFERS, "absolute values, v before the step; the rest proven: `tests/recovery/test_quantisation_metric.py`"
    ),
    **{("ACP-SGD", f"Fig. {n}"): _LOW_RANK for n in (1, 4)},
    ("ACP-SGD", "Table II"): Coverage(_DIFFERS, "MB that a rank sends, `bench render acp-shapes`; there: complexities"),
    **{("AQGB", f"Fig. {n}"): _BROADCAST for n in (1, 3, 4, 5, 6)},
    ("AQGB", "Fig. 7"): Coverage(_AS, "truncation of a float, bit for bit: `tests/recovery/test_truncated_float.py`"),
    ("AQGB", "Table 1"): Coverage(_AS, "a model's blocks, the simulator's workload `resnet50-4blocks`"),
    **{("SlimGC", f"Fig. {n}"): _STATS for n in (2, 6)},
    **{("SlimGC", f"Fig. {n}"): _SLIM for n in (3, 4, 7, 8)},
    ("SlimGC", "Fig. 14"): Coverage(_CANNOT, "memory of a GPU"),
    ("SlimGC", "Table 1"): Coverage(_AS, "symbols, `docs/terminology.md`"),
    ("Homomorphic", "Fig. 1"): Coverage(_AS, "the method, `docs/format.md`"),
    ("Homomorphic", "Table 1"): Coverage(_CANNOT, "models and their sparsity, on data that cannot be had here"),
}

_FASTER = Column("iteration_s", kind="speed-up", form=".2f")
_ROUNDS, _MORE = Column("rounds", form=".0f"), Column("more_rounds", "", 100, ".0f")
_SKETCH = {"scheme": "homomorphic:mode=sketch"}
_RATES = {"100 Mb/s": "100mbit", "1 Gb/s": "1gbit"}
# Of an experiment: in words, the column that stands beside it here, of which cells, the paper's number, and where it says so.
_ROWS: list[tuple[str, str, Column, dict[str, Any], str, str]] = [
    ("gcomp-fidelity", "bytes / a ring's, mean over training", Column("ratio_mean", form=".2f"),
     {"scheme": "gcomp:importance=paper"}, "0.33 to 0.37", "GComp, Fig. 9"),
    ("gcomp-tolerance", "four levels, truncated, bytes / a ring's", Column("ratio_mean", form=".2f"),
     {"scheme": "gcomp:format=1,rounding=truncate"}, "0.33 to 0.37", "GComp, Fig. 9"),
    ("allreduce-gradient", "time of an all-reduce, x Gloo's", Column("time_s", kind="ratio"), {"scheme": "gcomp"},
     "0.47 to 0.62", "GComp, Fig. 10"),
    ("gcomp-load", "cores busy, %", Column("machine_load", "", 100, ".0f"), {"scheme": "gcomp:importance=paper"},
     "below 21.6", "GComp, Fig. 11"),
    ("gcomp-scaling", "throughput of 128 workers, x a ring's", Column("round_s", kind="speed-up"),
     {"scheme": "gcomp", "workers": 128, "codec": True}, "1.35 to 2.27, of 4 to 128", "GComp, Fig. 17"),
    ("train-resnet", "GComp's step at 100 Mb/s, times faster than DDP's", _FASTER, {"rate": "100mbit", "scheme": "gcomp"},
     "1.5 to 1.9", "GComp, Fig. 15"),
    *(("acp-shapes", f"Power-SGD: times fewer bytes, {workload}", Column("power_sgd", form=".1f"),
       {"of": "ratios", "workload": workload}, paper, "ACP-SGD, Table I")
      for workload, paper in (("resnet50", "67"), ("resnet152", "53"), ("bert-base", "16"), ("bert-large", "21"))),
    ("acp-shapes", "ACP-SGD, a step: times fewer bytes, resnet50", Column("acp_sgd", form=".1f"),
     {"of": "ratios", "workload": "resnet50"}, "-", "ACP-SGD, Table I"),
    *(("acp-iteration-resnet50", f"ACP-SGD's step at {name}, times faster than DDP's", _FASTER,
       {"rate": _RATES[name], "scheme": "acp-sgd:rank=4"}, paper, "ACP-SGD, Fig. 13")
      for name, paper in (("100 Mb/s", "-"), ("1 Gb/s", "4.06 at 10 Gb/s, mean of 4 models (abstract)"))),
    *(("aqgb-live", f"AQGB at {name}, times faster than DDP's ring", _FASTER, {"rate": rate, "scheme": "aqgb:bucket_mb=0.5"},
       "-", "AQGB, Fig. 10") for name, rate in _RATES.items()),
    *(("aqgb-fig10", f"rounds in 200 s, {name}", _ROUNDS, {"scheme": scheme, "jitter": "common"}, paper, "AQGB, Fig. 10")
      for name, scheme, paper in (("32-bit broadcast", "broadcast-32", "39"), ("4-bit broadcast", "broadcast-4", "130"),
                                  ("an uncompressed ring", "plain", "-"))),
    *(("aqgb-fig13", f"more rounds than 32 bits, %, {name}", _MORE, {"scheme": scheme, "sigma": 1.5}, paper, "AQGB, Fig. 13")
      for name, scheme, paper in (("4 bits", "broadcast-4", "126"), ("AQGB", "aqgb", "118"))),
    ("slimgc-speed-resnet50", "a step, times faster than the bare quantiser's", Column("speed_up", form=".2f"),
     {"scheme": lambda spec: str(spec).startswith("slimgc") and "backup" in str(spec)}, "1.04 to 1.76", "SlimGC, Fig. 12"),
    *(("slimgc-rivals", f"a step of {scheme.partition(':')[0]}, x that of slimgc", Column("iteration_s", kind="ratio"),
       {"scheme": scheme}, paper, "SlimGC, Table 3")
      for scheme, paper in (("terngrad", "1.17"), ("thc", "1.56"), ("top-k:share=0.1", "2.07"), ("dgc:share=0.1", "2.89"))),
    ("homomorphic-time-ncf", "a step of NCF, times faster than DDP's", _FASTER, _SKETCH, "2.01", "Homomorphic, Fig. 7"),
    ("homomorphic-time-lstm", "a step of the LSTM, times faster than DDP's", _FASTER, _SKETCH, "1.31", "Homomorphic, Fig. 7"),
    *(("homomorphic-shapes", f"a step of {name}, times faster than DDP's", _FASTER,
       {"workload": workload, "scheme": "homomorphic:mode=lossy,budget=0.1"}, paper, "Homomorphic, Fig. 7")
      for name, workload, paper in (("VGG19", "vgg19", "3.45"), ("BERT-base", "bert-base", "1.17"))),
]  # fmt: skip
CLAIMS: dict[str, list[Goal]] = {}
for _key, _says, _column, _where, _paper, _figure in _ROWS:
    CLAIMS.setdefault(_key, []).append(Goal(_says, _column, "", 0, _where, (), _paper, Ref(*_figure.split(", "))))
