"""Trainings to their end, under one scheme after another: where the loss goes, what is sent, how long it takes.

All trainings of a run are done by one set of ranks, started once. Each leaves a run folder as `gradwire train` does;
one that is finished there, with the code as it is, is not trained again.
"""

import dataclasses
import hashlib
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from gradwire import schemes
from gradwire.codecs.gcomp import GCompCodec, HuffmanTable, describe
from gradwire.registry import parse_spec
from gradwire_lab.bench.driver import Timing, as_rank
from gradwire_lab.bench.level_rule import entropy_bits, exponent_histogram
from gradwire_lab.bench.measures import Call, Measured
from gradwire_lab.ranks.launch import run_gradwire
from gradwire_lab.results.experiment import Cell
from gradwire_lab.results.records import Record
from gradwire_lab.results.sources import source_hash
from gradwire_lab.training import TrainConfig, launching, train_rank
from gradwire_lab.workloads.gradients import load_gradients

Values = npt.NDArray[np.float64]

# What a scheme's spec may say about the workload, since the best learning rate is not the same for every scheme. It may name
# `bucket_mb` too, DDP's bucket_cap_mb, which schemes that work by block want no larger than a block.
_WORKLOAD_PREFIX = "workload."
# Options of TrainConfig that a spec may name, and `local_sgd` an axis too: pseudo-gradients every so many steps, instead of
# gradients at every step.
_LOCAL_SGD: dict[str, Any] = {
    "local_sgd": 0, "outer": "nesterov", "outer_rate": 0.0, "feedback_decay": 1.0, "fragments": 1, "delay": 0
}  # fmt: skip
_RECENT_STEPS = 100
_WINDOW = 10  # steps below a loss before it counts as reached, as in GComp's paper (section 7.6)
_UNSTEADY_STEPS = 2  # DDP rebuilds its buckets in step 1
_FIELDS = ("optimizer", "learning_rate", "batch_size", "n_parameters", "ratio", "wire_bytes", "cpu_s", "exposed_s",
           "loss", "loss_last_10", "held_out_loss", "accuracy", "replicas_equal", "parameters_sha256", "rate_bps",
           "network")  # fmt: skip


class FinishedRun(NamedTuple):
    """A run folder's content."""

    summary: dict[str, Any]
    steps: list[dict[str, Any]]
    folder: Path | None = None

    def until(self, step: int | None) -> "FinishedRun":
        """The run's first so many steps; what was evaluated at its end is left out of a part."""
        if step is None or step >= len(self.steps):
            return self
        summary = {key: value for key, value in self.summary.items() if key not in ("held_out_loss", "accuracy")}
        return FinishedRun(summary, self.steps[:step], self.folder)

    def column(self, key: str) -> Values:
        """(n_steps,)."""
        return np.array([step[key] for step in self.steps], np.float64)


# ---- measures


def measure(call: Call) -> Measured:
    """One training a cell, or with an axis `step` its first steps; `baseline`, a scheme, is trained too if it is none
    of them. `deviation_mean`, `_max`: of |loss - the baseline's loss|; `seconds_to_loss`, `steps_to_loss`: until the
    loss stays below what the baseline's does in its last fifth; of the baseline, with `dump_every`, `exponent_bits`."""
    baseline = call.get("baseline")
    asked = [*call.cells, *({**cell, "scheme": baseline} for cell in call.cells if baseline is not None)]
    configs = {_name(cell): configure(call, cell, str(cell["scheme"])) for cell in asked}
    runs = train_all(configs, int(call.get("ranks", 4)), str(call.get("rate", "none")), call.folder)
    records = []
    for cell in call.cells:
        run, reference = runs[_name(cell)], runs.get(_name({**cell, "scheme": baseline}))
        record = describe_run(run.until(cell.get("step")), reference)
        if run is reference and call.get("dump_every"):
            record |= exponent_bits(run)
        records.append((cell, record))
    return records


