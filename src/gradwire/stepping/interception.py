"""Puts a scheme between the user and the optimizer: `step` becomes the scheme's, and whoever reads parameters is served.

Reading a parameter directly between two steps sees it as it was before the pending step; `Attachment.flush()` first.
"""

from __future__ import annotations

import types
import weakref
from collections.abc import Sequence
from itertools import chain
from typing import Any, Protocol

import torch
from torch import nn
from torch.optim import optimizer as torch_optimizer

from gradwire.errors import Unsupported
from gradwire.stepping.blocks import Block, ObservedUse
from gradwire.stepping.frozen_step import FrozenStep
from gradwire.stepping.guard import GradientGuard


class StepOwner(Protocol):
    """What a scheme that owns the step is asked to do, all on the training thread."""

    def begin_forward(self) -> None:
        """The model's forward pass begins, in training."""

    def before_forward(self, block: Block) -> None:
        """A module that uses `block` begins its forward pass."""

    def take_step(self, frozen: FrozenStep) -> None:
        """The user called for the step of the last reduction."""

    def drop_step(self) -> None:
        """The step of the last reduction is not to be taken (AMP: a gradient was not finite)."""

    def flush(self) -> None:
        """Take every step that was called for: parameters and optimizer state are read next."""


class Interceptor:
    """Everything that is hung into a model and its optimizer for one owner, and taken out again by `remove`.

    Args:
        module: the model inside DDP; `wrapper`: the DDP model.
        blocks: `before_forward` is called for each before a module of its `users` runs.
        has_scaler: whether `attach` was given a GradScaler.
    Raises: Unsupported (somebody else has replaced `optimizer.step`).
    """

    def __init__(
        self,
        wrapper: nn.Module,
        module: nn.Module,
        optimizer: torch.optim.Optimizer,
        blocks: Sequence[Block],
        owner: StepOwner,
        names: dict[torch.Tensor, str],
        has_scaler: bool,
    ) -> None:
        self._optimizer, self._owner, self._names, self._has_scaler = optimizer, owner, names, has_scaler
        self._module = module
        self._is_accumulating = False
        self._in_blocks = {parameter for block in blocks for parameter in block.parameters}
        self.guard = GradientGuard(self._in_blocks)
        self._n_reductions = 0  # begun since attaching; the step of the last one may be called for once
        self._n_stepped = 0
        self._previous_step: Any = vars(optimizer).get("step")
        if self._previous_step is not None and not hasattr(self._previous_step, "_wrapped_by_lr_sched"):
            raise Unsupported(
                "optimizer.step was replaced by something other than a scheduler: call attach() before what replaces it"
            )
        self._is_active = True
        self._replace_step()
        self._uses = ObservedUse(module, blocks)
        self._handles: list[Any] = [module.register_forward_pre_hook(_Link(self, "_before_root"))]
        self._module_handles: dict[nn.Module, Any] = {
            inner: inner.register_forward_pre_hook(_Link(self, "_before_module"))
            for inner in module.modules()
            if inner is not module
        }
        for inner in module.modules():
            self._handles.append(inner.register_state_dict_pre_hook(_Link(self, "_flush")))
            self._handles.append(inner.register_load_state_dict_pre_hook(_Link(self, "_flush")))
        self._handles.append(optimizer.register_state_dict_pre_hook(_Link(self, "_flush")))
        self._handles.append(optimizer.register_load_state_dict_pre_hook(_Link(self, "_flush")))
        self._trained = [wrapper, module]
        for one in self._trained:
            vars(one)["train"] = _TrainLink(one, self)

    # ---- told by the hook

    def begin_reduction(self) -> None:
        """The first bucket of a backward pass. Raises: Unsupported (gradients are accumulated in `.grad`)."""
        if self._n_stepped < self._n_reductions and self._is_accumulating:
            raise Unsupported(
                "a second backward pass was reduced before the first one's step was taken, and its gradients add up in "
                ".grad: accumulate inside `with ddp.no_sync():` and reduce with the last backward pass only"
            )
        self._n_reductions += 1

    def end_backward(self) -> None:
        """The gradients are in `.grad`."""
        self.guard.note()

    # ---- hooks

    def _before_root(self, *_: Any) -> None:
        self._is_accumulating = self.guard.is_untouched
        if not self._module.training or not torch.is_grad_enabled():
            self._owner.flush()
            return
        if self._uses.finish():
            for inner in [inner for inner in self._module_handles if not self._uses.blocks_of(inner)]:
                self._module_handles.pop(inner).remove()
        self._owner.begin_forward()
        self._uses.note_call(self._module)
        for block in self._uses.blocks_of(self._module):
            self._owner.before_forward(block)

    def _before_module(self, inner: nn.Module, *_: Any) -> None:
        self._uses.note_call(inner)
        for block in self._uses.blocks_of(inner):
            self._owner.before_forward(block)

    def _flush(self, *_: Any) -> None:
        self._owner.flush()

    # ---- the step

    def _replace_step(self) -> None:
        link = weakref.ref(self)

        def step(optimizer: torch.optim.Optimizer, closure: Any = None) -> Any:
            """`optimizer.step()`, taken over by a gradwire scheme: see gradwire.stepping."""
            interceptor = link()
            if interceptor is None or not interceptor._is_active:
                return type(optimizer).step(optimizer, closure)
            vars(optimizer)["_opt_called"] = True  # what schedulers ask for
            return interceptor._user_step(closure)

        if self._previous_step is not None:
            vars(step)["_wrapped_by_lr_sched"] = True
        # A bound method: schedulers that come later wrap its `__func__`.
        self._own_step = types.MethodType(step, self._optimizer)
        vars(self._optimizer)["step"] = self._own_step
        # GradScaler then hands over its scale and what it found, instead of changing `.grad`.
        vars(self._optimizer)["_step_supports_amp_scaling"] = True

    def _user_step(self, closure: Any) -> None:
        optimizer = self._optimizer
        if closure is not None:
            raise Unsupported(
                "step(closure) evaluates the model inside the step, which a scheme that takes it over cannot follow: call "
                "step() without a closure, or attach a scheme that leaves the step to the optimizer"
            )
        for hook in chain(
            torch_optimizer._global_optimizer_pre_hooks.values(), optimizer._optimizer_step_pre_hooks.values()
        ):
            hook(optimizer, (optimizer,), {})
        self._take()
        for hook in chain(
            optimizer._optimizer_step_post_hooks.values(), torch_optimizer._global_optimizer_post_hooks.values()
        ):
            hook(optimizer, (optimizer,), {})

    def _take(self) -> None:
        optimizer = self._optimizer
        if self._n_stepped == self._n_reductions:
            if all(parameter.grad is None for parameter in self._in_blocks):
                return  # nothing to step, as without gradwire
            raise Unsupported(
                "step() was called without a backward pass through DDP since the last one: this scheme steps once for "
                "each reduction; call backward() outside of no_sync() first"
            )
        scale = self._read_scaler()
        self.guard.check(self._names)
        self._n_stepped = self._n_reductions
        self.guard.forget()
        if scale is not None and float(vars(optimizer)["found_inf"]) > 0:  # GradScaler has set it
            self._owner.drop_step()
            return
        frozen = FrozenStep(optimizer, self._n_reductions - 1, scale)
        self._step_others(frozen)
        self._owner.take_step(frozen)

    def _read_scaler(self) -> torch.Tensor | None:
        if not hasattr(self._optimizer, "found_inf"):
            return None
        scale = getattr(self._optimizer, "grad_scale", None)
        if scale is None:
            raise Unsupported(
                "scaler.unscale_(optimizer) changes .grad, which this scheme does not step from: leave it out, and pass "
                "max_grad_norm=... to the scheme in place of clipping"
            )
        if not self._has_scaler:
            raise Unsupported(
                "pass the GradScaler to attach(..., scaler=scaler): ranks must agree on non-finite gradients"
            )
        return scale

    def _step_others(self, frozen: FrozenStep) -> None:
        """Parameters of the optimizer that DDP does not reduce are stepped at once, from their own `.grad`."""
        others = {p: p.grad for p in frozen.parameters if p not in self._in_blocks and p.grad is not None}
        if others and frozen.inverse_scale is not None:
            torch._foreach_mul_(list(others.values()), float(frozen.inverse_scale))
        frozen.apply(others)

    def remove(self) -> None:
        """Give the model and the optimizer back as they were; after a flush."""
        self._is_active = False
        for handle in self._handles:
            handle.remove()
        for handle in self._module_handles.values():
            handle.remove()
        self._handles.clear()
        self._module_handles.clear()
        for one in self._trained:
            if isinstance(vars(one).get("train"), _TrainLink):
                del vars(one)["train"]
        self._trained.clear()
        optimizer = self._optimizer
        if vars(optimizer).get("step") is self._own_step:  # otherwise a scheduler wraps it, and it hands calls through
            del optimizer.step
            if self._previous_step is not None:
                vars(optimizer)["step"] = self._previous_step
        vars(optimizer).pop("_step_supports_amp_scaling", None)


