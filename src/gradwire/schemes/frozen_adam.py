"""Adam whose variance stays as it is from some step on: what the user's own optimizer does, once its momenta are compressed.

Just before its step the parameters that are frozen are stepped here, by its own state and hyper-parameters as they are at that
moment, and hidden from it; just after, their gradients are back.
"""

import logging
import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from gradwire import checks
from gradwire.core.bucket import Bucket, Slot, local_of
from gradwire.core.optimizers import Optimizers
from gradwire.core.session import Session
from gradwire.errors import InvalidArgument, Unsupported
from gradwire.schemes.momenta import as_lying
from gradwire.schemes.selection import ByName, Selection
from gradwire.wire.device_wire import Reading
from gradwire.wire.wire import holds_nonzero

_log = logging.getLogger(__name__)

# A variance counts as at least this share of its tensor's largest, and one of zero (the row of a word that had not come)
# as that itself: the quantiser's error, divided by next to nothing, would else be the largest of all updates.
FLOOR_SHARE = 1e-4
# Adam's updates, momentum by root of the variance, are of root mean square 0.1 to 2 here in trainings that go well, and 5 to
# 250 in those that froze the variance before gradients grew.
_LARGE_UPDATES = 4.0
_LOOK_EVERY = 16  # steps
_UNTAKEN = ("maximize", "capturable", "differentiable", "fused")


