"""The control law of `auto`, which says what each step is reduced with: a cost model proposes, short races decide.

Steps begin plain, which shows how much of a step waits for the network: where next to nothing does, nothing can be won.
Candidates run against the incumbent in turns that alternate, so that a network that changes meanwhile changes under both. Only
a measured gain makes a switch, and what races cost is a budget. A step time or a link that moves for good starts again.

No clock, no I/O; whole numbers, `+ - * //` and comparisons only, ties by name: ranks that feed it the same numbers decide the
same on every machine. Shares are in permille, times in microseconds.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

PLAIN = "plain"

# How much the law may spend, and what it takes for noise.
WARMUP = 1  # first steps that are not counted (DDP cuts its buckets anew after the first)
BASELINE = 4  # plain steps before the first race; one is enough where half of a step waits
BLOCK, LONGEST_BLOCK = 4, 32  # steps of a race's first turns, the first of which is not counted; turns double
LONGEST_RACE, LONGEST_TIE = 400, 60  # steps, where nothing else is worth a race and where something is
MARGIN = 30  # what a switch has to win
DOUBT, KNOWN_DOUBT = 150, 50  # how far off a prediction may be, before the scheme has ever run and after
CURIOSITY = 400  # how far off, of a family that never ran, where the budget would bear its race three times over
HOPELESS, OVERWHELMING = 1120, 670  # of the incumbent; one turn that slow, or that fast, ends a race
SAVINGS = 100  # of the time saved against plain, that races may cost; of all time so far it is `budget`
CREDIT = 2  # plain steps' worth of it at the start
WINDOW = 10  # steps of one look at a running scheme
DRIFT, SUDDEN = 150, 1500  # two windows in a row so far off mean another network; so do ...
JUMP = 3  # ... so many steps in a row
PROBE_EVERY, PROBING = 100, 3  # steps between two probes of the link at least; of all time that they may cost
AGAIN_AFTER = 300  # steps until a loser may race again, doubled with each loss
CHECK_AFTER = 60  # the same, once, after a narrow loss
BIAS_RANGE = (250, 4000)  # a prediction is never corrected by more than a factor of four
_NEVER = 1 << 62

# ---- robust statistics of a few whole numbers, in whole numbers

_DEVIATION_SQUARED = 1571  # permille: pi / 2, which makes a normal distribution's mean deviation its standard deviation
_FEW = 8  # samples, which may lie together by chance
_MEDIAN_VARIANCE = 157  # percent: of a median against that of a mean, pi / 2
_SURE_ABOVE = 4  # squared: two standard errors


def median(values: Sequence[int]) -> int:
    """The middle value; of an even number the mean of the two, rounded down."""
    ordered, half = sorted(values), len(values) // 2
    return ordered[half] if len(ordered) % 2 else (ordered[half - 1] + ordered[half]) // 2


def variance(values: Sequence[int]) -> int:
    """The variance of one sample, from its mean absolute deviation without the largest eighth. So a slow step in ten
    does not move it, and steps of two or three kinds are not taken for steps of one. Never below (2 % of the median)^2;
    of fewer than eight samples never below (7 %)^2."""
    middle = median(values)
    deviations = sorted(abs(value - middle) for value in values)
    if len(deviations) > 3:
        deviations = deviations[: -max(1, len(deviations) // 8)]
    deviation = sum(deviations) // len(deviations)
    floor = middle * middle // (200 if len(values) < _FEW else 2500)
    return max(_DEVIATION_SQUARED * deviation * deviation // 1000, floor)


def _noise_of(*groups: Sequence[int]) -> int:
    """The variance of the medians' difference; of one group, of its median."""
    return _MEDIAN_VARIANCE * sum(variance(values) // len(values) for values in groups) // 100


def _is_beyond_noise(difference: int, noise: int) -> bool:
    """Return whether a difference is more than two standard errors, the square of which is `noise`."""
    return difference * difference > _SURE_ABOVE * noise


def _is_off(now_us: int, was_us: int, samples: Sequence[int]) -> bool:
    """Return whether `now_us`, of `samples`, is too far from `was_us` for one network, and not by chance."""
    off_us = abs(now_us - was_us)
    return off_us * 1000 > DRIFT * was_us and _is_beyond_noise(off_us, _noise_of(samples))


# ---- what the law knows and keeps


@dataclass
class Candidate:
    """One scheme, as far as it is known."""

    name: str
    predicted_us: int  # by the model, for the link as last measured
    bias: int = 1000  # measured / predicted in permille; its family's until it has raced itself
    is_tried: bool = False  # it has run
    is_familiar: bool = False  # it, or one of its family
    measured_us: int = 0  # under this link; 0 if it has not run under it
    not_before: int = 0  # the first step at which it may race
    n_losses: int = 0  # races lost under this link
    first_predicted_us: int = 0  # as it was before any race

    @property
    def expected_us(self) -> int:
        """The time of a step under it, by all that is known."""
        return self.measured_us or self.predicted_us * self.bias // 1000

    def as_dict(self) -> dict[str, Any]:
        """For people: milliseconds, and None for what was not measured."""
        return {
            "spec": self.name,
            "predicted_ms": self.predicted_us / 1000,
            "first_predicted_ms": (self.first_predicted_us or self.predicted_us) / 1000,
            "measured_ms": self.measured_us / 1000 or None,
        }


def most_promising(
    candidates: Iterable[Candidate], step: int, base_us: int, allowed_us: int, floor_us: int
) -> Candidate | None:
    """The candidate to race at `step` against what takes `base_us`, if one promises a gain and its race costs no more than
    `allowed_us`; no scheme takes less than `floor_us`."""
    goal = base_us * (1000 - MARGIN)
    if floor_us * 1000 >= goal:
        return None  # less waits than a switch has to win
    for candidate in sorted(candidates, key=lambda c: (c.expected_us, c.name)):
        if step < candidate.not_before:
            continue
        expected_us = max(candidate.expected_us, floor_us)
        doubt = KNOWN_DOUBT if candidate.is_tried else DOUBT
        cost_us = max(0, expected_us * (1000 + doubt) // 1000 - base_us) * BLOCK
        promises = expected_us * (1000 - doubt) < goal and cost_us <= allowed_us
        could = not candidate.is_familiar and expected_us * (1000 - CURIOSITY) < goal
        if promises or (could and 3 * cost_us <= allowed_us):
            return candidate
    return None


class Decision(NamedTuple):
    """One decision, for people: at which step, of which kind (stay, try, switch, reject, drift), and why."""

    step: int
    kind: str
    scheme: str
    why: str


@dataclass(eq=False)
class Race:
    """The race under way, or the last one: two schemes in turns."""

    challenger: str = ""
    began: int = 0
    reference_us: int = 0  # what the incumbent took before
    may_cost_us: int = 0  # beyond the incumbent's time; a race that has cost more is broken off at once
    is_sure: bool = True  # `reference_us` is good enough to lose a race by; else the incumbent has a turn first
    n_pairs: int = 0
    took_us: int = 0  # of all of the challenger's steps
    n_taken: int = 0
    base: list[int] = field(default_factory=list)  # microseconds a step of the incumbent, of steps that count
    mine: list[int] = field(default_factory=list)  # and of the challenger
    _turn_began: int = 0  # index of the first sample of the incumbent's turn
    _n_off: int = 0

    @property
    def base_us(self) -> int:
        """The time of a step of the incumbent, by its turns if it has had any."""
        return median(self.base) if self.base else self.reference_us

    @property
    def excess_us(self) -> int:
        """The time of the challenger's steps beyond the incumbent's; below 0 where they take less."""
        return self.took_us - self.n_taken * self.base_us

    def is_hopeless(self) -> bool:
        """One turn is enough to see that the challenger loses."""
        return bool(self.mine) and median(self.mine) * 1000 > self.base_us * HOPELESS

    def is_overwhelming(self) -> bool:
        """Return whether every step of the challenger says that it wins: steps may differ in length."""
        knows_both = bool(self.mine) and (self.is_sure or bool(self.base))
        return knows_both and max(self.mine) * 1000 < self.base_us * OVERWHELMING

    def verdict(self, must_end: bool) -> bool | None:
        """Return whether the challenger is better, None as long as the noise decides; where that cannot be waited for, a guess:
        a gain by the margin, beyond one standard error."""
        noise = _noise_of(self.base, self.mine)
        gain, goal = self.base_us - median(self.mine), MARGIN * self.base_us // 1000
        if gain > goal // 2 and _is_beyond_noise(gain - goal // 2, noise):
            return True
        if gain < goal and _is_beyond_noise(goal - gain, noise):
            return False
        return gain > goal and gain * gain > noise if must_end else None

    def base_has_moved(self) -> int:
        """After a turn of the incumbent: its time, if the race now speaks of two networks, else 0. It does if the incumbent is
        far off what it took before for the second turn, or by much in every step of the turn."""
        turn, before_us = self.base[self._turn_began :], self.reference_us
        self._turn_began = len(self.base)
        if len(turn) < 3:
            return 0
        now_us = median(turn)
        if min(turn) * 1000 > SUDDEN * before_us or max(turn) * SUDDEN < 1000 * before_us:
            return now_us
        self._n_off = self._n_off + 1 if _is_off(now_us, before_us, turn) else 0
        return now_us if self._n_off >= 2 else 0


class PlannedStep(NamedTuple):
    """A step that was handed out, and what it is for."""

    scheme: str
    role: str  # warmup, baseline, run, settle (the first step of a turn), race
    race: Race | None = None
    ends_turn: bool = False


class Look(NamedTuple):
    """A window of one scheme's steps, compared with what a step took before."""

    now_us: int
    was_us: int
    n_steps: int  # how many of the last steps `now_us` is of
    is_off: bool  # `now_us` is far off, which may be chance
    has_drifted: bool  # it is no chance


class Drift:
    """Compares windows of one scheme's steps with what it took before, `reference_us`; 0 if that is not known."""

    def __init__(self, reference_us: int = 0) -> None:
        self.reference_us = reference_us
        self._window: list[int] = []
        self._last_window: list[int] = []
        self._n_off = self._n_sudden = 0

    def observe(self, time_us: int, look_now: bool) -> Look | None:
        """One more step; a look once a window is full, after a jump, or if asked for."""
        self._window.append(time_us)
        is_sudden = self._has_jumped(time_us)
        if len(self._window) < WINDOW and not look_now and not is_sudden:
            return None
        window, self._window, self._last_window = self._window, [], self._window
        now_us = median(window[-JUMP:] if is_sudden else window)
        was_us = self.reference_us = self.reference_us or now_us
        is_off = _is_off(now_us, was_us, window)
        self._n_off = self._n_off + 1 if is_off else 0
        has_drifted = self._n_off >= 2 or is_sudden or look_now
        if not is_off and not has_drifted:
            self.reference_us = (3 * was_us + now_us) // 4
        return Look(now_us, was_us, JUMP if is_sudden else WINDOW, is_off, has_drifted)

    def _has_jumped(self, time_us: int) -> bool:
        """Return whether this is the third step in a row that is slower, or faster, than any of the last window."""
        reference_us, last = self.reference_us, self._last_window
        up = reference_us and time_us * 1000 > SUDDEN * reference_us and time_us > max(last, default=0)
        down = reference_us and time_us * SUDDEN < 1000 * reference_us and time_us < min(last, default=time_us + 1)
        direction = 1 if up else -1 if down else 0
        self._n_sudden = self._n_sudden + direction if direction * self._n_sudden >= 0 and direction else direction
        return abs(self._n_sudden) >= JUMP


# ---- the law


class Law:
    """Decides step by step; see the module.

    Args:
        predicted_us: of every scheme allowed, "plain" among them.
        budget: of all time so far, that races may cost; 0: no races.
        predict_again: called with what a step computes (us, without waiting) after the baseline and when the network has
            changed; gives predictions anew. Must be a function of what all ranks share.
        family_of: schemes of one family share what the model misjudges until they have raced themselves.
        not_before: first step at which a scheme may race, where that is not the first.
    Attributes:
        state: baseline, run or race. is_settled: what the incumbent takes is known from more than a few sudden steps.
        probe_us: what the last probe of the link took on the slowest rank; told by the caller.
    """

    def __init__(
        self,
        predicted_us: Mapping[str, int],
        budget: int = 10,
        predict_again: Callable[[int], Mapping[str, int]] = lambda computing_us: {},
        family_of: Callable[[str], str] = lambda name: name,
        not_before: Mapping[str, int] | None = None,
    ) -> None:
        self._budget = budget
        self._predict_again, self._family_of, self._not_before = predict_again, family_of, dict(not_before or {})
        self.candidates = {
            name: Candidate(name, us, not_before=self._not_before.get(name, 0)) for name, us in predicted_us.items()
        }
        self.incumbent, self.state = PLAIN, "baseline"
        self.decisions: list[Decision] = []
        self.elapsed_us = self.saved_us = self._spent_before_us = 0
        self._first_step = self._next_step = self._n_handed_out = 0
        self._plan = [PlannedStep(PLAIN, "warmup")] * WARMUP
        # Of steps under plain; what waits is what any scheme could win at most.
        self._computing: list[int] = []
        self._waiting: list[int] = []
        self._could_win_us = 0
        self._race = Race()
        self.is_settled = True
        self._drift = Drift()
        self._next_probe, self.probe_us = _NEVER, 0

    # ---- what ranks ask

    def scheme_of(self, step: int) -> str:
        """The scheme of `step`, which may be beyond the last one observed. What has been handed out stands, so ranks ask and
        tell in the same order."""
        self._n_handed_out = max(self._n_handed_out, step + 1 - self._first_step)
        return self._planned(step).scheme

    def role_of(self, step: int) -> str:
        """What `step` is for, as PlannedStep names it; asked after `scheme_of`."""
        return self._planned(step).role

    def wants_probe(self, step: int) -> bool:
        """Ask for a probe of the link after `step`: when a step's time has moved, and now and then under compression."""
        return self.state == "run" and step == self._next_probe

    @property
    def computing_us(self) -> int:
        """The time that a step computes, without waiting, as plain steps showed it last; 0 before the first."""
        return median(self._computing) if self._computing else 0

    @property
    def challenger(self) -> str:
        """The scheme that races against the incumbent now; empty if none does."""
        return self._race.challenger if self.state == "race" else ""

    @property
    def spent_us(self) -> int:
        """The time that races have cost beyond the incumbent; one that wins costs nothing."""
        return self._spent_before_us + max(0, self._race.excess_us)

    @property
    def allowed_us(self) -> int:
        """The time that races may still cost beyond the incumbent."""
        earned_us = (self._budget * self.elapsed_us + SAVINGS * max(0, self.saved_us)) // 1000
        return CREDIT * self.candidates[PLAIN].expected_us + earned_us - self.spent_us

    def _planned(self, step: int) -> PlannedStep:
        role = "baseline" if self.state == "baseline" else "run"
        while step - self._first_step >= len(self._plan):
            self._plan.append(PlannedStep(self.incumbent, role))
        return self._plan[step - self._first_step]

    # ---- what ranks tell

    def observe(
        self, step: int, time_us: int, waiting_us: int = 0, link_changed: bool = False, is_typical: bool = True
    ) -> None:
        """Take the agreed numbers of one step, in order.

        Args:
            time_us: the slowest rank's; waiting_us: of it, what the rank that waited least waited.
            link_changed: a probe found another rate, or someone asked to think again.
            is_typical: False for a step that says nothing of its scheme, which sent it some plainer way: it only passes.
        """
        assert step == self._next_step, f"step {step} observed, {self._next_step} is next"
        planned, race = self._planned(step), self._race
        self._next_step += 1
        self.elapsed_us += time_us
        if planned.race is not None and planned.scheme != self.incumbent:
            if planned.race is race:
                race.took_us += time_us
                race.n_taken += 1
            else:  # of a race that is over: what was handed out stood
                self._spent_before_us += max(0, time_us - self.candidates[self.incumbent].expected_us)
        elif planned.scheme != PLAIN:
            self.saved_us += self.candidates[PLAIN].expected_us - time_us
        if self.state == "race":
            if planned.race is race and link_changed:
                self._start_again(step, race.base_us, race.reference_us, True)
            elif planned.race is race:
                self._observe_race(step, planned, time_us, is_typical)
        elif planned.role == self.state and planned.scheme == self.incumbent:
            if planned.scheme == PLAIN and is_typical:
                self._waiting.append(waiting_us)
                self._computing.append(time_us - waiting_us)
            if self.state == "run" and (is_typical or link_changed):
                self._watch(step, time_us, link_changed)
            elif self.state == "baseline" and is_typical:
                self._observe_baseline(step)

    def go_on_at(self, step: int, scheme: str | None = None) -> None:
        """`step` is the next one, under `scheme` (by default what was at work): the run was resumed, or steps passed unseen. A
        race under way is off."""
        self.incumbent = scheme or self.incumbent
        if self.state == "race" or self.incumbent != PLAIN:
            self.state = "run"
        self._first_step = self._next_step = step
        self._n_handed_out = 0
        self._plan = [PlannedStep(self.incumbent, "warmup")] * WARMUP
        self._set_next_probe(step)

    # ---- plain, before anything else

    def _observe_baseline(self, step: int) -> None:
        if len(self._waiting) < BASELINE and self._waiting[-1] <= self._computing[-1]:
            return
        took_us = [sum(parts) for parts in zip(self._computing, self._waiting, strict=True)]
        plain_us, self._could_win_us = median(took_us), median(self._waiting)
        self._predict()
        for candidate in self.candidates.values():
            candidate.first_predicted_us = candidate.predicted_us
        self._learn(PLAIN, plain_us)
        if self._could_win_us * 1000 < MARGIN * plain_us:
            waits = f"{self._could_win_us / 1000:.1f} of {plain_us / 1000:.1f} ms a step wait for communication"
            self._say(step, "stay", PLAIN, waits)
        self._run(step)

    # ---- races

    def _next_candidate(self, step: int) -> Candidate | None:
        """The most promising candidate that the budget allows to race, if there is one."""
        if not self._budget:
            return None
        others = [c for c in self.candidates.values() if c.name not in (self.incumbent, self.challenger)]
        base_us = self.candidates[self.incumbent].expected_us
        return most_promising(others, step, base_us, self.allowed_us, self._floor_us)

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
        self._race = Race(candidate.name, step, base_us, may_cost_us, self.is_settled)
        expected_us = max(candidate.expected_us, self._floor_us)
        why = f"expected to take {expected_us / 1000:.1f} ms a step; {self.incumbent} takes {base_us / 1000:.1f}"
        self._say(step, "try", candidate.name, why)
        self._add_pair()

    def _add_pair(self) -> None:
        """One more turn of each; what has been handed out before stands."""
        race = self._race
        n_steps = min(LONGEST_BLOCK, BLOCK << race.n_pairs)
        for scheme in (race.challenger, self.incumbent):
            for index in range(n_steps):
                role = "race" if index else "settle"
                self._plan.append(PlannedStep(scheme, role, race, index == n_steps - 1))
        race.n_pairs += 1

    def _observe_race(self, step: int, planned: PlannedStep, time_us: int, is_typical: bool) -> None:
        race = self._race
        is_challengers = planned.scheme == race.challenger
        if planned.role == "race" and is_typical:
            (race.mine if is_challengers else race.base).append(time_us)
        if is_challengers and race.excess_us > race.may_cost_us:  # in the middle of a turn: it has cost all that it may
            if race.is_hopeless():
                self._conclude(step, is_better=False)
            else:
                self._give_up(step, f"has cost {race.excess_us / 1000:.1f} ms, which is all that it may")
        elif is_challengers and planned.ends_turn:
            if race.is_hopeless() or race.is_overwhelming():
                self._conclude(step, is_better=race.is_overwhelming())
        elif planned.ends_turn:
            self._end_pair(step)

    def _end_pair(self, step: int) -> None:
        race, n_steps = self._race, step - self._race.began
        is_out_of_time = n_steps > LONGEST_RACE or (n_steps > LONGEST_TIE and self._next_candidate(step) is not None)
        if not race.base or not race.mine:  # nothing but steps that say nothing
            if not is_out_of_time:
                return self._add_pair()
            return self._give_up(step, "no step of its race could be counted")
        if moved_to_us := race.base_has_moved():
            return self._start_again(step, moved_to_us, race.reference_us, False)
        is_behind_and_spent = race.base_us < median(race.mine) and self.allowed_us < 0
        verdict = race.verdict(must_end=is_out_of_time or is_behind_and_spent)
        return self._add_pair() if verdict is None else self._conclude(step, verdict)

    def _conclude(self, step: int, is_better: bool) -> None:
        old, new = self.incumbent, self._race.challenger
        base_us, tried_us = self._race.base_us, median(self._race.mine)
        self._learn(old, base_us)
        self._learn(new, tried_us)
        self._put_off(old if is_better else new, step, is_narrow=abs(base_us - tried_us) * 10 < base_us)
        if is_better:
            self.incumbent = new
            self._set_next_probe(step)
        kind = "switch" if is_better else "reject"
        self._say(step, kind, new, f"{tried_us / 1000:.1f} ms a step; {old} takes {base_us / 1000:.1f}")
        self._run(step)

    def _give_up(self, step: int, why: str) -> None:
        self._say(step, "reject", self._race.challenger, why)
        self._put_off(self._race.challenger, step, is_narrow=True)
        self._run(step)

    def _put_off(self, name: str, step: int, is_narrow: bool) -> None:
        """`name` has lost: it may race again, soon after a first loss that may have been chance."""
        loser = self.candidates[name]
        loser.n_losses += 1
        is_again = loser.n_losses > 1 or not is_narrow
        wait = AGAIN_AFTER << min(6, loser.n_losses - 1) if is_again else CHECK_AFTER
        loser.not_before = max(loser.not_before, step + wait)

    def _learn(self, name: str, measured_us: int) -> None:
        candidate = self.candidates[name]
        candidate.measured_us, candidate.is_tried, candidate.is_familiar = measured_us, True, True
        if candidate.predicted_us <= 0:
            return
        candidate.bias = min(max(measured_us * 1000 // candidate.predicted_us, BIAS_RANGE[0]), BIAS_RANGE[1])
        for other in self.candidates.values():
            if not other.is_tried and self._family_of(other.name) == self._family_of(name):
                other.bias, other.is_familiar = candidate.bias, True

    def _predict(self) -> None:
        predicted_us = self._predict_again(self.computing_us) if self._computing else {}
        for name in predicted_us.keys() & self.candidates.keys():
            self.candidates[name].predicted_us = predicted_us[name]

    # ---- a scheme at work

    def _run(self, step: int) -> None:
        """Back to the incumbent, and on to the next race if one is worth it."""
        del self._plan[self._n_handed_out :]
        self.state = "run"
        self._drift = Drift(self.candidates[self.incumbent].measured_us)
        if self._next_probe <= step:
            self._next_probe = step + 1  # it fell into a race, or is urgent; the next race waits for what it says
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
        if self._next_probe <= step:
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
            self._next_probe = step  # what the model predicts is of the link as it was
        self._run(step)

    def _set_next_probe(self, step: int) -> None:
        """Probe as soon after `step` as probes cost no more than they may; under plain never: a faster link shows by itself."""
        self._next_probe = _NEVER
        if self.incumbent != PLAIN:
            step_us = max(1, self.candidates[self.incumbent].expected_us)
            self._next_probe = step + max(PROBE_EVERY, self.probe_us * 1000 // (PROBING * step_us))

    def _say(self, step: int, kind: str, scheme: str, why: str) -> None:
        self.decisions.append(Decision(step, kind, scheme, why))

    # ---- between runs

    def figures(self) -> dict[str, Any]:
        """For people: decisions, and in seconds what races cost and what was saved."""
        decisions = [decision._asdict() for decision in self.decisions]
        return {"decisions": decisions, "spent_s": self.spent_us / 1e6, "saved_s": self.saved_us / 1e6}

    def state_dict(self) -> dict[str, Any]:
        """Plain values: what a resumed run begins with."""
        kept = ("bias", "is_tried", "measured_us")
        return {
            "incumbent": self.incumbent,
            "candidates": {name: {key: getattr(one, key) for key in kept} for name, one in self.candidates.items()},
        }

    def load_state_dict(self, state: Mapping[str, Any], step: int | None = None, is_same_link: bool = True) -> None:
        """Go on at `step`, or where it is, with what `state_dict` gave, as far as it names schemes that are allowed here; on
        another link without the times that were measured."""
        for name in self.candidates.keys() & state["candidates"].keys():
            one, saved = self.candidates[name], state["candidates"][name]
            one.bias = min(max(int(saved["bias"]), BIAS_RANGE[0]), BIAS_RANGE[1])
            one.measured_us, one.is_tried = is_same_link * int(saved["measured_us"]), bool(saved["is_tried"])
            one.is_familiar = one.is_tried
        name = str(state["incumbent"])
        self.go_on_at(self._next_step if step is None else step, name if name in self.candidates else PLAIN)
