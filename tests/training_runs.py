"""Training runs with everything that scripts do around an optimizer, to be compared between DDP and a scheme."""

import contextlib
import copy
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import gradwire
from gradwire.schemes import Scheme

N_STEPS = 8


class Model(nn.Module):
    """With what makes models awkward: a tied layer, a parameter of the root's own, attention that bypasses its output
    layer's forward, a layer that is used in some steps only, and batch norm."""

    def __init__(self, has_unused: bool = False) -> None:
        super().__init__()
        self.token = nn.Embedding(11, 16)
        self.position = nn.Parameter(torch.randn(5, 16))
        self.attention = nn.MultiheadAttention(16, 2, batch_first=True)
        self.norm = nn.BatchNorm1d(5)
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(4))
        self.spare = nn.Linear(16, 16) if has_unused else None
        self.never = nn.Linear(3, 3) if has_unused else None
        self.head = nn.Linear(16, 11, bias=False)
        self.head.weight = self.token.weight
        self.calls = 0

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.token(tokens) + self.position
        x = self.norm(x + self.attention(x, x, x, need_weights=False)[0])
        for layer in self.layers:
            x = torch.tanh(layer(x))
        if self.spare is not None and self.training:
            self.calls += 1
            if self.calls % 3 == 0:
                x = x + self.spare(x)
        return self.head(x)


# Every module apart, so that a block's step in the wrong place shows.
BLOCKS = [["token"], ["attention"], ["norm"], ["layers.0", "layers.1"], ["layers.2"], ["layers.3"]]

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=1e-3),
    "nesterov": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True, foreach=True),
    "adam": lambda p: torch.optim.Adam(p, lr=1e-2),
    "adamw": lambda p: torch.optim.AdamW(p, lr=1e-2, fused=True),
    "amsgrad": lambda p: torch.optim.AdamW(p, lr=1e-2, amsgrad=True, foreach=True),
}
MORE_OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=1e-3, momentum=0.5),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=1e-2),
    "fused sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, fused=True),
}
SCHEDULES: dict[str, Callable[[torch.optim.Optimizer], Any]] = {
    "none": lambda optimizer: None,
    "cosine": lambda optimizer: torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, N_STEPS),
    "one cycle": lambda optimizer: torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=N_STEPS + 2),
}


def batch_of(rank: int, step: int) -> Tensor:
    return torch.randint(0, 11, (3, 5), generator=torch.Generator().manual_seed(100 * rank + step))