def configure(call: Call, cell: Cell, spec: str) -> TrainConfig:
    """The training of a cell under the scheme `spec`. Raises: InvalidArgument, Unsupported (what there is not)."""
    (workload, workload_options), (scheme, options) = parse_spec(str(call.get("workload"))), parse_spec(spec)
    for key in [key for key in options if key.startswith(_WORKLOAD_PREFIX)]:
        workload_options[key.removeprefix(_WORKLOAD_PREFIX)] = options.pop(key)
    workload_options |= {key: cell[key] for key in ("fold",) if key in cell}
    bucket_mb = options.pop("bucket_mb", call.get("bucket_mb"))
    is_baseline = spec == call.get("baseline")
    given = {} if is_baseline else {key: cell[key] for key in ("local_sgd",) if key in cell}
    local = {key: type(value)(options.pop(key, given.get(key, value))) for key, value in _LOCAL_SGD.items()}
    config = TrainConfig(
        workload=workload,
        workload_options=workload_options,
        scheme=scheme,
        scheme_options=schemes.as_published(scheme, options),
        steps=int(call.get("steps", 300)),
        batch_size=call.get("batch_size"),
        seed=int(cell.get("seed", call.get("seed", 0))),
        bucket_cap_mb=None if bucket_mb is None else float(bucket_mb),
        dump_gradients_every=int(call.get("dump_every", 0)) if is_baseline else 0,
        out=call.folder,
        **local,
    )
    launching.check(config)
    return config


# ---- what is made of a run


