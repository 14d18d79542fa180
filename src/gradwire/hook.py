"""The DDP communication hook: turns DDP's buckets into Buckets, hands them to a scheme, and reports its errors.

An error never travels through the future that DDP waits for: DDP would turn it into a RuntimeError and be left
unusable. The future completes with whatever the buffer holds, and the error is raised, with its own type, by a callback
at the very end of the same backward pass, so no optimizer step can follow.
"""

# No `from __future__ import annotations` here: DDP compares the hook's annotations as objects, not as strings.
import time
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import GradBucket

from gradwire.bucket import Bucket
from gradwire.communicator import DEFAULT_TIMEOUT_S, Communicator
from gradwire.errors import GradwireError, InvalidArgument
from gradwire.preamble import compare_preambles
from gradwire.schemes import Scheme, Session, by_name
from gradwire.telemetry.recorder import Recorder
from gradwire.threads import use_fair_share_of_cores


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
        self.scheme = by_name(scheme) if isinstance(scheme, str) else scheme
        if not isinstance(self.scheme, Scheme):
            raise InvalidArgument(f"scheme must be a gradwire Scheme or a registry name, got {type(scheme).__name__}")
        use_fair_share_of_cores()
        self.module = module
        self.step = 0
        self._group = group
        self._error: GradwireError | None = None
        self._layouts: set[int] = set()
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
        )
        try:
            self.scheme.bind(self.session)
        except Exception:
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
        if in_backward and ddp_bucket.index() == 0:
            torch.autograd.Variable._execution_engine.queue_callback(self._before_ddp_waits)
        reduced: torch.futures.Future = torch.futures.Future()
        step = self.step
        record = self.recorder.open_bucket(
            step, ddp_bucket.index(), ddp_bucket.buffer().numel() * ddp_bucket.buffer().element_size()
        )
        try:
            bucket = Bucket.from_ddp(ddp_bucket, step, record)
            if bucket.layout_hash not in self._layouts:
                self._layouts.add(bucket.layout_hash)
                self.communicator.submit(self._compare_layout, bucket)
            done = self.scheme.reduce(bucket)
        except Exception as error:
            self._error = self.communicator.fail(error)
            self.recorder.close_bucket(record)
            reduced.set_result(ddp_bucket.buffer())
        else:
            done.add_done_callback(lambda future: self._finish_bucket(bucket, future, reduced))
        if ddp_bucket.is_last():
            self.step += 1
            self.communicator.submit(self._end_step, step)
            if not in_backward:  # the shadow of a rank that has left `ddp.join` early: nothing else would raise here
                reduced.wait()
                self._close_step(step, 0)
        return reduced

    def _compare_layout(self, bucket: Bucket) -> None:
        compare_preambles(self.communicator, self.scheme.preamble(bucket), bucket.record)

    def _finish_bucket(self, bucket: Bucket, done: torch.futures.Future, reduced: torch.futures.Future) -> None:
        """On the lane or the backend's thread: hand the mean, or whatever there is in case of an error, to DDP."""
        try:
            done.wait()
        except Exception as error:
            self._error = self.communicator.fail(error)
        self.recorder.close_bucket(bucket.record)
        reduced.set_result(bucket.buffer)

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
        self.recorder.close_step(step, exposed_ns)
        if self._error is not None:
            raise self._error

    # ---- between steps

    def wait_until_idle(self) -> None:
        """Return when the lane has finished everything submitted so far. Raises what the group failed of."""
        self.communicator.submit(lambda: None).wait()
        if self._error is not None:
            raise self._error

    def switch(self, scheme: Scheme | str) -> None:
        """Use another scheme from the next step on; every rank calls it between the same two steps.

        The next bucket of every layout begins with a full preamble again, so ranks that disagree get RankMismatch.
        """
        successor = by_name(scheme) if isinstance(scheme, str) else scheme
        self.wait_until_idle()
        successor.bind(self.session)  # the old scheme stays if this raises
        self.scheme.close()
        self.scheme = successor
        self._layouts.clear()

    def close(self) -> None:
        """Stop compressing; a hook that stays registered then reduces as DDP does by itself. Every rank calls it."""
        if self._closed:
            return
        self._closed = True
        self.scheme.close()
        self.recorder.close()
        self.communicator.close()

    def _all_reduce_as_ddp_does(self, ddp_bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        buffer = ddp_bucket.buffer().mul_(1.0 / dist.get_world_size(self._group))
        work = dist.all_reduce(buffer, group=self._group, async_op=True)
        assert work is not None
        return work.get_future().then(lambda future: future.value()[0])


def ddp_hook(state: HookState, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    """The communication hook for `DistributedDataParallel.register_comm_hook(state, gradwire.ddp_hook)`."""
    return state.reduce(bucket)


def names_of(module: torch.nn.Module | None) -> dict[torch.Tensor, str]:
    """Each parameter of `module` with its name; a tied parameter has the first of its names."""
    if module is None:
        return {}
    inner = module.module if isinstance(module, torch.nn.parallel.DistributedDataParallel) else module
    return {parameter: name for name, parameter in inner.named_parameters()}