class Run:
    """One training run; what happens in it is said by the options. `scheme`: of blocks and max_grad_norm; None: DDP."""

    def __init__(
        self,
        rank: int,
        scheme: Callable[[Any, float | None], Scheme] | None,
        optimizer: str = "momentum",
        schedule: str = "none",
        scheduler_first: bool = False,
        set_to_none: bool = True,
        has_unused: bool = False,
        accumulate: int = 1,
        amp: bool = False,
        max_norm: float | None = None,
        look: str = "",
        blocks: Any = BLOCKS,
        **ddp_options: Any,
    ) -> None:
        torch.manual_seed(3)
        self.rank, self.set_to_none, self.accumulate, self.look = rank, set_to_none, accumulate, look
        self.max_norm, self.has_scheme = max_norm, scheme is not None
        self.model = Model(has_unused)
        self.ddp = DistributedDataParallel(
            self.model, bucket_cap_mb=0.002, find_unused_parameters=has_unused, **ddp_options
        )
        groups = [
            {"params": [p for p in self.model.parameters() if p.dim() > 1]},
            {"params": [p for p in self.model.parameters() if p.dim() == 1], "weight_decay": 0.0},
        ]
        self.optimizer = (OPTIMIZERS | MORE_OPTIMIZERS)[optimizer](groups)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**14, growth_interval=3, enabled=amp)
        scheduler = SCHEDULES[schedule](self.optimizer) if scheduler_first else None
        self.attachment = None
        if scheme is not None:
            made = scheme(blocks, max_norm)
            scaler = self.scaler if amp else None
            self.attachment = gradwire.attach(self.ddp, self.optimizer, made, scaler, timeout_s=100)
        self.scheduler = scheduler or SCHEDULES[schedule](self.optimizer)
        self.seen: list[Tensor] = []
        self.n_hook_calls = 0
        self.optimizer.register_step_pre_hook(self._count)
        self.optimizer.register_step_post_hook(self._count)

    def _count(self, *_: Any) -> None:
        self.n_hook_calls += 1

    def train(self) -> list[Tensor]:
        for step in range(N_STEPS):
            self.take_step(step)
            self.scheduler and self.scheduler.step()
            if self.look:
                self.look_at(step)
        if self.attachment is not None:
            assert self.attachment.stats()["n_steps"] == N_STEPS
            self.attachment.close()
        assert self.scaler.is_enabled() or self.n_hook_calls == 2 * N_STEPS
        self.seen += [p.detach().clone() for p in self.model.parameters()]
        self.seen += [buffer.clone() for buffer in self.model.buffers()]
        self.seen += self.momenta()
        self.seen.append(torch.tensor(self.scaler.get_scale()))
        return self.seen

    def take_step(self, step: int) -> None:
        for part in range(self.accumulate):
            is_last = part == self.accumulate - 1
            tokens = batch_of(self.rank, self.accumulate * step + part)
            with contextlib.nullcontext() if is_last else self.ddp.no_sync():
                loss = F.cross_entropy(self.ddp(tokens).flatten(0, 1), tokens.flatten())
                if self.scaler.is_enabled() and step == 2 and self.rank == 0:
                    loss = loss * torch.inf
                self.seen.append(loss.detach().clone())
                self.scaler.scale(loss).backward()
        if self.max_norm is not None and not self.has_scheme:
            nn.utils.clip_grad_norm_(self.ddp.parameters(), self.max_norm)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad(set_to_none=self.set_to_none)

    def momenta(self) -> list[Tensor]:
        state = self.optimizer.state_dict()["state"]
        return [value.clone() for key in sorted(state) for value in state[key].values() if torch.is_tensor(value)]

    def look_at(self, step: int) -> None:
        """What a script does between two steps."""
        if self.look == "evaluation":
            self.model.eval()
            self.seen.append(self.model.head.weight.detach().clone())
        if self.look in ("evaluation", "forward without gradients"):
            with torch.no_grad():
                self.seen.append(self.ddp(batch_of(0, 0)))
            self.ddp.train()
        elif self.look == "state_dict":
            self.seen += [value.clone() for value in self.ddp.state_dict().values()]
            self.seen += self.momenta()
        elif self.look == "inner state_dict":
            self.seen += [value.clone() for value in self.model.layers[2].state_dict().values()]
        elif self.look == "flush":
            if self.attachment is not None:
                self.attachment.flush()
            self.seen += [p.detach().clone() for p in self.model.parameters()]
        if self.look == "copy":
            average = copy.deepcopy(self.model).eval()  # as for an average of weights
            with torch.no_grad():
                self.seen.append(average(batch_of(0, 0)).isfinite())
        if self.look == "load" and step == 3:
            state = {key: value.clone() for key, value in self.model.state_dict().items()}
            self.model.load_state_dict({key: value * 0.5 for key, value in state.items()})


LOOKS = ("evaluation", "forward without gradients", "state_dict", "inner state_dict", "flush", "copy", "load")
CASES: dict[str, dict[str, Any]] = {
    **{f"{name}, {plan}": {"optimizer": name, "schedule": plan} for name in OPTIMIZERS for plan in SCHEDULES},
    "schedule before attach": {"schedule": "one cycle", "scheduler_first": True},
    "gradients kept": {"optimizer": "adamw", "set_to_none": False},
    "unused": {"optimizer": "adam", "has_unused": True},
    "unused, gradients kept": {"optimizer": "momentum", "has_unused": True, "set_to_none": False},
    "bucket views": {"gradient_as_bucket_view": True},
    "static graph": {"static_graph": True},
    "accumulation": {"optimizer": "adam", "accumulate": 3},
    "accumulation, views": {"accumulate": 2, "gradient_as_bucket_view": True},
    "amp": {"optimizer": "adamw", "amp": True},
    "amp, sgd": {"optimizer": "sgd", "amp": True, "gradient_as_bucket_view": True},
    "clipped": {"max_norm": 0.05},
    "loosely clipped": {"max_norm": 1e6, "optimizer": "adam"},
    "one block": {"blocks": [["layers", "token", "attention", "norm", "head"]]},
    "automatic blocks": {"blocks": 4},
    **{look: {"look": look, "optimizer": "adamw"} for look in LOOKS},
}


def find_differences(
    rank: int, cases: dict[str, dict[str, Any]], scheme: Callable[[Any, float | None], Scheme]
) -> list[str]:
    """The cases in which `scheme` does not give DDP's bits."""
    wrong = []
    for name, options in cases.items():
        expected, found = Run(rank, None, **options).train(), Run(rank, scheme, **options).train()
        same = len(expected) == len(found) and all(
            torch.equal(a, b) or (torch.equal(a.isnan(), b.isnan()) and bool(a.isnan().any()))
            for a, b in zip(expected, found, strict=True)
        )
        if not same:
            worst = [i for i, (a, b) in enumerate(zip(expected, found, strict=False)) if not torch.equal(a, b)]
            wrong.append(f"{name}: differs at {worst[:5]} of {len(expected)}")
    return wrong
