"""The training loop of one rank."""

import functools
import hashlib
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import HashStore

from gradwire.errors import InvalidArgument, PeerLost, RankMismatch, Unsupported
from gradwire.telemetry.environment import describe_environment
from gradwire.telemetry.jsonl import JsonLines
from gradwire.telemetry.stopwatch import Stopwatch, processor_ns
from gradwire_lab.ranks.network import current_network
from gradwire_lab.results.records import write_json, write_text
from gradwire_lab.training import checkpoints
from gradwire_lab.training.config import TrainConfig, TrainResult
from gradwire_lab.training.meter import Meter
from gradwire_lab.training.session import TrainingSession
from gradwire_lab.workloads import Workload, by_name
from gradwire_lab.workloads.gradients import write_snapshot

_describe_environment = functools.cache(describe_environment)  # several runs of a process ask once

# Ranks exchange their figures this often: each exchange costs some milliseconds on a slow network.
_GATHER_EVERY = 10

Progress = Callable[[dict[str, Any]], None]  # called on rank 0 with a step's record


def train_rank(config: TrainConfig, on_progress: Progress | None = None) -> TrainResult:
    """Train as one rank, to the end of `config.steps`; call it in every rank.
    Where there is no default process group, one is made from torchrun's environment variables, or for this process alone.
    Raises: InvalidArgument, Unsupported (configuration), RankMismatch, PeerLost, CorruptMessage, IncompatibleVersion.
    """
    device = torch.device(config.device)
    if device.type == "cuda":
        if not torch.cuda.is_available():
            raise Unsupported("device='cuda': this torch sees no GPU; use --device cpu")
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(device)
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
        result = _train(config, workload, device, on_progress)
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


def _train(config: TrainConfig, workload: Workload, device: torch.device, on_progress: Progress | None) -> TrainResult:
    rank, world_size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(config.seed + rank)  # for dropout; weights and data have generators of their own
    session = TrainingSession(config, workload, device)
    start_step = _prepare(session)
    meter = Meter(device, session.is_computed)
    batch_size = config.batch_size or workload.batch_size
    description = _describe(session, batch_size, start_step)
    folder = config.out if rank == 0 else None
    steps = None if folder is None else _open_steps(folder, description, start_step)
    _add_trace(session)
    watch = Stopwatch()
    batches = workload.batches(rank, world_size, batch_size, config.seed, start_step)
    for step in range(start_step, config.steps):
        inputs, targets = next(batches)
        batch = (inputs.to(device), targets.to(device))
        if step in config.rewrap_at and step != start_step:
            session.rewrap()
            _add_trace(session)
        meter.add(step, _take_step(session, batch, step))
        done = step + 1
        is_last = done == config.steps
        saving = config.checkpoint is not None and (is_last or done % (config.save_every or config.steps) == 0)
        if done % _GATHER_EVERY == 0 or is_last or saving:
            for record in meter.gather():
                if steps is not None:
                    steps.append(record)
                if on_progress is not None and rank == 0:
                    on_progress(record)
        if saving:
            _save(session, done)
    summary = description | _finish(session, meter)
    summary["total_s"] = watch.elapsed_s
    if steps is not None and folder is not None:
        steps.close()
        write_json(folder / "summary.json", summary)
    return TrainResult(meter.records, summary, summary["parameters_sha256"])


def _prepare(session: TrainingSession) -> int:
    """Load the newest checkpoint if asked to, wrap the model; returns the step to begin with."""
    config = session.config
    newest = checkpoints.find_newest(config.checkpoint) if config.resume and config.checkpoint else None
    if newest is None:
        session.wrap()
        return 0
    step, shared, own = checkpoints.load(newest, config.identity(), dist.get_world_size(), dist.get_rank())
    if step >= config.steps:
        raise InvalidArgument(f"{newest} is already at step {step}: pass --steps above it to train on")
    session.load_shared_state(shared)
    session.wrap(own["scheme"])
    torch.set_rng_state(own["random_state"])
    return step


def _take_step(session: TrainingSession, batch: tuple[torch.Tensor, torch.Tensor], step: int) -> dict[str, float]:
    """One step; returns its figures."""
    watch, processor = Stopwatch(), Stopwatch(processor_ns)
    session.zero_grad()
    loss = session.workload.loss(session.ddp, batch)
    loss.backward()
    forward_backward_s, waited_s = watch.elapsed_s, session.since_last_gradient_s()
    every, out = session.config.dump_gradients_every, session.config.out
    if every and step % every == 0 and dist.get_rank() == 0:
        assert out is not None
        write_snapshot(out / "gradients" / f"step-{step:08}.npz", session.optimizers[0], step + 1)
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


