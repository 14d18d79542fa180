"""What the control law of `racing.py` knows and keeps: its limits, its candidates, what steps are handed out for."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from gradwire.control.samples import is_beyond_noise, median, noise_of


@dataclass(frozen=True)
class Limits:
    """What the law may spend and what it takes for noise.

    Attributes:
        warmup: first steps that are not counted (DDP cuts its buckets anew after the first).
        baseline: plain steps before the first race; one is enough where half of a step waits.
        block, longest_block: steps of a race's first turns, the first of which is not counted; turns double.
        longest_race, longest_tie: steps, where nothing else is worth a race and where something is.
        margin: what a switch has to win.
        doubt, known_doubt: how far off a prediction may be, before the scheme has ever run and after.
        curiosity: how far off one may be of a family that never ran, where the budget would bear its race three times over.
        hopeless, overwhelming: of the incumbent; one turn that slow, or that fast, ends a race.
        budget, savings: of all time so far, and of the time saved against plain, that races may cost; budget 0: no races.
        credit: plain steps' worth of it at the start.
        window: steps of one look at a running scheme.
        drift: two windows in a row so far off mean another network; `sudden`: so do three steps in a row.
        probe_every: steps between two probes of the link at least; `probing`: of all time that they may cost.
        again_after: steps until a loser may race again, doubled with each loss; `check_after`: once, after a narrow one.
    """

    warmup: int = 1
    baseline: int = 4
    block: int = 4
    longest_block: int = 32
    longest_race: int = 400
    longest_tie: int = 60
    margin: int = 30
    doubt: int = 150
    known_doubt: int = 50
    curiosity: int = 400
    hopeless: int = 1120
    overwhelming: int = 670
    budget: int = 10
    savings: int = 100
    credit: int = 2
    window: int = 10
    drift: int = 150
    sudden: int = 1500
    probe_every: int = 100
    probing: int = 3
    again_after: int = 300
    check_after: int = 60


@dataclass
class Candidate:
    """What is known of one scheme.

    Attributes:
        predicted_us: by the model, for the link as last measured; `first_predicted_us`: as it was before any race.
        bias: measured / predicted in permille; its family's until it has raced itself.
        is_tried: whether it ever ran; `is_familiar`: it, or one of its family.
        measured_us: under this link; 0 if it has not run under it.
        not_before: the first step at which it may race.
        n_losses: races lost under this link.
        excluded: why it may never run; empty if it may.
    """

    name: str
    predicted_us: int
    bias: int = 1000
    is_tried: bool = False
    is_familiar: bool = False
    measured_us: int = 0
    not_before: int = 0
    n_losses: int = 0
    excluded: str = ""
    first_predicted_us: int = 0

    @property
    def expected_us(self) -> int:
        """What a step under it takes, by all that is known."""
        return self.measured_us or self.predicted_us * self.bias // 1000

    def state_dict(self) -> dict[str, Any]:
        """Plain values: what a resumed run knows of it."""
        return {"bias": self.bias, "is_tried": self.is_tried, "measured_us": self.measured_us}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take what `state_dict` gave."""
        self.bias, self.measured_us = int(state["bias"]), int(state["measured_us"])
        self.is_tried = self.is_familiar = bool(state["is_tried"])

    def as_dict(self) -> dict[str, Any]:
        """For people: milliseconds, and None for what was not measured."""
        return {
            "spec": self.name,
            "predicted_ms": self.predicted_us / 1000,
            "first_predicted_ms": (self.first_predicted_us or self.predicted_us) / 1000,
            "measured_ms": self.measured_us / 1000 or None,
            "bias": self.bias / 1000,
            "n_losses": self.n_losses,
            "not_before": self.not_before,
            "excluded": self.excluded,
        }


