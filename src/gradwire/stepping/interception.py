"""Puts a scheme between the user and the optimizer: `step` becomes the scheme's, and whoever reads parameters is served.

Reading a parameter directly between two steps sees it as it was before the pending step; `Attachment.flush()` first.
"""

import copy
import functools
import types
import weakref
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from typing import Any, Protocol

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import optimizer as torch_optimizer
from torch.utils.hooks import RemovableHandle

from gradwire.core.bucket import Bucket, inner_of, named_parameters
from gradwire.core.optimizers import inside
from gradwire.core.session import Session
from gradwire.errors import InvalidArgument, Unsupported
from gradwire.stepping.blocks import Block, ObservedUse
from gradwire.wire.communicator import completed


def stepped_parameters(session: Session, what: str, of_one: bool = False) -> list[torch.Tensor]:
    """The parameters whose gradients DDP reduces, in the model's order, which `what` steps from gradients of its own.
    `of_one`: `what` steps one optimizer only."""
    module, optimizers = session.module, session.optimizers
    if module is None or not optimizers:
        raise InvalidArgument(
            f"{what} takes the optimizer's step itself and needs the model and the optimizer: use "
            "gradwire.attach(ddp, optimizer, scheme), or HookState(scheme, module=ddp, optimizer=optimizer)"
        )
    for optimizer in optimizers:
        if not hasattr(optimizer, "_optimizer_state_dict_pre_hooks"):
            raise Unsupported(
                f"{what} needs an optimizer with torch's hooks, and {type(optimizer).__name__} has none: attach the "
                f"optimizer inside it ({type(inside(optimizer)).__name__}), if its step is all that changes parameters"
            )
    if of_one and len(optimizers) > 1:
        raise Unsupported(
            f"{what} takes the step of one optimizer, and was given {optimizers}: have one step all parameters, or attach a "
            "scheme that leaves the step to them"
        )
    ignored: set[str] = getattr(module, "parameters_to_ignore", set())
    named = named_parameters(module).items()
    reduced = [p for name, p in named if p.requires_grad and name not in ignored]
    shared = [session.names.get(p, "?") for p in optimizers.shared()]
    if shared:
        raise InvalidArgument(
            f"{what} takes each parameter's step once, and two optimizers step {shared[0]} ({len(shared)} in all): give each "
            "parameter to one of them"
        )
    strays = [session.names.get(p, "?") for p in reduced if optimizers.of(p) is None]
    if strays:
        raise Unsupported(
            f"{what} keeps the mean gradient from .grad, and parameter {strays[0]} ({len(strays)} in all) is not in the "
            "optimizer that was attached: attach the one that has all trainable parameters, or a list of all, or freeze the "
            "others with requires_grad_(False) before DDP"
        )
    return reduced


def refuse_join(module: nn.Module | None, what: str, instead: str) -> None:
    """Refuse to work while `ddp.join` is in force; `what` cannot serve it, `instead` can."""
    if isinstance(module, DistributedDataParallel) and module._join_config.enable:
        raise Unsupported(
            f"{what} cannot stand in for ranks that ran out of input (ddp.join): give every rank equally many batches, or "
            + instead
        )


class FiniteFlag:
    """Has every rank skip the same steps under AMP: one rank's Inf is put into all ranks' `.grad`.

    Without a GradScaler it does nothing. It travels on connections of its own, so that it waits for no gradient.
    """

    def __init__(self, session: Session) -> None:
        """Collective."""
        self._communicator = session.communicator.subgroup() if session.has_scaler else None
        self._is_finite = True

    def begin_step(self) -> None:
        """No gradient of the step has been seen yet."""
        self._is_finite = True

    def own_gradient(self, bucket: Bucket) -> torch.futures.Future:
        """Give DDP this rank's own gradient to go on with, at once; the last bucket's when all ranks have told each other."""
        if self._communicator is None:
            return completed(bucket.buffer)
        self._is_finite = self._is_finite and bool(torch.isfinite(bucket.buffer).all())
        return self._communicator.submit(self._share, bucket.buffer) if bucket.is_last else completed(bucket.buffer)

    def _share(self, buffer: torch.Tensor) -> None:
        assert self._communicator is not None
        flag = torch.tensor([float(not self._is_finite)], dtype=torch.float32, device="cpu")
        self._communicator.all_reduce(flag)
        if flag.item() > 0 and buffer.numel():
            buffer[0] = torch.inf

    def close(self) -> None:
        """Let go of the connections."""
        if self._communicator is not None:
            self._communicator.close()


