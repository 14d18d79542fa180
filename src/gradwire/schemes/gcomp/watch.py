"""Notices when importance bytes are about an optimizer that does not make the steps, or about gradients that are not used.

Importance is read from the optimizer given to `attach`, before its step. Two things make it silently wrong: parameters
that another optimizer changes, and gradients that are scaled up after the backward pass (bits that were dropped then
count). Both are looked for; neither needs the user to say anything. A learning rate that is raised after the backward pass is
told of, once.
"""

import logging
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from gradwire.core.bucket import Bucket, local_of
from gradwire.errors import Unsupported
from gradwire.wire.device_wire import Reading

_log = logging.getLogger(__name__)

_ADVICE = 'importance="uniform" (a fixed number of bits) and importance="none" (lossless) do not read the optimizer'
# Once may be a checkpoint that was loaded: parameters then change without a step.
_CHANGES_WITHOUT_STEP = 2
_SAMPLE_ELEMENTS = 64
# Gradients this much larger than they arrived were scaled; below it lies what rounding does to float16.
_SCALED_BY = 1.01
# A rate this many times that of the backward pass is worth a word: the tolerance is for that one.
_FASTER_BY = 2.0


class OptimizerWatch:
    """Counts an optimizer's steps against the reductions of its parameters, and looks at gradients before each step.

    `object_to` is called with what is found, and may raise it.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, object_to: Callable[[Unsupported], None]) -> None:
        self._optimizer, self._object_to = optimizer, object_to
        self._n_steps = 0
        self._rates: list[float] = []  # of the groups, at the last reduction
        self._has_told = False
        self._stepped: set[int] = set()
        # By the first parameter of a bucket: versions of all and steps at its last reduction, changes without a step.
        self._seen: dict[Tensor, tuple[int, int, int]] = {}
        self._samples: dict[Tensor, tuple[Tensor, float]] = {}  # parameter: gradient as it arrived, loss scale
        self._looks: list[tuple[Reading, float]] = []  # both, on their way from a device, loss scale
        self._hooks = [
            optimizer.register_step_pre_hook(self._before_step),
            optimizer.register_step_post_hook(self._after_step),
        ]

    def before_reduction(self, parameters: Sequence[Tensor]) -> None:
        """On the training thread, for each bucket: object to another optimizer at work. Parameters that are not this
        optimizer's are sent whole, so that nobody needs to look at them."""
        groups = self._optimizer.param_groups
        self._rates = self._learning_rates()
        if len(self._stepped) != sum(len(group["params"]) for group in groups):
            self._stepped = {id(parameter) for group in groups for parameter in group["params"]}
        parameters = [parameter for parameter in parameters if id(parameter) in self._stepped]
        if not parameters:
            return
        version = sum(parameter._version for parameter in parameters)
        last_version, last_steps, n_changes = self._seen.get(parameters[0], (version, self._n_steps, 0))
        if last_steps != self._n_steps:
            n_changes = 0
        elif last_version != version:
            n_changes += 1
        self._seen[parameters[0]] = (version, self._n_steps, n_changes)
        if n_changes >= _CHANGES_WITHOUT_STEP:
            self._object_to(
                Unsupported(
                    f"the parameters changed {n_changes} times while the optimizer given to attach made no step: "
                    'importance="paper" reads its state. If another optimizer makes the steps, attach that one; if the loop '
                    f"changes parameters by itself, {_ADVICE}"
                )
            )

    def after_reduction(self, bucket: Bucket, scale: float) -> None:
        """Keep a few values of the mean that `bucket` holds, of gradients whose loss was multiplied by `scale`."""
        for slot, offset in zip(bucket.slots, bucket.offsets, strict=True):
            parameter = slot.parameter
            # One value alone cannot tell a scale from another gradient; another optimizer's may be unscaled at another time.
            if slot.numel() <= 1 or id(parameter) not in self._stepped:
                continue
            if parameter is not None and slot.start == 0 and local_of(parameter).is_contiguous():
                arrived = bucket.buffer[offset : offset + min(_SAMPLE_ELEMENTS, slot.numel())]
                self._samples[parameter] = arrived.to(torch.float32, copy=bucket.resident is not None), scale
            return

    def close(self) -> None:
        for hook in self._hooks:
            hook.remove()

    def _before_step(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        samples, self._samples = self._samples, {}
        while self._looks and self._looks[0][0].is_there():
            look, scale = self._looks.pop(0)
            arrived, now = look.wait().unbind()
            self._compare(arrived, now, scale)
        pairs = zip(self._learning_rates(), self._rates, strict=False)
        faster = max((now / then for now, then in pairs if then > 0), default=0.0)
        if faster > _FASTER_BY and not self._has_told:
            self._has_told = True
            _log.warning(
                "a learning rate is %.3g times what it was in the backward pass, by which gcomp kept its tolerance: set it "
                "before the backward pass",
                faster,
            )
        if getattr(optimizer, "grad_scale", None) is not None:
            return  # a fused step under a GradScaler takes the loss scale out by itself
        for parameter, (arrived, scale) in samples.items():
            gradient = None if parameter.grad is None else local_of(parameter.grad)
            if gradient is None or not gradient.is_contiguous():
                continue
            now = gradient.detach().reshape(-1)[: arrived.numel()].float().to(arrived.device)
            if arrived.device.type == "cpu":
                self._compare(arrived, now, scale)
            else:
                # Nobody waits for a device: what it holds is compared before a later step.
                arrived.record_stream(torch.accelerator.current_stream(arrived.device))
                self._looks.append((Reading(torch.stack([arrived, now])), scale))

    def _learning_rates(self) -> list[float]:
        """Of the groups; 0 where one is not a number in host memory."""
        rates = [group.get("lr") for group in self._optimizer.param_groups]
        return [float(rate) if isinstance(rate, int | float) else 0.0 for rate in rates]

    def _after_step(self, *_: Any) -> None:
        self._n_steps += 1

    def _compare(self, arrived: Tensor, now: Tensor, scale: float) -> None:
        """Object to gradients that were scaled up since they arrived."""
        ratio = (now * scale / arrived)[(arrived != 0) & arrived.isfinite() & now.isfinite()]
        if ratio.numel() < 2:
            return
        smallest, largest = float(ratio.min()), float(ratio.max())
        if smallest > _SCALED_BY and largest < smallest * _SCALED_BY:
            self._object_to(
                Unsupported(
                    f"gradients are {smallest:.3g} times as large as they arrived after backward: bits that could not "
                    'matter then, and were not sent with importance="paper", count now. Scale the loss instead, pass the '
                    f"GradScaler to attach, or scale before the backward pass; {_ADVICE}"
                )
            )
