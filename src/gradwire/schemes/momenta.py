"""Behind the optimizer: a gradient is expected to be its momentum, which all ranks share, and what differs is compressed.

With m the optimizer's momentum as a running mean of gradients, b its decay, and E what compression has left out so far:

    D <- gradient - m + b E;    C <- compressed(D);    E <- D - C;    gradient <- m + mean(C)

So what is sent are changes of momenta: the user's optimizer moves m by (1 - b) mean(C), and what is late is never older than
the momentum's own memory. (Dion's decoupled momenta, Ahn et al. 2025; EF21's differences, Richtarik et al. 2021.)
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gradwire.core.bucket import Slot, flatten_like, local_of
from gradwire.core.session import Session
from gradwire.errors import Unsupported


class Momentum(NamedTuple):
    """What is expected of a tensor's gradient."""

    # (n,) float32, as its bucket lies, free of the loss scale; None: nothing yet, or no momentum that is known
    values: Tensor | None
    decay: float  # what is left of a residual for the next step


_ADAMS = tuple(getattr(torch.optim, name) for name in ("Adam", "AdamW", "NAdam", "RAdam"))


class Momenta:
    """The momenta of the session's optimizers, read live: Adam, AdamW, NAdam, RAdam, Muon, and SGD with momentum of torch. Of
    any other nothing is expected, and its residuals do not decay."""

    def bind(self, session: Session, scheme: str) -> None:
        """Raises: Unsupported (no optimizer with a momentum that is known; DDP looks for unused parameters)."""
        if getattr(session.module, "find_unused_parameters", False):
            why = f"{scheme} takes a parameter that no rank used for one whose momentum goes on"
            raise Unsupported(f"find_unused_parameters=True: {why}; leave it out, or take power-sgd")
        self._optimizers, self._device = session.optimizers, session.wire.device
        if not any(_kept_by(optimizer, group) for optimizer in self._optimizers for group in optimizer.param_groups):
            raise Unsupported(
                f"{scheme} compresses what gradients differ from the momentum of Adam, AdamW, NAdam, RAdam, Muon or SGD with "
                f"momentum, and was given {session.optimizers}: give attach() the optimizer, or take power-sgd"
            )

    def of(self, slot: Slot) -> Momentum:
        """As it is now; between two steps of the optimizer."""
        place = self._optimizers.of(slot.parameter)
        if place is None or slot.parameter is None or (kept := _kept_by(*place)) is None:
            return Momentum(None, 1.0)
        key, decay, factor = kept
        values = place.optimizer.state.get(slot.parameter, {}).get(key)
        if not isinstance(values, Tensor):
            return Momentum(None, decay)
        flat = as_lying(local_of(values).detach(), slot, self._device)
        return Momentum(flat if factor == 1 else flat * factor, decay)


def _kept_by(optimizer: torch.optim.Optimizer, group: Mapping[str, Any]) -> tuple[str, float, float] | None:
    """(the momentum's name in the state, its decay, what makes a mean of gradients of it); None: it is not known."""
    sign = -1.0 if group.get("maximize") else 1.0
    if isinstance(optimizer, _ADAMS):
        return "exp_avg", float(group["betas"][0]), sign
    if isinstance(optimizer, torch.optim.Muon):
        return "momentum_buffer", float(group["momentum"]), sign
    if isinstance(optimizer, torch.optim.SGD) and 0 < group["momentum"] < 1:
        decay = float(group["momentum"])
        return "momentum_buffer", decay, sign * (1 - decay) / (1 - float(group["dampening"]))
    return None


def as_lying(values: Tensor, slot: Slot, device: torch.device) -> Tensor:
    """(n,) float32, on the device: of a tensor in the shape of the slot's parameter, as the slot lies in a bucket."""
    assert slot.parameter is not None
    flat = flatten_like(values, local_of(slot.parameter))
    return flat[slot.start : slot.start + slot.numel()].to(device=device, dtype=torch.float32)
