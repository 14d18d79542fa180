"""What `bench train` times: a workload under one scheme, under PyTorch's own hooks, or under DDP alone."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

import gradwire
from gradwire import codecs, schemes
from gradwire.errors import GradwireError, InvalidArgument
from gradwire.registry import parse_spec
from gradwire.wire.communicator import ring_bytes
from gradwire_lab.bench import training_thread
from gradwire_lab.bench.overlap import Timeline
from gradwire_lab.bench.reducers import make_scheme
from gradwire_lab.training import torch_hooks
from gradwire_lab.workloads import Workload

# Bare quantisers that encode and decode on the training thread; `all` does not mean them.
TRAINING_THREAD = tuple(training_thread.CODECS)
BASELINES = ("ddp", "ddp-fp16", "ddp-bf16", "ddp-powersgd", "ddp-quant8", "hsdp", "fully-shard", *TRAINING_THREAD)
# FSDP2 over all ranks, as torch has it and with its collectives compressed.
_OVER_ALL = ("fully-shard", "fsdp2-shards")
# Several ranks a node: two levels under DDP, FSDP2 in the nodes with torch's all-reduce between them (HSDP) or a scheme's.
SHARDED = ("hsdp", "fsdp2", *_OVER_ALL)
BY_NAME_ONLY = ("two-level", *SHARDED, *TRAINING_THREAD)
# Options that baselines take in a spec. `bucket_mb`: DDP's bucket_cap_mb, 0 a bucket for every tensor, inf one for all.
# `start`: steps that powerSGD_hook leaves to the plain all-reduce.
_BASELINE_OPTIONS = {"ddp": ("bucket_mb",), "ddp-powersgd": ("rank", "start")}
# Of FSDP2 over all ranks: dtypes, by name, of the weights that are gathered and of the gradients that are reduced.
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_PRECISION = ("param", "reduce")
# PowerSGD's own documentation starts with rank 1 or 2 and compresses from the first steps on only with a warm start;
# bench runs are short, so it starts at once.
_POWER_SGD = {"rank": 2, "start": 2}


@dataclass(frozen=True)
class StepTimes:
    """One step on one rank, in seconds: iteration = local + waiting + update, data loading left out.

    `local_s` is forward and backward up to the last gradient; `waiting_s` from there to the end of the backward pass,
    which is communication that no computation hid, and slower ranks; `update_s` the optimizer's step.
    """

    local_s: float
    waiting_s: float
    update_s: float

    @property
    def iteration_s(self) -> float:
        return self.local_s + self.waiting_s + self.update_s


class TrainMethod:
    """A model of its own in training, a `RankMethod` of the driver; methods of one run start from the same weights and see the
    same batches.

    Args:
        has_timeline: keep what `overlap` tells.

    Attributes:
        settling_steps: how many steps it takes until it works as it will; those are not to be counted.
    """

    def __init__(self, spec: str, workload: Workload, seed: int, has_timeline: bool = False) -> None:
        self.name, self.options = parse_spec(spec)
        self._workload, self._seed = workload, seed
        self._rank, self._world_size = dist.get_rank(), dist.get_world_size()
        module = workload.build_model(seed)
        self.n_parameters = sum(parameter.numel() for parameter in module.parameters())
        self._n_in_blocks = 0  # parameters that FSDP2 gathers block by block
        self._last_gradient_s: float | None = None
        self._hooks: list[Any] = []
        self._model: Any = self._shard(module) if self.name in SHARDED else self._replicate(module)
        self._optimizers = workload.build_optimizers(self._model)
        self._schedulers = workload.build_schedulers(self._optimizers)
        self.attachment = None
        self._quantiser: training_thread.TrainingThreadQuantiser | None = None
        self._timeline = Timeline() if has_timeline else None
        self._baseline_bytes: Callable[[], float] = lambda: 0.0
        if self.name in BASELINES:
            self._register_baseline()
        else:
            self.attachment = self._attach()
            if self._timeline is not None:
                self.attachment.recorder.add_sink(self._timeline)
        self._owns_step = self.attachment is not None and self.attachment.scheme.owns_step
        self.settling_steps = 0 if self.attachment is None else self.attachment.scheme.settling_steps
        self._steps = 0
        self.losses: list[float] = []
        self.times: list[StepTimes] = []

    def _replicate(self, module: nn.Module) -> DistributedDataParallel:
        self._hooks = [
            parameter.register_post_accumulate_grad_hook(self._note_gradient)
            for parameter in module.parameters()
            if parameter.requires_grad
        ]
        ddp_options = self._workload.ddp_options()
        if self.name in torch_hooks.ONE_BUCKET:
            ddp_options["bucket_cap_mb"] = self._whole_model_mb()
        elif "bucket_mb" in self.options:
            # The least that DDP takes for a size still lets no two tensors share a bucket.
            ddp_options["bucket_cap_mb"] = min(max(float(self.options["bucket_mb"]), 1e-6), self._whole_model_mb())
        return DistributedDataParallel(module, **ddp_options)

    def _shard(self, module: nn.Module) -> nn.Module:
        """Whole copies on all nodes and shards inside, or shards over all; blocks of a list or a sequence are gathered each."""
        if self.name in _OVER_ALL:
            _check_precision(self.name, self.options, alone=False)
            mesh = init_device_mesh("cpu", (self._world_size,))
        else:
            shape = (self._world_size // ranks_per_node(), ranks_per_node())
            mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard"))
        dtypes: dict[str, Any] = {
            f"{key}_dtype": _DTYPES[self.options[key]] for key in _PRECISION if key in self.options
        }
        for one in list(module.modules()):
            if isinstance(one, nn.ModuleList | nn.Sequential):
                for block in one:
                    if any(True for _ in block.parameters()):
                        self._n_in_blocks += sum(parameter.numel() for parameter in block.parameters())
                        fully_shard(block, mesh=mesh, mp_policy=MixedPrecisionPolicy(**dtypes))
        dtypes |= {"output_dtype": torch.float32} if dtypes else {}
        fully_shard(module, mesh=mesh, mp_policy=MixedPrecisionPolicy(**dtypes))  # in place
        return module

    def _attach(self) -> gradwire.Attachment:
        if self.name != "fsdp2-shards":
            return gradwire.attach(self._model, self._optimizers, self._make_scheme())
        scheme = {key: value for key, value in self.options.items() if key not in ("gradients", "weights", *_PRECISION)}
        name, weights = self.options.get("gradients", "gcomp"), self.options.get("weights")
        return gradwire.attach(self._model, self._optimizers, name, weights=weights, **scheme)

    def _make_scheme(self) -> schemes.Scheme:
        # DDP's bucket size is no option of the scheme's; schemes that work by block want buckets no larger than blocks.
        options = {k: v for k, v in self.options.items() if k != "bucket_mb"}
        if self.name == "fsdp2":
            return make_scheme(options.pop("scheme", "plain"), options)
        return make_scheme(self.name, options)

    def step(self) -> None:
        """One training step; its times and loss are kept."""
        batch = self._workload.batch_at(
            self._steps, self._rank, self._world_size, self._workload.batch_size, self._seed
        )
        # Dropout must not depend on which methods ran before.
        torch.manual_seed((self._seed * 1_000_003 + self._steps) * 1_009 + self._rank)
        started = time.perf_counter()
        self._model.zero_grad(set_to_none=True)
        loss = self._workload.loss(self._model, batch)
        loss.backward()
        reduced = time.perf_counter()
        steps: list[Any] = [*self._optimizers, *self._schedulers]
        for one in steps:
            one.step()
        ended = time.perf_counter()
        if self._timeline is not None:
            self._timeline.note_step(started, self._last_gradient_s or reduced, ended)
        # Behind FSDP2 nobody says when a gradient is there: what communication was not hidden stays in `local_s`.
        last_gradient_s = self._last_gradient_s or reduced
        waiting_s = reduced - last_gradient_s
        local_s = last_gradient_s - started
        if self.attachment is not None and self._owns_step:
            # The forward pass, too, stood still for blocks of the step before.
            forward_wait_s = max(0.0, self.attachment.recorder.steps[-1].exposed_ns / 1e9 - waiting_s)
            local_s, waiting_s = local_s - forward_wait_s, waiting_s + forward_wait_s
        self.times.append(StepTimes(local_s, waiting_s, ended - reduced))
        self.losses.append(self._workload.reported_loss(loss))
        self._steps += 1

    def own_stats(self) -> dict[str, Any]:
        """gradwire's own figures; empty for a baseline."""
        return {} if self.attachment is None else self.attachment.stats()

    def finish_turn(self) -> None:
        """End of a turn: what a scheme has put off is done before the next method's turn, on the last step's account."""
        if self.attachment is None or not self._owns_step:
            return
        started = time.perf_counter()
        self.attachment.flush()
        last, ended = self.times[-1], time.perf_counter()
        self.times[-1] = StepTimes(last.local_s, last.waiting_s + ended - started, last.update_s)
        if self._timeline is not None:
            self._timeline.extend_last(ended)

    def check(self) -> None:
        """Raises: GradwireError if the scheme is still measuring after its `settling_steps`."""
        if self.attachment is None:
            return
        self.attachment.stats()  # waits for what is under way
        if not self.attachment.scheme.is_settled:
            raise GradwireError(
                f"{self.name} still measures after {self._steps} steps, and what it does now is not what it will do: "
                "raise --warmup"
            )

    def overlap(self, since_s: float, until_s: float) -> dict[str, float] | None:
        """`Timeline.measure` of the steps begun between these moments; None without a timeline, or a count of spans."""
        timeline = self._timeline
        if timeline is None or (self.attachment is None and self._quantiser is None):
            return None
        measured = Timeline(
            timeline.computing, timeline.waiting, list(timeline.communicating), list(timeline.training_codec),
            list(timeline.other_codec), timeline.training_thread,
        )  # fmt: skip
        if self.attachment is not None:
            measured.add(self.attachment.recorder.unsummed_buckets())
        if self._quantiser is not None:
            measured.communicating += self._quantiser.communicate_spans
            measured.training_codec += self._quantiser.codec_spans
        return measured.measure(since_s, until_s)

    def _note_gradient(self, _: torch.Tensor) -> None:
        # Runs when a gradient is in `.grad` and before DDP's reducer hears of it: the last call of a step is the end of
        # this rank's own computation.
        self._last_gradient_s = time.perf_counter()

    def stats(self) -> dict[str, float]:
        """What it has come to so far on this rank.

        `sent_bytes`, for gradients: gradwire's count, or what a baseline's hook must send; seconds in the codec, hidden or not,
        where a hook tells: `codec_s`, of encoding, decoding and what they need, and of these `decode_s`, which grows with the
        messages received, the rest with those sent.
        """
        if self.attachment is not None:
            own = self.attachment.stats()
            codec_s = sum(own[f"{kind}_s"] for kind in ("encode", "decode", "importance", "table"))
            return {
                "sent_bytes": float(own["bytes_sent"]),
                "codec_s": float(codec_s),
                "decode_s": float(own["decode_s"]),
            }
        sent = {"sent_bytes": self._baseline_bytes()}
        if self._quantiser is not None:
            encode_s, decode_s = self._quantiser.encode_s, self._quantiser.decode_s
            return {**sent, "codec_s": encode_s + decode_s, "decode_s": decode_s}
        return {**sent, "codec_s": 0.0, "decode_s": 0.0} if self.name == "ddp" else sent

    def memory_bytes(self) -> int:
        """What it holds on one rank: parameters, gradients, buckets, two optimizer moments, and a scratch."""
        return 6 * 4 * self.n_parameters

    def close(self) -> None:
        """Let gradwire go, and the model: autograd holds its hooks where the garbage collector does not look. Collective."""
        for hook in self._hooks:
            hook.remove()
        if self.attachment is not None:
            self.attachment.close()

    def _register_baseline(self) -> None:
        """The hook of a baseline, and what it must send so far: `_baseline_bytes`."""
        model, n_elements, world_size = self._model, self.n_parameters, self._world_size
        if self.name == "hsdp":
            n_nodes, n_shard = world_size // ranks_per_node(), -(-n_elements // ranks_per_node())
            self._baseline_bytes = lambda: float(self._steps * ring_bytes(4 * n_shard, n_nodes))
        elif self.name == "fully-shard":
            weight, gradient = (_DTYPES[self.options.get(key, "float32")].itemsize for key in _PRECISION)
            # A block's weights are gathered for both passes, those of the whole for one.
            n_bytes = weight * (n_elements + self._n_in_blocks) + gradient * n_elements
            self._baseline_bytes = lambda: float(self._steps * (world_size - 1) * n_bytes / world_size)
        elif self.name in TRAINING_THREAD:
            quantiser = training_thread.TrainingThreadQuantiser(
                training_thread.CODECS[self.name](**self.options), getattr(model.module, "occupy", None)
            )
            quantiser.register(model)
            self._quantiser, self._baseline_bytes = quantiser, lambda: float(quantiser.sent_bytes)
        else:
            defaults = _POWER_SGD if self.name == "ddp-powersgd" else {}
            hook = torch_hooks.TorchHook(self.name, {**defaults, **self.options})
            hook.register(model)
            self._baseline_bytes = lambda: hook.sent_bytes(self._steps)

    def _whole_model_mb(self) -> int:
        return 1 + 4 * self.n_parameters // (1 << 20)