def clip_factor(gradients: list[torch.Tensor], max_norm: float) -> torch.Tensor:
    """The factor that brings the norm of all `gradients` down to `max_norm`; computed as clip_grad_norm_ does."""
    norm = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(gradients, 2.0)), 2.0)
    return torch.clamp(max_norm / (norm + 1e-6), max=1.0)


class FrozenStep:
    """One call of `optimizer.step()`, kept as it was meant, to be carried out later and for a few parameters at a time.

    Holds the hyper-parameters of every group at the user's call, and which parameters had a gradient then. Other optimizers'
    calls for the same reduction may `join` it.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, step: int, scale: torch.Tensor | None = None) -> None:
        self.step = step  # the reduction that it belongs to
        parameters = (p for group in optimizer.param_groups for p in group["params"])
        # The optimizer leaves those without a gradient alone, their state too.
        self.parameters = self._own = frozenset(p for p in parameters if p.grad is not None)
        self._joined: list[FrozenStep] = []
        # Of the loss scale under AMP, (1,) float32 as GradScaler computes it.
        self.inverse_scale = None if scale is None else scale.detach().cpu().double().reciprocal().float()
        self._optimizer = optimizer
        self._groups = [
            {  # a learning rate may be a tensor that schedulers change in place
                key: value.detach().clone() if isinstance(value, torch.Tensor) else copy.copy(value)
                for key, value in group.items()
                if key != "params"
            }
            for group in optimizer.param_groups
        ]

    def join(self, other: "FrozenStep") -> None:
        """Carry out another optimizer's call with this one."""
        self._joined.append(other)
        self.parameters |= other.parameters

    def apply(self, gradients: Mapping[torch.Tensor, torch.Tensor]) -> None:
        """Step those of `gradients` that had a gradient, with these, free of the loss scale, in the place of `.grad`.
        `.grad`, groups and hyper-parameters are as before afterwards; the user's step hooks are not called."""
        for other in self._joined:
            other.apply(gradients)
        chosen = {p: gradient for p, gradient in gradients.items() if p in self._own}
        if not chosen:
            return
        optimizer = self._optimizer
        groups = [dict(group) for group in optimizer.param_groups]
        kept = {parameter: parameter.grad for parameter in chosen}
        # A GradScaler in its `step` lays these on the optimizer, whose step would unscale, or refuse them.
        laid = vars(optimizer)
        told: dict[str, Any] = {name: laid.pop(name) for name in ("grad_scale", "found_inf") if name in laid}
        step: Any = type(optimizer).step
        try:
            # Groups that came after the call took no part in it.
            for group, frozen in zip(optimizer.param_groups, self._groups, strict=False):
                group.update(frozen)
            for group in optimizer.param_groups:
                group["params"] = [p for p in group["params"] if p in chosen]
            for parameter, gradient in chosen.items():
                parameter.grad = gradient.to(parameter.device)
            # Without the hooks that users registered and that torch wraps around it.
            (step.__wrapped__ if getattr(step, "hooked", False) else step)(optimizer)
        finally:
            for group, before in zip(optimizer.param_groups, groups, strict=True):
                group.update(before)
            vars(optimizer).update(told)
            for parameter, own in kept.items():
                parameter.grad = own


class StepOwner(Protocol):
    """Takes the optimizer's step in its place. All calls come on the training thread."""

    def take_step(self, frozen: FrozenStep) -> None: ...  # the user called for the step of the last reduction
    def drop_step(self) -> None: ...  # it is not to be taken (AMP: a gradient was not finite)
    def begin_forward(self) -> None: ...  # of the model, in training
    def flush(self) -> None: ...  # take every step that was called for: parameters and optimizer state are read next

    def before_forward(self, block: Block) -> None:  # of a module that uses `block`
        return


