"""All-reduces of any tensors through a scheme: one call, or all that a process group "gradwire" is asked for.

The second is how the paper deploys GComp: below the framework, in the place of the collective. DDP, native HSDP or a loop of
one's own call torch.distributed as ever.
"""

import functools
import weakref
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from gradwire.core.bucket import SUPPORTED_DTYPES
from gradwire.doors.passes import call_last
from gradwire.errors import InvalidArgument, PeerLost, Unsupported
from gradwire.reducer import Reducer
from gradwire.schemes import Scheme, by_name
from gradwire.telemetry.stopwatch import Stopwatch
from gradwire.wire.rendezvous import ranks_of, timeout_of

# Every bit of every value arrives: what is reduced may be anything.
DEFAULT = "gcomp:importance=none"
# Of one tensor: below it time is latency, and small things (losses, counts, statistics) keep the backend's own sums.
LEAST_BYTES = 1 << 16

_BACKEND = "gradwire"


def _name_of(op: Any) -> str:
    """The Reducer's name of an operation; "" of one that it lacks. A RedOpType and a ReduceOp are equal, but not as keys."""
    return "sum" if op == dist.ReduceOp.SUM else "mean" if op == dist.ReduceOp.AVG else ""


def all_reduce(
    tensor: torch.Tensor,
    group: dist.ProcessGroup | None = None,
    scheme: Scheme | str = DEFAULT,
    *,
    op: Any = dist.ReduceOp.SUM,
    async_op: bool = False,
) -> "SchemeWork | None":
    """`torch.distributed.all_reduce` through a scheme, in place, over a group of any backend. Collective.

    The first call for a group, scheme and operation makes connections, which stay until the group goes.

    Args:
        tensor: float32, bfloat16 or float16, of any shape and size; the same shape and dtype on all ranks.
        scheme: one that keeps nothing of single tensors: no error feedback, no optimizer.
        op: SUM, which is the mean times the number of ranks, or AVG.
        async_op: return at once, a work to `wait()` for.
    Raises: InvalidArgument, Unsupported, and what any rank failed of, here or by `wait()`.
    """
    name = _name_of(op)
    if not name:
        raise InvalidArgument(f"op is ReduceOp.SUM or ReduceOp.AVG, not {op}: give it to torch.distributed.all_reduce")
    if tensor.dtype not in SUPPORTED_DTYPES:
        raise InvalidArgument(f"a tensor of {tensor.dtype}: torch.distributed.all_reduce takes it")
    home = dist.group.WORLD if group is None else group
    if home is None:
        raise InvalidArgument("torch.distributed is not initialised: call init_process_group first")
    made = _by_group.setdefault(home, {})
    key = scheme, name
    if key not in made:
        # By its ranks: what is kept must not hold the group.
        made[key] = Reducer(_stateless(scheme), ranks_of(home), op=name, timeout_s=timeout_of(home))
        made[key].close_with(home)
    work = SchemeWork(made[key], tensor)
    if async_op:
        return work
    work.wait()
    return None


def register_backend(scheme: str = DEFAULT) -> None:
    """Make `init_process_group("gradwire")` and `new_group(backend="gradwire")` known to torch.distributed.

    Such a group sums and averages float32, bfloat16 and float16 tensors from 64 KiB on by the scheme; everything else it
    leaves to Gloo. Another call changes the scheme of groups that are made later. Ranks call it alike.

    Args:
        scheme: a registry name with its options, of a scheme that keeps nothing of single tensors.
    Raises: InvalidArgument, Unsupported.
    """
    _stateless(scheme)
    make = functools.partial(GradwireGroup, scheme=scheme)
    dist.Backend.register_backend(_BACKEND, make, extended_api=True, devices=["cpu", "cuda"])


def _stateless(scheme: Scheme | str) -> Scheme:
    """The scheme, if tensors without names may go through it. Raises: InvalidArgument, Unsupported."""
    made = by_name(scheme) if isinstance(scheme, str) else scheme
    if made.owns_step or made.needs_momenta or made.is_ahead or made.state_is_per_world or made.is_transparent:
        raise Unsupported(
            f"scheme {made.name!r} keeps something of each parameter, or asks for the model; a collective has tensors without "
            "names: take gcomp (importance none or uniform), bf16, homomorphic or another without error feedback, or attach"
        )
    if made.configuration.get("importance") == "paper":
        raise InvalidArgument(
            f'{made.name} with importance="paper" reads the optimizer, of which a collective knows nothing: say '
            "importance=none, or importance=uniform,bits=12"
        )
    return made


