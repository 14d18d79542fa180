"""`auto` between FSDP2's shards: torch's own collectives, or codings of weights and gradients, chosen by measurement.

Votes and the control law are those behind DDP. What is chosen among is a table of its own: weights travel too, twice a step,
and nothing of error feedback can be had. Steps begin with FSDP2's own collectives, called as without gradwire.
"""

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from gradwire.core.optimizers import FAMILIES
from gradwire.core.session import Session
from gradwire.registry import parse_spec
from gradwire.schemes.auto.fidelity import check_spec, levels_to
from gradwire.schemes.auto.law import PLAIN, Law, median
from gradwire.schemes.auto.turns import Turns, is_changed
from gradwire.schemes.base import Scheme
from gradwire.telemetry.stopwatch import Lap
from gradwire.wire.communicator import ring_bytes
from gradwire.wire.link_probe import probe_elements, probe_link

_FEW = 5  # steps that say how long one waits
_ALL, _ADAM = frozenset(FAMILIES), frozenset({"adam"})


class Pair(NamedTuple):
    """Codings of gradients and weights, the level of their losses, and under which optimizers (as fidelity.py's rows)."""

    gradients: str
    weights: str
    level: str
    families: frozenset[str] = _ALL

    @property
    def spec(self) -> str:
        """What logs and `stats` call it."""
        return f"gradients={self.gradients},weights={self.weights}"

    def share(self, weight_bytes: int, gradient_bytes: int) -> float:
        """Its bytes, of those of values that are so wide: two gathers of weights, and gradients once. About; races decide."""
        coded = float(parse_spec(self.gradients)[1].get("bits") or 8) / (8 * gradient_bytes)
        of_gradients = {"plain": 1.0, "gcomp": 0.52 if gradient_bytes == 4 else 0.7}.get(self.gradients, coded)
        of_weights = {"plain": 1.0, "exact": 0.84 if weight_bytes == 4 else 0.67, "close": 1 / weight_bytes}
        sent = 2 * weight_bytes * of_weights[self.weights] + gradient_bytes * of_gradients
        return sent / (2 * weight_bytes + gradient_bytes)


TABLE = (
    Pair("plain", "exact", "exact"),
    Pair("gcomp", "exact", "exact"),
    Pair("embedded-float:bits=8", "close", "close"),
    Pair("embedded-float:bits=5", "close", "close", _ADAM),
    Pair("embedded-float:bits=4", "close", "any"),
)


