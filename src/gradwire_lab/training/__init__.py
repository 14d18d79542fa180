"""The training job: what `gradwire train` runs in each rank, and what tests and benchmarks call directly."""

from gradwire_lab.training.config import TrainConfig, TrainResult
from gradwire_lab.training.loop import train_rank

__all__ = ["TrainConfig", "TrainResult", "train_rank"]
