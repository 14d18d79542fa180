"""`attach`: picks the door for a model, and puts a scheme to work behind it."""

import contextlib
import logging
import os
import weakref
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import GradBucket
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

from gradwire import schemes
from gradwire.core import checkpoint
from gradwire.core.optimizers import Optimizers
from gradwire.doors import fsdp2
from gradwire.doors.gradients import GradientState
from gradwire.doors.hook import Copied, HookState, ddp_hook
from gradwire.doors.shards import ShardState
from gradwire.errors import GradwireError, InvalidArgument, Unsupported
from gradwire.reducer import Reducer
from gradwire.registry import parse_spec
from gradwire.schemes import Scheme
from gradwire.schemes.auto.scheme import Auto

_log = logging.getLogger("gradwire")


class _Door:
    """The hook that is registered with DDP, which takes one and never gives it back: for whichever state is attached."""

    def __init__(self, state: HookState, model: DistributedDataParallel) -> None:
        self.state, self._model = state, weakref.ref(model)
        self._is_registered = False

    def reduce_bucket(self, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        """As `HookState.reduce_bucket`."""
        return self.state.reduce_bucket(bucket)

    def register(self) -> None:
        """Put the hook in, between two steps, if it is not in yet. Raises: Unsupported (there is another)."""
        model = self._model()
        if self._is_registered or model is None:
            return
        try:
            model.register_comm_hook(self, ddp_hook)
        except RuntimeError as error:
            raise Unsupported(_TAKEN) from error
        self._is_registered = True

    def __reduce__(self) -> Any:
        return (Copied, ())


_TAKEN = (
    "this DDP model has a communication hook already and takes only one: leave out its register_comm_hook(...), or make "
    "DistributedDataParallel(...) anew and attach to that"
)
_DOORS_OWN = ("bucket_mb", "bucket_dtype", "op")
_doors: weakref.WeakKeyDictionary[DistributedDataParallel, _Door] = weakref.WeakKeyDictionary()

Attachment = Reducer


class Alone(Reducer):
    """An attachment that does nothing, so that a script for several ranks runs unchanged on one.

    Several ranks that load its `state_dict` begin anew, and `load_state_dict` takes whatever other runs have saved.
    """

    def __init__(self, scheme: Scheme) -> None:
        self.scheme, self.step, self.closed = scheme, 0, False
        _log.warning("attach: one rank has nothing to exchange, so scheme %r does nothing here", scheme.name)

    def stats(self) -> dict[str, Any]:
        return {"scheme": self.scheme.name, "world_size": 1}

    def state_dict(self, all_ranks: bool = False) -> dict[str, Any]:
        return dict(checkpoint.ALONE)

    def fail(self, error: BaseException) -> GradwireError:
        return GradwireError(str(error))  # and nobody is to be told

    def _do_nothing(self, *given: Any, **options: Any) -> None:
        """One rank has nothing to wait for, to load or to switch."""

    wait_until_idle = flush = load_state_dict = switch = _do_nothing

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """As the doors of modules have it."""
        yield

    def close(self) -> None:
        self.closed = True


def is_alone() -> bool:
    """Whether this process is the only one of its training: without process groups as long as no launcher says otherwise."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_world_size() == 1
    return int(os.environ.get("WORLD_SIZE") or 1) == 1


def attach(
    module: torch.nn.Module,
    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
    scheme: Scheme | str = "auto",
    scaler: Any = None,
    *,
    fidelity: str | Sequence[str] | None = None,
    group: dist.ProcessGroup | Sequence[int] | None = None,
    timeout_s: float | None = None,
    trace: bool = False,
    placement: str | None = None,
    ahead: int = 0,
    **options: Any,
) -> Attachment:
    """Reduce the gradients of `module` by `scheme`. Collective: every rank calls it, with the same arguments.

    Args:
        module: a DistributedDataParallel model, compiled or not; a module that FSDP2's `fully_shard` has sharded over all
            ranks, or those of a node, or HSDP; or a module whose gradients nothing else reduces.
        optimizer: the optimizer that steps its parameters, or a list of all that do, as [muon, adamw]; read, never changed.
            Wrappers that hand calls through, as Accelerate's, are looked through.
        scheme: a Scheme, or a registry name such as "gcomp". The default "auto" measures and chooses, and keeps DDP's
            own all-reduce if no scheme is faster; so for FSDP2 over all ranks. Other modules need a scheme by name, or there
            is one rank, where nothing is exchanged and what is returned does nothing.
        fidelity: for scheme "auto": "exact" (default: the losses of DDP), "close", "any", or a list of schemes.
        scaler: the torch.amp.GradScaler, if the loss is scaled.
        group: the ranks to reduce over; with FSDP2 those that hold the same shard, one on each node. Not for DDP, which has
            its own.
        timeout_s: how long to wait for a peer before PeerLost is raised (default: the timeout of the model's process group).
        trace: record the spans of a Chrome trace.
        placement: for DDP on a GPU: "staged" reduces in host memory (every scheme), "device" on the GPU, by the backend that
            torch has there (docs/gpu.md lists the schemes; tested without a GPU only). Not said, "auto" chooses among both,
            and a scheme by name is staged.
        ahead: for DDP: 1 has the next step start on local weights while means travel, which it uses a step later, with
            `local`, `local_rate`, `sync_steps` and `max_grad_norm` as further options (see `gradwire.schemes.Ahead`).
        options: those of a scheme given by name, as "aqgb", floor=0.25; and for modules other than DDP bucket_mb, bucket_dtype
            and op (see GradientState); for FSDP2 `weights`, "exact", "close" or "plain" (see ShardState), and where ranks
            have replicas too `inside`, the scheme between the shards.
    Raises: Unsupported (a wrapper, optimizer or scheme that is not supported here), InvalidArgument.
    """
    optimizers = Optimizers([None] if optimizer is None else optimizer)
    model = getattr(module, "_orig_mod", module)  # torch.compile keeps the module it was given here
    if not isinstance(model, DistributedDataParallel):
        fsdp2.check(model)
    _check_stepped(model, optimizers)
    if fidelity is not None:
        if scheme != "auto":
            raise InvalidArgument('fidelity is an argument of scheme "auto"; leave one of the two out')
        options["fidelity"] = fidelity
    doors_own = {name: options.pop(name) for name in _DOORS_OWN if name in options}
    shards: dict[str, Any] = {
        name: options.pop(name) for name in ("weights", "inside") if name in options and fsdp2.is_fsdp2(model)
    }
    if group is None and not is_alone() and fsdp2.is_sharded_over_all(model) and not ahead:
        return _attach_shards(
            model, optimizers, scheme, scaler, shards, options, doors_own, timeout_s=timeout_s, trace=trace
        )
    if isinstance(scheme, str):
        scheme = schemes.by_name(scheme, **options, **({"ahead": ahead} if ahead else {}))
    elif ahead:
        scheme = schemes.Ahead(scheme, ahead, **options)
    elif options:
        raise InvalidArgument(
            f'{", ".join(options)}: options go with a scheme\'s name, as in attach(ddp, optimizer, "name", option=value); a '
            "scheme that is made has its own"
        )
    if not isinstance(model, DistributedDataParallel):
        if placement == "device":
            raise Unsupported('placement="device" is for DDP models: leave it out')
        if group is None and is_alone() and (isinstance(scheme, Auto) or not dist.is_initialized()):
            return Alone(scheme)
        if ahead:
            raise Unsupported("ahead=1 takes the step of a model inside DDP: wrap the module in it, or leave ahead out")
        if isinstance(scheme, Auto):
            raise Unsupported(
                'scheme "auto" chooses for DDP models and for FSDP2 over all ranks: name a scheme that exchanges the '
                'gradients of this one, HSDP included, attach(module, optimizer, "gcomp"); or wrap a module without FSDP in DDP'
            )
        between = GradientState(scheme, model, optimizers, scaler, group, timeout_s=timeout_s, trace=trace, **doors_own)
        if shards:
            scheme, weights = shards.get("inside", "plain"), shards.get("weights", "plain")
            try:
                between.inside = ShardState(
                    scheme, model, optimizers, scaler, weights, timeout_s=timeout_s, trace=trace
                )
            except BaseException:
                between.close()
                raise
        return between
    if doors_own or group is not None:
        raise InvalidArgument(f"DDP has its own {', '.join(doors_own) or 'group'}; give it to DistributedDataParallel")
    if getattr(scheme, "owns_step", False) and model is not module:
        raise Unsupported(
            f"scheme {scheme.name!r} steps parameters inside the forward pass, which torch.compile would trace: attach it to "
            "a model that is not compiled, or a scheme that leaves the step to the optimizer"
        )
    door = _doors.get(model)
    if door is not None and not door.state.closed:
        raise Unsupported(
            "this model has an attachment already; use attachment.switch(scheme), or close() it before attaching again"
        )
    if door is None and not all(isinstance(state, Copied) for _, state in getattr(model, "_comm_hooks", [])):
        raise Unsupported(_TAKEN)
    state = HookState(scheme, model, optimizers, scaler, model.process_group, timeout_s, trace, placement)
    door = door or _Door(state, model)
    door.state = state
    try:
        state.connect(door.register, module)
    except Unsupported:
        state.close()
        raise
    _doors[model] = door
    return state


def _attach_shards(
    model: torch.nn.Module, optimizers: Optimizers, scheme: Scheme | str, scaler: Any,
    shards: dict[str, Any], options: dict[str, Any], doors_own: dict[str, Any], **common: Any,
) -> ShardState:  # fmt: skip
    """FSDP2 over all ranks: `scheme` is for the gradients inside."""
    if "inside" in shards or doors_own:
        raise InvalidArgument(
            f"{', '.join([*doors_own, *(['inside'] if 'inside' in shards else [])])}: this model is sharded over all ranks, so "
            "the scheme is the one inside the group, of the modules' own buffers; leave them out"
        )
    if isinstance(scheme, Auto):
        raise Unsupported(
            'between shards scheme "auto" is given by its name: attach(model, optimizer, fidelity="close")'
        )
    fidelity = options.pop("fidelity", "exact")
    if isinstance(scheme, str) and options:
        name, written = parse_spec(scheme)
        given = ",".join(f"{key}={value}" for key, value in {**written, **options}.items())
        scheme = f"{name}:{given}"
    elif options:
        raise InvalidArgument(f"{', '.join(options)}: options go with a scheme's name")
    return ShardState(scheme, model, optimizers, scaler, fidelity=fidelity, **shards, **common)


def _check_stepped(model: torch.nn.Module, optimizers: Optimizers) -> None:
    if any(isinstance(optimizer, ZeroRedundancyOptimizer) for optimizer in optimizers):
        raise Unsupported(
            "ZeroRedundancyOptimizer is not supported yet; use the optimizer that it wraps, or DDP without gradwire"
        )
    stepped = {id(parameter) for group in optimizers.param_groups for parameter in group["params"]}
    if stepped.isdisjoint(id(parameter) for parameter in model.parameters()):
        raise InvalidArgument(
            f"{optimizers} steps none of the model's parameters; give the optimizer made from the model's parameters, after "
            "the model took its final form (after DDP(...), or fully_shard(...))"
        )
