"""How one rank fails in the middle of a training, and what every other is then told."""

from __future__ import annotations

import gradwire
from ranks import Outcome

FAILURES: dict[str, tuple[type[Exception], str]] = {
    "mismatch": (gradwire.RankMismatch, "disagree on configuration"),
    "codec": (gradwire.RankMismatch, "rank 1 failed"),
    "death": (gradwire.PeerLost, ""),
}


def assert_failure_is_told(how: str, outcomes: list[Outcome], lost: str = "") -> None:
    """Rank 1 has ended with exit code 7 if it is death, of which others say `lost`; all others raise the error."""
    error, words = FAILURES[how]
    words = words or lost
    for rank, outcome in enumerate(outcomes):
        if how == "death" and rank == 1:
            assert outcome.exit_code == 7
        else:
            assert isinstance(outcome.error, error), (rank, outcome)
            assert words in str(outcome.error)
