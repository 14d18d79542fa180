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
from gradwire.core.bucket import Bucket
from gradwire.core.session import Session
from gradwire.core.site import DeviceSite
from gradwire.errors import Unsupported
from gradwire.exchange.patterns import Gather, Values
from gradwire.gpu.kernels import kernels_on
from gradwire.gpu.signs import DeviceSigns
from gradwire.schemes.on_device import Placed, StepsOnDevice
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
        _native.write_majority(
            payloads.contiguous().view(-1).view(torch.uint32),
            wire.world_size,
            dtype_code(gradient.dtype),
            _bits_of(values.loss_scale, gradient.dtype),
            self.ties == "positive",
            gradient.view(torch.uint8),
        )


class SignsOnDevice(StepsOnDevice):
    """Steps of signs that every rank gathers and counts. Raises: Unsupported (no kernels here)."""

    acts_alone = True

    def __init__(self, session: Session, site: DeviceSite, ties: str) -> None:
        super().__init__(session, site)
        self._signs = DeviceSigns(kernels_on(site.device), ties == "positive")

    def _enqueue(self, bucket: Bucket, *facts: Any) -> None:
        site, values, world = self._site, bucket.buffer, self._session.communicator.world_size
        n_words = self._signs.n_words(bucket.n_elements)
        own, words = (site.scratch(name, n * n_words, torch.int32) for name, n in (("own", 1), ("words", world)))
        self._signs.pack(values, own)
        site.group.all_gather(words.view(world, n_words), own)
        bucket.record.count_exchanged((world - 1) * 4 * n_words)
        unit = _bits_of(self._session.loss_scale(), values.dtype)
        self._signs.vote(words.view(world, n_words), values, unit, site.flags[1:])


class SignSgd(Placed):
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

    def _go_to(self, site: DeviceSite, session: Session) -> StepsOnDevice:
        return SignsOnDevice(session, site, self.ties)


def _bits_of(value: float, dtype: torch.dtype) -> int:
    """The value as `dtype`."""
    return int.from_bytes(bytes(torch.tensor([value], dtype=dtype).view(torch.uint8).tolist()), "little")
