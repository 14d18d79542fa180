"""The frame of `auto`, behind DDP and between shards: schemes that take turns as the law says, from votes on every step.

Ranks tell each other a few integers of each step on a background all-reduce, of which the largest count: the slowest rank's
time is everybody's, and of the waiting the smallest, as who waits least waits for the network, the others for that rank.
"""

import logging
import math
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from gradwire.core.bucket import Bucket
from gradwire.core.session import Session
from gradwire.errors import InvalidArgument, RankMismatch
from gradwire.schemes.auto.costs import look_for_zeros
from gradwire.schemes.auto.law import PLAIN, Law
from gradwire.schemes.base import Scheme
from gradwire.telemetry.stopwatch import Lap
from gradwire.wire.communicator import Communicator
from gradwire.wire.link_probe import probe_transfer_us
from gradwire.wire.preamble import FORMAT_VERSION, Preamble, compare_preambles, hash_configuration
from gradwire.wire.wire import Wire

_log = logging.getLogger("gradwire.auto")
LAG = 2  # steps after which a vote is read, so that nobody waits for it
_LONG_STEP = 50  # times as long as a vote: while something is tried it is read before the next step
_MOST_BUDGET = 0.1
_BATCH = 5  # steps that share a vote while nothing is tried
_N_PROBES = 3  # in steps on end, until a slower link is believed
_CHANGED = 250  # permille


class Vote(NamedTuple):
    """The largest numbers of all ranks, of some steps."""

    last_step: int  # of those voted on
    reconsider: bool  # any rank asks to think again
    transfer_us: int  # the slowest rank's probe; 0 if there was none
    density: float | None  # the largest share of values that are not zero; None: nobody looked
    steps: list[tuple[int, int, int, bool]]  # (step, took_us, waited_us, fell_back), in order


