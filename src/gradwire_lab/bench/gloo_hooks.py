"""PyTorch's own communication hooks, made to run on Gloo, for which DDP or the hook itself was not written."""

# No `from __future__ import annotations` here: DDP compares a hook's annotations as objects, not as strings.
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import GradBucket
from torch.distributed.algorithms.ddp_comm_hooks import quantization_hooks


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

    def all_gather(self, gathered: list[torch.Tensor], tensor: torch.Tensor, group: Any, async_op: bool) -> "_Gather":
        work = dist.all_gather(gathered, tensor, group=group, async_op=async_op)
        assert work is not None
        return _Gather(work.get_future(), gathered)


class _Gather:
    def __init__(self, done: torch.futures.Future, gathered: list[torch.Tensor]) -> None:
        self._done, self._gathered = done, gathered

    def get_future(self) -> torch.futures.Future:
        return self._done.then(lambda done: (done.wait(), [self._gathered])[1])