class Interceptor:
    """Everything that is hung into a model and its optimizers for one owner, and taken out again by `remove`.

    Of several optimizers the owner sees one step, called for when all have been asked; those that have not been when the model
    runs again are left out of it. If one of them is not to step (AMP), none does.

    It remembers which gradients a backward pass left in `.grad` and how often each was changed, because the owner steps from
    gradients of its own: a clipping of `.grad` would be lost without a word.
    """

    def __init__(
        self, session: Session, parameters: Sequence[torch.Tensor], owner: StepOwner, blocks: Sequence[Block] = ()
    ) -> None:
        wrapper, optimizers = session.module, session.optimizers
        assert wrapper is not None, "checked with the parameters"
        module = inner_of(wrapper)
        self._module, self._optimizers, self._owner = module, optimizers, owner
        self._names, self._has_scaler = session.names, session.has_scaler
        self._parameters = dict.fromkeys(parameters)
        self._noted: dict[torch.Tensor, tuple[weakref.ref[torch.Tensor], int]] = {}  # .grad after the backward pass
        self._is_accumulating = False
        self._n_reductions = 0  # begun since attaching; the step of the last one may be called for once
        self._n_stepped = 0
        self._asked: dict[torch.optim.Optimizer, FrozenStep | None] = {}  # None: it is not to step
        self._previous_steps: dict[torch.optim.Optimizer, Any] = {one: vars(one).get("step") for one in optimizers}
        for previous in self._previous_steps.values():
            if previous is not None and not hasattr(previous, "_wrapped_by_lr_sched"):
                raise Unsupported(
                    "optimizer.step was replaced by something other than a scheduler: call attach() before what replaces it"
                )
        self._is_active = True
        self._own_steps = {optimizer: self._replace_step(optimizer) for optimizer in optimizers}
        self._uses = ObservedUse(module, blocks)
        flush = _Link(self, "_flush")
        self._handles: list[Any] = [module.register_forward_pre_hook(_Link(self, "_before_root"))]
        self._module_handles: dict[nn.Module, Any] = {
            inner: inner.register_forward_pre_hook(_Link(self, "_before_module"))
            for inner in module.modules()
            if inner is not module
        }
        reads: list[nn.Module | torch.optim.Optimizer] = [*module.modules(), *optimizers]
        for read in reads:
            self._handles += [read.register_state_dict_pre_hook(flush), read.register_load_state_dict_pre_hook(flush)]
        self._trained = [wrapper, module]
        for one in self._trained:
            vars(one)["train"] = _TrainLink(one, self)

    # ---- told by the hook

    def begin_reduction(self) -> None:
        """The first bucket of a backward pass."""
        if self._n_stepped < self._n_reductions and self._is_accumulating:
            raise Unsupported(
                "a second backward pass was reduced before the first one's step was taken, and its gradients add up in "
                ".grad: accumulate inside `with ddp.no_sync():` and reduce with the last backward pass only"
            )
        self._n_reductions += 1

    def end_backward(self) -> None:
        """The gradients are in `.grad`."""
        self._noted = {p: (weakref.ref(p.grad), p.grad._version) for p in self._parameters if p.grad is not None}

    def _is_as_noted(self, parameter: torch.Tensor) -> bool:
        gradient, version = self._noted[parameter]
        return parameter.grad is not None and gradient() is parameter.grad and parameter.grad._version == version

    def _before_root(self, *_: Any) -> None:
        self.end_step()
        self._is_accumulating = any(map(self._is_as_noted, self._noted))  # one more pass would add to it
        if not self._module.training or not torch.is_grad_enabled():
            self._owner.flush()
            return
        if self._uses.finish():
            for inner in [inner for inner in self._module_handles if not self._uses.blocks_of(inner)]:
                self._module_handles.pop(inner).remove()
        self._owner.begin_forward()
        self._before_module(self._module)

    def _before_module(self, inner: nn.Module, *_: Any) -> None:
        self._uses.note_call(inner)
        for block in self._uses.blocks_of(inner):
            self._owner.before_forward(block)

    def _flush(self, *_: Any) -> None:
        self.end_step()
        self._owner.flush()

    # ---- the step

    def _replace_step(self, optimizer: torch.optim.Optimizer) -> Any:
        """Put a step of the owner's in the place of the optimizer's, and return it."""
        link = weakref.ref(self)

        def step(optimizer: torch.optim.Optimizer, closure: Any = None) -> Any:
            """`optimizer.step()`, taken over by a gradwire scheme: see gradwire.stepping."""
            interceptor = link()
            if interceptor is None or not interceptor._is_active:
                return type(optimizer).step(optimizer, closure)
            vars(optimizer)["_opt_called"] = True  # what schedulers ask for
            return interceptor._user_step(optimizer, closure)

        if self._previous_steps[optimizer] is not None:
            vars(step)["_wrapped_by_lr_sched"] = True
        # A bound method: schedulers that come later wrap its `__func__`.
        own_step = vars(optimizer)["step"] = types.MethodType(step, optimizer)
        # GradScaler then hands over its scale and what it found, instead of changing `.grad`.
        vars(optimizer)["_step_supports_amp_scaling"] = True
        return own_step

    def _user_step(self, optimizer: torch.optim.Optimizer, closure: Any) -> None:
        if closure is not None:
            raise Unsupported(
                "step(closure) evaluates the model inside the step, which a scheme that takes it over cannot follow: call "
                "step() without a closure, or attach a scheme that leaves the step to the optimizer"
            )
        for hook in chain(
            torch_optimizer._global_optimizer_pre_hooks.values(), optimizer._optimizer_step_pre_hooks.values()
        ):
            hook(optimizer, (optimizer,), {})
        self._take(optimizer)
        for hook in chain(
            optimizer._optimizer_step_post_hooks.values(), torch_optimizer._global_optimizer_post_hooks.values()
        ):
            hook(optimizer, (optimizer,), {})

    def _take(self, optimizer: torch.optim.Optimizer) -> None:
        own = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        if self._n_stepped == self._n_reductions or optimizer in self._asked:
            if all(parameter.grad is None for parameter in own if parameter in self._parameters):
                return  # nothing to step, as without gradwire
            raise Unsupported(
                "step() was called without a backward pass through DDP since the last one: this scheme steps once for "
                "each reduction; call backward() outside of no_sync() first"
            )
        scale = self._read_scaler(optimizer)
        self._refuse_changed_gradients(own)
        if scale is not None and float(vars(optimizer)["found_inf"]) > 0:  # GradScaler has set it
            self._asked[optimizer] = None
        else:
            frozen = self._asked[optimizer] = FrozenStep(optimizer, self._n_reductions - 1, scale)
            self._step_others(frozen)
        if len(self._asked) == len(self._optimizers):
            self.end_step()

    def end_step(self) -> None:
        """Hand over what was called for since the last reduction."""
        if not self._asked:
            return
        steps, self._asked = list(self._asked.values()), {}
        self._n_stepped, self._noted = self._n_reductions, {}
        taken = [one for one in steps if one is not None]
        if len(taken) < len(steps):
            self._owner.drop_step()
            return
        for other in taken[1:]:
            taken[0].join(other)
        self._owner.take_step(taken[0])

    def _read_scaler(self, optimizer: torch.optim.Optimizer) -> torch.Tensor | None:
        if not hasattr(optimizer, "found_inf"):
            return None
        scale = getattr(optimizer, "grad_scale", None)
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

    def _refuse_changed_gradients(self, parameters: Sequence[torch.Tensor]) -> None:
        """Refuse gradients that were replaced or changed since; those that were cleared are left alone."""
        for parameter in parameters:
            if parameter in self._noted and parameter.grad is not None and not self._is_as_noted(parameter):
                name = self._names.get(parameter, f"of shape {tuple(parameter.shape)}")
                raise Unsupported(
                    f"the gradient of parameter {name} was changed between backward() and step() (clip_grad_norm_, "
                    "unscale_, zero_grad?), but this scheme takes the step from gradients of its own, which are still on "
                    "their way: pass max_grad_norm=... to the scheme instead of clipping, and leave unscale_ to GradScaler"
                )

    def _step_others(self, frozen: FrozenStep) -> None:
        """Parameters of the optimizer that DDP does not reduce are stepped at once, from their own `.grad`."""
        others = {p: p.grad for p in frozen.parameters if p not in self._parameters and p.grad is not None}
        if others and frozen.inverse_scale is not None:
            torch._foreach_mul_(list(others.values()), float(frozen.inverse_scale))
        frozen.apply(others)

    def remove(self) -> None:
        """Give the model and the optimizer back as they were; after a flush."""
        self._is_active = False
        for handle in (*self._handles, *self._module_handles.values()):
            handle.remove()
        self._handles.clear()
        self._module_handles.clear()
        for one in self._trained:
            if isinstance(vars(one).get("train"), _TrainLink):
                del vars(one)["train"]
        self._trained.clear()
        for optimizer, own_step in self._own_steps.items():
            if vars(optimizer).get("step") is own_step:  # otherwise a scheduler wraps it, and it hands calls through
                del optimizer.step
                if self._previous_steps[optimizer] is not None:
                    vars(optimizer)["step"] = self._previous_steps[optimizer]
            vars(optimizer).pop("_step_supports_amp_scaling", None)