class FrozenAdam:
    """The user's Adam or AdamW, while a scheme of its momenta is bound: its variances are frozen one by one.

    On a device the host waits for it in `choose` alone: for the step before, and once more after a state was loaded.

    Args:
        freeze_step: updates of a parameter, from its first gradient on, before its variance is frozen. A parameter that
            begins to train later travels plainly for so many updates of its own.
        correction: of the variance for its start at zero: "frozen" with it, so that the size of a step goes on as it was;
            "running", as Adam's own, by which steps grow to 1 / sqrt(1 - beta2^freeze_step) times theirs: what is
            published has no correction, and ends there.
    """

    def __init__(self, scheme: str, freeze_step: int, correction: str) -> None:
        self._scheme = scheme
        if checks.count("freeze_step", freeze_step, at_least=0) == 0:
            raise InvalidArgument("freeze_step must be at least 1: a variance that has seen nothing cannot be frozen")
        self.freeze_step = freeze_step
        self.correction = checks.choice("correction", correction, ("frozen", "running"))
        self._reset()

    def _reset(self) -> None:
        self._hooks: list[RemovableHandle] = []
        self._begun: _BegunVariances | None = None
        self.frozen_at: dict[Tensor, int] = {}  # frozen parameters, with the updates that their variances had seen
        self.idle_until: dict[Tensor, int] = {}  # parameters with the updates that they had seen no gradient in
        self._counts = {"frozen_at": self.frozen_at, "idle_until": self.idle_until}
        self._largest: dict[Tensor, Tensor] = {}  # variances, each where its parameter is
        self._hidden: list[tuple[Tensor, Tensor]] = []
        self._n_steps = 0  # with frozen parameters
        self._sizes: list[tuple[Tensor, int]] = []  # of this step's updates: sum of squares, values
        self._read_sizes: tuple[Reading, int] | None = None
        self._has_warned = False

    @property
    def configuration(self) -> dict[str, Any]:
        """The options that ranks must share."""
        return {"freeze_step": self.freeze_step, "correction": self.correction}

    def check(self, session: Session) -> None:
        """Raises: Unsupported (no DDP, no Adam, or options that change what its state means)."""
        if session.module is None:
            raise Unsupported(f"{self._scheme} works inside DDP; behind other doors take one-bit or two-bit")
        adams = [one for one in session.optimizers if isinstance(one, torch.optim.Adam | torch.optim.AdamW)]
        if not adams:
            raise Unsupported(
                f"{self._scheme} compresses the momenta of Adam and AdamW, and was given {session.optimizers}: give attach() "
                f"the AdamW, or take one-bit or two-bit"
            )
        for adam in adams:
            self._groups_of(adam)
        self._adams = Optimizers(adams)

    def bind(self, session: Session) -> None:
        """Step frozen parameters of the session's Adams, which were checked, from now on until `close`."""
        self._reset()
        self._device = session.wire.device
        self._begun = None if self._device.type == "cpu" else _BegunVariances()
        for adam in self._adams:
            self._hooks += (
                adam.register_step_pre_hook(self._before_step),
                adam.register_step_post_hook(self._after_step),
            )

    def close(self) -> None:
        """Leave the optimizer as it was; its variance goes on from where it stood."""
        for hook in self._hooks:
            hook.remove()
        self._adams = Optimizers()
        self._reset()

    def choose(self, bucket: Bucket, select: ByName) -> Selection:
        """The tensors of which momenta are sent from now on; alike on all ranks, as their optimizers' states are."""
        # All are asked, because to ask is to count.
        frozen = {slot: self._is_frozen(slot) for slot in bucket.slots}
        return Selection(bucket, lambda slot: slot is not None and frozen[slot] and select(slot))

    def _is_frozen(self, slot: Slot) -> bool:
        parameter = slot.parameter
        if parameter is None:
            return False
        if parameter in self.frozen_at:
            return True
        state = self._state_of(parameter)
        if "exp_avg_sq" not in state:
            return False
        n_updates, variance = int(state["step"]), _variance(state)
        if not (holds_nonzero(variance.reshape(-1)) if self._begun is None else self._begun.has(parameter, variance)):
            self.idle_until[parameter] = n_updates
        if n_updates - self.idle_until.get(parameter, 0) < self.freeze_step:
            return False
        self.frozen_at[parameter] = n_updates
        return True

    def momentum(self, slot: Slot) -> tuple[Tensor, float]:
        """(n,) float32: what the state holds for a frozen slot, as its bucket lies; and beta1, as it is now."""
        place: Any = self._adams.of(slot.parameter)  # there is one: it was frozen by its Adam's state
        momentum = local_of(place.optimizer.state[slot.parameter]["exp_avg"]).detach()
        return as_lying(momentum, slot, self._device), float(place.group["betas"][0])

    def _before_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if not self.frozen_at:
            return
        if any(one is not None for one in (*args[1:], *kwargs.values())):
            raise Unsupported(f"{self._scheme}: optimizer.step() takes no closure; compute the loss before it")
        for group in self._groups_of(optimizer):
            for parameter in group["params"]:
                if parameter.grad is not None and parameter in self.frozen_at:
                    self._step(parameter, group)
                    self._hidden.append((parameter, parameter.grad))
                    parameter.grad = None
        self._warn_of_large_updates()
        self._n_steps += 1

    def _after_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        for parameter, gradient in self._hidden:
            parameter.grad = gradient
        self._hidden.clear()
        if self._begun is not None:
            states = [pair for adam in self._adams for pair in adam.state.items() if pair[0] not in self.frozen_at]
            self._begun.look({p: _variance(state) for p, state in states if "exp_avg_sq" in state})

    def _warn_of_large_updates(self) -> None:
        """Look at the sizes of this step's updates; on a device, at those that have been read."""
        if self._sizes:
            squares = torch.stack([square.float() for square, _ in self._sizes])
            self._read_sizes = Reading(squares), sum(n for _, n in self._sizes)
            self._sizes.clear()
        if self._read_sizes is None or self._has_warned or not self._read_sizes[0].is_there():
            return
        (reading, n_values), self._read_sizes = self._read_sizes, None
        total = float(reading.wait().double().sum())
        self._has_warned = total > _LARGE_UPDATES**2 * n_values
        if not self._has_warned:
            return
        _log.warning(
            "gradwire %s: updates are %.0f times what the variance says that was frozen after %d updates: it was frozen too "
            "early, and the loss may stay behind or diverge. Begin again with freeze_step= a sixth of the run or more",
            self._scheme, math.sqrt(total / n_values), min(self.frozen_at.values()),
        )  # fmt: skip

    @torch.no_grad()
    def _step(self, parameter: Tensor, group: Mapping[str, Any]) -> None:
        state = self._state_of(parameter)
        state["step"] += 1
        (beta1, beta2), lr = map(float, group["betas"]), float(group["lr"])
        assert parameter.grad is not None
        values, gradient, momentum = map(local_of, (parameter, parameter.grad, state["exp_avg"]))
        if group["weight_decay"]:
            values.mul_(1 - lr * float(group["weight_decay"]))
        momentum.lerp_(gradient.to(momentum.dtype), 1 - beta1)
        n_seen = self.frozen_at[parameter] if self.correction == "frozen" else float(state["step"])
        variance = _variance(state)
        if parameter not in self._largest:
            # Which one is the largest does not hang on the order in which threads look, as a mean does.
            self._largest[parameter] = variance.max() if variance.numel() else variance.new_zeros(())
        largest = self._largest[parameter]
        floor = largest.double().mul_(FLOOR_SHARE).to(variance.dtype)
        root = variance.clamp(min=floor).masked_fill_(variance == 0, largest).sqrt_()
        root.div_(math.sqrt(1 - beta2**n_seen)).add_(float(group["eps"]))
        if not self._has_warned and self._n_steps % _LOOK_EVERY == 0:
            self._sizes.append((momentum.div(root).square_().sum(), momentum.numel()))
        values.addcdiv_(momentum, root, value=-lr / (1 - beta1 ** float(state["step"])))

    def _groups_of(self, optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
        """The parameter groups as they are now. Raises: Unsupported."""
        for group in optimizer.param_groups:
            for option in filter(group.get, _UNTAKEN):
                cure = "leave it out, or take one-bit or two-bit"
                raise Unsupported(f"{self._scheme} does not take {option}=True; {cure}")
            is_decoupled = isinstance(optimizer, torch.optim.AdamW) or group.get("decoupled_weight_decay")
            if group["weight_decay"] and not is_decoupled:
                why = "Adam adds its weight_decay to the gradient, and so to the momenta"
                raise Unsupported(f"{self._scheme}: {why}; use AdamW")
        return optimizer.param_groups

    def _state_of(self, parameter: Tensor) -> dict[str, Any]:
        """What its Adam keeps of the parameter; empty before its first step, or if none of them steps it."""
        place = self._adams.of(parameter)
        return {} if place is None else place.optimizer.state.get(parameter, {})

    def state_by_name(self, slots: Mapping[str, Slot]) -> dict[str, dict[str, int]]:
        """Counts of updates by parameter name, for `load_by_name`."""
        return {
            key: {name: counts[slot.parameter] for name, slot in slots.items() if slot.parameter in counts}
            for key, counts in self._counts.items()
        }

    def load_by_name(self, state: Mapping[str, Any], slots: Mapping[str, Slot]) -> None:
        """Take counts back. Raises: InvalidArgument (a name that the model lacks, no counts)."""
        for key, counts in self._counts.items():
            counts.clear()
            for name, n in state[key].items():
                slot = slots.get(name)
                if slot is None or slot.parameter is None:
                    raise InvalidArgument(f"the checkpoint's {key} names {name!r}, which the model has no parameter of")
                counts[slot.parameter] = checks.count(f"the checkpoint's {key} of {name!r}", n, at_least=0)
        self._largest.clear()


def _variance(state: Mapping[str, Any]) -> Tensor:
    """What Adam divides by, of this rank's part of a parameter."""
    return local_of(state["max_exp_avg_sq" if "max_exp_avg_sq" in state else "exp_avg_sq"])


class _BegunVariances:
    """Remembers which variances on a device hold anything but zeros; those that do go on doing so."""

    def __init__(self) -> None:
        self._known: dict[Tensor, Tensor] = {}  # variances that do, by parameter
        self._looked: list[tuple[Tensor, Tensor]] = []
        self._reading: Reading | None = None

    def look(self, variances: Mapping[Tensor, Tensor]) -> None:
        """Start reading those that are not known yet; after the optimizer's step, with its stream current."""
        looked = [(p, v) for p, v in variances.items() if self._known.get(p) is not v and v.numel()]
        if looked:
            self._start(looked)

    def has(self, parameter: Tensor, variance: Tensor) -> bool:
        """Waits for the last `look`; and for the current stream, if that has not seen this variance: it was loaded since."""
        self._finish()
        if self._known.get(parameter) is variance:
            return True
        if not variance.numel() or any(v is variance for _, v in self._looked):
            return False
        self._start([*self._looked, (parameter, variance)])
        self._finish()
        return self._known.get(parameter) is variance

    def _start(self, looked: list[tuple[Tensor, Tensor]]) -> None:
        largest = [torch.linalg.vector_norm(v, float("inf")).float() for _, v in looked]
        self._looked, self._reading = looked, Reading(torch.stack(largest) != 0)

    def _finish(self) -> None:
        if self._reading is None:
            return
        found, self._reading = self._reading.wait().tolist(), None
        self._known |= {p: v for (p, v), has_begun in zip(self._looked, found, strict=True) if has_begun}