class _Link:
    """A hook that a copied or saved model does not take along: it does nothing there."""

    def __init__(self, interceptor: Interceptor | None = None, method: str = "") -> None:
        self._interceptor = None if interceptor is None else weakref.ref(interceptor)
        self._method = method

    def __call__(self, *args: Any) -> None:
        interceptor = None if self._interceptor is None else self._interceptor()
        if interceptor is not None and interceptor._is_active:
            getattr(interceptor, self._method)(*args)

    def __deepcopy__(self, memo: dict[int, Any]) -> _Link:
        return _Link()

    def __reduce__(self) -> Any:
        return (_Link, ())


class _TrainLink:
    """`module.train`, which flushes before evaluation; `module.eval()` calls it too."""

    def __init__(self, module: nn.Module, interceptor: Interceptor | None = None) -> None:
        self._module = weakref.ref(module)
        self._interceptor = None if interceptor is None else weakref.ref(interceptor)

    def __call__(self, mode: bool = True) -> nn.Module:
        interceptor = None if self._interceptor is None else self._interceptor()
        if not mode and interceptor is not None and interceptor._is_active:
            interceptor._flush()
        module = self._module()
        assert module is not None
        return type(module).train(module, mode)

    def __deepcopy__(self, memo: dict[int, Any]) -> _TrainLink:
        module = self._module()
        return _TrainLink(memo[id(module)])

    def __reduce__(self) -> Any:
        return (_TrainLink, (self._module(),))
