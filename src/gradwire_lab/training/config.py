"""What a training run is given, and what it gives back."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gradwire import checks
from gradwire.errors import InvalidArgument
from gradwire_lab.training.sharding import SHARDED


@dataclass(frozen=True)
class TrainConfig:
    """One run; the same on all ranks."""

    workload: str = "gpt"
    workload_options: dict[str, Any] = field(default_factory=dict)
    # a name in `gradwire.schemes.names()`; "ddp", "ddp-bf16", "ddp-fp16", "ddp-powersgd": DistributedDataParallel without
    # gradwire, with PyTorch's hook; "fully-shard", "fsdp2-shards": FSDP2 over all ranks, without gradwire and with it
    scheme: str = "gcomp"
    scheme_options: dict[str, Any] = field(default_factory=dict)
    steps: int = 100  # the step number to train up to; a resumed run does what is left
    batch_size: int | None = None  # samples per rank; None takes the workload's
    seed: int = 0  # of weights and data
    deterministic: bool = True  # torch's deterministic algorithms
    device: str = "cpu"  # "cpu", or "cuda" for GPU LOCAL_RANK
    # torch's threads per rank; None: 1 when several ranks share the machine, else torch's default
    n_threads: int | None = None
    bucket_cap_mb: float | None = None  # DDP's; None takes its default
    out: Path | None = None  # folder for config.json, steps.jsonl, summary.json; None writes nothing
    trace: bool = False  # write a Chrome trace per rank into `out` (open it in Perfetto)
    # rank 0 writes gradient, parameters and optimizer state of every such step (0, EVERY, ...) into `out`/gradients; 0:
    # never. The writing counts to that step's time.
    dump_gradients_every: int = 0
    # folder of checkpoints, written every `save_every` steps (0: at the end only) and at the end
    checkpoint: Path | None = None
    resume: bool = False  # continue from the newest checkpoint there, if any
    save_every: int = 0
    # steps before which the model is wrapped in a new DDP and the scheme attached anew, as a resumption does: a run
    # that does so is bit-identical to one that stops there and resumes
    rewrap_at: tuple[int, ...] = ()
    evaluate: bool = True
    # H; ranks step by themselves and exchange pseudo-gradients every H steps (`LocalSgd`). 0: gradients, every step.
    # `outer`: its outer optimizer, "nesterov" (DiLoCo's) or "average", `outer_rate` its learning rate (0: its own);
    # `feedback_decay`: share of the residuals that lasts from one exchange to the next; `fragments` and `delay`: as
    # LocalSgd's.
    local_sgd: int = 0
    outer: str = "nesterov"
    outer_rate: float = 0.0
    feedback_decay: float = 1.0
    fragments: int = 1
    delay: int = 0

    def __post_init__(self) -> None:
        """Raises: InvalidArgument."""
        checks.count("steps", self.steps)
        if self.batch_size is not None:
            checks.count("batch_size", self.batch_size)
        for name in ("save_every", "dump_gradients_every", "local_sgd"):
            if getattr(self, name) < 0:
                raise InvalidArgument(f"{name}={getattr(self, name)}: expected a number of steps, or 0 (never)")
        if self.checkpoint is None and (self.resume or self.save_every):
            raise InvalidArgument(
                "to resume or to save there must be a folder for it: pass checkpoint=DIR (--checkpoint DIR)"
            )
        if self.out is None and (self.trace or self.dump_gradients_every):
            raise InvalidArgument(
                "traces and gradients are written into the run's folder: pass out=RUN_DIR (--out RUN_DIR)"
            )
        if self.local_sgd and (self.scheme.startswith("ddp") or self.checkpoint is not None or self.rewrap_at):
            raise InvalidArgument(
                "with local SGD there is no DDP, and each rank has a state of its own: take a scheme such as plain, and leave "
                "checkpoints out (a loop of your own saves them: gradwire.LocalSgd.state_dict)"
            )
        outside = ("checkpoint", "rewrap_at", "dump_gradients_every", "local_sgd", "bucket_cap_mb")
        if self.scheme in SHARDED and (any(getattr(self, name) for name in outside) or self.device != "cpu"):
            words = ", ".join(outside)
            raise InvalidArgument(f"{self.scheme} cuts the model into shards, on CPUs: leave out {words} and device")
        checks.choice("outer", self.outer, ("nesterov", "average"))
        checks.choice("device", self.device, ("cpu", "cuda"))

    def identity(self) -> dict[str, Any]:
        """What must be the same for a checkpoint of one run to continue in another."""
        options = {name: repr(sorted(getattr(self, name).items())) for name in ("workload_options", "scheme_options")}
        return options | {name: getattr(self, name) for name in ("workload", "scheme", "batch_size", "seed")}


@dataclass(frozen=True)
class TrainResult:
    """What a run came to; the same on all ranks."""

    # one flat record a step (this run's own steps, not those before a resumption), as in steps.jsonl
    steps: list[dict[str, Any]]
    summary: dict[str, Any]  # one record, as in summary.json (machine and versions on rank 0 only)
    parameters_sha256: str  # of all parameters, equal on all ranks

    @property
    def losses(self) -> list[float]:
        """The loss of each step, as the mean over the ranks in float64."""
        return [record["loss"] for record in self.steps]
