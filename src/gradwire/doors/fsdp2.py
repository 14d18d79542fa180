"""FSDP2 (`fully_shard`) behind the gradient door: says who may be attached, and takes its own all-reduce out."""

import functools
import weakref
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
    return next(param_groups(module), None) is not None


def param_groups(module: nn.Module) -> Iterator[Any]:
    """FSDP2's parameter groups below `module`; torch calls them private, and renamed them in 2.12."""
    for part in module.modules():
        yield from _groups_of(part)


def _groups_of(part: nn.Module) -> list[Any]:
    get_state: Any = getattr(part, "_get_fsdp_state", None)
    state = None if get_state is None else get_state()
    groups = getattr(state, "_fsdp_param_groups", None) or [getattr(state, "_fsdp_param_group", None)]
    return [group for group in groups if group is not None]


_COLLECTIVES = "_all_gather_comm", "_reduce_scatter_comm"  # no public name says what the setters would replace


def put_in(part: nn.Module, group: Any, *wraps: Callable[[Any], Any]) -> Callable[[], None]:
    """Have FSDP2 use what `wraps` make of a group's own all-gather and reduce-scatter; give back what puts these in again."""
    module, own = weakref.ref(part), [getattr(group, name) for name in _COLLECTIVES]

    def use(all_gather: Any, reduce_scatter: Any) -> None:
        sharded: Any = module()
        if sharded is not None:
            sharded.set_custom_all_gather(all_gather)
            sharded.set_custom_reduce_scatter(reduce_scatter)

    use(*(wrap(collective) for wrap, collective in zip(wraps, own, strict=True)))
    return functools.partial(use, *own)


def units(module: nn.Module) -> Iterator[tuple[str, Any, Any]]:
    """Each group of parameters that FSDP2 shards, gathers and reduces together: name, module, and torch's own group."""
    seen = set()
    for name, part in module.named_modules():
        groups = _groups_of(part)
        if not groups or id(groups[0]) in seen:
            continue
        seen.add(id(groups[0]))
        name = name or "the whole module"
        if len(groups) > 1:
            raise Unsupported(
                f"{name}: its parameters lie in {len(groups)} groups (shard_placement_fn), for which FSDP2 takes no other "
                "collectives; call fully_shard on the parts"
            )
        (group,) = groups
        info = group.mesh_info
        if getattr(info, "shard_process_group", None) is None or hasattr(info, "replicate_process_group"):
            raise Unsupported(f"{name} is not sharded over a mesh of one dimension; {_PUBLIC_WAY}")
        if any(
            placed.device_mesh.ndim > 1 + _is_replicated(placed)
            for placed in part.parameters()
            if hasattr(placed, "device_mesh")
        ):
            raise Unsupported(
                f"{name} lies on a mesh of more dimensions than FSDP2's (tensor parallel?), which is not supported"
            )
        if group.device.type != "cpu":
            raise Unsupported(
                f"{name} lies on {group.device}: shards are compressed in host memory only. Between nodes gradwire takes "
                'device gradients: fully_shard(..., mesh=<nodes x ranks of a node>), attach(module, optimizer, "gcomp")'
            )
        if not hasattr(part, "set_custom_all_gather") or not all(hasattr(group, own) for own in _COLLECTIVES):
            raise Unsupported(f"torch {torch.__version__}'s FSDP2 takes no other collectives; use torch 2.13 or later")
        for own in _COLLECTIVES:
            kind = type(getattr(group, own))
            if not kind.__name__.startswith("Default"):
                raise Unsupported(
                    f"{name} has another collective already, {kind.__module__}.{kind.__name__}: leave out the call that set it "
                    "(set_custom_all_gather, set_custom_reduce_scatter, set_symm_mem_for_comm and their kin), or close() the "
                    "attachment before attaching again"
                )
        yield name, part, group


def exchanged_dtypes(module: nn.Module) -> tuple[set[torch.dtype], set[torch.dtype]]:
    """The dtypes in which weights are gathered, and those in which gradients are reduced between shards."""
    policies = [(group.mp_policy, one.sharded_param) for group in param_groups(module) for one in group.fsdp_params]
    return (
        {policy.param_dtype or parameter.dtype for policy, parameter in policies},
        {policy.reduce_dtype or policy.param_dtype or parameter.dtype for policy, parameter in policies},
    )


def is_sharded_over_all(module: nn.Module) -> bool:
    """Return whether one sharding group has all ranks: nothing is left to reduce between replicas."""
    return is_fsdp2(module) and all(
        getattr(group.mesh_info, "shard_mesh_size", 0) == dist.get_world_size() for group in param_groups(module)
    )


def check(module: nn.Module) -> None:
    """Refuse a module that the gradient door cannot serve, with what would work."""
    for part in module.modules():
        if type(part).__name__ == "FullyShardedDataParallel":
            raise Unsupported("FSDP1 models are not supported; use FSDP2, torch.distributed.fsdp.fully_shard")
    if isinstance(module, nn.DataParallel):
        raise Unsupported("attach() got DataParallel, which has one process; use DistributedDataParallel")
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
    """Take native HSDP's own all-reduce out: its parameters stay as they are, (Replicate, Shard) and all. Returns: the
    group that HSDP would have all-reduced over (None: the module is not HSDP), and what gives it back."""
    try:
        from torch.distributed.fsdp._fully_shard._fsdp_common import DDPMeshInfo, FSDPMeshInfo
    except ImportError:
        if any(_is_replicated(parameter) for parameter in module.parameters()):
            raise Unsupported(f"this torch's HSDP cannot be taken over; {_PUBLIC_WAY}") from None
        return None, lambda: None
    replicated = [group for group in param_groups(module) if isinstance(group.mesh_info, DDPMeshInfo)]
    taken = [(group, group.mesh_info) for group in replicated]
    for _, info in taken:
        if not isinstance(info, FSDPMeshInfo) or info.mesh.ndim != 2 or info.mesh.mesh_dim_names is None:
            raise Unsupported(f"only HSDP over a named mesh of two dimensions is taken over; {_PUBLIC_WAY}")
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
    """Refuse a `group` of ranks that hold other shards than this one."""
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
