"""Steps under a GradScaler, which calls for none where a gradient overflowed, and has no hook that says so."""

from __future__ import annotations

import functools
import weakref
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import torch
from torch.utils.hooks import RemovableHandle

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
