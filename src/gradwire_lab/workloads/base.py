"""What every workload gives to a training loop."""

import contextlib
import hashlib
import itertools
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from typing import Any, ClassVar

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler

from gradwire import checks
from gradwire.errors import InvalidArgument, Unsupported

Batch = tuple[Tensor, Tensor]  # (inputs, targets) of one rank at one step


# name: (class, options, default learning rate, default weight decay)
_OPTIMIZERS: dict[str, tuple[Callable[..., Optimizer], dict[str, Any], float, float]] = {
    "sgd": (torch.optim.SGD, {}, 0.1, 0.0),
    "momentum": (torch.optim.SGD, {"momentum": 0.9}, 0.05, 5e-4),
    "nesterov": (torch.optim.SGD, {"momentum": 0.9, "nesterov": True}, 0.05, 5e-4),
    "adagrad": (torch.optim.Adagrad, {}, 1e-2, 0.0),
    "rmsprop": (torch.optim.RMSprop, {}, 1e-3, 0.0),
    "adam": (torch.optim.Adam, {}, 1e-3, 0.0),
    "adamw": (torch.optim.AdamW, {}, 1e-3, 1e-2),
    "amsgrad": (torch.optim.Adam, {"amsgrad": True}, 1e-3, 0.0),
    "muon": (torch.optim.Muon, {}, 0.02, 0.0),  # of hidden matrices, with AdamW for the rest
}

# How a learning rate follows the batch: not at all; so that an epoch moves the weights as far; or so that a step's variance
# stays (SlimGC, section 4.3.1).
_SCALINGS: dict[str, Callable[[float], float]] = {"none": lambda factor: 1.0, "linear": float, "square-root": math.sqrt}


class Workload(ABC):
    """A model with its data, loss and optimizer, all functions of the seed and the step. Rank r takes the r-th slice of one
    *global* batch a step, so that 4 ranks of 8 samples train on the same samples as 1 rank of 32.

    Args:
        optimizer: one of the seven of the GComp paper, "amsgrad", or "muon" with AdamW beside it; default: the workload's own.
        learning_rate, weight_decay: default: the optimizer's for this workload.
        schedule: "constant" or "cosine" (with `warmup_steps`, down to 0 at `schedule_steps`).
        batch_size: samples per rank and step.
        rate_scaling: "none", "linear" or "square-root": how the learning rate follows the global batch.
    """

    default_optimizer: ClassVar[str] = "adamw"
    default_batch_size: ClassVar[int] = 8
    # Learning rates that are others for this workload.
    learning_rates: ClassVar[dict[str, float]] = {}
    # The papers' model that the workload stands for.
    stands_for: str = ""
    # "real", or "emulate" when waits stand for forward and backward.
    compute: str = "real"

    # "real": data with something to learn, so that its loss means something. "shape-only": random inputs of the right
    # shape, for timing alone.
    data: str = "real"

    def __init__(
        self,
        *,
        name: str,
        optimizer: str | None = None,
        learning_rate: float | None = None,
        weight_decay: float | None = None,
        schedule: str = "constant",
        schedule_steps: int = 1000,
        warmup_steps: int = 0,
        batch_size: int | None = None,
        rate_scaling: str = "none",
    ) -> None:
        self.name = name
        self.rate_scaling = checks.choice("rate_scaling", rate_scaling, _SCALINGS)
        self.optimizer = checks.choice("optimizer", optimizer or self.default_optimizer, _OPTIMIZERS)
        self.learning_rate = learning_rate if learning_rate is not None else self.learning_rates.get(self.optimizer)
        self.weight_decay = weight_decay
        checks.choice("schedule", schedule, ("constant", "cosine"))
        if not 0 <= warmup_steps < schedule_steps:
            raise InvalidArgument(f"warmup_steps={warmup_steps}: expected 0 <= warmup_steps < {schedule_steps=}")
        self.schedule, self.schedule_steps, self.warmup_steps = schedule, schedule_steps, warmup_steps
        self.batch_size = checks.count("batch_size", self.default_batch_size if batch_size is None else batch_size)

    @abstractmethod
    def make_model(self) -> nn.Module:
        """The model, initialised from torch's default generator (which `build_model` seeds)."""

    @abstractmethod
    def batch_at(self, step: int, rank: int, world_size: int, batch_size: int, seed: int) -> Batch:
        """The batch of `rank` at `step`, whatever was drawn before."""

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        """() float: the mean loss of `batch`, a classifier's; call it with the DDP module, so that its hooks run."""
        return F.cross_entropy(model(batch[0]).flatten(0, -2), batch[1].flatten())

    def evaluate(self, model: nn.Module) -> dict[str, float]:
        """Figures on held-out data (accuracy, loss), or {} when the data is shape-only; leaves the model's mode as it was."""
        return {}

    def mean_loss(self, model: nn.Module, batch: Batch, n_at_once: int) -> float:
        """The mean loss of a large batch, taken in pieces, in evaluation mode."""
        with evaluating(model) as device:
            pieces = zip(*(one.to(device).split(n_at_once) for one in batch), strict=True)
            losses = [float(self.loss(model, piece)) for piece in pieces]
        return sum(losses) / len(losses)

    def build_model(self, seed: int) -> nn.Module:
        """The model with the weights that `seed` stands for; torch's own random state is left alone."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            return self.make_model()

    def build_optimizers(self, model: nn.Module) -> list[Optimizer]:
        """The optimizers over all of the model's parameters: one, or Muon and AdamW, each with a rate of its own."""
        if self.optimizer != "muon":
            return [self.build_optimizer(model)]
        matrices = hidden_matrices(model)
        rest = [parameter for parameter in model.parameters() if not any(parameter is one for one in matrices)]
        return [self._build("muon", matrices), self._build("adamw", rest)]

    def build_optimizer(self, model: nn.Module) -> Optimizer:
        """The optimizer over all of the model's parameters. Raises: Unsupported (there are two: `build_optimizers`)."""
        if self.optimizer == "muon":
            raise Unsupported("Muon has AdamW beside it, and this works with one optimizer: take another one")
        return self._build(self.optimizer, model.parameters())

    def _build(self, name: str, parameters: Iterable[Tensor]) -> Optimizer:
        cls, options, _, decay = _OPTIMIZERS[name]
        decay = decay if self.weight_decay is None else self.weight_decay
        return cls(parameters, lr=self._rate_of(name), weight_decay=decay, **options)

    def _rate_of(self, name: str) -> float:
        given = self.learning_rate if name == self.optimizer else self.learning_rates.get(name)
        n_ranks = dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1
        factor = _SCALINGS[self.rate_scaling](n_ranks * self.batch_size / self.default_batch_size)
        return factor * (_OPTIMIZERS[name][2] if given is None else given)

    def build_schedulers(self, several: Iterable[Optimizer]) -> list[LRScheduler]:
        """The learning-rate schedule of each, or none for a constant rate."""
        if self.schedule == "constant":
            return []
        warmup_steps, schedule_steps = self.warmup_steps, self.schedule_steps

        def factor_at(step: int) -> float:
            if step < warmup_steps:
                return (step + 1) / warmup_steps
            share = min(1.0, (step - warmup_steps) / (schedule_steps - warmup_steps))
            return 0.5 * (1.0 + math.cos(math.pi * share))

        return [LambdaLR(optimizer, factor_at) for optimizer in several]

    def batches(
        self, rank: int, world_size: int, batch_size: int | None = None, seed: int = 0, start_step: int = 0
    ) -> Iterator[Batch]:
        """The batches of `rank` from `start_step` on, without end; the step number is their whole state."""
        if not 0 <= rank < world_size:
            raise InvalidArgument(f"rank {rank} is not in a world of {world_size}")
        for step in itertools.count(start_step):
            yield self.batch_at(step, rank, world_size, batch_size or self.batch_size, seed)

    def ddp_options(self) -> dict[str, Any]:
        """Keyword arguments that this workload's model wants DistributedDataParallel to have."""
        return {}

    def describe(self) -> dict[str, Any]:
        """Plain values for a run's records."""
        return {
            "workload": self.name,
            "data": self.data,
            "compute": self.compute,
            "emulated": self.compute == "emulate",
            "optimizer": self.optimizer,
            "learning_rate": self._rate_of(self.optimizer),
            "batch_size": self.batch_size,
            "stands_for": self.stands_for,
        }


