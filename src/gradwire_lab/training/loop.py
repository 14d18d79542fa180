"""The training loop of one rank."""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore

from gradwire.errors import InvalidArgument, PeerLost, Unsupported
from gradwire.telemetry.environment import describe_environment
from gradwire.telemetry.jsonl import JsonLines
from gradwire.telemetry.stopwatch import Stopwatch, processor_watch
from gradwire_lab.ranks.network import current_network
from gradwire_lab.results.records import write_json, write_text
from gradwire_lab.training import checkpoints
from gradwire_lab.training.config import TrainConfig, TrainResult
from gradwire_lab.training.digest import check_equal, gather_hashes, hash_parameters
from gradwire_lab.training.meter import Meter
from gradwire_lab.training.session import TrainingSession, n_parameters
from gradwire_lab.training.torch_hooks import HOOKS
from gradwire_lab.workloads import Workload, by_name
from gradwire_lab.workloads.gradients import write_snapshot

_describe_environment = functools.cache(describe_environment)  # several runs of a process ask once

# Ranks exchange their figures this often: each exchange costs some milliseconds on a slow network.
_GATHER_EVERY = 10

Progress = Callable[[dict[str, Any]], None]  # called on rank 0 with a step's record


def train_rank(config: TrainConfig, on_progress: Progress | None = None) -> TrainResult:
    """Train as one rank, to the end of `config.steps`; call it in every rank.

    Uses the default process group if there is one; else makes it from torchrun's environment variables, or for this
    process alone when they are not set, and takes it down again.

    Raises: InvalidArgument, Unsupported (configuration), RankMismatch, PeerLost (other ranks), CorruptMessage,
        IncompatibleVersion (checkpoints).
    """
    device = _choose_device(config.device)
    own_group = not dist.is_initialized()
    if own_group:
        alone: dict[str, Any] = {} if "RANK" in os.environ else {"store": HashStore(), "rank": 0, "world_size": 1}
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo", **alone)
    local_ranks = int(os.environ.get("LOCAL_WORLD_SIZE", dist.get_world_size()))
    n_threads = config.n_threads or (1 if local_ranks > 1 else None)
    threads_before, deterministic_before = torch.get_num_threads(), torch.are_deterministic_algorithms_enabled()
    if n_threads is not None:
        torch.set_num_threads(n_threads)  # ranks that share a machine would otherwise fight for its cores
    torch.use_deterministic_algorithms(config.deterministic, warn_only=True)
    try:
        workload = by_name(config.workload, **config.workload_options)
        result = _Run(config, workload, device, on_progress).run()
    except RuntimeError as error:
        # Gloo says so only in its message, from collectives of DDP's or ours; the scheme's own raise PeerLost.
        if "gloo" in str(error) or isinstance(error, dist.DistError):
            raise PeerLost(f"rank {dist.get_rank()} lost a peer: {str(error).splitlines()[0][:300]}") from error
        raise
    finally:
        torch.set_num_threads(threads_before)
        torch.use_deterministic_algorithms(deterministic_before)
    if own_group:
        dist.destroy_process_group()
    return result


