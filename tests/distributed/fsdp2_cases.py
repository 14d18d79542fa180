"""Four ranks as two nodes of two: FSDP2 inside a node. A model with odd sizes, so that shards are padded."""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.utils.checkpoint import checkpoint

import gradwire

VOCABULARY, WIDTH = 53, 37


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.inner, self.outer = nn.Linear(WIDTH, 2 * WIDTH + 1), nn.Linear(2 * WIDTH + 1, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.outer(torch.relu(self.inner(self.norm(x))))


class Net(nn.Module):
    """An embedding (its input needs no gradient), three blocks, a head, and a layer that nobody uses."""

    def __init__(self, checkpointing: str = "") -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList([Residual() for _ in range(3)])
        self.head = nn.Linear(WIDTH, VOCABULARY)
        self.spare = nn.Linear(WIDTH, 3)
        self.checkpointing = checkpointing

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.embed(x)
        for block in self.blocks:
            h = (
                checkpoint(block, h, use_reentrant=self.checkpointing == "reentrant")
                if self.checkpointing
                else block(h)
            )
        return self.head(h)


def make_mesh() -> DeviceMesh:
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))


def build(mesh: DeviceMesh, case: str = "", checkpointing: str = "") -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(1)
    net = Net(checkpointing)
    options: dict[str, Any] = {}
    if "bf16" in case or "mixed32" in case:
        reduced = torch.float32 if "mixed32" in case else torch.bfloat16
        options["mp_policy"] = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=reduced)
    if "fp16" in case:
        options["mp_policy"] = MixedPrecisionPolicy(param_dtype=torch.float16, reduce_dtype=torch.float16)
    if "offload" in case:
        options["offload_policy"] = CPUOffloadPolicy(pin_memory=False)
    if "noreshard" in case:
        options["reshard_after_forward"] = False
    if "tied" in case:
        net.head.weight = net.embed.weight
    if "frozen" in case:
        net.blocks[0].requires_grad_(False)
        net.blocks[1].inner.requires_grad_(False)  # type: ignore[union-attr]
    for block in net.blocks:
        if "compile" in case:
            block.compile(backend="aot_eager")
        fully_shard(block, mesh=mesh, **options)
    fully_shard(net, mesh=mesh, **options)
    if "prefetch" in case:
        net.set_modules_to_forward_prefetch(list(net.blocks))  # type: ignore[attr-defined]
        net.blocks[0].set_modules_to_forward_prefetch([net.blocks[1], net.blocks[2]])  # type: ignore[union-attr,operator]
        net.blocks[2].set_modules_to_backward_prefetch([net.blocks[1], net.blocks[0]])  # type: ignore[union-attr,operator]
    if "divided" in case:
        for part in (*net.blocks, net):
            part.set_gradient_divide_factor(3.0)  # type: ignore[operator,union-attr]
            part.set_force_sum_reduction_for_comms(True)  # type: ignore[operator,union-attr]
    return net, torch.optim.AdamW(net.parameters(), 1e-2)


def batch_of(rank: int, step: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1000 * rank + step)
    drawn = torch.randint(0, VOCABULARY, (2, 8, 5), generator=generator)
    return drawn[0], drawn[1]


def train(
    net: nn.Module,
    optimizer: torch.optim.Optimizer,
    rank: int,
    steps: range = range(5),
    micro: int = 1,
    between: Any = lambda is_last: None,
    clip: bool = False,
) -> None:
    """`between(is_last)`: what accumulation does before each micro-batch; may give back a context."""
    for step in steps:
        for part in range(micro):
            x, y = batch_of(rank, 10 * step + part)
            with between(part == micro - 1) or contextlib.nullcontext():
                nn.functional.cross_entropy(net(x).flatten(0, 1).float(), y.flatten()).backward()
        if clip:
            nn.utils.clip_grad_norm_(net.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()


def shards_of(net: nn.Module) -> list[torch.Tensor]:
    return [parameter.to_local().detach().clone() for parameter in net.parameters()]  # type: ignore[attr-defined]


def attach(
    net: nn.Module, optimizer: torch.optim.Optimizer, mesh: DeviceMesh, scheme: Any = "plain", **options: Any
) -> gradwire.Attachment:
    """Between the nodes, in small buckets."""
    options = {"bucket_mb": 0.01, "timeout_s": 20, **options}
    return gradwire.attach(net, optimizer, scheme, group=mesh.get_group("replicate"), **options)
