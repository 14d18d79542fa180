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

from gradwire.codecs.signs import Signs
from gradwire.control.checks import choice as check_choice
from gradwire.core.bucket import Bucket
from gradwire.core.session import Session
from gradwire.core.site import DeviceSite
from gradwire.errors import Unsupported
from gradwire.exchange.patterns import Gather, Values
from gradwire.gpu.kernels import kernels_on
from gradwire.schemes.on_device import Placed, StepsOnDevice
from gradwire.wire.wire import Wire

_MAX_RANKS = 255  # votes are counted in bytes
_TIES = ("zero", "positive")


class SignVotes:
    """Payload: a bit an element. The result is +1, -1 or 0, times the loss scale."""

    def __init__(self, signs: Signs) -> None:
        self._signs = signs

    def encode(self, values: Values, wire: Wire) -> tuple[Tensor, bool]:
        words = torch.empty(self._signs.n_words(values.gradient), dtype=torch.int32)
        return words, bool(self._signs.pack(values.gradient, words))

    def decode(self, payloads: Tensor, values: Values, wire: Wire) -> None:
        self._signs.vote(payloads, values.gradient, values.loss_scale)


class SignsOnDevice(StepsOnDevice):
    """Steps of signs that every rank gathers and counts. Raises: Unsupported (no kernels here)."""

    acts_alone = True

    def __init__(self, session: Session, site: DeviceSite, signs: Signs) -> None:
        super().__init__(session, site)
        self._signs = signs
        kernels_on(site.device)  # raises, where there are none

    def _enqueue(self, bucket: Bucket, *facts: Any) -> None:
        site, values, world = self._site, bucket.buffer, self._session.communicator.world_size
        n_words = self._signs.n_words(values)
        own, words = (site.scratch(name, n * n_words, torch.int32) for name, n in (("own", 1), ("words", world)))
        self._signs.pack(values, own)
        site.group.all_gather(words.view(world, n_words), own)
        bucket.record.count_exchanged((world - 1) * 4 * n_words)
        self._signs.vote(words.view(world, n_words), values, self._session.loss_scale(), site.flags[1:])


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
        self.ties, self._signs = ties, Signs(ties_are_positive=ties == "positive")
        super().__init__(SignVotes(self._signs), Gather())

    @property
    def configuration(self) -> dict[str, Any]:
        return {"ties": self.ties}

    def bind(self, session: Session) -> None:
        """Raises: Unsupported (more ranks than votes can be counted of)."""
        if session.communicator.world_size > _MAX_RANKS:
            raise Unsupported(f"sign-sgd takes up to {_MAX_RANKS} ranks; use acp-sgd, whose sums do not grow with them")
        super().bind(session)

    def _go_to(self, site: DeviceSite, session: Session) -> StepsOnDevice:
        return SignsOnDevice(session, site, self._signs)