class Polls:
    """The votes of one rank: what its steps took goes out, what all agreed on comes back some steps later, in order."""

    def __init__(self, communicator: Communicator) -> None:
        self._communicator = communicator
        self._rows: list[tuple[Lap, bool]] = []  # of each step that is not on its way yet
        self._pending: deque[tuple[int, torch.futures.Future]] = deque()  # last step; of the all-reduce and its numbers
        self._has_looked = False
        self.wants_to_reconsider = False  # the next vote asks all ranks to

    def add(
        self,
        step: int,
        lap: Lap,
        fell_back: bool,
        gradients: Iterable[Tensor | None],
        at_once: bool,
        probe: Wire | None,
    ) -> None:
        """Put a step to the vote, at once or with the next ones, on the training thread. `fell_back`: it says nothing
        of its scheme. Of the first vote, and of one before which the link of the wire `probe` is measured, `gradients`
        are looked at for zeros."""
        looks = probe is not None or not self._has_looked
        self._rows.append((lap, fell_back))
        if not at_once and not looks and len(self._rows) < _BATCH:
            return
        density = look_for_zeros(gradients) if looks else None
        started = self._communicator.submit(self._start, step, self.wants_to_reconsider, density, self._rows, probe)
        self._rows, self._has_looked, self.wants_to_reconsider = [], True, False
        self._pending.append((step, started))

    def _start(
        self, step: int, reconsider: bool, density: Callable[[], float] | None, laps: list[tuple[Lap, bool]],
        probe: Wire | None,
    ) -> tuple[torch.futures.Future, Tensor]:  # fmt: skip
        """Write (5 + 3 n,) int64, what is to be the least with its sign changed, and begin their maximum: on the lane, which
        waits for the end of steps that a device is still at, and then probes a link."""
        rows = [(*lap.read(), fell_back) for lap, fell_back in laps]
        permille = 0 if density is None else 1 + round(1000 * density())
        numbers = [step, -step, int(reconsider), 0 if probe is None else probe_transfer_us(probe), permille]
        for took_ns, waited_ns, fell_back in rows:
            numbers += [took_ns // 1000, -(waited_ns // 1000), int(fell_back)]
        largest = torch.tensor(numbers, dtype=torch.int64, device="cpu")
        return self._communicator.start_all_reduce(largest, dist.ReduceOp.MAX), largest

    def next_before(self, step: int) -> Vote | None:
        """The oldest vote, if it is of steps before `step`: waits for it. Raises: RankMismatch, PeerLost."""
        if not self._pending or self._pending[0][0] >= step:
            return None
        communicator, (mine, started) = self._communicator, self._pending.popleft()
        under_way, largest = started.wait()
        communicator.finish(under_way)
        last_step, minus_first, reconsider, transfer_us, permille, *rows = largest.tolist()
        if last_step != -minus_first:  # of the first rank and of the last
            raise communicator.fail(
                RankMismatch(
                    f"rank {communicator.rank} is at step {mine}, another is elsewhere: call backward equally often "
                    "on all ranks, and resume all of them from the same checkpoint"
                )
            )
        columns = zip(rows[::3], rows[1::3], rows[2::3], strict=True)
        steps = [
            (step, took_us, -waited_us, bool(fell_back))
            for step, (took_us, waited_us, fell_back) in enumerate(columns, mine - len(rows) // 3 + 1)
        ]
        return Vote(mine, bool(reconsider), transfer_us, (permille - 1) / 1000 if permille else None, steps)

    def forget(self) -> None:
        """Wait for what is under way, and take no notice of it. Raises: PeerLost."""
        for _, started in self._pending:
            self._communicator.finish(started.wait()[0])
        self._pending.clear()
        self._rows, self._has_looked = [], False


class LinkProbes:
    """Says which steps are followed by a probe of the link, and whether probes have found another one. Alike on all ranks.

    Other traffic only slows a probe: the fastest counts, and a slower link is looked at again.
    """

    def __init__(self) -> None:
        self._n_to_come = 0
        self._transfers_us: list[int] = []

    def ask(self, is_urgent: bool) -> None:
        """Probe after the next step; if it is urgent, after the next ones, whatever the first says."""
        self._n_to_come = _N_PROBES if is_urgent else 1

    def take(self) -> bool:
        """Return whether this step is followed by a probe; asked once a step."""
        is_due = self._n_to_come > 0
        self._n_to_come -= is_due
        return is_due

    def found(self, transfer_us: int, old: float, rate_of: Callable[[int], float]) -> int | None:
        """What a transfer takes over another link than that of rate `old`, if the slowest rank's one says that it is another;
        `rate_of` a link over which a transfer takes so many microseconds."""
        self._transfers_us.append(transfer_us)
        fastest_us = min(self._transfers_us)
        new = rate_of(fastest_us)
        is_slower = (old - new) * 1000 > _CHANGED * old
        if is_slower and len(self._transfers_us) < _N_PROBES:
            self._n_to_come = max(1, self._n_to_come)
            return None
        self._transfers_us.clear()
        return fastest_us if is_changed(old, new) else None


def is_changed(old: float, new: float) -> bool:
    """Return whether a link of rate `new` is another than one of rate `old`."""
    return abs(new - old) * 1000 > _CHANGED * old


class Turns(Scheme):
    """One of several schemes at a time, or none where the collectives that gradwire finds do the step.

    `fidelity` and `budget` are Auto's. Raises: InvalidArgument.
    """

    name = "auto"

    def __init__(self, fidelity: str | Sequence[str], budget: float) -> None:
        if not 0 <= budget <= _MOST_BUDGET:
            raise InvalidArgument(f"budget is a share of the time from 0 to {_MOST_BUDGET}, got {budget}")
        self._fidelity = fidelity if isinstance(fidelity, str) else list(fidelity)
        self._budget, self._budget_permille = budget, math.ceil(1000 * budget)
        self._subs: dict[str, Scheme] = {}
        self.active = PLAIN  # the scheme that reduces this step, or will reduce the next one
        self._stepping: Scheme  # what reduces this step
        self._schedule: list[tuple[int, str]] = []
        self.law: Law  # once bound

    @property
    def is_transparent(self) -> bool:
        """True where the collectives that gradwire finds do this step, as without it."""
        return self.active == PLAIN

    def bind(self, session: Session) -> None:
        super().bind(session)
        self._polls, self._probes, self._told = Polls(session.communicator), LinkProbes(), 0

    def _compare_offers(self, specs: Sequence[str]) -> None:
        """Raises: RankMismatch if ranks were given other options, or can bind other schemes."""
        session, communicator = self.session, self.session.communicator
        if communicator.world_size == 1:
            return
        bound = {**self.configuration, "bound": list(specs), "optimizers": str(session.optimizers)}
        mine = Preamble(FORMAT_VERSION, 0, self.name, hash_configuration(self.name, bound), 0, 0, len(specs))
        record = session.recorder.open_bucket(0, -1, 0)
        communicator.submit(compare_preambles, communicator, mine, record, session.optimizers).wait()

    # ---- between two steps

    def begin_at(self, step: int) -> None:
        """Go on at another step than the one after the last: what was measured is kept, what is under way is not."""
        self._polls.forget()
        self._probes = LinkProbes()
        self._schedule = [entry for entry in self._schedule if entry[0] < step]
        self.law.go_on_at(step)

    def _lag_of(self, vote_us: float) -> int:
        """The steps that a vote, of which one takes `vote_us`, may take to come; the same on all ranks."""
        is_long = self.law.candidates[PLAIN].expected_us > _LONG_STEP * vote_us
        return 0 if is_long and self.law.state != "run" else LAG

    def _count(self, vote: Vote) -> None:
        law, link_changed = self.law, vote.reconsider
        if vote.transfer_us:  # of a probe
            law.probe_us = vote.transfer_us
            link_changed = self._note_transfer(vote.transfer_us) or link_changed
        for step, took_us, waited_us, fell_back in vote.steps:
            if law.wants_probe(step):
                self._probes.ask(is_urgent=not law.is_settled)
            self._note_waiting(step, waited_us)
            law.observe(step, took_us, waited_us, link_changed and step == vote.last_step, is_typical=not fell_back)
        for decision in law.decisions[self._told :] if self.session.communicator.rank == 0 else ():
            level = logging.WARNING if decision.kind == "drift" else logging.INFO
            _log.log(level, "step %d: %s %s: %s", decision.step, decision.kind, decision.scheme, decision.why)
        self._told = len(law.decisions)

    def _note_transfer(self, transfer_us: int) -> bool:
        """Return whether a probe says that the link of plain steps is another, from which predictions follow anew."""
        raise NotImplementedError

    def _note_waiting(self, step: int, waited_us: int) -> None:
        """Before the law: what a step waited."""

    def _enter(self, step: int, name: str) -> None:
        if not self._schedule or self._schedule[-1][1] != name:
            self._schedule.append((step, name))
        self.session.recorder.scheme = name

    def _vote(self, step: int, lap: Lap, fell_back: bool, gradients: Iterable[Tensor | None], link: Wire) -> None:
        """Put this rank's numbers to the vote, and probe `link`, that of plain steps, if it is time."""
        at_once = self.law.role_of(step) != "run"  # by what all ranks know alone
        self._polls.add(step, lap, fell_back, gradients, at_once, link if self._probes.take() else None)

    def reconsider(self) -> None:
        """Think again soon: forget what was measured under the old network. Any rank may call it."""
        self._polls.wants_to_reconsider = True

    def stats(self) -> dict[str, Any]:
        """`auto`: scheme, what was predicted and measured of each, decisions with reasons, the schedule."""
        candidates = [one.as_dict() for one in self.law.candidates.values()]
        own = {"scheme": self.active, "fidelity": self.configuration["fidelity"], "candidates": candidates}
        return {"auto": {**own, "schedule": list(self._schedule), **self.law.figures()}}

    # ---- a step of the scheme at work

    def begin_step(self, step: int) -> None:
        self._stepping = self._subs[self.active]
        self._stepping.begin_step(step)

    def reduce(self, bucket: Bucket) -> torch.futures.Future:
        return self._stepping.reduce(bucket)

    def end_step(self, step: int) -> None:
        self._stepping.end_step(step)

    def end_backward(self, step: int) -> int:
        return 0 if self.is_transparent else self._stepping.end_backward(step)

    def close(self) -> None:
        for sub in self._subs.values():
            sub.close()

    def unbind(self) -> None:
        for sub in self._subs.values():
            sub.unbind()
        self._subs.clear()
        super().unbind()
