"""Four ranks as two nodes of two: FSDP2 inside a node. A model with odd sizes, so that shards are padded."""

import contextlib
import functools
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.utils.checkpoint import checkpoint

import gradwire
from ranks import at_end, bits_of

VOCABULARY, WIDTH = 53, 37
adamw, sgd = functools.partial(torch.optim.AdamW, lr=1e-2), functools.partial(torch.optim.SGD, lr=0.1)
# Of `fully_shard`, by a word of a case.
OPTIONS: dict[str, dict[str, Any]] = {
    "mixed32": {"mp_policy": MixedPrecisionPolicy(torch.bfloat16, torch.float32)},
    "bf16": {"mp_policy": MixedPrecisionPolicy(torch.bfloat16, torch.bfloat16)},
    "fp16": {"mp_policy": MixedPrecisionPolicy(torch.float16, torch.float16)},
    "offload": {"offload_policy": CPUOffloadPolicy(pin_memory=False)},
    "noreshard": {"reshard_after_forward": False},
}


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.inner, self.outer = nn.Linear(WIDTH, 2 * WIDTH + 1), nn.Linear(2 * WIDTH + 1, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.outer(torch.relu(self.inner(self.norm(x))))


class Net(nn.Module):
    """An embedding (its input needs no gradient), three blocks, a head, and a layer that nobody uses."""

    def __init__(self, reentrant: bool | None) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList([Residual() for _ in range(3)])
        self.head = nn.Linear(WIDTH, VOCABULARY)
        self.spare = nn.Linear(WIDTH, 3)
        self.reentrant = reentrant  # where blocks run again in the backward pass

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.embed(x)
        for block in self.blocks:
            h = block(h) if self.reentrant is None else checkpoint(block, h, use_reentrant=self.reentrant)
        return self.head(h)


def make_mesh() -> DeviceMesh:
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))


def build(mesh: DeviceMesh | None, case: str = "") -> nn.Module:
    """A net behind FSDP2, of which the words of `case` say what it is asked for; by itself where there is no mesh."""
    torch.manual_seed(1)
    net = Net(next((kind == "reentrant" for kind in ("ordinary", "reentrant") if kind in case), None))
    if mesh is None:
        return net
    options = {key: value for word in case.split() for key, value in OPTIONS.get(word, {}).items()}
    if "tied" in case:
        net.head.weight = net.embed.weight
    if "frozen" in case:
        net.blocks[0].requires_grad_(False)
        net.blocks[1].inner.requires_grad_(False)
    for block in net.blocks:
        if "compile" in case:
            block.compile(backend="aot_eager")
        fully_shard(block, mesh=mesh, **options)
    fully_shard(net, mesh=mesh, **options)
    if "prefetch" in case:
        net.set_modules_to_forward_prefetch(list(net.blocks))
        net.blocks[0].set_modules_to_forward_prefetch([net.blocks[1], net.blocks[2]])
        net.blocks[2].set_modules_to_backward_prefetch([net.blocks[1], net.blocks[0]])
    if "divided" in case:
        for part in (*net.blocks, net):
            part.set_gradient_divide_factor(3.0)
            part.set_force_sum_reduction_for_comms(True)
    return net


def batch_of(rank: int, step: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1000 * rank + step)
    drawn = torch.randint(0, VOCABULARY, (2, 8, 5), generator=generator)
    return drawn[0], drawn[1]


class Sharded:
    """The net of a case, its optimizer and, where a scheme is given, the attachment (with `options`), which is closed
    when the rank's function has returned, at the latest; steps have numbers."""

    def __init__(
        self,
        rank: int,
        mesh: DeviceMesh | None,
        case: str = "",
        scheme: Any = None,
        optimizer: Callable[[Any], torch.optim.Optimizer] = adamw,
        **options: Any,
    ) -> None:
        self.rank, self.mesh, self.case = rank, mesh, case
        self.net: Any = build(mesh, case)
        self.optimizer = optimizer(self.net.parameters())
        self.state: Any = None
        if scheme is not None:
            self.attach(scheme, **options)

    def attach(self, scheme: Any = "plain", **options: Any) -> None:
        self.state = gradwire.attach(self.net, self.optimizer, scheme, **{"timeout_s": 20, **options})
        at_end.callback(self.state.close)

    def take_steps(self, steps: Iterable[int], n_parts: int = 1) -> "Sharded":
        """Of `n_parts` micro-batches each, or of three in a case of them."""
        n_parts = 3 if "micro" in self.case else n_parts
        for step in steps:
            for part in range(n_parts):
                x, y = batch_of(self.rank, 10 * step + part)
                with self._accumulating(part == n_parts - 1):
                    nn.functional.cross_entropy(self.net(x).flatten(0, 1).float(), y.flatten()).backward()
            if "clip" in self.case:
                nn.utils.clip_grad_norm_(self.net.parameters(), 0.5)
            self.optimizer.step()
            self.optimizer.zero_grad()
        return self

    def _accumulating(self, is_last: bool) -> contextlib.AbstractContextManager[Any]:
        """As the case wants it: through FSDP2, or through the attachment where FSDP2 does not all-reduce."""
        if "sync" in self.case:
            self.net.set_requires_gradient_sync(is_last)
        elif "all-reduce" in self.case and self.mesh.ndim == 2:
            self.net.set_requires_all_reduce(is_last)
        elif "all-reduce" in self.case and not is_last:
            return self.state.no_sync()
        return contextlib.nullcontext()

    def shards(self) -> list[torch.Tensor]:
        return [parameter.to_local().detach().clone() for parameter in self.net.parameters()]

    def has_bits_of(self, other: "Sharded") -> bool:
        return all(bits_of(mine) == bits_of(theirs) for mine, theirs in zip(self.shards(), other.shards(), strict=True))
