"""The frame of `auto`, behind DDP and between shards: schemes that take turns as the law says, from votes on every step."""

import logging
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from gradwire.core.bucket import Bucket
from gradwire.core.session import Session
from gradwire.errors import InvalidArgument
from gradwire.schemes.auto.law import PLAIN, Law
from gradwire.schemes.auto.votes import LinkProbes, Polls, Vote
from gradwire.schemes.base import Scheme
from gradwire.telemetry.stopwatch import Lap
from gradwire.wire.preamble import FORMAT_VERSION, Preamble, compare_preambles, hash_configuration
from gradwire.wire.wire import Wire

_log = logging.getLogger("gradwire.auto")
LAG = 2  # steps after which a vote is read, so that nobody waits for it
_LONG_STEP = 50  # times as long as a vote: while something is tried it is read before the next step
_MOST_BUDGET = 0.1


class Turns(Scheme):
    """One of several schemes at a time, or none where the collectives that gradwire finds do the step.

    Args:
        budget: share of the run's time that trials may cost, 0 to 0.1. With 0 nothing is tried: all stays plain.
    Raises: InvalidArgument.
    """

    name = "auto"

    def __init__(self, budget: float) -> None:
        if not 0 <= budget <= _MOST_BUDGET:
            raise InvalidArgument(f"budget is a share of the time from 0 to {_MOST_BUDGET}, got {budget}")
        self._budget = budget
        self._subs: dict[str, Scheme] = {}
        self._active = PLAIN
        self._stepping: Scheme  # what reduces this step
        self._schedule: list[tuple[int, str]] = []
        self._wants_to_reconsider = False
        self.law: Law  # once bound

    @property
    def active(self) -> str:
        """The scheme that reduces this step, or will reduce the next one."""
        return self._active

    @property
    def is_transparent(self) -> bool:
        """True where the collectives that gradwire finds do this step, as without it."""
        return self._active == PLAIN

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
        self._probes.forget()
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

    def _vote(self, step: int, lap: Lap, fell_back: bool, gradients: Iterable[torch.Tensor | None], link: Wire) -> None:
        """Put this rank's numbers to the vote, and probe `link`, that of plain steps, if it is time."""
        probe = link if self._probes.take() else None
        at_once = self.law.role_of(step) != "run" or probe is not None  # by what all ranks know alone
        if self._polls.add(step, lap, fell_back, gradients,
                           at_once=at_once, probe=probe, reconsider=self._wants_to_reconsider):  # fmt: skip
            self._wants_to_reconsider = False

    def reconsider(self) -> None:
        """Think again soon: forget what was measured under the old network. Any rank may call it."""
        self._wants_to_reconsider = True

    def stats(self) -> dict[str, Any]:
        """`auto`: scheme, what was predicted and measured of each, decisions with reasons, the schedule."""
        candidates = [one.as_dict() for one in self.law.candidates.values()]
        schedule = list(self._schedule)
        own = {"scheme": self._active, "candidates": candidates, "schedule": schedule, **self.law.figures()}
        return {"auto": own}

    # ---- a step of the scheme at work

    def begin_step(self, step: int) -> None:
        self._stepping = self._subs[self._active]
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