# ---- steps under a GradScaler, which calls for none where a gradient overflowed, and has no hook that says so

Watcher = Callable[[Any, bool], None]
_watchers: weakref.WeakKeyDictionary[Any, OrderedDict[int, Watcher]] = weakref.WeakKeyDictionary()  # by optimizer


def watch_scalers(optimizer: torch.optim.Optimizer, watcher: Watcher) -> RemovableHandle:
    """Call watcher(scaler, has_stepped) after every `scaler.step(optimizer)`, until the handle is removed."""
    if not hasattr(torch.amp.GradScaler.step, "tells"):
        torch.amp.GradScaler.step = _telling(torch.amp.GradScaler.step)  # type: ignore[method-assign]  # it has no hooks
    watchers = _watchers.setdefault(optimizer, OrderedDict())
    handle = RemovableHandle(watchers)
    watchers[handle.id] = watcher
    return handle


def _telling(plain_step: Any) -> Any:
    """GradScaler's `step`, which tells the optimizer's watchers."""

    @functools.wraps(plain_step)
    def step(scaler: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        stepped = getattr(optimizer, "optimizer", optimizer)  # Accelerate's wrapper hands calls through
        watchers, steps = list(_watchers.get(stepped, OrderedDict()).values()), []
        if not watchers:
            return plain_step(scaler, optimizer, *args, **kwargs)
        counting = stepped.register_step_post_hook(lambda *_: steps.append(True))
        try:
            result = plain_step(scaler, optimizer, *args, **kwargs)
        finally:
            counting.remove()
        for watcher in watchers:
            watcher(scaler, bool(steps))
        return result

    vars(step)["tells"] = True
    return step


# ---- hooks that a copied model leaves behind


class _Link:
    """A hook that a copied or saved model does not take along: it does nothing there."""

    def __init__(self, interceptor: Interceptor | None = None, method: str = "") -> None:
        self._interceptor = None if interceptor is None else weakref.ref(interceptor)
        self._method = method

    def __call__(self, *args: Any) -> None:
        interceptor = None if self._interceptor is None else self._interceptor()
        if interceptor is not None and interceptor._is_active:
            getattr(interceptor, self._method)(*args)

    def __reduce__(self) -> Any:
        return (_Link, ())


class _TrainLink:
    """`module.train`, which flushes before evaluation; `module.eval()` calls it too."""

    def __init__(self, module: nn.Module, interceptor: Interceptor | None = None) -> None:
        self._module, self._flush = weakref.ref(module), _Link(interceptor, "_flush")

    def __call__(self, mode: bool = True) -> nn.Module:
        if not mode:
            self._flush()
        module = self._module()
        assert module is not None
        return type(module).train(module, mode)

    def __reduce__(self) -> Any:
        return (_TrainLink, (self._module(),))
