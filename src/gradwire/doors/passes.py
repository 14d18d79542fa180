"""Finds the beginning and the end of a backward pass, for doors that nobody tells."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn.parallel.distributed import _find_tensors  # DDP's own, in whatever a module returns


class BackwardPass:
    """Watches the passes through a module's output.

    Where a pass begins: a callback queued from a hook inside a re-entrant checkpoint would run too early.
    """

    def __init__(
        self,
        module: nn.Module,
        is_watched: Callable[[], bool],  # whether a pass that begins now counts
        end: Callable[[], None],  # called when a pass is over and its gradients have come
        is_given_up: Callable[[], None],  # another pass begins, and the one before never came to its end
        forward_is_over: Callable[[], None] = lambda: None,  # after a forward pass that a backward pass may follow
    ) -> None:
        self._is_watched, self._end, self._is_given_up = is_watched, end, is_given_up
        self._forward_is_over = forward_is_over
        self._task: int | None = None  # autograd's number of the pass that is under way
        self._handle = module.register_forward_hook(self._after_forward)

    def _after_forward(self, module: nn.Module, inputs: Any, output: Any) -> None:
        if torch.is_grad_enabled():
            if self._task is None:
                self._forward_is_over()
            for tensor in _find_tensors(output):
                if tensor.requires_grad:
                    tensor.register_hook(self._begin_at)

    def _begin_at(self, _: torch.Tensor) -> None:
        """The gradient of an output is there: of this pass, or of the next one."""
        if self._task not in (None, torch._C._current_graph_task_id()) and self._is_watched():
            self._is_given_up()
            self._task = None
        self.begin()

    def begin(self) -> None:
        """A gradient has come: the pass has begun, if nobody has noticed before."""
        if self._task is None and self._is_watched():
            self._task = torch._C._current_graph_task_id()
            call_last(self._finish)

    def _finish(self) -> None:
        try:
            with torch.no_grad():
                self._end()
        finally:
            self._task = None

    def remove(self) -> None:
        """Watch no more."""
        self._handle.remove()


def call_last(callback: Callable[[], None]) -> None:
    """Call it at the end of the backward pass under way, when what DDP or FSDP2 has queued there by then is done."""
    engine = torch.autograd.Variable._execution_engine
    engine.queue_callback(lambda: engine.queue_callback(callback))
