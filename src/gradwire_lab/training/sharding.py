"""A model under FSDP2, over all ranks or inside each node, with torch's own collectives or compressed; two levels."""

import os
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import gradwire
from gradwire import schemes
from gradwire.errors import InvalidArgument
from gradwire.wire.communicator import ring_bytes

# The names that stand for them where a scheme's is expected: torch's alone, and gradwire's, whose options are `gradients`,
# `weights` and what `attach` takes.
OVER_ALL = ("fully-shard", "fsdp2-shards")
# Whole copies on all nodes and shards inside: torch's all-reduce between the nodes (HSDP), or that of the option `scheme`.
IN_NODES = ("hsdp", "fsdp2")
SHARDED = (*IN_NODES, *OVER_ALL)
# Options of those over all ranks: dtypes, by name, of the weights that are gathered and of the gradients that are reduced.
PRECISION = ("param", "reduce")
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def check_options(name: str, options: Mapping[str, Any]) -> None:
    """Raises: InvalidArgument (a dtype that is none; of torch's alone any other option)."""
    for key, value in options.items():
        if (name == OVER_ALL[0] and key not in PRECISION) or (key in PRECISION and value not in _DTYPES):
            raise InvalidArgument(f"{name}:{key}={value}: expected param or reduce, one of {', '.join(_DTYPES)}")


def ranks_per_node() -> int:
    """How many ranks share this one's node, by LOCAL_WORLD_SIZE."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


def make_scheme(name: str, options: Mapping[str, Any]) -> schemes.Scheme:
    """A scheme of the registry, or "two-level" around the one that its option `scheme` names. Raises: InvalidArgument."""
    if name != "two-level":
        return schemes.by_name(name, **options)
    rest = dict(options)
    return schemes.TwoLevel(str(rest.pop("scheme", "plain")), **rest)


class Sharded:
    """`module`, cut into shards in place: the blocks of its lists and sequences each, and what is left."""

    def __init__(self, module: nn.Module, name: str, options: Mapping[str, Any]) -> None:
        self.module, self._name, self._options = module, name, dict(options)
        self._n, self._n_in_blocks = sum(one.numel() for one in module.parameters()), 0
        self._world_size, self._n_nodes = dist.get_world_size(), dist.get_world_size() // ranks_per_node()
        if name in OVER_ALL:
            check_options(name, options)
            mesh = init_device_mesh("cpu", (self._world_size,))
        else:
            shape = (self._n_nodes, ranks_per_node())
            mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard"))
        keys = [key for key in PRECISION if key in options and name in OVER_ALL]
        precision: dict[str, Any] = {f"{key}_dtype": _DTYPES[options[key]] for key in keys}
        lists = [one for one in list(module.modules()) if isinstance(one, nn.ModuleList | nn.Sequential)]
        for block in (block for one in lists for block in one):
            if n_elements := sum(parameter.numel() for parameter in block.parameters()):
                self._n_in_blocks += n_elements
                fully_shard(block, mesh=mesh, mp_policy=MixedPrecisionPolicy(**precision))
        precision |= {"output_dtype": torch.float32} if precision else {}
        fully_shard(module, mesh=mesh, mp_policy=MixedPrecisionPolicy(**precision))

    def attach(self, optimizers: Any) -> gradwire.Attachment:
        """Compress what its shards exchange, or what its nodes do."""
        options = dict(self._options)
        if self._name == "fsdp2":
            return gradwire.attach(self.module, optimizers, make_scheme(str(options.pop("scheme", "plain")), options))
        for key in PRECISION:
            options.pop(key, None)
        name, weights = options.pop("gradients", "gcomp"), options.pop("weights", None)
        return gradwire.attach(self.module, optimizers, name, weights=weights, **options)

    def sent_bytes(self, n_steps: int) -> float:
        """By this rank in so many steps of torch's own; inside nodes what leaves them."""
        if self._name == "hsdp":
            return float(n_steps * ring_bytes(4 * -(-self._n // ranks_per_node()), self._n_nodes))
        # A block's weights are gathered for both passes, others for one.
        weight, gradient = (_DTYPES[self._options.get(key, "float32")].itemsize for key in PRECISION)
        n_bytes = weight * (self._n + self._n_in_blocks) + gradient * self._n
        return float(n_steps * (self._world_size - 1) * n_bytes / self._world_size)

    def whole(self, like: nn.Module) -> nn.Module:
        """`like`, a model of the same shape, with all of the weights. Collective."""
        like.load_state_dict(get_model_state_dict(self.module, options=StateDictOptions(full_state_dict=True)))
        return like