class GradwireGroup(dist.ProcessGroup):
    """A process group whose large sums and means of floats go through a scheme, and all else through Gloo.

    Args:
        options: torch's, for a backend that is made by `register_backend(..., extended_api=True)`.
        of_backend: what `pg_options` gave; nothing is taken.
        scheme: a registry name.
    """

    def __init__(self, options: Any, of_backend: Any, *, scheme: str) -> None:
        rank, size = options.group_rank, options.group_size
        super().__init__(rank, size)  # type: ignore[call-arg]  # torch's annotations lack this form
        self._gloo = dist.ProcessGroupGloo(options.store, rank, size, options.timeout)
        self._plain: Any = dist.ProcessGroup(options.store, rank, size)
        kind = dist.ProcessGroup.BackendType.GLOO
        for group in (self, self._plain):
            for device in ("cpu", "cuda"):
                group._register_backend(torch.device(device), kind, self._gloo)
            group._set_default_backend(kind)
        self._scheme, self._timeout_s = scheme, options.timeout.total_seconds()
        self._members = list(options.global_ranks_in_group) or list(range(size))
        # By operation; made when the first tensor comes: here torch.distributed has yet to be initialised.
        self._reducers: dict[str, Reducer] = {}

    def getBackendName(self) -> str:  # noqa: N802  # torch's own name
        """Torch asks for it."""
        return _BACKEND

    def allreduce(self, tensors: Any, opts: Any = None) -> Any:  # type: ignore[override]  # one for torch's three
        """Torch's own signature: one tensor in a list, and its options or the operation itself."""
        op = getattr(opts, "reduceOp", opts)
        name = "sum" if op is None else _name_of(op)
        (tensor, *others) = tensors = [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)
        if (
            not name
            or len(self._members) == 1
            or others
            or tensor.layout is not torch.strided
            or tensor.dtype not in SUPPORTED_DTYPES
            or tensor.numel() * tensor.element_size() < LEAST_BYTES
        ):
            return self._plain.allreduce(tensors, *([] if opts is None else [opts]))
        if name not in self._reducers:
            scheme = _stateless(self._scheme)
            self._reducers[name] = Reducer(scheme, self._members, op=name, timeout_s=self._timeout_s)
        return SchemeWork(self._reducers[name], tensor)

    def stats(self) -> dict[str, dict[str, Any]]:
        """`Reducer.stats` of the sums, and of the means, that have gone through the scheme."""
        return {op: reducer.stats() for op, reducer in self._reducers.items()}

    def shutdown(self) -> None:
        """Finish what is under way; `destroy_process_group` calls it."""
        for reducer in self._reducers.values():
            reducer.close_quietly()

    def abort(self) -> None:
        """End what is under way: every rank raises PeerLost."""
        for reducer in self._reducers.values():
            reducer.fail(PeerLost(f"rank {dist.get_rank()} has aborted its process group"))
        self._gloo.abort()


def _left_to_gloo(name: str) -> Callable[..., Any]:
    def forward(group: GradwireGroup, *args: Any, **options: Any) -> Any:
        return getattr(group._plain, name)(*args, **options)

    return forward


# What torch looks for in a group written in Python. What it does not find there it calls with Python's lock held, and Gloo's
# thread, which frees tensors with its queue's lock held, waits for that: a deadlock (torch 2.13, WORK_OVERRIDE).
for _method in (
    "allgather", "allgather_into_tensor_coalesced", "allreduce_coalesced", "alltoall_base", "barrier", "broadcast",
    "reduce_scatter", "reduce_scatter_tensor_coalesced", "send", "recv",
):  # fmt: skip
    setattr(GradwireGroup, _method, _left_to_gloo(_method))


_by_group: weakref.WeakKeyDictionary[Any, dict[tuple[Scheme | str, str], Reducer]] = weakref.WeakKeyDictionary()


class SchemeWork(dist.distributed_c10d.Work):
    """An all-reduce of a tensor of any shape under way, in place: a step of the reducer. Ranks begin them in one order.

    DDP takes its future alone, and would turn an error in it into a RuntimeError: of one that begins in a backward pass the
    error is raised at the end of that pass, with its own type.
    """

    def __init__(self, reducer: Reducer, tensor: torch.Tensor) -> None:
        super().__init__()
        tensor = tensor.detach()
        flat = tensor.contiguous().view(-1)
        self._reducer, self._step, self._is_closed = reducer, reducer.step, False
        is_in_backward = torch._C._current_graph_task_id() != -1
        if is_in_backward:
            call_last(self._close)  # behind DDP's own callback, which waits for the future

        def end(done: torch.futures.Future) -> list[torch.Tensor]:
            done.wait()
            if flat.data_ptr() != tensor.data_ptr():
                tensor.copy_(flat.view_as(tensor))
            if not is_in_backward:
                reducer.communicator.raise_if_failed()
            return [tensor]

        # A small all-gather: ranks whose programs have come apart are told so; else they would wait for each other.
        reducer.forget_layouts()
        self._future = reducer.reduce(flat, (), (), 0, True).then(end)

    def wait(self, timeout: Any = None) -> bool:
        """Return when the tensor holds the result; no longer than the group's own timeout. Raises: what a rank failed of."""
        waited = Stopwatch()
        try:
            self._future.wait()
        finally:
            self._close(waited.elapsed_ns)  # raises the error itself
        return True

    def _close(self, exposed_ns: int = 0) -> None:
        if not self._is_closed:
            self._is_closed = True
            self._reducer.close_pass(self._step, exposed_ns)

    def get_future(self) -> Any:
        """Of [tensor]. Outside of a backward pass an error ends it."""
        return self._future

    def is_completed(self) -> bool:
        """True if `wait` would return at once."""
        return self._future.done()

    def result(self) -> list[torch.Tensor]:
        """What was reduced."""
        return list(self._future.value())
