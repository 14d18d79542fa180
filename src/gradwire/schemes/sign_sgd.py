"""The scheme `sign-sgd`: one bit an element, majority vote over the ranks (Bernstein et al., ICML 2018).

When not to use this: with the learning rate of another scheme. It alone says how far a parameter moves (1e-4 is a start for
what trains at 0.1), and weak gradients count like strong ones (`one-bit` sends as little, with error feedback).
"""

import torch
from torch import Tensor

from gradwire.checks import choice as check_choice
from gradwire.codecs.signs import Signs
from gradwire.core.feedback import Part
from gradwire.core.session import Session
from gradwire.errors import Unsupported
from gradwire.schemes.compressed import Compressed
from gradwire.schemes.selection import ByName, Names
from gradwire.wire.wire import Flag, Wire

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
    shared = ("ties",)

    def __init__(self, ties: str = "zero", **names: Names) -> None:
        super().__init__(select=ByName(**{"exempt": (), **names}))
        self.ties = check_choice("ties", ties, ("zero", "positive"))
        self._signs = Signs(ties_are_positive=ties == "positive")

    def bind(self, session: Session) -> None:
        """Raises: Unsupported (more ranks than votes can be counted of)."""
        if session.communicator.world_size > _MAX_RANKS:
            raise Unsupported(f"sign-sgd takes up to {_MAX_RANKS} ranks; use acp-sgd, whose sums do not grow with them")
        super().bind(session)

    def step(self, part: Part, wire: Wire) -> None:
        """Have the owner of each shard of words count its votes, and gather what it found; two ranks gather each other's."""
        with wire.timing("encode"):
            words = wire.scratch("signs", self._signs.n_words(part.values), torch.int32)
            is_finite = self._signs.pack(part.values, words)
        votes = self._by_owners(words, is_finite, wire) if wire.world_size > 2 else wire.gather(words, is_finite)
        with wire.timing("decode"):
            self._signs.vote(votes, part.values, part.loss_scale)

    def _by_owners(self, words: Tensor, is_finite: Flag, wire: Wire) -> Tensor:
        """(k, n_words): messages of which most say what most ranks do; two where there may be ties, on which these disagree."""
        world, lead = wire.world_size, self._signs.n_leading(words)
        n_words = words.numel() - lead
        shard = -(-n_words // world)
        rows = wire.scratch("rows", world * shard, torch.int32).zero_()
        rows[:n_words].copy_(words[lead:])
        theirs = wire.to_owners(rows.view(world, shard), is_finite)
        with wire.timing("decode"):
            counted, packed = wire.scratch("counted", 32 * shard), words.new_empty(lead + shard)
            self._signs.vote(_led(theirs, lead), counted, 1.0)
            is_whole = self._signs.pack(counted, packed)
            found = [packed[lead:].clone()]
            if world % 2 == 0 and self.ties == "zero":
                self._signs.pack(counted.neg_(), packed)  # of what is not above zero, the complement
                found.append(packed[lead:].bitwise_not())
        answers = wire.gather(torch.cat(found), is_whole).reshape(world, len(found), shard)
        return _led(answers.transpose(0, 1).reshape(len(found), -1)[:, :n_words], lead)


def _led(words: Tensor, n: int) -> Tensor:
    """(k, n + m): rows (k, m) behind `n` words that say that all is finite."""
    return torch.cat([words.new_zeros(len(words), n), words], 1) if n else words
