"""A model under FSDP2 over all ranks: with torch's own collectives, or compressed by gradwire's."""

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import gradwire
from gradwire.errors import InvalidArgument

# The names that stand for them where a scheme's is expected: torch's alone, and gradwire's, whose options are `gradients`,
# `weights` and what `attach` takes.
OVER_ALL = ("fully-shard", "fsdp2-shards")
# Options of both: dtypes, by name, of the weights that are gathered and of the gradients that are reduced.
PRECISION = ("param", "reduce")
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def check_options(name: str, options: Mapping[str, Any]) -> None:
    """Raises: InvalidArgument (a dtype that is none; of torch's alone any other option)."""
    for key, value in options.items():
        if (name == OVER_ALL[0] and key not in PRECISION) or (key in PRECISION and value not in _DTYPES):
            raise InvalidArgument(f"{name}:{key}={value}: expected param or reduce, one of {', '.join(_DTYPES)}")


class Sharded:
    """`module`, cut into shards in place: the blocks of its lists and sequences each, and what is left.

    Args:
        options: of the scheme's name. `mesh`: all ranks, unless there are two dimensions.
    """

    def __init__(self, module: nn.Module, options: Mapping[str, Any], mesh: DeviceMesh | None = None) -> None:
        self.module, self._options = module, dict(options)
        self._n, self._n_in_blocks = sum(one.numel() for one in module.parameters()), 0
        mesh = mesh or init_device_mesh("cpu", (dist.get_world_size(),))
        precision: dict[str, Any] = {f"{key}_dtype": _DTYPES[options[key]] for key in PRECISION if key in options}
        lists = [one for one in list(module.modules()) if isinstance(one, nn.ModuleList | nn.Sequential)]
        for block in (block for one in lists for block in one):
            if n_elements := sum(parameter.numel() for parameter in block.parameters()):
                self._n_in_blocks += n_elements
                fully_shard(block, mesh=mesh, mp_policy=MixedPrecisionPolicy(**precision))
        precision |= {"output_dtype": torch.float32} if precision else {}
        fully_shard(module, mesh=mesh, mp_policy=MixedPrecisionPolicy(**precision))

    def attach(self, optimizers: Any) -> gradwire.Attachment:
        """Compress what its shards exchange."""
        options = {key: value for key, value in self._options.items() if key not in PRECISION}
        name, weights = options.pop("gradients", "gcomp"), options.pop("weights", None)
        return gradwire.attach(self.module, optimizers, name, weights=weights, **options)

    def sent_bytes(self, n_steps: int) -> float:
        """By this rank in so many steps of torch's own: a block's weights are gathered for both passes, others for one."""
        weight, gradient = (_DTYPES[self._options.get(key, "float32")].itemsize for key in PRECISION)
        n_bytes, world_size = weight * (self._n + self._n_in_blocks) + gradient * self._n, dist.get_world_size()
        return float(n_steps * (world_size - 1) * n_bytes / world_size)

    def whole(self, like: nn.Module) -> nn.Module:
        """`like`, a model of the same shape, with all of the weights. Collective."""
        like.load_state_dict(get_model_state_dict(self.module, options=StateDictOptions(full_state_dict=True)))
        return like
