"""The scheme `power-momentum`: low rank behind the optimizer, of what gradients differ from the momentum that ranks share.

With m and b as in `momenta.py`, E what compression has left out, and Q the right factor of the step before, for every matrix:

    D <- M - m + b E;  P <- orthogonal(mean(D Q));  Q <- mean(D^T P);  E <- D - P Q^T;  gradient <- m + P Q^T

Power-SGD's power iteration, on a change of momenta instead of a gradient. Where Power-SGD hands Adam gradients of a rank, here
they have all of the momentum, and what was left out comes back no older than the momentum's own memory. So embeddings are
compressed too, and no step is plain.

When not to use this: where ranks use different parameters in a step; and under Muon where 0.03 nats count (docs/schemes.md):
it brings all singular directions to one length, those too that low rank has left out.
"""

import math
from typing import Any

from gradwire.schemes.low_rank import LowRank, Options
from gradwire.schemes.momenta import Momenta
from gradwire.schemes.power_sgd import steps_of
from gradwire.schemes.selection import Names


class PowerMomentum(LowRank):
    """Mean over the ranks, in low rank around the optimizer's momentum. Options: see `gradwire.schemes.low_rank.Options`.

    A residual decays as its momentum does, and by `feedback_decay` besides.
    """

    needs_momenta = True

    def __init__(
        self,
        rank: int = 8,
        factor_dtype: str = "bfloat16",
        buffer_mb: float = math.inf,
        exempt: Names = (),
        **options: Any,
    ) -> None:
        chosen = Options(rank=rank, factor_dtype=factor_dtype, buffer_mb=buffer_mb, exempt=exempt, **options)
        super().__init__("power-momentum", steps_of, chosen, momenta=Momenta())