class _Run:
    def __init__(
        self, config: TrainConfig, workload: Workload, device: torch.device, on_progress: Progress | None
    ) -> None:
        self._config, self._workload, self._device, self._on_progress = config, workload, device, on_progress
        self._rank, self._world_size = dist.get_rank(), dist.get_world_size()
        self._batch_size = config.batch_size or workload.batch_size
        self._saved_step = -1

    def run(self) -> TrainResult:
        config, workload = self._config, self._workload
        torch.manual_seed(config.seed + self._rank)  # for dropout; weights and data have generators of their own
        session = TrainingSession(config, workload, self._device)
        start_step = self._prepare(session)
        meter = Meter(self._device, is_computed=config.scheme in HOOKS)
        description = self._describe(n_parameters(session.model), start_step)
        files = _RunFiles(config.out, description, start_step) if config.out and self._rank == 0 else None
        self._add_trace(session)
        watch = Stopwatch()
        batches = workload.batches(self._rank, self._world_size, self._batch_size, config.seed, start_step)
        for step in range(start_step, config.steps):
            inputs, targets = next(batches)
            batch = (inputs.to(self._device), targets.to(self._device))
            if step in config.rewrap_at and step != start_step:
                session.rewrap()
                self._add_trace(session)
            meter.add(step, self._take_step(session, batch, step))
            done = step + 1
            saving = config.save_every > 0 and done % config.save_every == 0
            if done % _GATHER_EVERY == 0 or done == config.steps or saving:
                for record in meter.gather():
                    if files is not None:
                        files.steps.append(record)
                    if self._on_progress is not None and self._rank == 0:
                        self._on_progress(record)
            if saving:
                self._save(session, done)
        if config.checkpoint is not None and self._saved_step != config.steps and start_step < config.steps:
            self._save(session, config.steps)
        summary = description | self._finish(session, meter)
        summary["total_s"] = watch.elapsed_s
        if files is not None:
            files.finish(summary)
        return TrainResult(meter.records, summary, summary["parameters_sha256"])

    def _prepare(self, session: TrainingSession) -> int:
        """Load the newest checkpoint if asked to, wrap the model; returns the step to begin with."""
        config = self._config
        newest = checkpoints.find_newest(config.checkpoint) if config.resume and config.checkpoint else None
        if newest is None:
            session.wrap()
            return 0
        step, shared, own = checkpoints.load(newest, config.identity(), self._world_size, self._rank)
        if step >= config.steps:
            raise InvalidArgument(f"{newest} is already at step {step}: pass --steps above it to train on")
        session.load_shared_state(shared)
        session.wrap(own["scheme"])
        torch.set_rng_state(own["random_state"])
        self._saved_step = step
        return step

    def _take_step(
        self, session: TrainingSession, batch: tuple[torch.Tensor, torch.Tensor], step: int
    ) -> dict[str, float]:
        """One step; returns its figures."""
        watch, processor = Stopwatch(), processor_watch()
        session.zero_grad()
        loss = self._workload.loss(session.ddp, batch)
        loss.backward()
        forward_backward_s, waited_s = watch.elapsed_s, session.since_last_gradient_s()
        every = self._config.dump_gradients_every
        if every and step % every == 0 and self._rank == 0:
            assert self._config.out is not None
            write_snapshot(self._config.out / "gradients" / f"step-{step:08}.npz", session.optimizers[0], step + 1)
        session.update()
        # Reading the loss waits for a GPU, so the step's time is whole.
        loss_value = float(loss.detach())
        iteration_s = watch.elapsed_s
        return session.step_figures(waited_s) | {
            "loss": loss_value,
            "iteration_s": iteration_s,
            "forward_backward_s": forward_backward_s,
            "optimizer_s": iteration_s - forward_backward_s,
            "cpu_s": processor.elapsed_s,  # of all threads: the codec's and the lane's too
        }

    def _save(self, session: TrainingSession, step: int) -> None:
        assert self._config.checkpoint is not None
        if session.replicas_may_differ:
            raise Unsupported(
                f"scheme {self._config.scheme!r} lets the replicas differ, and a checkpoint holds one model: "
                "run it without --checkpoint, or take another scheme"
            )
        own = {"scheme": session.scheme_state(), "random_state": torch.get_rng_state()}
        shared = session.shared_state()
        checkpoints.save(self._config.checkpoint, step, self._config.identity(), shared, own, self._device)
        self._saved_step = step

    def _finish(self, session: TrainingSession, meter: Meter) -> dict[str, Any]:
        """Close the scheme, compare the replicas, evaluate."""
        session.flush()
        hashes = gather_hashes(hash_parameters(session.model), self._device)
        equal = len(set(hashes)) == 1
        if not session.replicas_may_differ:
            check_equal(hashes, self._config.steps)
        evaluation: dict[str, float] = {}
        if self._config.evaluate and self._rank == 0:
            evaluation = self._workload.evaluate(session.model)
        stats = {} if session.attachment is None else dict(session.attachment.stats())
        session.close()
        dist.barrier()  # the other ranks wait for the evaluation, or their end would look like a loss of peers
        return {
            **meter.summarize(),
            **evaluation,
            "parameters_sha256": hashes[0],
            "replicas_equal": equal,
            "stats": stats,
        }

    def _describe(self, n_elements: int, start_step: int) -> dict[str, Any]:
        config = self._config
        # Rank 0 writes the records, and asking for the commit starts git.
        environment = _describe_environment() if self._rank == 0 else {}
        names = ("scheme", "scheme_options", "workload_options", "steps", "local_sgd", "outer", "feedback_decay", "seed",
                 "deterministic")  # fmt: skip
        return {
            **{name: getattr(config, name) for name in names},
            "ranks": self._world_size,
            "rate_bps": current_network().rate_bps,  # of the test network; None for links that are not shaped
            "start_step": start_step,
            "n_parameters": n_elements,
            **self._workload.describe(),
            "batch_size": self._batch_size,
            "n_threads": torch.get_num_threads(),
            **environment,
        }

    def _add_trace(self, session: TrainingSession) -> None:
        if self._config.trace and session.recorder is not None:
            from gradwire.telemetry.chrome_trace import ChromeTraceSink

            assert self._config.out is not None
            path = self._config.out / f"trace-rank{self._rank}.json"
            session.recorder.add_sink(ChromeTraceSink(path, self._rank, self._world_size))


class _RunFiles:
    """Rank 0's folder of a run: config.json, `steps` (steps.jsonl, a line a step), summary.json.

    Args:
        start_step: steps from here on are this run's; earlier lines of an interrupted run are kept.
    """

    def __init__(self, folder: Path, config: dict[str, Any], start_step: int) -> None:
        self._folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        write_json(folder / "config.json", config)
        (folder / "summary.json").unlink(missing_ok=True)  # of an earlier run: this one is not done yet
        path = folder / "steps.jsonl"
        if goes_on := start_step > 0 and path.exists():
            kept = [line for line in path.read_text().splitlines() if _step_of(line) < start_step]
            write_text(path, "".join(line + "\n" for line in kept))
        self.steps = JsonLines(path, append=goes_on)

    def finish(self, summary: dict[str, Any]) -> None:
        """Write the summary; only a run that came to its end has one."""
        self.steps.close()
        write_json(self._folder / "summary.json", summary)


def _step_of(line: str) -> float:
    try:
        return float(json.loads(line)["step"])
    except (ValueError, KeyError, TypeError):
        return float("inf")  # a line cut short by a crash is dropped


def _choose_device(name: str) -> torch.device:
    if name == "cpu":
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise Unsupported("device='cuda': this torch sees no GPU; use --device cpu")
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
    torch.cuda.set_device(device)
    return device
