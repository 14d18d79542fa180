"""The scheme `sign-sgd`: one bit an element, majority vote over the ranks (Bernstein et al., ICML 2018).

When not to use this: with the learning rate of another scheme. The result is +1, -1 or 0 for every element, so the
learning rate alone says how far a parameter moves (1e-4 is a start for what trains at 0.1), and weak gradients count
like strong ones (`one-bit` sends as little, with error feedback). Each rank receives a bit of every other: past 32
ranks that is more than a plain all-reduce.
"""

from __future__ import annotations

from typing import Any

import torch

from gradwire.checks import choice as check_choice
from gradwire.codecs.signs import Signs
from gradwire.core.feedback import Part
from gradwire.core.session import Session
from gradwire.errors import Unsupported
from gradwire.schemes.compressed import Compressed
from gradwire.schemes.selection import ByName, Names
from gradwire.wire.wire import Wire

_MAX_RANKS = 255  # votes are counted in bytes


class SignSgd(Compressed):
    """The sign that most ranks have. Zeros count as positive; -0.0 is a zero. Without error feedback, as published.

    With a GradScaler the result is multiplied by its scale, which `unscale_` takes off again.

    Args:
        ties: what is written where as many ranks are below zero as not: "zero" or "positive".
        exempt, only: see `ByName`. By default nothing is spared: a mean beside signs would want another learning rate.
    """

    name = "sign-sgd"
    options_of = ByName
    acts_alone = True

    def __init__(self, ties: str = "zero", **names: Names) -> None:
        super().__init__(select=ByName(**{"exempt": (), **names}))
        self.ties = check_choice("ties", ties, ("zero", "positive"))
        self._signs = Signs(ties_are_positive=ties == "positive")

    @property
    def configuration(self) -> dict[str, Any]:
        return {"ties": self.ties, **self.frame_configuration}

    def bind(self, session: Session) -> None:
        """Raises: Unsupported (more ranks than votes can be counted of)."""
        if session.communicator.world_size > _MAX_RANKS:
            raise Unsupported(f"sign-sgd takes up to {_MAX_RANKS} ranks; use acp-sgd, whose sums do not grow with them")
        super().bind(session)

    def step(self, part: Part, wire: Wire) -> None:
        """Gather a bit a value from every rank, and count."""
        with wire.timing("encode"):
            words = wire.scratch("signs", self._signs.n_words(part.values), torch.int32)
            is_finite = self._signs.pack(part.values, words)
        gathered = wire.gather(words, is_finite)
        with wire.timing("decode"):
            self._signs.vote(gathered, part.values, part.loss_scale)