class ShardsAuto(Turns):
    """FSDP2's own collectives or one of several pairs at a time.

    Args:
        make: a scheme of gradients by its name, with the collective of shards.
        widths: bytes of a weight as it is gathered and of a gradient as it is reduced.
        weights: the only coding of weights that may be used; None: whichever `fidelity` allows.
        fidelity: "exact", "close", "any", or a list of gradients' schemes, whose weights are `weights`, by default "exact".
    """

    takes_any_gradient = True
    per_rank_state = None

    def __init__(
        self, make: Callable[[str], Scheme], widths: tuple[int, int], weights: str | None = None,
        fidelity: str | Sequence[str] = "exact", budget: float = 0.01,
    ) -> None:  # fmt: skip
        super().__init__(fidelity, budget)
        self._make, self._widths, self._only = make, widths, weights
        self._pairs: dict[str, Pair] = {}
        self._allowed(set(FAMILIES))  # its complaints, now

    @property
    def configuration(self) -> dict[str, Any]:
        return {"fidelity": self._fidelity, "weights": self._only or "", "budget": self._budget}

    @property
    def weights(self) -> str:
        """The coding of weights in this step."""
        return "plain" if self.is_transparent else self._pairs[self.active].weights

    def _allowed(self, families: set[str]) -> list[Pair]:
        if isinstance(self._fidelity, list):
            return [Pair(check_spec(one), self._only or "exact", "any") for one in self._fidelity]
        levels = levels_to(self._fidelity)
        known = [pair for pair in TABLE if pair.level in levels and pair.families >= families]
        return [pair for pair in known if self._only in (None, pair.weights)]

    def bind(self, session: Session) -> None:
        """Make and bind every candidate, and time the link. Collective. Raises: RankMismatch, PeerLost, Unsupported."""
        super().bind(session)
        communicator = session.communicator
        trained = [parameter for parameter in session.names if parameter.requires_grad]
        self._pairs = {pair.spec: pair for pair in self._allowed(set(session.optimizers.families(trained)))}
        for spec, pair in self._pairs.items():
            self._subs[spec] = self._make(pair.gradients)
            self._subs[spec].bind(session)
        self._compare_offers(list(self._pairs))
        hop_s, byte_s = communicator.submit(probe_link, session.wire).wait()
        n_hops = 2 * (communicator.world_size - 1)
        transfer_s = n_hops * hop_s + byte_s * ring_bytes(4 * probe_elements(session.wire), communicator.world_size)
        slowest_us = torch.tensor([1e6 * hop_s, 1e6 * transfer_s], dtype=torch.int64, device="cpu")
        communicator.submit(communicator.all_reduce, slowest_us, dist.ReduceOp.MAX).wait()
        self._hop_us, self._transfer_us = slowest_us.tolist()
        self._waiting_us, self._waits = 0, deque[int](maxlen=_FEW)
        known = dict.fromkeys((PLAIN, *self._pairs), 1000)
        self.law = Law(known, self._budget_permille, self._predict, self._family_of)

    def _family_of(self, spec: str) -> str:
        return PLAIN if spec == PLAIN else self._pairs[spec].weights

    def _predict(self, computing_us: int) -> Mapping[str, int]:
        """What waits is as long as what is sent."""
        coded = {spec: pair.share(*self._widths) for spec, pair in self._pairs.items()}
        return {spec: computing_us + int(self._waiting_us * share) for spec, share in {PLAIN: 1.0, **coded}.items()}

    # ---- a step

    def begin_at(self, step: int) -> None:
        super().begin_at(step)
        self.choose(step)

    def choose(self, step: int) -> None:
        """Read what is due and decide, on the training thread, between two steps. Raises: RankMismatch, PeerLost."""
        lag = self._lag_of(self._hop_us * 2 * (self.session.communicator.world_size - 1))
        while (vote := self._polls.next_before(step - lag)) is not None:
            self._count(vote)
        name = self.law.scheme_of(step)
        if name != self.active:
            self.session.communicator.submit(lambda: None).wait()  # its last step is committed
            self.active = name
            self._waits.clear()
        self._enter(step, name)

    def end_watched_step(self, step: int, took_ns: int, waited_ns: int) -> None:
        self._vote(step, Lap(took_ns, waited_ns), False, (), self.session.wire)
        self.choose(step + 1)

    def _note_transfer(self, transfer_us: int) -> bool:
        found_us = self._probes.found(transfer_us, 1 / self._transfer_us, lambda us: 1 / us)
        if found_us:
            self._waiting_us = self._waiting_us * found_us // self._transfer_us
            self._transfer_us = found_us
        return bool(found_us)

    def _note_waiting(self, step: int, waited_us: int) -> None:
        """A plain step says what plain waits; others, how long it may wait at most: more bytes, but nothing to encode."""
        name = self.law.scheme_of(step)
        self._waits.append(waited_us if name == PLAIN else int(waited_us / self._pairs[name].share(*self._widths)))
        if name == PLAIN:
            self._waiting_us = waited_us
        elif len(self._waits) == self._waits.maxlen:
            self._waiting_us = min(self._waiting_us, median(list(self._waits)))

    # ---- between steps

    def state_dict(self) -> dict[str, Any]:
        schemes = {spec: sub.state_dict() for spec, sub in self._subs.items()}
        return {"law": self.law.state_dict(), "transfer_us": self._transfer_us, "schemes": schemes}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if not is_changed(1 / (state.get("transfer_us") or self._transfer_us), 1 / self._transfer_us):
            self.law.load_state_dict(state["law"])  # times of this link
        for spec, sub in self._subs.items():
            if spec in state["schemes"]:
                sub.load_state_dict(state["schemes"][spec])
