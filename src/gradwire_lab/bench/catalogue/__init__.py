"""Everything that is measured, as data: one module a system, the experiments of each in the order of its page."""

from __future__ import annotations

from pathlib import Path

from gradwire_lab.bench.catalogue import (
    acp_sgd,
    aqgb,
    auto,
    codecs,
    gcomp,
    homomorphic,
    lossy,
    schemes,
    simulator,
    slimgc,
)
from gradwire_lab.bench.measures import code_of
from gradwire_lab.results.experiment import Experiment, Table
from gradwire_lab.results.pages import COVERAGE, Book

# {name of the page: its title}, in the order of the overview.
SYSTEMS = {
    "auto": "`auto`: what choosing costs",
    "schemes": "Every scheme: training and all-reduce",
    "codecs": "Codecs: ratio and speed",
    "gcomp": "GComp",
    "acp-sgd": "ACP-SGD and Power-SGD",
    "aqgb": "AQGB",
    "slimgc": "SlimGC",
    "homomorphic": "Homomorphic compression",
    "lossy": "Which scheme under which optimizer",
    "simulator": "The simulator",
    COVERAGE: "The papers' figures and tables, one by one",
}

_MODULES = (auto, schemes, codecs, gcomp, acp_sgd, aqgb, slimgc, homomorphic, lossy, simulator)
EXPERIMENTS: tuple[Experiment, ...] = tuple(one for module in _MODULES for one in module.EXPERIMENTS)

# Tables for other pages, between `<!-- generated: bench render NAME -->` and `<!-- end -->`.
SNIPPETS: dict[str, tuple[str, Table]] = {
    "gcomp-beside-bf16": ("gcomp-frontier", gcomp.BESIDE_BF16),
    "auto-speed": ("regret", auto.README_TABLE),
    "readme-speed": ("train-resnet", schemes.README_TABLE),
    "schemes-speed": ("train-resnet", schemes.SPEED_TABLE),
}

# The papers' figures and tables that nothing here gives.
LEFT_OUT = {
    ("GComp", "Fig. 1"): "scaling of large models on its authors' cluster",
    **{("GComp", f"Fig. {n}"): "the method: `docs/format.md`" for n in (4, 5, 6, 7, 8)},
    ("GComp", "Table 1"): "the method: `docs/format.md`",
    ("GComp", "Table 2"): "metrics of seven optimizers: proven in `tests/recovery/test_quantisation_metric.py`",
    ("ACP-SGD", "Fig. 1"): "the method: proven against transcriptions in `tests/distributed/test_low_rank_oracles.py`",
    ("ACP-SGD", "Fig. 4"): "the method: proven against transcriptions in `tests/distributed/test_low_rank_oracles.py`",
    ("AQGB", "Table 1"): "a model's blocks: the simulator's workload `resnet50-4blocks`",
    ("SlimGC", "Fig. 2"): "in `stats()` and the report of every run of `slimgc`",
    ("SlimGC", "Fig. 6"): "in `stats()` and the report of every run of `slimgc`",
    ("SlimGC", "Fig. 14"): "memory of a GPU",
    ("Homomorphic", "Fig. 1"): "an example: `docs/format.md`",
    ("Homomorphic", "Table 1"): "models and their sparsity: data that cannot be had here",
}


def book(root: Path) -> Book:
    """The pages of the checkout at `root`."""
    return Book(root, EXPERIMENTS, SYSTEMS, SNIPPETS, LEFT_OUT, code_of)
