"""The scheme `sign-sgd`: one bit an element, majority vote over the ranks (Bernstein et al., ICML 2018).

When not to use this: with the learning rate of another scheme. The result is +1, -1 or 0 for every element, so the
learning rate alone says how far a parameter moves (1e-4 is a start for what trains at 0.1), and weak gradients count
like strong ones (`one-bit` sends as little, with error feedback). Each rank receives a bit of every other: past 32
ranks that is more than a plain all-reduce.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from gradwire import _native
from gradwire.codecs.tensors import dtype_code
from gradwire.control.checks import choice as check_choice
from gradwire.core.session import Session
from gradwire.errors import Unsupported
from gradwire.exchange.patterns import Gather, Values
from gradwire.schemes.compressed import Compressed
from gradwire.wire.wire import Wire

_MAX_RANKS = 255  # votes are counted in bytes
_TIES = ("zero", "positive")


class SignVotes:
    """Payload: a bit an element. The result is +1, -1 or 0, times the loss scale."""

    def __init__(self, ties: str) -> None:
        self.ties = ties

    def encode(self, values: Values, wire: Wire) -> tuple[Tensor, bool]:
        gradient = values.gradient
        words = torch.empty((gradient.numel() + 31) // 32, dtype=torch.int32)
        code = dtype_code(gradient.dtype)
        return words, _native.pack_signs(gradient.view(torch.uint8), code, words.view(torch.uint32))

    def decode(self, payloads: Tensor, values: Values, wire: Wire) -> None:
        gradient = values.gradient
        unit = torch.tensor([values.loss_scale], dtype=gradient.dtype).view(torch.uint8)
        _native.write_majority(
            payloads.contiguous().view(-1).view(torch.uint32),
            wire.world_size,
            dtype_code(gradient.dtype),
            int.from_bytes(bytes(unit.tolist()), "little"),
            self.ties == "positive",
            gradient.view(torch.uint8),
        )


class SignSgd(Compressed):
    """The sign that most ranks have. Zeros count as positive; -0.0 is a zero. Without error feedback, as published.

    With a GradScaler the result is multiplied by its scale, which `unscale_` takes off again.

    Args:
        ties: what is written where as many ranks are below zero as not: "zero" or "positive".
    """

    name = "sign-sgd"
    acts_alone = True

    def __init__(self, ties: str = "zero") -> None:
        check_choice("ties", ties, _TIES)
        super().__init__(SignVotes(ties), Gather())
        self.ties = ties

    @property
    def configuration(self) -> dict[str, Any]:
        return {"ties": self.ties}

    def bind(self, session: Session) -> None:
        """Raises: Unsupported (more ranks than votes can be counted of)."""
        if session.communicator.world_size > _MAX_RANKS:
            raise Unsupported(f"sign-sgd takes up to {_MAX_RANKS} ranks; use acp-sgd, whose sums do not grow with them")
        super().bind(session)
