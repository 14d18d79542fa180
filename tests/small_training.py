"""One rank's small training behind DDP, by itself or with a scheme attached, as the tests of schemes make it."""

import copy
import io
import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import gradwire
from ranks import at_end

Loss = Callable[[nn.Module, int, int], Tensor]
MakeOptimizer = Callable[[Any], Any]  # one, or a list of several


def layers() -> nn.Module:
    """96,000 parameters: with DDP's buckets of 0.2 MB, several."""
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(20, 300), nn.ReLU(), nn.Linear(300, 300), nn.ReLU(), nn.Linear(300, 3))


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-3)


def muon_and_adamw(parameters: Any) -> list[torch.optim.Optimizer]:
    """Muon for matrices, AdamW for the rest."""
    several = list(parameters)
    matrices, rest = [p for p in several if p.ndim == 2], [p for p in several if p.ndim != 2]
    return [torch.optim.Muon(matrices, lr=0.02), torch.optim.AdamW(rest, lr=1e-3)]


def batch_of(rank: int, step: int) -> Tensor:
    return torch.randn(8, 20, generator=torch.Generator().manual_seed(1_000 * rank + step))


def mean_square(module: nn.Module, rank: int, step: int) -> Tensor:
    return module(batch_of(rank, step)).square().mean()


def from_one(module: nn.Module, rank: int, step: int) -> Tensor:
    return (module(batch_of(rank, step)).float() - 1).square().mean()


def small_layers(seed: int = 1, dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(20, 60), nn.Tanh(), nn.Linear(60, 60), nn.Tanh(), nn.Linear(60, 3)).to(dtype)


def copying(module: nn.Module, rank: int, step: int) -> Tensor:
    """The loss of a model that is to give back the first values of its input."""
    inputs = batch_of(rank, step).to(next(module.parameters()).dtype)
    return (module(inputs) - inputs[:, :3]).square().mean()


class Given(nn.Module):
    """Its gradient is what `forward` is told, to the bit: a backward pass by multiplication would change it."""

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(-1, 1, math.prod(shape)).view(shape).to(dtype))

    def forward(self, gradient: torch.Tensor) -> torch.Tensor:
        return _Give.apply(self.weight, gradient)


class _Give(torch.autograd.Function):
    @staticmethod
    def forward(ctx, weight: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        ctx.save_for_backward(gradient)
        return weight.sum()

    @staticmethod
    def backward(ctx, _: torch.Tensor) -> tuple[torch.Tensor, None]:  # type: ignore[override]
        return ctx.saved_tensors[0], None


class GivenParts(nn.Module):
    """A parameter of each shape, all its values `fill`, whose gradients are what `forward` is told."""

    def __init__(self, shapes: Iterable[tuple[int, ...]], dtype: torch.dtype, fill: float) -> None:
        super().__init__()
        self.parts = nn.ModuleList(Given(shape, dtype) for shape in shapes)
        for part in self.parts:
            nn.init.constant_(part.weight, fill)

    def forward(self, gradients: Iterable[Tensor]) -> Tensor:
        return torch.stack([part(gradient) for part, gradient in zip(self.parts, gradients, strict=True)]).sum()


def flat(module: nn.Module) -> Tensor:
    """(n,): a copy of all parameters, on the CPU."""
    return torch.cat([parameter.detach().cpu().reshape(-1) for parameter in module.parameters()])


class Training:
    """A model behind DDP, its optimizer and, where a scheme is given, the attachment; steps have numbers. `loss`: of
    the model, on a rank, in a step; `ddp`: options of DistributedDataParallel, `options`: of `attach`. What is attached
    is closed when the rank's function has returned, if nobody has closed it before."""

    def __init__(
        self,
        rank: int,
        scheme: Any = None,
        optimizer: MakeOptimizer = sgd,
        model: Callable[[], nn.Module] = layers,
        loss: Loss = mean_square,
        ddp: dict[str, Any] | None = None,
        **options: Any,
    ) -> None:
        self.rank, self.loss = rank, loss
        self.ddp = DistributedDataParallel(model(), **{"bucket_cap_mb": 0.2, **(ddp or {})})
        made = optimizer(self.ddp.parameters())
        self.optimizers = made if isinstance(made, list) else [made]
        self.optimizer = self.optimizers[0]
        self.attachment: Any = None
        if scheme is not None:
            self.attachment = gradwire.attach(self.ddp, made, scheme, **options)
            at_end.callback(self.attachment.close)

    def backward(self, step: int, factor: float = 1.0) -> Tensor:
        """New gradients, of the loss times `factor`, which is returned; nobody waits for a device."""
        self.ddp.zero_grad()
        loss = factor * self.loss(self.ddp, self.rank, step)
        loss.backward()
        return loss.detach()

    def take_steps(self, steps: Iterable[int], factor: float = 1.0) -> list[Tensor]:
        """The losses, times `factor`."""
        losses = []
        for step in steps:
            losses.append(self.backward(step, factor))
            for one in self.optimizers:
                one.step()
        return losses

    def after(self, steps: Iterable[int]) -> "Training":
        """Itself, these steps later."""
        self.take_steps(steps)
        return self

    def take_scaled_step(
        self, scaler: torch.amp.GradScaler, step: int, factor: float = 1.0, max_norm: float | None = None
    ) -> None:
        """With gradients that are clipped to `max_norm`, if it is given."""
        self.ddp.zero_grad()
        scaler.scale(factor * self.loss(self.ddp, self.rank, step)).backward()
        for one in self.optimizers:
            if max_norm is not None:
                scaler.unscale_(one)
                torch.nn.utils.clip_grad_norm_(self.ddp.parameters(), max_norm)
            scaler.step(one)
        scaler.update()

    def flat(self) -> Tensor:
        return flat(self.ddp)

    def gradient(self) -> Tensor:
        return torch.cat([parameter.grad.reshape(-1).cpu() for parameter in self.ddp.parameters()])

    def stats(self) -> dict[str, Any]:
        stats: dict[str, Any] = self.attachment.stats()
        return stats

    def close(self) -> dict[str, Any]:
        """What the attachment has counted, if there is one."""
        stats = {}
        if self.attachment is not None:
            stats = self.stats()
            self.attachment.close()
        return stats

    def state(self, **options: Any) -> tuple[Any, ...]:
        """Of model, optimizers and, with these options, attachment, as a file gives it back."""
        file, own = io.BytesIO(), [one.state_dict() for one in (self.ddp.module, *self.optimizers)]
        torch.save([*own, self.attachment.state_dict(**options)], file)
        file.seek(0)
        return tuple(torch.load(file, weights_only=True))

    def load(self, state: tuple[Any, ...]) -> "Training":
        model, *optimizers, attachment = copy.deepcopy(state)
        self.ddp.module.load_state_dict(model)
        for one, own in zip(self.optimizers, optimizers, strict=True):
            one.load_state_dict(own)
        self.attachment.load_state_dict(attachment)
        return self