def step_generator(*key: int | str) -> torch.Generator:
    """A CPU generator whose numbers depend on `key` (seed, step, purpose, ...) and nothing else."""
    digest = hashlib.sha256(repr(key).encode()).digest()
    generator = torch.Generator()
    generator.manual_seed(int.from_bytes(digest[:7], "little"))  # 56 bits: within what manual_seed takes as is
    return generator


def draw_from_epochs(n_samples: int, step: int, rank: int, world_size: int, batch_size: int, seed: int) -> Tensor:
    """(batch_size,) int64: this rank's samples at `step`. Epochs are permutations of all, one after the other without a gap."""
    first = (step * world_size + rank) * batch_size
    positions = torch.arange(first, first + batch_size)
    indices = torch.empty(batch_size, dtype=torch.int64)
    for epoch in range(first // n_samples, (first + batch_size - 1) // n_samples + 1):
        chosen = positions // n_samples == epoch
        permutation = torch.randperm(n_samples, generator=step_generator(seed, "epoch", epoch))
        indices[chosen] = permutation[positions[chosen] % n_samples]
    return indices


@contextlib.contextmanager
def evaluating(model: nn.Module) -> Iterator[torch.device]:
    """Evaluation mode without gradients inside the block, on the device that it gives; modes come back after it."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        with torch.no_grad():
            yield next(model.parameters()).device
    finally:
        for module, mode in modes:
            module.training = mode


def hidden_matrices(model: nn.Module) -> list[torch.Tensor]:
    """What Muon is for: matrices of linear layers, but for a head, the last linear layer of the model's own children."""
    inner = model.module if isinstance(model, DistributedDataParallel) else model
    heads = [child for child in inner.children() if isinstance(child, nn.Linear)][-1:]
    linears = [one for one in inner.modules() if isinstance(one, nn.Linear) and one not in heads]
    embedded = {one.weight for one in inner.modules() if isinstance(one, nn.Embedding)}  # a tied head is one of these
    found = list(dict.fromkeys(one.weight for one in linears if one.weight not in embedded))
    if not found:
        raise Unsupported("Muon is for hidden matrices, and this model has none: take another optimizer")
    return found