def ranks_per_node() -> int:
    """How many ranks share this one's node, by LOCAL_WORLD_SIZE."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


def check_baseline_options(name: str, options: dict[str, Any]) -> None:
    """Raises: InvalidArgument (what a baseline does not take); schemes check their own options."""
    if name not in BASELINES:
        return
    if name in TRAINING_THREAD:  # the codec's own
        codecs.by_name(name.removeprefix("ddp-"), **options)
        return
    if name == "fully-shard":
        _check_precision(name, options, alone=True)
        return
    known = _BASELINE_OPTIONS.get(name, ())
    for key, value in options.items():
        if key not in known:
            raise InvalidArgument(f"{name} takes {', '.join(known) or 'no options'} here, not {key}")
        if isinstance(value, bool) or not isinstance(value, int | float) or not value >= 0:
            raise InvalidArgument(f"{name}:{key}={value}: expected a number of 0 or more")
    if options.get("start", 0) > _POWER_SGD["start"] or options.get("rank", 1) < 1:
        raise InvalidArgument(f"{name}: expected start from 0 to {_POWER_SGD['start']} and rank from 1")


def _check_precision(name: str, options: dict[str, Any], alone: bool) -> None:
    """Raises: InvalidArgument (a dtype that is none; `alone`: any other option)."""
    for key, value in options.items():
        if (alone and key not in _PRECISION) or (key in _PRECISION and value not in _DTYPES):
            raise InvalidArgument(f"{name}:{key}={value}: expected param or reduce, one of {', '.join(_DTYPES)}")


def names() -> list[str]:
    """What `all` means: the baselines, then every scheme of the registry that works with any optimizer."""
    return [name for name in [*BASELINES, *schemes.names()] if name not in more()]


def more() -> list[str]:
    """What there is beside these: doors, codecs on the training thread, and schemes of one optimizer."""
    return [*BY_NAME_ONLY, *(name for name in schemes.names() if schemes.needs_momenta(name))]


def describe(method: TrainMethod) -> str:
    """The options, as written in a spec, and what was done to run it at all."""
    words = [f"{key}={value}" for key, value in method.options.items()]
    return ",".join([*words, "one bucket"] if method.name in torch_hooks.ONE_BUCKET else words)
