"""What the control law of `racing.py` knows and keeps: its limits, its candidates, what steps are handed out for."""

from __future__ import annotations

from dataclasses import dataclass, field


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
        curiosity: how far off an untried one may be where the budget would bear its race three times over.
        hopeless, overwhelming: of the incumbent; one turn that slow, or that fast, ends a race.
        budget, savings: of all time so far, and of the time saved against plain, that races may cost.
        credit: plain steps' worth of it at the start.
        window: steps of one look at a running scheme.
        drift: two windows in a row so far off mean another network; `sudden`: so do three steps in a row.
        probe_every, probe_most: steps between two probes of the link; doubles while nothing changes.
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
    probe_most: int = 1600
    again_after: int = 300
    check_after: int = 60


@dataclass
class Candidate:
    """What is known of one scheme.

    Attributes:
        predicted_us: by the model, for the link as last measured.
        bias: measured / predicted in permille; its family's until it has raced itself.
        is_tried: whether it ever ran.
        measured_us: under this link; 0 if it has not run under it.
        not_before: the first step at which it may race.
        n_losses: races lost under this link.
        excluded: why it may never run; empty if it may.
    """

    name: str
    predicted_us: int
    bias: int = 1000
    is_tried: bool = False
    measured_us: int = 0
    not_before: int = 0
    n_losses: int = 0
    excluded: str = ""

    @property
    def expected_us(self) -> int:
        """What a step under it takes, by all that is known."""
        return self.measured_us or self.predicted_us * self.bias // 1000


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
    number: int = 0
    challenger: str = ""
    began: int = 0
    n_pairs: int = 0
    reference_us: int = 0  # what the incumbent took before
    turn_began: int = 0  # index of the first sample of the incumbent's turn
    n_off: int = 0
    excess_us: int = 0  # what its steps took beyond the incumbent's, less what they took below it
    samples: dict[str, list[int]] = field(default_factory=dict)