def most_promising(
    candidates: Iterable[Candidate], limits: Limits, step: int, base_us: int, allowed_us: int, floor_us: int
) -> Candidate | None:
    """Who may race at `step` against what takes `base_us`, if that promises a gain and its cost is allowed.

    Args:
        allowed_us: what a race may cost. floor_us: no scheme takes less.
    """
    goal = base_us * (1000 - limits.margin)
    if not limits.budget or floor_us * 1000 >= goal:
        return None  # nothing may be tried, or less waits than a switch has to win
    for candidate in sorted(candidates, key=lambda c: (c.expected_us, c.name)):
        if candidate.excluded or step < candidate.not_before:
            continue
        expected_us = max(candidate.expected_us, floor_us)
        doubt = limits.known_doubt if candidate.is_tried else limits.doubt
        cost_us = max(0, expected_us * (1000 + doubt) // 1000 - base_us) * limits.block
        promises = expected_us * (1000 - doubt) < goal and cost_us <= allowed_us
        could = not candidate.is_familiar and expected_us * (1000 - limits.curiosity) < goal
        if promises or (could and 3 * cost_us <= allowed_us):
            return candidate
    return None


@dataclass(frozen=True)
class Decision:
    """One decision, for people: at which step, of which kind (stay, try, switch, reject, drift), and why."""

    step: int
    kind: str
    scheme: str
    why: str


@dataclass(frozen=True)
class Planned:
    """What a step is handed out for: `race` numbers its race, 0 outside of races."""

    scheme: str
    role: str  # warmup, baseline, run, settle (the first step of a turn), race
    race: int = 0
    ends_turn: bool = False


@dataclass
class Race:
    """The race under way, or the last one: two schemes in turns.

    Attributes:
        reference_us: what the incumbent took before.
        may_cost_us: beyond the incumbent's time; a race that has cost more is broken off at once.
        is_sure: whether `reference_us` is good enough to lose a race by; else the incumbent has a turn first.
        took_us, n_taken: of all of the challenger's steps.
        base, mine: microseconds a step of the incumbent and of the challenger, of steps that count.
    """

    number: int = 0
    challenger: str = ""
    began: int = 0
    reference_us: int = 0
    may_cost_us: int = 0
    is_sure: bool = True
    n_pairs: int = 0
    took_us: int = 0
    n_taken: int = 0
    base: list[int] = field(default_factory=list)
    mine: list[int] = field(default_factory=list)
    _turn_began: int = 0  # index of the first sample of the incumbent's turn
    _n_off: int = 0

    @property
    def base_us(self) -> int:
        """What the incumbent takes, by its turns if it has had any."""
        return median(self.base) if self.base else self.reference_us

    @property
    def excess_us(self) -> int:
        """What the challenger's steps have taken beyond the incumbent's; below 0 where they take less."""
        return self.took_us - self.n_taken * self.base_us

    def is_hopeless(self, limits: Limits) -> bool:
        """Whether one turn is enough to see that the challenger loses."""
        return bool(self.mine) and median(self.mine) * 1000 > self.base_us * limits.hopeless

    def is_overwhelming(self, limits: Limits) -> bool:
        """Whether every step of the challenger says that it wins: steps may differ in length."""
        knows_both = bool(self.mine) and (self.is_sure or bool(self.base))
        return knows_both and max(self.mine) * 1000 < self.base_us * limits.overwhelming

    def verdict(self, limits: Limits) -> bool | None:
        """Whether the challenger is better, None as long as the noise decides."""
        noise = noise_of(self.base, self.mine)
        gain, goal = self.base_us - median(self.mine), limits.margin * self.base_us // 1000
        if gain > goal // 2 and is_beyond_noise(gain - goal // 2, noise):
            return True
        return False if gain < goal and is_beyond_noise(goal - gain, noise) else None

    def looks_better(self, limits: Limits) -> bool:
        """The best guess where no verdict can be waited for: a gain by the margin, beyond one standard error."""
        gain = self.base_us - median(self.mine)
        return gain > limits.margin * self.base_us // 1000 and gain * gain > noise_of(self.base, self.mine)

    def base_has_moved(self, limits: Limits) -> int:
        """After a turn of the incumbent: its time, if it is far off what it took before for the second turn, or every step
        of the turn by much, else 0.

        The race then says nothing of other networks' steps.
        """
        turn = self.base[self._turn_began :]
        self._turn_began = len(self.base)
        if len(turn) < 3:
            return 0
        now_us = median(turn)
        if min(turn) * 1000 > limits.sudden * self.reference_us or max(turn) * limits.sudden < 1000 * self.reference_us:
            return now_us
        off_us = abs(now_us - self.reference_us)
        is_off = off_us * 1000 > limits.drift * self.reference_us and is_beyond_noise(off_us, noise_of(turn))
        self._n_off = self._n_off + 1 if is_off else 0
        return now_us if self._n_off >= 2 else 0