def describe_run(run: FinishedRun, baseline: FinishedRun | None) -> Record:
    """One flat record of a training, beside that of the baseline."""
    record = {key: run.summary.get(key) for key in _FIELDS}
    steady = slice(min(_UNSTEADY_STEPS, len(run.steps) - 1), None)
    iteration_s, cpu_s, ratio = run.column("iteration_s")[steady], run.column("cpu_s")[steady], run.column("ratio")
    cores = float(cpu_s.sum() / iteration_s.sum())
    record |= Timing.of(iteration_s.tolist()).fields("iteration_s")
    record |= {"cores_per_rank": cores, "machine_load": cores * run.summary["ranks"] / run.summary["n_cores"]}
    record |= {"ratio_mean": float(ratio.mean()), "ratio_last_10": float(ratio[-10:].mean())}
    record["elapsed_s"] = run.steps[-1]["elapsed_s"]
    record["loss_recent"] = float(run.column("loss")[-_RECENT_STEPS:].mean())
    if baseline is not None:
        losses, theirs = run.column("loss"), baseline.column("loss")[: len(run.steps)]  # means over the ranks
        # What the baseline stays at or below in its last fifth is the slowest honest choice that is reached.
        deviation, target = np.abs(losses - theirs), float(theirs[-max(_WINDOW, theirs.size // 5) :].max())
        reached = first_below(losses, target)
        record |= {"deviation_mean": float(deviation.mean()), "deviation_max": float(deviation.max())}
        record |= {"target_loss": target, "steps_to_loss": None if reached is None else reached + 1}
        record["seconds_to_loss"] = None if reached is None else float(run.column("elapsed_s")[reached])
    return record


def first_below(losses: Values, target: float) -> int | None:
    """The last of the first ten steps in a row whose losses are at most `target`; None if there are none."""
    starts = range(losses.size - _WINDOW + 1)
    return next((at + _WINDOW - 1 for at in starts if (losses[at : at + _WINDOW] <= target).all()), None)


def exponent_bits(run: FinishedRun) -> Record:
    """GComp's Fig. 13a: the exponent part of its messages under the built-in table for ever, and under refreshed ones.
    The saved gradients are encoded again, as the sums that the ring's last hops carry. A refreshed table is of the one
    saved before, as old as one in training ever gets if they are saved as often as tables are made."""
    assert run.folder is not None
    bits: dict[str, list[float]] = {"static_bits": [], "refreshed_bits": [], "entropy_bits": []}
    earlier: HuffmanTable | None = None
    for path in sorted((run.folder / "gradients").glob("step-*.npz")):
        gradient = load_gradients(path).gradient * np.float32(run.summary["ranks"])
        histogram = exponent_histogram(gradient)
        if earlier is not None:
            bits["entropy_bits"].append(entropy_bits(histogram))
            for name, table in (("static_bits", None), ("refreshed_bits", earlier)):
                codec = GCompCodec("none", table=table)
                out = torch.empty(codec.max_encoded_bytes(gradient.size, torch.float32), dtype=torch.uint8)
                n_bytes = codec.encode(torch.from_numpy(gradient), out)
                bits[name].append(float(describe(out[:n_bytes])["exponent_bits"]))
        earlier = HuffmanTable.from_histogram(torch.from_numpy(histogram))
    return {name: float(np.mean(values)) for name, values in bits.items() if values}


# ---- trainings


def train_all(configs: dict[str, TrainConfig], n_ranks: int, rate: str, folder: Path) -> dict[str, FinishedRun]:
    """Train what is not finished; every run by its name. `out` of the configurations is replaced."""
    trainings = folder.resolve() / "trainings" / source_hash(__name__)
    placed: dict[str, TrainConfig] = {}
    for name, config in configs.items():
        # What is trained in words, and a digest of all that sets trainings apart.
        asked = json.dumps([dataclasses.asdict(config) | {"out": None}, n_ranks, rate], default=str, sort_keys=True)
        words = f"{config.workload}--{config.scheme}--seed-{config.seed}--{config.steps}-steps--{n_ranks}-ranks"
        folder_name = f"{words}--{hashlib.blake2b(asked.encode(), digest_size=8).hexdigest()}"
        placed[name] = dataclasses.replace(config, out=trainings / folder_name)
    if left := {config.out: config for config in placed.values() if find_finished(config) is None}:
        run_in_ranks(list(left.values()), n_ranks, rate)
    found = {name: run for name, config in placed.items() if (run := find_finished(config)) is not None}
    assert found.keys() == placed.keys(), f"trainings ended without a word: {placed.keys() - found.keys()}"
    return found


def find_finished(config: TrainConfig) -> FinishedRun | None:
    """The run if its folder holds one that came to its end, else None. The folder's name tells the configuration."""
    folder = config.out
    assert folder is not None
    try:
        summary = json.loads((folder / "summary.json").read_text(encoding="utf-8"))
        steps = [json.loads(line) for line in (folder / "steps.jsonl").read_text(encoding="utf-8").splitlines()]
    except (OSError, ValueError):
        return None
    every = config.dump_gradients_every
    is_dumped = not every or (folder / "gradients" / f"step-{(config.steps - 1) // every * every:08}.npz").exists()
    if not is_dumped or [step["step"] for step in steps] != list(range(config.steps)):
        return None
    return FinishedRun(summary, steps, folder)


def run_in_ranks(configs: Sequence[TrainConfig], n_ranks: int, rate: str) -> None:
    """Train one after another in one set of ranks. Raises: PeerLost (a rank failed)."""
    each = rate.split(",") if "," in rate else rate
    run_gradwire([launching.to_text(config) for config in configs], n_ranks, each, module=__name__)


def train_as_rank(texts: Sequence[str]) -> None:
    """A rank's side: train every configuration, in one process group."""
    configs = [launching.from_text(text) for text in texts]
    with as_rank():
        for number, config in enumerate(configs, start=1):
            summary = train_rank(config).summary
            if int(os.environ["RANK"]) == 0:
                options = ",".join(f"{key}={value}" for key, value in config.scheme_options.items())
                words = f"{number}/{len(configs)} {config.workload}, {config.scheme}:{options}, seed {config.seed}"
                print(f"    {words}: loss {summary['loss_last_10']:.4f} ({summary['total_s']:.0f} s)", flush=True)


def _name(cell: Cell) -> str:
    return json.dumps(cell, default=str, sort_keys=True)


if __name__ == "__main__":
    train_as_rank(sys.argv[1:])
