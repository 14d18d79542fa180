"""What trains without gradwire: DistributedDataParallel, and PyTorch's hooks, which send less than it."""

# No `from __future__ import annotations` here: DDP compares a hook's annotations as objects, not as strings.
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import GradBucket
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

from gradwire.errors import InvalidArgument

# The names that stand for them where a scheme's is expected, and their options: powerSGD_hook's rank, and how many
# first steps it leaves to the plain all-reduce (at least 2).
HOOKS: dict[str, dict[str, int]] = {
    "ddp": {},
    "ddp-bf16": {},
    "ddp-fp16": {},
    "ddp-powersgd": {"rank": 8, "start": 50},
}
_LEAST = {"rank": 1, "start": 2}


def bf16_hook(group: dist.ProcessGroup, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    """`bf16_compress_hook` under another name: DDP refuses that one off CUDA, though Gloo sums bfloat16 well enough."""
    return default_hooks.bf16_compress_hook(group, bucket)


def check_options(name: str, options: dict[str, Any]) -> None:
    """Raises: InvalidArgument (what the hook `name` does not take)."""
    known = HOOKS[name]
    for key, value in options.items():
        if key not in known:
            takes = " and ".join(known) or "no options"
            raise InvalidArgument(f"scheme {name!r} is DDP without gradwire and takes {takes}")
        if isinstance(value, bool) or not isinstance(value, int) or value < _LEAST[key]:
            raise InvalidArgument(f"{name}: {key} is a count from {_LEAST[key]}, not {value!r}")


class TorchHook:
    """One of them on a model in DDP, and what it sends.

    Args:
        options: checked, see `check_options`.
    """

    def __init__(self, name: str, options: dict[str, Any]) -> None:
        self._name, self._options = name, {**HOOKS[name], **options}
        self._state: powerSGD_hook.PowerSGDState | None = None
        self._n_values = self._n_counted = 0

    def ddp_options(self, model: nn.Module) -> dict[str, Any]:
        """What DDP has to be told: powerSGD_hook starts collectives from callbacks, whose order Gloo does not keep between
        buckets, so that it gets one."""
        if self._name != "ddp-powersgd":
            return {}
        return {"bucket_cap_mb": 1 + sum(p.numel() * p.element_size() for p in model.parameters()) // (1 << 20)}

    def register(self, ddp: DistributedDataParallel) -> None:
        """Give DDP the hook, if there is one."""
        group = dist.group.WORLD
        self._n_values = sum(p.numel() for p in ddp.parameters() if p.requires_grad)
        if self._name == "ddp-bf16":
            ddp.register_comm_hook(group, bf16_hook)
        elif self._name == "ddp-fp16":
            ddp.register_comm_hook(group, default_hooks.fp16_compress_hook)
        elif self._name == "ddp-powersgd":
            self._state = powerSGD_hook.PowerSGDState(
                group,
                matrix_approximation_rank=self._options["rank"],
                start_powerSGD_iter=self._options["start"],
                random_seed=0,
            )
            ddp.register_comm_hook(self._state, powerSGD_hook.powerSGD_hook)

    def step_bytes(self) -> dict[str, float]:
        """Of the step just taken, by computation: what every rank sends in a ring all-reduce of what the hook hands on."""
        payload = (2 if self._name in ("ddp-bf16", "ddp-fp16") else 4) * self._n_values
        if self._state is not None:  # it counts the steps that it compresses
            n_new = self._state.total_numel_after_compression - self._n_counted
            self._n_counted += n_new
            payload = 4 * n_new or payload
        world_size = dist.get_world_size()
        sent = 2 * (world_size - 1) / world_size * payload
        return {"original_bytes": 4.0 * self._n_values, "bytes_sent": sent, "bytes_received": sent}
