"""The moving parts of a run in one rank: model, optimizer, DDP, and the scheme attached to it."""

import gc
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import gradwire
from gradwire import LocalSgd, schemes
from gradwire.doors.local_sgd import OUTER
from gradwire.telemetry.stopwatch import Stopwatch
from gradwire_lab.training.config import TrainConfig
from gradwire_lab.training.sharding import SHARDED, Sharded, make_scheme
from gradwire_lab.training.torch_hooks import HOOKS, ONE_BUCKET, TorchHook
from gradwire_lab.workloads import Workload


class TrainingSession:
    """One rank's model under training; `wrap` puts it into DDP, or FSDP2, and attaches the scheme."""

    def __init__(self, config: TrainConfig, workload: Workload, device: torch.device) -> None:
        self.config, self.workload, self.device = config, workload, device
        self.model = workload.build_model(config.seed).to(device)
        self.n_parameters = sum(parameter.numel() for parameter in self.model.parameters())
        self._sharded = Sharded(self.model, config.scheme, config.scheme_options) if config.scheme in SHARDED else None
        self.optimizers = workload.build_optimizers(self.model)
        self.schedulers = workload.build_schedulers(self.optimizers)
        self.attachment: Any = None
        self._scheme: Any = None
        self._torch_hook: TorchHook | None = None
        self._hooks: list[Any] = []
        self._last_gradient = Stopwatch()
        self.ddp: nn.Module  # or the model itself, under local SGD and FSDP2
        self._exchanged_step = -1

    def wrap(self, scheme_state: dict[str, Any] | None = None) -> None:
        """Put the model into a new DDP and attach the scheme, with the state it had if there was one."""
        self._n_steps, self._sent_bytes, config = 0, 0.0, self.config
        if config.local_sgd:
            self._begin_local_sgd()
            return
        if self._sharded is not None:
            self.ddp = self.model
            self.attachment = None if self.is_computed else self._sharded.attach(self.optimizers)
            return
        options, whole_mb = self.workload.ddp_options(), 1 + (sum(p.nbytes for p in self.model.parameters()) >> 20)
        if config.bucket_cap_mb is not None:
            # The least that DDP takes for a size still lets no two tensors share a bucket.
            options["bucket_cap_mb"] = min(max(config.bucket_cap_mb, 1e-6), whole_mb)
        if config.scheme in ONE_BUCKET:
            options["bucket_cap_mb"] = whole_mb
        devices = [self.device.index] if self.device.type == "cuda" else None
        self.ddp = DistributedDataParallel(self.model, device_ids=devices, **options)
        if config.scheme in HOOKS:
            self._torch_hook = TorchHook(config.scheme, config.scheme_options, self.ddp)
            self.note_gradients()
            return
        self._scheme = make_scheme(config.scheme, config.scheme_options)
        self.attachment = gradwire.attach(self.ddp, self.optimizers, self._scheme)
        if scheme_state is not None:
            self.attachment.load_state_dict(scheme_state)

    def note_gradients(self) -> None:
        """Let `since_last_gradient_s` tell: a hook runs when a gradient is in `.grad` and before DDP hears of it."""
        trained = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        self._hooks = [one.register_post_accumulate_grad_hook(lambda _: self._last_gradient.begin()) for one in trained]

    def _begin_local_sgd(self) -> None:
        config = self.config

        def outer(anchors: Iterable[torch.Tensor]) -> torch.optim.Optimizer:
            optimizer = OUTER[config.outer](anchors)
            for group in optimizer.param_groups:
                group["lr"] = config.outer_rate or group["lr"]
            return optimizer

        # Only a bare name may be made without error feedback, where momentum forbids it.
        scheme = schemes.by_name(config.scheme, **config.scheme_options) if config.scheme_options else config.scheme
        self.ddp = self.model
        self.attachment = LocalSgd(
            self.model, self.optimizers, scheme, config.local_sgd, outer, delay=config.delay,
            fragments=config.fragments, feedback_decay=config.feedback_decay,
        )  # fmt: skip

    def rewrap(self) -> None:
        """Wrap anew, as a resumption does, carrying the scheme's state over."""
        state = self.scheme_state()
        self.close()
        self.wrap(state)

    def close(self) -> None:
        """Detach the scheme and let go of DDP, so that its hooks leave the parameters."""
        if self.attachment is not None:
            self.attachment.close()
            self.attachment = None
        for hook in self._hooks:
            hook.remove()
        if hasattr(self, "ddp"):
            del self.ddp
        self.zero_grad()  # they may be views of the old DDP's buckets
        gc.collect()  # DDP's reducer sits in reference cycles

    @property
    def is_computed(self) -> bool:
        """Without gradwire nobody counts what is sent."""
        return self.config.scheme in (*HOOKS, "hsdp", "fully-shard")

    def whole_model(self) -> nn.Module:
        """The model with all of its weights. Collective."""
        return self._sharded.whole(self.workload.build_model(0)) if self._sharded else self.model

    @property
    def recorder(self) -> Any:
        """The scheme's telemetry; None without gradwire."""
        attachment = self.attachment.reducer if self.config.local_sgd else self.attachment
        return None if attachment is None else attachment.recorder

    def since_last_gradient_s(self) -> float:
        """At the end of the backward pass: how long it has only waited; 0 behind FSDP2, where no gradient is noted."""
        return self._last_gradient.elapsed_s if self._hooks else 0.0

    def computed_bytes(self, n_steps: int) -> float:
        """What this rank must have sent without gradwire in so many steps."""
        source = self._torch_hook or self._sharded
        assert source is not None
        return source.sent_bytes(n_steps)

    def step_figures(self, waited_s: float) -> dict[str, float]:
        """The communication of the last step; `waited_s`: what `since_last_gradient_s` said at the end of its backward pass."""
        original = {"original_bytes": 4.0 * self.n_parameters}
        if self.config.local_sgd:
            steps = self.recorder.steps
            if not steps or steps[-1].step == self._exchanged_step:
                return original
            self._exchanged_step = steps[-1].step
            return dict(steps[-1].as_dict())
        if self.attachment is not None:
            # The step's record was closed at the end of its backward pass.
            return {**self.recorder.steps[-1].as_dict(), **self.attachment.scheme.step_figures()}
        self._n_steps += 1
        before, self._sent_bytes = self._sent_bytes, self.computed_bytes(self._n_steps)
        sent = self._sent_bytes - before
        return {**original, "exposed_s": waited_s, "bytes_sent": sent, "bytes_received": sent}

    def update(self) -> None:
        """The optimizers' steps, then the schedules'."""
        steps: list[Any] = [*self.optimizers, *self.schedulers]
        for one in steps:
            one.step()

    def zero_grad(self) -> None:
        """Let go of all gradients."""
        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none=True)

    def flush(self) -> None:
        """Have the parameters that all ranks share: a scheme that owns the optimizer's step finishes it."""
        flush = getattr(self.attachment, "take_shared" if self.config.local_sgd else "flush", None)
        if flush is not None:
            flush()

    @property
    def replicas_may_differ(self) -> bool:
        """Whether replicas may be apart at the end: `periodic`."""
        return self._scheme is not None and bool(self._scheme.replicas_may_differ)

    def scheme_state(self) -> dict[str, Any] | None:
        """The attachment's state; None for plain DDP."""
        return None if self.attachment is None else self.attachment.state_dict()

    def shared_state(self) -> dict[str, Any]:
        """What is the same on all ranks: model (its buffers are broadcast from rank 0 at every step), optimizers."""
        return {
            "model": self.model.state_dict(),
            "optimizers": [optimizer.state_dict() for optimizer in self.optimizers],
            "schedulers": [scheduler.state_dict() for scheduler in self.schedulers],
        }

    def load_shared_state(self, state: dict[str, Any]) -> None:
        """Take over what `shared_state` gave; before `wrap`."""
        self.model.load_state_dict(state["model"])
        for optimizer, own in zip(self.optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(own)
        for scheduler, at in zip(self.schedulers, state["schedulers"], strict=True):
            scheduler.load_state_dict(at)
