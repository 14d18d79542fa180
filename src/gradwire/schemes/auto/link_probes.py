"""Probes of the link while training: how many are to come, and whether they have found another link. Alike on all ranks."""

from __future__ import annotations

from gradwire.schemes.auto.profile import CostProfile

_N_PROBES = 3  # in steps on end, until a slower link is believed
_CHANGED = 250  # permille


class LinkProbes:
    """Other traffic only slows a probe: the fastest counts, and a slower link is looked at again."""

    def __init__(self) -> None:
        self._n_to_come = 0
        self._transfers_us: list[int] = []

    def ask(self, is_urgent: bool) -> None:
        """Probe after the next step; if it is urgent, after the next ones, whatever the first says."""
        self._n_to_come = _N_PROBES if is_urgent else 1

    def take(self) -> bool:
        """Whether this step is followed by a probe; asked once a step."""
        is_due = self._n_to_come > 0
        self._n_to_come -= is_due
        return is_due

    def found(self, transfer_us: int, profile: CostProfile) -> CostProfile | None:
        """The costs over another link than `profile` holds, if the slowest rank's transfer says that it is another."""
        self._transfers_us.append(transfer_us)
        old, new = profile.link.rate, profile.with_transfer(min(self._transfers_us))
        is_slower = (old - new.link.rate) * 1000 > _CHANGED * old
        if is_slower and len(self._transfers_us) < _N_PROBES:
            self._n_to_come = max(1, self._n_to_come)
            return None
        self._transfers_us.clear()
        return new if abs(new.link.rate - old) * 1000 > _CHANGED * old else None

    def forget(self) -> None:
        """Nothing is to come, and what came does not count."""
        self._n_to_come = 0
        self._transfers_us.clear()
