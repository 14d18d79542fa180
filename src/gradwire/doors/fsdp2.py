"""FSDP2 (`fully_shard`) behind the gradient door: says who may be attached, and takes its own all-reduce out."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from gradwire.errors import InvalidArgument, Unsupported

_PUBLIC_WAY = (
    'shard over the node\'s ranks only, fully_shard(module, mesh=mesh["shard"]), and attach with '
    'group=mesh.get_group("replicate")'
)


def is_fsdp2(module: nn.Module) -> bool:
    """Return whether `fully_shard` was called on it or on a part of it."""
    return any(True for _ in param_groups(module))


def param_groups(module: nn.Module) -> Iterator[Any]:
    """FSDP2's parameter groups below `module`; torch calls them private, and renamed them in 2.12."""
    for part in module.modules():
        get_state: Any = getattr(part, "_get_fsdp_state", None)
        state = None if get_state is None else get_state()
        groups = getattr(state, "_fsdp_param_groups", None) or [getattr(state, "_fsdp_param_group", None)]
        yield from (group for group in groups if group is not None)


def check(module: nn.Module) -> None:
    """Raises: Unsupported, with what would work, if the gradient door cannot serve this module."""
    for part in module.modules():
        if type(part).__name__ == "FullyShardedDataParallel":
            raise Unsupported("FSDP1 models are not supported; use FSDP2, torch.distributed.fsdp.fully_shard")
    if isinstance(module, nn.DataParallel):
        raise Unsupported("attach() got DataParallel, which has one process; use DistributedDataParallel")
    if is_fsdp2(module) and not hasattr(torch.distributed, "tensor"):
        raise Unsupported(f"torch {torch.__version__}'s FSDP2 calls no hooks on its parameters; use torch 2.5 or later")
    if getattr(torch._dynamo.config, "compiled_autograd", False):
        raise Unsupported(
            "under compiled autograd FSDP2 calls no hooks; switch torch._dynamo.config.compiled_autograd off"
        )
    meshes = set()
    for name, parameter in module.named_parameters():
        if not parameter.requires_grad:
            continue
        if getattr(parameter, "_post_accumulate_grad_hooks", None):
            raise Unsupported(
                f"parameter {name} has a post-accumulate hook already (an optimizer in the backward pass, another "
                "attachment?); step after the backward pass, or close() the attachment before attaching again"
            )
        meshes.add(getattr(parameter, "device_mesh", None))
    if len(meshes) > 1:
        raise Unsupported(
            f"this model's parameters lie on {len(meshes)} meshes; attach each part with a mesh of its own "
            "to a group of its own, one attachment a mesh"
        )


def take_over(module: nn.Module) -> tuple[dist.ProcessGroup | None, Callable[[], None]]:
    """Take native HSDP's own all-reduce out: its parameters stay as they are, (Replicate, Shard) and all.

    Returns: the group that HSDP would have all-reduced over (None: the module is not HSDP), and what gives it back.
    Raises: Unsupported (a torch that keeps this elsewhere).
    """
    try:
        from torch.distributed.fsdp._fully_shard._fsdp_common import DDPMeshInfo, FSDPMeshInfo
    except ImportError:
        if any(_is_replicated(parameter) for parameter in module.parameters()):
            raise Unsupported(f"this torch's HSDP cannot be taken over; {_PUBLIC_WAY}") from None
        return None, lambda: None
    taken: list[tuple[Any, Any]] = []
    for group in param_groups(module):
        info = group.mesh_info
        if isinstance(info, DDPMeshInfo):
            if not isinstance(info, FSDPMeshInfo) or info.mesh.ndim != 2 or info.mesh.mesh_dim_names is None:
                raise Unsupported(f"only HSDP over a named mesh of two dimensions is taken over; {_PUBLIC_WAY}")
            taken.append((group, info))
    if not taken:
        if any(_is_replicated(parameter) for parameter in module.parameters()):
            raise Unsupported(f"this model replicates by itself, in a way that gradwire does not know; {_PUBLIC_WAY}")
        return None, lambda: None
    replicas = taken[0][1].replicate_process_group
    for group, info in taken:
        group.mesh_info = FSDPMeshInfo(info.mesh[info.mesh.mesh_dim_names[info.shard_mesh_dim]], shard_mesh_dim=0)

    def give_back() -> None:
        for group, info in taken:
            group.mesh_info = info

    return replicas, give_back


def check_group(module: nn.Module, group: Any) -> None:
    """Raises: InvalidArgument if `group` holds ranks that hold other shards than this one."""
    if not is_fsdp2(module):
        return
    if group is None:
        raise InvalidArgument(
            'with FSDP2 say which ranks hold the same shard, one a node: attach(..., group=mesh.get_group("replicate"))'
        )
    members = list(group) if isinstance(group, (list, tuple)) else dist.get_process_group_ranks(group)
    for shard_group in param_groups(module):
        info = shard_group.mesh_info
        shards = dist.get_process_group_ranks(info.shard_process_group)
        strangers = sorted((set(shards) & set(members)) - {dist.get_rank()})
        if strangers:
            raise InvalidArgument(
                f"ranks {strangers} of the group hold other shards of this model than rank {dist.get_rank()}: the group is "
                'those that hold the same shard, one a node, mesh.get_group("replicate")'
            )


def _is_replicated(parameter: torch.Tensor) -> bool:
    placements = getattr(parameter, "placements", ())
    return any(p.is_replicate() for p in placements) and any(p.is_shard() for p in placements)
