"""What a run of `bench regret` found, from every method's seconds a step and what each auto says of itself."""

from __future__ import annotations

import itertools
import json
import random
import statistics
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

_GOOD = 1.06  # of the best, is as good as the best
_OF_STEPS, _GOOD_STEPS = 20, 18
N_BLOCKS, _SAMPLES = 10, 1000  # of the bootstrap

T = TypeVar("T")
Turns = Sequence[Sequence[float]]  # a method's seconds a step, turn by turn; a turn in which it paused is empty


def make_records(
    turns_s: Mapping[str, Turns], autos: Mapping[str, Mapping[str, Any]], first: int = 0
) -> dict[str, dict[str, Any]]:
    """{method: its figures} of one phase of a run.

    Args:
        turns_s: every method's seconds a step, "ddp" among them. In a turn each takes as many steps as any other, or none.
        autos: {method: `stats()["auto"]` of it}.
        first: the number of auto's first step of the phase.

    Two methods are compared in the turns that both took, in the same minutes of the machine.
    `x_ddp`: over all of these. `x_best_last_half`: against `best` in the second half; `best` is which of DDP and the schemes
    that this auto may use is the fastest over all turns (the luckiest of few turns is not the best). Above 1 auto is faster;
    `_low`, `_high`: 95 % intervals. `good_after`: steps until 18 of 20 ran under a scheme within 6 % of the best.
    """
    beside_ddp = {spec: _common(turns_s["ddp"], turns) for spec, turns in turns_s.items()}
    x_ddp = {spec: _times_as_fast(turns) for spec, turns in beside_ddp.items()}
    found: dict[str, dict[str, Any]] = {}
    for spec, turns in turns_s.items():
        ordered = sorted(itertools.chain(*turns))
        found[spec] = {
            "iteration_s": statistics.median(ordered),
            "iteration_s_low": ordered[len(ordered) // 4],
            "iteration_s_high": ordered[len(ordered) * 3 // 4],
            "late_s": statistics.fmean(itertools.chain(*_late_half([turn for turn in turns if turn]))),
            "n_steps": len(ordered),
            "x_ddp": x_ddp[spec],
            "x_ddp_last_half": _times_as_fast(_late_half(beside_ddp[spec])),
        }
    for spec, auto in autos.items():
        allowed = {c["spec"]: c for c in auto["candidates"] if not c["excluded"]}
        fixed = ["ddp", *(one for one in turns_s if one in allowed)]
        best = max(fixed, key=lambda one: (x_ddp[one], one))
        beside_best = _common(turns_s[best], turns_s[spec])
        last = first + found[spec]["n_steps"]
        medians = {one: found[one]["iteration_s"] for one in fixed} | {"plain": found["ddp"]["iteration_s"]}
        errors = sorted(
            abs(1e-3 * c["first_predicted_ms"] / medians[one] - 1) for one, c in allowed.items() if medians.get(one)
        )
        found[spec] |= {
            "fidelity": auto["fidelity"],
            "x_best": _times_as_fast(beside_best),
            "x_best_last_half": _times_as_fast(_late_half(beside_best)),
            **_interval("x_ddp", beside_ddp[spec]),
            **_interval("x_best_last_half", _late_half(beside_best)),
            "best": best,
            "ends_with": auto["scheme"],
            "good_after": steps_until_good(auto["schedule"], medians, first, last),
            "spent_s": auto["spent_s"],
            "model_error": statistics.median(errors),
            "model_error_most": errors[-1],
            "fixed_ms": json.dumps({one: round(1e3 * seconds, 2) for one, seconds in medians.items()}),
            "predicted_ms": json.dumps({one: round(c["first_predicted_ms"], 2) for one, c in allowed.items()}),
            "decisions": json.dumps([d for d in auto["decisions"] if first <= d["step"] < last]),
        }
    return found


def _common(base_s: Turns, mine_s: Turns) -> list[tuple[float, float]]:
    """Seconds of each turn that both took."""
    return [(sum(base), sum(mine)) for base, mine in zip(base_s, mine_s, strict=True) if base and mine]


def _late_half(turns: Sequence[T]) -> Sequence[T]:
    return turns[len(turns) // 2 :]


def _times_as_fast(turns: Sequence[tuple[float, float]]) -> float:
    return sum(base for base, _ in turns) / sum(mine for _, mine in turns)


def _interval(name: str, turns: Sequence[tuple[float, float]]) -> dict[str, float]:
    """95 % interval of `_times_as_fast`, by a bootstrap over `N_BLOCKS` stretches of the turns.

    Turns are not drawn singly, nor steps: what disturbs one disturbs its neighbours.
    """
    n_blocks = min(N_BLOCKS, len(turns))
    blocks = [turns[len(turns) * i // n_blocks : len(turns) * (i + 1) // n_blocks] for i in range(n_blocks)]
    rng = random.Random(0)
    ratios = sorted(_times_as_fast([*itertools.chain(*rng.choices(blocks, k=n_blocks))]) for _ in range(_SAMPLES))
    return {f"{name}_low": ratios[_SAMPLES * 25 // 1000], f"{name}_high": ratios[_SAMPLES * 975 // 1000 - 1]}


def steps_until_good(schedule: Sequence[Sequence[Any]], step_s: Mapping[str, float], first: int, last: int) -> int:
    """Steps from `first` on until 18 of 20 run under a scheme that is within 6 % of the best; all of them if none do.

    Args:
        schedule: [(step, scheme from then on)]. step_s: seconds a step of every scheme, "plain" among them.
    """
    best_s = min(step_s.values())
    good = []
    for step in range(first, last):
        scheme = next((name for since, name in reversed(schedule) if since <= step), "plain")
        good.append(step_s.get(scheme, step_s["plain"]) <= _GOOD * best_s)
    starts = range(max(0, len(good) - _OF_STEPS + 1))
    return next((at for at in starts if sum(good[at : at + _OF_STEPS]) >= _GOOD_STEPS), len(good))
