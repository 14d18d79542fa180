"""What a step ahead is made of: its options, the backup of the global weights, a step on a copy of the optimizer's state."""

import contextlib
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch

from gradwire.checks import choice as check_choice
from gradwire.errors import InvalidArgument, Unsupported

# Optimizers whose whole state lies in `optimizer.state[parameter]`, elementwise: it can be copied and thrown away.
_PEEKABLE = (
    "ASGD", "Adadelta", "Adagrad", "Adam", "AdamW", "Adamax", "NAdam", "RAdam", "RMSprop", "Rprop", "SGD",
)  # fmt: skip


@dataclass(frozen=True)
class LookAheadOptions:
    """Options of a step that starts before the one before it is complete.

    Attributes:
        local: "peek": the user's own rule, on a copy of its state that is thrown away; "sgd": weights - local_rate x
            gradient.
        local_rate: of "sgd"; None: each group's own learning rate.
        sync_steps: steps from the beginning that wait for their aggregate, as without; None: as its owner says.
        max_grad_norm: clip the norm of the mean gradient, as clip_grad_norm_ does; and of the local one for its step.
    Raises: InvalidArgument.
    """

    local: str = "peek"
    local_rate: float | None = None
    sync_steps: int | None = None
    max_grad_norm: float | None = None

    def __post_init__(self) -> None:
        local, rate = check_choice("local", self.local, ("peek", "sgd")), self.local_rate
        if rate is not None and (local != "sgd" or not (math.isfinite(rate) and rate > 0)):
            raise InvalidArgument(
                f'local_rate is a positive learning rate for local="sgd", got {rate!r} with {local!r}'
            )
        if self.sync_steps is not None and self.sync_steps < 0:
            raise InvalidArgument(f"sync_steps is 0 or more, got {self.sync_steps}")
        if self.max_grad_norm is not None and not self.max_grad_norm > 0:
            raise InvalidArgument(f"max_grad_norm must be positive, got {self.max_grad_norm}")


@contextlib.contextmanager
def on_copies_of_the_state(optimizer: torch.optim.Optimizer, parameters: Iterable[torch.Tensor]) -> Iterator[None]:
    """Have the optimizer work on copies of these parameters' state; afterwards it is as it was."""
    state = optimizer.state
    kept = {parameter: state[parameter] for parameter in parameters if parameter in state}
    for parameter, own in kept.items():
        state[parameter] = {key: one.clone() if isinstance(one, torch.Tensor) else one for key, one in own.items()}
    try:
        yield
    finally:
        state.update(kept)
        for parameter in parameters:
            if parameter not in kept:
                state.pop(parameter, None)


def check_peekable(optimizer: torch.optim.Optimizer) -> None:
    """Refuse an optimizer whose step cannot be tried and thrown away."""
    known = [getattr(torch.optim, name).step for name in _PEEKABLE]
    step = type(optimizer).step  # or what torch wraps hooks around
    if not any(step is one or step is getattr(one, "__wrapped__", None) for one in known):
        raise Unsupported(
            f'{type(optimizer).__name__} cannot be peeked: local="peek" tries its step on a copy of its state, which it '
            f'knows how to copy for torch.optim\'s {", ".join(_PEEKABLE)}; use local="sgd", or leave ahead out'
        )
    for group in optimizer.param_groups:
        for option in ("differentiable", "capturable"):
            if group.get(option):
                raise Unsupported(f'local="peek" does not serve {option}=True: use local="sgd", or leave ahead out')


class LocBuf:
    """loc_buf: the last complete global weights, from which every local step departs (SlimGC, section 3.6).

    `is_local` is the paper's flag: 1 after a local update, when the parameters hold this rank's own weights and the
    global ones lie here; 0 after the global weights were put back. Every read and write asserts it, so that neither can
    be taken for the other. While local weights are in place, nobody else may write to the parameters: their versions
    are noted, and a change is an error instead of a loss.
    """

    def __init__(self, parameters: Iterable[torch.Tensor]) -> None:
        self._parameters = tuple(parameters)
        self._backup: list[torch.Tensor] = []
        self._versions: list[int] = []
        self.is_local = False

    def back_up(self) -> None:
        """Copy the global weights, which the parameters hold, to the backup."""
        assert not self.is_local, "the parameters hold local weights"
        if not self._backup:
            self._backup = [torch.empty_like(parameter) for parameter in self._parameters]
        torch._foreach_copy_(self._backup, [parameter.detach() for parameter in self._parameters])

    def note_local(self) -> None:
        """The parameters have been moved by this rank's own gradient."""
        assert not self.is_local, "a local update on top of a local update"
        self.is_local = True
        self._versions = [parameter._version for parameter in self._parameters]

    def put_back(self) -> None:
        """Put the global weights into the parameters again, unless they are there."""
        self.check_untouched()
        if self.is_local:
            torch._foreach_copy_([parameter.detach() for parameter in self._parameters], self._backup)
            self.is_local = False

    def check_untouched(self) -> None:
        """Refuse parameters that somebody wrote to while they hold local weights."""
        if not self.is_local:
            return
        for parameter, version in zip(self._parameters, self._versions, strict=True):
            if parameter._version != version:
                # Without this the error would come up again when the pending step is taken.
                self._versions = [parameter._version for parameter in self._parameters]
                raise Unsupported(
                    f"a parameter of shape {tuple(parameter.shape)} was changed while it held this rank's local weights, "
                    "which the next step throws away: call attachment.flush() first (load_state_dict of the module does "
                    "so by itself), then change it on every rank"
                )


# Parameters whose state is copied at a time: 16 MB of float32 a moment, instead of the whole optimizer's state again.
_CHUNK_ELEMENTS = 1 << 22


def in_chunks(parameters: Iterable[torch.Tensor]) -> list[list[torch.Tensor]]:
    """The parameters in portions whose state is copied at a time."""
    chunks: list[list[torch.Tensor]] = []
    room = 0
    for parameter in parameters:
        if not chunks or parameter.numel() > room:
            chunks.append([])
            room = _CHUNK_ELEMENTS
        chunks[-1].append(parameter)
        room -= parameter.numel()
    return chunks
