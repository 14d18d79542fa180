"""`gradwire bench run` of one small experiment of our own: two trainings of two ranks each, at the rates of argv[1]."""

import sys

from gradwire_lab.cli import main
from gradwire_lab.cli.bench import experiments
from gradwire_lab.results.experiment import Experiment

if __name__ == "__main__":
    rates, *rest = sys.argv[1:]
    experiments.EXPERIMENTS = (
        Experiment(
            "small", "schemes", "?", "train",
            axes={"seed": [1, 2], "scheme": ["ddp", "gcomp"]},
            fixed={"workload": "many-tensors", "ranks": 2, "rate": rates, "steps": 3, "warmup": 1},
        ),
    )  # fmt: skip
    sys.exit(main(["bench", "run", "small", *rest]))
