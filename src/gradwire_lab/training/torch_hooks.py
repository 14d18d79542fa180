"""What trains without gradwire: DistributedDataParallel, and PyTorch's hooks, which send less than it."""

import sys
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import GradBucket
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook, quantization_hooks
from torch.nn.parallel import DistributedDataParallel

from gradwire.errors import InvalidArgument
from gradwire.wire.communicator import ring_bytes

# The names that stand for them where a scheme's is expected, and their options: powerSGD_hook's rank, and how many
# first steps it leaves to the plain all-reduce.
HOOKS: dict[str, dict[str, int]] = {
    "ddp": {},
    "ddp-bf16": {},
    "ddp-fp16": {},
    "ddp-powersgd": {"rank": 8, "start": 50},
    "ddp-quant8": {},
}
# These start collectives from the callbacks of others. With several buckets under way Gloo runs the callbacks of each rank
# in an order of its own, and the collectives of different buckets meet: "Received data size doesn't match". So they get
# all gradients in one bucket, and overlap nothing.
ONE_BUCKET = ("ddp-powersgd", "ddp-quant8")
_LEAST_START = 2  # that powerSGD_hook's constructor takes


def bf16_hook(group: dist.ProcessGroup, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    """`bf16_compress_hook` under another name: DDP refuses that one off CUDA, though Gloo sums bfloat16 well enough."""
    return default_hooks.bf16_compress_hook(group, bucket)


def quant8_hook(group: dist.ProcessGroup, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    """`quantization_pertensor_hook`, which takes the result of an all-gather to be nested as NCCL's is."""
    view = vars(quantization_hooks)  # that module's view of torch.distributed, nobody else's
    if not isinstance(view["dist"], _DistributedAsNccl):
        view["dist"] = _DistributedAsNccl()
    return quantization_hooks.quantization_pertensor_hook(group, bucket)


class _DistributedAsNccl:
    """torch.distributed, but for the value of all_gather's future: [[tensor of each rank]] instead of [tensor, ...]."""

    def __getattr__(self, name: str) -> Any:
        return getattr(dist, name)

    def all_gather(
        self, gathered: list[torch.Tensor], tensor: torch.Tensor, group: Any, async_op: bool
    ) -> SimpleNamespace:
        work = dist.all_gather(gathered, tensor, group=group, async_op=async_op)
        assert work is not None
        nested = work.get_future().then(lambda done: (done.wait(), [gathered])[1])
        return SimpleNamespace(get_future=lambda: nested)


_PLAIN_HOOKS = {"ddp-bf16": bf16_hook, "ddp-fp16": default_hooks.fp16_compress_hook, "ddp-quant8": quant8_hook}


def check_options(name: str, options: Mapping[str, Any], starts: range = range(_LEAST_START, sys.maxsize)) -> None:
    """Raises: InvalidArgument (what `name` does not take); `starts`: what `start` may be."""
    known, allowed = HOOKS.get(name, {}), {"rank": range(1, sys.maxsize), "start": starts}
    for key, value in options.items():
        if key not in known:
            takes = " and ".join(known) or "no options"
            raise InvalidArgument(f"scheme {name!r} is torch's own, without gradwire, and takes {takes}")
        counts = allowed[key]
        if type(value) is not int or value not in counts:
            most = f" to {counts[-1]}" if counts.stop < sys.maxsize else ""
            raise InvalidArgument(f"{name}: {key} is a count from {counts.start}{most}, not {value!r}")


class TorchHook:
    """One of them on a model in DDP, and what it sends; `options` are checked, and a `start` below 2 begins at once."""

    def __init__(self, name: str, options: Mapping[str, Any], ddp: DistributedDataParallel) -> None:
        self._name, options = name, {**HOOKS[name], **options}
        self._state: powerSGD_hook.PowerSGDState | None = None
        self._n_values = sum(p.numel() for p in ddp.parameters() if p.requires_grad)
        if name in _PLAIN_HOOKS:
            ddp.register_comm_hook(dist.group.WORLD, _PLAIN_HOOKS[name])
        elif name == "ddp-powersgd":
            self._start = options["start"]
            allowed = max(self._start, _LEAST_START)
            self._state = powerSGD_hook.PowerSGDState(
                dist.group.WORLD, options["rank"], start_powerSGD_iter=allowed, random_seed=0
            )
            self._state.iter = allowed - self._start  # the hook's own count of steps so far
            ddp.register_comm_hook(self._state, powerSGD_hook.powerSGD_hook)

    def sent_bytes(self, n_steps: int) -> float:
        """By this rank in its first `n_steps` steps, by computation: a ring all-reduce of what the hook hands on."""
        world_size, n_values = dist.get_world_size(), n_steps * self._n_values
        if self._name == "ddp-quant8":  # an all-gather of bytes: everyone's to everyone
            return float((world_size - 1) * n_values)
        if self._state is not None:  # it counts what it compresses; the steps before are plain
            n_values = min(n_steps, self._start) * self._n_values + self._state.total_numel_after_compression
        return float(ring_bytes((2 if self._name in ("ddp-bf16", "ddp-fp16") else 4) * n_values, world_size))
