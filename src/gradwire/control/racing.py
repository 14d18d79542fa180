"""Which scheme a step is reduced with: a cost model proposes, short races between schemes dispose.

Steps begin plain. A few of them say how long a step takes and how much of it waits for the network; where next to
nothing waits nothing can be won. Otherwise candidates run against the incumbent, the most promising first, in blocks that
alternate with the incumbent's, so that a network that changes meanwhile changes under both. Only a measured gain makes a
switch, and what races cost is a budget: a share of the time so far and of what was saved. A step time that moves for
good, or a link that does, starts again from new predictions.

Pure: no clock, no I/O; whole numbers, `+ - * //` and comparisons only, ties by name. Ranks that feed it the same numbers
decide the same on every machine. Shares are in permille, times in microseconds.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from gradwire.control.drift import Drift
from gradwire.control.probing import Probing
from gradwire.control.race import Candidate, Decision, Limits, Planned, Race, most_promising
from gradwire.control.samples import median

__all__ = ["PLAIN", "Candidate", "Decision", "Law", "Limits"]

PLAIN = "plain"

_BIAS_RANGE = (250, 4000)  # permille: a prediction is never corrected by more than a factor of four


class Law:
    """Decides step by step; see the module.

    Args:
        predicted_us: microseconds a step of every scheme allowed, "plain" among them.
        predict_again: called with what a step computes (us, without waiting) after the baseline and when the network has
            changed; gives predictions anew. Must be a function of what all ranks share.
        family_of: schemes of one family share what the model misjudges until they have raced themselves.
        not_before: first step at which a scheme may race, where that is not the first.
        first_step: the step that training goes on with.
    Attributes:
        is_settled: whether what the incumbent takes is known from more than a few sudden steps.
        probing: when the link is probed; told what a probe took.
    """

    def __init__(
        self,
        predicted_us: Mapping[str, int],
        limits: Limits | None = None,
        predict_again: Callable[[int], Mapping[str, int]] | None = None,
        family_of: Callable[[str], str] = lambda name: name,
        not_before: Mapping[str, int] | None = None,
        first_step: int = 0,
    ) -> None:
        assert PLAIN in predicted_us, "plain is always allowed"
        self.limits = limits or Limits()
        waits = not_before or {}
        self.candidates = {
            name: Candidate(name, us, not_before=waits.get(name, 0)) for name, us in predicted_us.items()
        }
        self.incumbent = PLAIN
        self.state = "baseline"  # baseline, run, race
        self.since_step = first_step
        self.decisions: list[Decision] = []
        self.elapsed_us = self.saved_us = self._spent_before_us = 0
        self._predict_again, self._family_of, self._not_before = predict_again, family_of, dict(waits)
        self._first_step = self._next_step = first_step
        self._plan = [Planned(PLAIN, "warmup")] * self.limits.warmup
        self._n_handed_out = 0
        self._baseline: list[int] = []
        self._computing: list[int] = []
        self._waiting: list[int] = []  # under plain: what any scheme could win at most
        self._could_win_us = 0
        self._race = Race()
        self.is_settled = True
        self._drift = Drift(self.limits)
        self.probing = Probing(self.limits)

    # ---- what ranks ask

    def scheme_of(self, step: int) -> str:
        """What `step` is reduced with; may be asked for any number of steps beyond the last one observed.

        What has been handed out stands. So ranks ask and tell in the same order.
        """
        self._n_handed_out = max(self._n_handed_out, step + 1 - self._first_step)
        return self._planned(step).scheme

    def role_of(self, step: int) -> str:
        """What `step` is for: warmup, baseline, run, settle (first of a turn) or race; asked after `scheme_of`."""
        return self._planned(step).role

    def wants_probe(self, step: int) -> bool:
        """Whether the link is to be probed after `step`: when a step's time has moved, and now and then under compression."""
        return self.state == "run" and self.probing.is_at(step)

    @property
    def computing_us(self) -> int:
        """What a step computes, without waiting, as plain steps showed it last; 0 before the first."""
        return median(self._computing) if self._computing else 0

    @property
    def challenger(self) -> str:
        """What races against the incumbent now; empty if nothing does."""
        return self._race.challenger if self.state == "race" else ""

    @property
    def spent_us(self) -> int:
        """What races have cost beyond the incumbent; one that wins costs nothing."""
        return self._spent_before_us + max(0, self._race.excess_us)

    @property
    def allowed_us(self) -> int:
        """What races may still cost beyond the incumbent."""
        limits, saved_us = self.limits, max(0, self.saved_us)
        earned_us = (limits.budget * self.elapsed_us + limits.savings * saved_us) // 1000
        return limits.credit * self.candidates[PLAIN].expected_us + earned_us - self.spent_us

    def _planned(self, step: int) -> Planned:
        role = "baseline" if self.state == "baseline" else "run"
        while step - self._first_step >= len(self._plan):
            self._plan.append(Planned(self.incumbent, role))
        return self._plan[step - self._first_step]

    # ---- what ranks tell

    def observe(
        self, step: int, time_us: int, waiting_us: int = 0, link_changed: bool = False, is_typical: bool = True
    ) -> None:
        """The agreed numbers of one step, in order.

        Args:
            time_us: the slowest rank's; waiting_us: of it, what the rank that waited least waited.
            link_changed: a probe found another rate, or someone asked to think again.
            is_typical: False for a step that says nothing of its scheme (a non-finite gradient): it only passes.
        """
        assert step == self._next_step, f"step {step} observed, {self._next_step} is next"
        planned = self._planned(step)
        self._next_step += 1
        self.elapsed_us += time_us
        if planned.race and planned.scheme != self.incumbent:
            if planned.race == self._race.number:
                self._race.took_us += time_us
                self._race.n_taken += 1
            else:  # of a race that is over: what was handed out stood
                self._spent_before_us += max(0, time_us - self.candidates[self.incumbent].expected_us)
        elif planned.scheme != PLAIN:
            self.saved_us += self.candidates[PLAIN].expected_us - time_us
        if planned.role == "baseline" and self.state == "baseline":
            if is_typical:
                self._observe_baseline(step, time_us, waiting_us)
        elif planned.race and planned.race == self._race.number and self.state == "race":
            if link_changed:
                self._start_again(step, self._race.base_us, self._race.reference_us, True)
            else:
                self._observe_race(step, planned, time_us, is_typical)
        elif planned.role == "run" and self.state == "run" and planned.scheme == self.incumbent:
            if planned.scheme == PLAIN and is_typical:
                self._waiting.append(waiting_us)
                self._computing.append(time_us - waiting_us)
            if is_typical or link_changed:
                self._watch(step, time_us, link_changed)

    def exclude(self, name: str, why: str) -> None:
        """Never run `name` again; not the incumbent."""
        assert name not in (PLAIN, self.incumbent)
        self.candidates[name].excluded = why

    def go_on_at(self, step: int, scheme: str | None = None) -> None:
        """`step` is the next one, under `scheme` (by default what was at work): the run was resumed, or steps passed unseen.

        A race under way is off.
        """
        if scheme is not None and scheme != self.incumbent:
            self.incumbent, self.since_step = scheme, step
        if self.state == "race" or self.incumbent != PLAIN:
            self.state = "run"
        self._first_step = self._next_step = step
        self._n_handed_out = 0
        self._plan = [Planned(self.incumbent, "warmup")] * self.limits.warmup
        self._set_next_probe(step)

    # ---- plain, before anything else

    def _observe_baseline(self, step: int, time_us: int, waiting_us: int) -> None:
        self._baseline.append(time_us)
        self._computing.append(time_us - waiting_us)
        self._waiting.append(waiting_us)
        if len(self._baseline) < self.limits.baseline and 2 * waiting_us <= time_us:
            return
        plain_us, waits_us = median(self._baseline), median(self._waiting)
        self._predict()
        for candidate in self.candidates.values():
            candidate.first_predicted_us = candidate.predicted_us
        self._learn(PLAIN, plain_us)
        self._could_win_us = waits_us
        if waits_us * 1000 < self.limits.margin * plain_us:
            self._say(
                step, "stay", PLAIN, f"{waits_us / 1000:.1f} of {plain_us / 1000:.1f} ms a step wait for communication"
            )
        self._run(step)

    # ---- races

    def _next_candidate(self, step: int) -> Candidate | None:
        """The most promising candidate that the budget allows to race, if there is one."""
        others = [c for c in self.candidates.values() if c.name not in (self.incumbent, self.challenger)]
        base_us = self.candidates[self.incumbent].expected_us
        return most_promising(others, self.limits, step, base_us, self.allowed_us, self._floor_us)

    @property
    def _floor_us(self) -> int:
        """No scheme takes less: plain without its waiting."""
        return self.candidates[PLAIN].expected_us - self._could_win_us if self.incumbent == PLAIN else 0

    def _begin_race(self, step: int) -> None:
        """Race the most promising candidate, if one is worth it."""
        candidate, base_us = self._next_candidate(step), self.candidates[self.incumbent].expected_us
        if candidate is None:
            return
        self.state = "race"
        may_cost_us, self._spent_before_us = self.allowed_us, self.spent_us
        self._race = Race(self._race.number + 1, candidate.name, step, base_us, may_cost_us, self.is_settled)
        expected_us = max(candidate.expected_us, self._floor_us)
        why = f"expected to take {expected_us / 1000:.1f} ms a step; {self.incumbent} takes {base_us / 1000:.1f}"
        self._say(step, "try", candidate.name, why)
        self._add_pair()

    def _add_pair(self) -> None:
        """One more turn of each; what has been handed out before stands."""
        race = self._race
        n_steps = min(self.limits.longest_block, self.limits.block << race.n_pairs)
        for scheme in (race.challenger, self.incumbent):
            for index in range(n_steps):
                role = "race" if index else "settle"
                self._plan.append(Planned(scheme, role, race.number, index == n_steps - 1))
        race.n_pairs += 1

    def _observe_race(self, step: int, planned: Planned, time_us: int, is_typical: bool) -> None:
        race = self._race
        is_challengers = planned.scheme == race.challenger
        if planned.role == "race" and is_typical:
            (race.mine if is_challengers else race.base).append(time_us)
        if is_challengers and race.excess_us > race.may_cost_us:  # in the middle of a turn: it has cost all that it may
            if race.is_hopeless(self.limits):
                self._conclude(step, is_better=False)
            else:
                self._give_up(step, f"has cost {race.excess_us / 1000:.1f} ms, which is all that it may")
        elif is_challengers and planned.ends_turn:
            if race.is_hopeless(self.limits) or race.is_overwhelming(self.limits):
                self._conclude(step, is_better=race.is_overwhelming(self.limits))
        elif planned.ends_turn:
            self._end_pair(step)

    def _end_pair(self, step: int) -> None:
        race, limits = self._race, self.limits
        n_steps = step - race.began
        is_out_of_time = n_steps > limits.longest_race or (
            n_steps > limits.longest_tie and self._next_candidate(step) is not None
        )
        if not race.base or not race.mine:  # nothing but steps that say nothing
            if is_out_of_time:
                self._give_up(step, "no step of its race could be counted")
            else:
                self._add_pair()
            return
        moved_to_us = race.base_has_moved(limits)
        if moved_to_us:
            self._start_again(step, moved_to_us, race.reference_us, False)
            return
        verdict = race.verdict(limits)
        if verdict is not None:
            self._conclude(step, verdict)
        elif is_out_of_time or (race.base_us < median(race.mine) and self.allowed_us < 0):
            self._conclude(step, race.looks_better(limits))
        else:
            self._add_pair()

    def _conclude(self, step: int, is_better: bool) -> None:
        old, new = self.incumbent, self._race.challenger
        base_us, tried_us = self._race.base_us, median(self._race.mine)
        self._learn(old, base_us)
        self._learn(new, tried_us)
        self._put_off(old if is_better else new, step, is_narrow=abs(base_us - tried_us) * 10 < base_us)
        if is_better:
            self.incumbent, self.since_step = new, self._first_step + self._n_handed_out
            self._set_next_probe(step)
        kind = "switch" if is_better else "reject"
        self._say(step, kind, new, f"{tried_us / 1000:.1f} ms a step; {old} takes {base_us / 1000:.1f}")
        self._end_race(step)

    def _give_up(self, step: int, why: str) -> None:
        self._say(step, "reject", self._race.challenger, why)
        self._put_off(self._race.challenger, step, is_narrow=True)
        self._end_race(step)

    def _put_off(self, name: str, step: int, is_narrow: bool) -> None:
        """`name` has lost: it may race again, soon after a first loss that may have been chance."""
        limits, loser = self.limits, self.candidates[name]
        loser.n_losses += 1
        wait = limits.again_after << min(6, loser.n_losses - 1)
        if is_narrow and loser.n_losses == 1:
            wait = limits.check_after
        loser.not_before = max(loser.not_before, step + wait)

    def _end_race(self, step: int) -> None:
        """Back to the incumbent, and on to the next race if one is worth it."""
        del self._plan[self._n_handed_out :]
        self._run(step)

    def _learn(self, name: str, measured_us: int) -> None:
        candidate = self.candidates[name]
        candidate.measured_us, candidate.is_tried, candidate.is_familiar = measured_us, True, True
        if candidate.predicted_us <= 0:
            return
        candidate.bias = min(max(measured_us * 1000 // candidate.predicted_us, _BIAS_RANGE[0]), _BIAS_RANGE[1])
        for other in self.candidates.values():
            if not other.is_tried and self._family_of(other.name) == self._family_of(name):
                other.bias, other.is_familiar = candidate.bias, True

    def _predict(self) -> None:
        if self._predict_again is None or not self._computing:
            return
        for name, predicted_us in self._predict_again(median(self._computing)).items():
            self.candidates[name].predicted_us = predicted_us

    # ---- a scheme at work

    def _run(self, step: int) -> None:
        self.state = "run"
        self._drift.begin(self.candidates[self.incumbent].measured_us)
        if self.probing.is_due(step):
            self.probing.at(step + 1)  # it fell into a race, or is urgent; the next race waits for what it says
        else:
            self._begin_race(step)

    def _watch(self, step: int, time_us: int, link_changed: bool) -> None:
        look = self._drift.observe(time_us, link_changed)
        if look is None:
            return
        if self.incumbent == PLAIN and self._waiting:
            self._could_win_us = median(self._waiting[-look.n_steps :])
            del self._waiting[: -look.n_steps], self._computing[: -look.n_steps]
        if look.has_drifted:
            self._start_again(step, look.now_us, look.was_us, link_changed)
            return
        if look.is_off:
            return  # a second look decides; what is measured meanwhile would be of neither network
        if self.probing.is_due(step):
            self._set_next_probe(step)
        self.candidates[self.incumbent].measured_us = self._drift.reference_us
        self.is_settled = True
        self._begin_race(step)

    def _start_again(self, step: int, now_us: int, reference_us: int, link_changed: bool) -> None:
        """The network is another: what was measured is forgotten, what the model misjudges stays."""
        why = f"{now_us / 1000:.1f} ms a step, was {reference_us / 1000:.1f}"
        self._say(step, "drift", self.incumbent, why + ("; the link has changed" if link_changed else ""))
        self._predict()
        self.is_settled = False
        for candidate in self.candidates.values():
            candidate.measured_us = candidate.n_losses = 0
            candidate.not_before = self._not_before.get(candidate.name, 0)
        self.candidates[self.incumbent].measured_us = now_us
        self._set_next_probe(step)
        if not link_changed:
            self.probing.at(step)  # what the model predicts is of the link as it was
        self._end_race(step)

    def _set_next_probe(self, step: int) -> None:
        if self.incumbent == PLAIN:
            self.probing.never()
        else:
            self.probing.later(step, self.candidates[self.incumbent].expected_us)

    def _say(self, step: int, kind: str, scheme: str, why: str) -> None:
        self.decisions.append(Decision(step, kind, scheme, why))

    # ---- between runs

    def state_dict(self) -> dict[str, Any]:
        """Plain values: what a resumed run begins with."""
        return {
            "incumbent": self.incumbent,
            "candidates": {candidate.name: candidate.state_dict() for candidate in self.candidates.values()},
        }

    def load_state_dict(self, state: Mapping[str, Any], step: int) -> None:
        """Go on at `step` with what `state_dict` gave, as far as it names schemes that are allowed here."""
        for name, known in state["candidates"].items():
            if name in self.candidates:
                self.candidates[name].load_state_dict(known)
        name = state["incumbent"]
        self.go_on_at(step, name if name in self.candidates and not self.candidates[name].excluded else PLAIN)
