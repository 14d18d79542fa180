"""The DDP communication hook: turns DDP's buckets into Buckets, hands them to a scheme, and reports its errors.

An error never travels through the future that DDP waits for: DDP would turn it into a RuntimeError and be left
unusable. The future completes with whatever the buffer holds, and the error is raised, with its own type, by a callback
at the very end of the same backward pass, so no optimizer step can follow.
"""

# No `from __future__ import annotations` here: DDP compares the hook's annotations as objects, not as strings.
import time
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import GradBucket

from gradwire.core.bucket import Bucket
from gradwire.core.session import Session
from gradwire.core.staging import CudaDevice, HostStaging
from gradwire.core.threads import use_fair_share_of_cores
from gradwire.errors import GradwireError, InvalidArgument, Unsupported
from gradwire.schemes import Scheme, by_name
from gradwire.telemetry.recorder import Recorder
from gradwire.wire.communicator import DEFAULT_TIMEOUT_S, Communicator
from gradwire.wire.preamble import compare_preambles


class HookState:
    """What `ddp_hook` works with: `ddp.register_comm_hook(HookState(...), gradwire.ddp_hook)`.

    `gradwire.attach` does the same and more in one call; this is the door for frameworks that only take a hook.

    Args:
        scheme: a Scheme, or a registry name.
        module: the model; needed by `state_dict`, which names parameters as the module does.
        optimizer: the optimizer; needed by schemes that read its state (gcomp with importance="paper").
        scaler: the GradScaler, if the loss is scaled.
        group: the process group that DDP uses (default: all ranks). Making a HookState is collective over it.
        timeout_s: how long to wait for a peer before PeerLost.
        trace: keep single spans for a Chrome trace.
    Raises: InvalidArgument, Unsupported.
    """

    def __init__(
        self,
        scheme: Scheme | str,
        module: torch.nn.Module | None = None,
        optimizer: torch.optim.Optimizer | None = None,
        scaler: Any = None,
        group: dist.ProcessGroup | None = None,
        timeout_s: float = DEFAULT_TIMEOUT_S,
        trace: bool = False,
    ) -> None:
        self.scheme = _free_scheme(scheme)
        use_fair_share_of_cores()
        self.module = module
        self.step = 0
        self._group = group
        self._error: GradwireError | None = None
        self._staging: HostStaging | None = None
        self._layouts: set[tuple[int, int]] = set()  # bucket index and layout hash of what was compared
        self._shadows: list[torch.futures.Future[torch.Tensor]] = []
        self._waiting_since_ns = 0
        self._closed = False
        communicator = Communicator(group, timeout_s)
        self.recorder = Recorder(communicator.rank, communicator.world_size, trace=trace)
        self.session = Session(
            communicator,
            self.recorder,
            optimizer,
            names_of(module),
            (lambda: 1.0) if scaler is None else (lambda: float(scaler.get_scale())),
            module,
            scaler is not None,
        )
        try:
            self.scheme.bind(self.session)
            self.scheme.take_over()
        except Exception as error:
            communicator.fail(error)  # the other ranks, which may have bound theirs, would wait for this one
            communicator.close()
            raise

    @property
    def closed(self) -> bool:
        """Whether `close` was called: the hook then reduces as DDP does by itself."""
        return self._closed

    @property
    def communicator(self) -> Communicator:
        return self.session.communicator

    # ---- one bucket

    def reduce(self, ddp_bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        """Start the reduction of one DDP bucket; called by DDP during the backward pass."""
        if self._closed:
            return self._all_reduce_as_ddp_does(ddp_bucket)
        in_backward = torch._C._current_graph_task_id() != -1
        # With the last bucket, not the first: a re-entrant checkpoint has backward passes of its own inside the pass, and
        # only the one in which DDP has all its buckets ends with DDP's waiting for them.
        if in_backward and ddp_bucket.is_last():
            torch.autograd.Variable._execution_engine.queue_callback(self._before_ddp_waits)
        buffer = ddp_bucket.buffer()
        on_device = buffer.device.type == "cuda"
        reduced: torch.futures.Future = torch.futures.Future(devices=[buffer.device] if on_device else None)
        step = self.step
        record = self.recorder.open_bucket(step, ddp_bucket.index(), buffer.numel() * buffer.element_size())
        try:
            self._check_divisor()
            bucket = Bucket.from_ddp(ddp_bucket, step, record, self._staging_for(buffer))
            if (bucket.index, bucket.layout_hash) not in self._layouts:
                self._layouts.add((bucket.index, bucket.layout_hash))
                self.communicator.submit(self._compare_layout, bucket)
            done = self.scheme.reduce(bucket)
        except Exception as error:
            self._error = self.communicator.fail(error)
            self.recorder.close_bucket(record)
            reduced.set_result(buffer)
        else:
            done.add_done_callback(lambda future: self._finish_bucket(bucket, buffer, future, reduced))
        if not in_backward:
            self._shadows.append(reduced)
        if ddp_bucket.is_last():
            self.step += 1
            self.communicator.submit(self._end_step, step)
            if not in_backward:  # the shadow of a rank that has left `ddp.join` early: nothing else would raise here
                while self._shadows:
                    self._shadows.pop().wait()
                self._close_step(step, 0)
        return reduced

    def _check_divisor(self) -> None:
        """A hook is not told by how many ranks DDP divides once some have left `join`: all of them is the default."""
        module = self.module
        if (
            isinstance(module, torch.nn.parallel.DistributedDataParallel)
            and module._join_config.enable
            and not getattr(module, "_divide_by_initial_world_size", True)
        ):
            raise Unsupported(
                "ddp.join(divide_by_initial_world_size=False) changes the divisor as ranks run out of input, and DDP tells "
                "no communication hook; use join() with its default, or close() the attachment first"
            )

    def _compare_layout(self, bucket: Bucket) -> None:
        compare_preambles(self.communicator, self.scheme.preamble(bucket), bucket.record)

    def _staging_for(self, buffer: torch.Tensor) -> HostStaging | None:
        """For a bucket on a device and a scheme that works on copies in host memory."""
        if buffer.device.type != "cuda" or not self.scheme.stages_device_buckets:
            return None
        if self._staging is None:
            self._staging = HostStaging(CudaDevice(buffer.device))
        return self._staging

    def _finish_bucket(
        self, bucket: Bucket, buffer: torch.Tensor, done: torch.futures.Future, reduced: torch.futures.Future
    ) -> None:
        """On the lane or the backend's thread: hand the mean, or whatever there is in case of an error, to DDP."""
        try:
            done.wait()
            if bucket.staged is not None and not self.scheme.owns_step:  # which leaves DDP its own gradient
                bucket.staged.copy_back()
        except Exception as error:
            self._error = self.communicator.fail(error)
        self.recorder.close_bucket(bucket.record)
        reduced.set_result(buffer)

    def _end_step(self, step: int) -> None:
        try:
            self.scheme.end_step(step)
        except Exception as error:
            self._error = self.communicator.fail(error)

    # ---- the end of a backward pass

    def _before_ddp_waits(self) -> None:
        """Runs when the gradients are computed, just before DDP waits for the buckets."""
        self._waiting_since_ns = time.perf_counter_ns()
        torch.autograd.Variable._execution_engine.queue_callback(self._after_ddp_waited)

    def _after_ddp_waited(self) -> None:
        """Runs when DDP has put all means into `.grad`: the one place where errors reach the training thread."""
        self._close_step(self.step - 1, time.perf_counter_ns() - self._waiting_since_ns)

    def _close_step(self, step: int, exposed_ns: int) -> None:
        exposed_ns += self.scheme.end_backward(step)
        self.recorder.close_step(step, exposed_ns)
        if self._error is not None:
            raise self._error

    # ---- between steps

    def wait_until_idle(self) -> None:
        """Return when the lane has finished everything submitted so far.

        Raises: what the group failed of, InvalidArgument (closed).
        """
        self.communicator.submit(lambda: None).wait()
        if self._error is not None:
            raise self._error

    def flush(self) -> None:
        """Take every optimizer step that was called for. Raises: what the group failed of."""
        if not self._closed:
            self.scheme.flush()

    def switch(self, scheme: Scheme | str) -> None:
        """Use another scheme from the next step on; every rank calls it between the same two steps.

        The next bucket of every layout begins with a full preamble again, so ranks that disagree get RankMismatch.
        """
        successor = _free_scheme(scheme)
        self.flush()
        self.wait_until_idle()
        successor.bind(self.session)  # the old scheme stays if this raises
        self.scheme.hand_over()
        self.scheme.close()
        self.scheme.unbind()
        self.scheme = successor
        successor.take_over()
        self._layouts.clear()

    def close(self) -> None:
        """Stop compressing; a hook that stays registered then reduces as DDP does by itself. Every rank calls it.

        The model and the optimizer are let go: DDP never gives a hook back, and would keep them alive through it.
        """
        if self._closed:
            return
        self._closed = True
        self.communicator.close()
        try:
            self.scheme.close()
        except GradwireError:
            if self._error is None:  # otherwise `backward` has raised it
                raise
        finally:
            self.scheme.unbind()
            self.recorder.close()
            self.module = None
            self.session = replace(self.session, optimizer=None, names={}, loss_scale=lambda: 1.0, module=None)

    def _all_reduce_as_ddp_does(self, ddp_bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        buffer = ddp_bucket.buffer().mul_(1.0 / dist.get_world_size(self._group))
        work = dist.all_reduce(buffer, group=self._group, async_op=True)
        assert work is not None
        return work.get_future().then(lambda future: future.value()[0])


def ddp_hook(state: HookState, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    """The communication hook for `DistributedDataParallel.register_comm_hook(state, gradwire.ddp_hook)`."""
    return state.reduce(bucket)


def _free_scheme(scheme: Scheme | str) -> Scheme:
    """The scheme, made if a name was given. Raises: InvalidArgument (no scheme, or one that is at work elsewhere)."""
    made = by_name(scheme) if isinstance(scheme, str) else scheme
    if not isinstance(made, Scheme):
        raise InvalidArgument(f"scheme must be a gradwire Scheme or a registry name, got {type(scheme).__name__}")
    if made.is_bound:
        raise InvalidArgument(
            f"this {made.name!r} object is at work in another attachment; make one for each: "
            f'gradwire.schemes.by_name("{made.name}", ...)'
        )
    return made


def names_of(module: torch.nn.Module | None) -> dict[torch.Tensor, str]:
    """Each parameter of `module` with its name; a tied parameter has the first of its names."""
    if module is None:
        return {}
    inner = module.module if isinstance(module, torch.nn.parallel.DistributedDataParallel) else module
    return {parameter: name for name, parameter in inner.named_parameters()}