def _save(session: TrainingSession, step: int) -> None:
    config = session.config
    assert config.checkpoint is not None
    if session.replicas_may_differ:
        raise Unsupported(
            f"scheme {config.scheme!r} lets the replicas differ, and a checkpoint holds one model: "
            "run it without --checkpoint, or take another scheme"
        )
    own = {"scheme": session.scheme_state(), "random_state": torch.get_rng_state()}
    checkpoints.save(config.checkpoint, step, config.identity(), session.shared_state(), own, session.device)


def _finish(session: TrainingSession, meter: Meter) -> dict[str, Any]:
    """Close the scheme, compare the replicas, evaluate."""
    session.flush()
    model, config = session.whole_model(), session.config
    mine = torch.tensor(list(bytes.fromhex(hash_parameters(model))), dtype=torch.uint8, device=session.device)
    everyone = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(everyone, mine)
    hashes = [bytes(one.tolist()).hex() for one in everyone]
    different = [rank for rank, one in enumerate(hashes) if one != hashes[0]]
    if different and not session.replicas_may_differ:
        raise RankMismatch(
            f"after step {config.steps} the parameters of rank(s) {different} differ from rank 0's "
            f"({hashes[different[0]][:12]}... against {hashes[0][:12]}...): the replicas have drifted apart"
        )
    evaluation = session.workload.evaluate(model) if config.evaluate and dist.get_rank() == 0 else {}
    stats = {} if session.attachment is None else dict(session.attachment.stats())
    session.close()
    dist.barrier()  # the other ranks wait for the evaluation, or their end would look like a loss of peers
    same = {"parameters_sha256": hashes[0], "replicas_equal": not different}
    return {**meter.summarize(), **evaluation, **same, "stats": stats}


def hash_parameters(model: nn.Module) -> str:
    """SHA-256 (hex) over name, dtype, shape and bytes of every parameter, in the model's order; the same on any machine."""
    digest = hashlib.sha256()
    for name, parameter in model.named_parameters():
        digest.update(f"{name} {parameter.dtype} {tuple(parameter.shape)}\n".encode())
        # Through bytes, since numpy knows no bfloat16.
        digest.update(parameter.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)
    return digest.hexdigest()


def _describe(session: TrainingSession, batch_size: int, start_step: int) -> dict[str, Any]:
    # Rank 0 writes the records, and asking for the commit starts git.
    environment = _describe_environment() if dist.get_rank() == 0 else {}
    names = ("scheme", "scheme_options", "workload_options", "steps", "local_sgd", "outer", "feedback_decay", "seed",
             "deterministic")  # fmt: skip
    return {
        **{name: getattr(session.config, name) for name in names},
        "ranks": dist.get_world_size(),
        "rate_bps": current_network().rate_bps,  # of the test network; None for links that are not shaped
        "start_step": start_step,
        "n_parameters": session.n_parameters,
        **session.workload.describe(),
        "batch_size": batch_size,
        "n_threads": torch.get_num_threads(),
        **environment,
    }


def _add_trace(session: TrainingSession) -> None:
    if session.config.trace and session.recorder is not None:
        from gradwire.telemetry.chrome_trace import ChromeTraceSink

        assert session.config.out is not None
        path = session.config.out / f"trace-rank{dist.get_rank()}.json"
        session.recorder.add_sink(ChromeTraceSink(path, dist.get_rank(), dist.get_world_size()))


def _open_steps(folder: Path, config: dict[str, Any], start_step: int) -> JsonLines:
    """steps.jsonl (a line a step) of a run's folder, with config.json beside it; a run that ends has a summary.json too."""
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / "config.json", config)
    (folder / "summary.json").unlink(missing_ok=True)  # of an earlier run: this one is not done yet
    path = folder / "steps.jsonl"
    if goes_on := start_step > 0 and path.exists():  # earlier lines of an interrupted run are kept
        kept = [line for line in path.read_text().splitlines() if _step_of(line) < start_step]
        write_text(path, "".join(line + "\n" for line in kept))
    return JsonLines(path, append=goes_on)


def _step_of(line: str) -> float:
    try:
        return float(json.loads(line)["step"])
    except (ValueError, KeyError, TypeError):
        return float("inf")  # a line cut short by a crash is dropped
