"""Everything that is measured, as data: one module a system, the experiments of each in the order of its page."""

from dataclasses import replace
from pathlib import Path

from gradwire_lab.bench.catalogue import acp_sgd, aqgb, gcomp, homomorphic, lossy, papers, schemes, sites, slimgc
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
    "optimizers": "Muon beside AdamW, and a long run",
    "sites": "Between sites",
    "shards": "FSDP2's own transfers",
    "defaults": "Defaults beside Adam: plain first steps, levels, groups, ranks",
    "simulator": "The simulator",
    COVERAGE: "The papers' figures and tables, one by one",
}

_MODULES = (schemes, gcomp, acp_sgd, aqgb, slimgc, homomorphic, lossy, sites)
_MEASURED = [one for module in _MODULES for one in module.EXPERIMENTS]
# With what the papers claim beyond their goals, and what differs from the papers' conditions.
EXPERIMENTS: tuple[Experiment, ...] = tuple(
    replace(one, goals=[*papers.CLAIMS.get(one.key, ()), *one.goals], differs=papers.DIFFERS.get(one.key, ""))
    for one in sorted(_MEASURED, key=lambda one: list(SYSTEMS).index(one.system))
)

# Tables for other pages, between `<!-- generated: bench render NAME -->` and `<!-- end -->`.
SNIPPETS: dict[str, tuple[str, Table]] = {
    "gcomp-beside-bf16": ("gcomp-tolerance", gcomp.BESIDE_BF16),
    "auto-speed": ("regret", schemes.AUTO_TABLE),
    "readme-speed": ("train-resnet", schemes.README_TABLE),
    "schemes-speed": ("train-resnet", schemes.SPEED_TABLE),
}


def book(root: Path) -> Book:
    """The pages of the checkout at `root`."""
    return Book(root, EXPERIMENTS, SYSTEMS, SNIPPETS, papers.LEFT_OUT, code_of)
