"""What a run of `bench regret` found, from every method's seconds a step and what each auto says of itself."""

from __future__ import annotations

import json
import random
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

_GOOD = 1.06  # of the best, is as good as the best
_OF_STEPS, _GOOD_STEPS = 20, 18
N_BLOCKS, _SAMPLES = 10, 1000  # of the bootstrap


def make_records(
    steps_s: Mapping[str, Sequence[float]], autos: Mapping[str, Mapping[str, Any]], first: int = 0
) -> dict[str, dict[str, Any]]:
    """{method: its figures} of one phase of a run.

    Args:
        steps_s: every method's seconds a step, "ddp" among them; fixed schemes may have fewer steps.
        autos: {method: `stats()["auto"]` of it}.
        first: the number of auto's first step of the phase.

    `x_ddp`: over all steps. `x_best_last_half`: against `best`, which of DDP and the schemes that this auto may use is
    fastest in the second half. Above 1 auto is faster; `_low`, `_high`: 95 % intervals. `good_after`: steps until 18 of 20
    ran under a scheme within 6 % of the best.
    """
    mean = {spec: statistics.fmean(values) for spec, values in steps_s.items()}
    late = {spec: statistics.fmean(_late_half(values)) for spec, values in steps_s.items()}
    found: dict[str, dict[str, Any]] = {}
    for spec, values in steps_s.items():
        ordered = sorted(values)
        found[spec] = {
            "iteration_s": statistics.median(ordered),
            "iteration_s_low": ordered[len(ordered) // 4],
            "iteration_s_high": ordered[len(ordered) * 3 // 4],
            "late_s": late[spec],
            "n_steps": len(values),
            "x_ddp": mean["ddp"] / mean[spec],
            "x_ddp_last_half": late["ddp"] / late[spec],
        }
    for spec, auto in autos.items():
        allowed = {c["spec"]: c for c in auto["candidates"] if not c["excluded"]}
        fixed = ["ddp", *(one for one in steps_s if one in allowed)]
        best = min(fixed, key=lambda one: (late[one], one))
        last = first + len(steps_s[spec])
        medians = {one: found[one]["iteration_s"] for one in fixed} | {"plain": found["ddp"]["iteration_s"]}
        errors = sorted(
            abs(1e-3 * c["first_predicted_ms"] / medians[one] - 1) for one, c in allowed.items() if medians.get(one)
        )
        found[spec] |= {
            "fidelity": auto["fidelity"],
            "x_best": min(mean[one] for one in fixed) / mean[spec],
            "x_best_last_half": late[best] / late[spec],
            **_interval("x_ddp", steps_s["ddp"], steps_s[spec]),
            **_interval("x_best_last_half", _late_half(steps_s[best]), _late_half(steps_s[spec])),
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


def _late_half(values: Sequence[float]) -> Sequence[float]:
    return values[len(values) // 2 :]


def _interval(name: str, base_s: Sequence[float], mine_s: Sequence[float]) -> dict[str, float]:
    """95 % interval of how many times as fast `mine_s` is, by a bootstrap over `N_BLOCKS` stretches of the run.

    Methods take turns, so one stretch of the run is the same minutes of the machine for both: both are drawn together.
    Steps are not drawn singly: what disturbs one disturbs its neighbours.
    """
    n_blocks = min(N_BLOCKS, len(base_s), len(mine_s))
    blocks = [(_block(base_s, i, n_blocks), _block(mine_s, i, n_blocks)) for i in range(n_blocks)]
    rng = random.Random(0)
    ratios = []
    for _ in range(_SAMPLES):
        drawn = rng.choices(blocks, k=n_blocks)
        ratios.append(statistics.fmean(base for base, _ in drawn) / statistics.fmean(mine for _, mine in drawn))
    ratios.sort()
    return {f"{name}_low": ratios[_SAMPLES * 25 // 1000], f"{name}_high": ratios[_SAMPLES * 975 // 1000 - 1]}


def _block(values: Sequence[float], index: int, n_blocks: int) -> float:
    return statistics.fmean(values[len(values) * index // n_blocks : len(values) * (index + 1) // n_blocks])


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
