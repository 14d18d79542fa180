"""Step times measured on a quiet machine, and the law as ranks run it on them: what tests of laws and models share."""

import json
import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gradwire.schemes.auto.law import PLAIN, Law

# Workload -> a row a scheme.
TABLES: dict[str, list[dict[str, Any]]] = json.loads(Path(__file__).with_name("measured_steps.json").read_text())
del TABLES["comment"]
RATES = ("100mbit", "1gbit", "unshaped")


def step_us(workload: str, rate: str) -> dict[str, int]:
    """{scheme: microseconds}; DDP's own row is under "ddp"."""
    return {row["scheme"]: int(1000 * row[f"ms_{rate}"]) for row in TABLES[workload] if row[f"ms_{rate}"] is not None}


CELLS = [(workload, rate) for workload in TABLES for rate in RATES if step_us(workload, rate)]

World = dict[str, int]  # microseconds a step of each scheme

EXACT = (PLAIN, "gcomp", "homomorphic")
CLOSE = (*EXACT, "terngrad", "qsgd", "embedded-float", "truncated-float", "one-bit", "two-bit", "thc")
ANY = (*CLOSE, "acp-sgd", "power-sgd", "top-k", "sign-sgd")
N_PROBES, BATCH = 3, 5  # as the scheme has them
FAMILIES = {
    "gcomp": "ring", "embedded-float": "ring", "truncated-float": "ring",
    "one-bit": "push", "two-bit": "push", "qsgd": "push",
}  # fmt: skip


def family_of(name: str) -> str:
    return FAMILIES.get(name, name)


def world_of(workload: str, rate: str, allowed: Sequence[str]) -> World:
    """As measured; "plain" under auto is as light as DDP, so it is the row of the scheme `plain`."""
    steps = step_us(workload, rate)
    return {name: steps[name] for name in allowed if name in steps}


@dataclass
class Outcome:
    law: Law
    steps: list[tuple[str, int, float]]  # scheme, microseconds, noise of the step
    worlds: list[World]  # of each step

    def speed_against(self, reference: Callable[[World], int], since: int = 0) -> float:
        """How many times as fast as always running what `reference` takes, with the same noise."""
        pairs = list(zip(self.steps, self.worlds, strict=True))[since:]
        return sum(reference(world) * noise for (_, _, noise), world in pairs) / sum(us for (_, us, _), _ in pairs)

    def steps_until_good(self, first: int, last: int) -> int:
        """Steps from `first` on until 18 of 20 ran within 6 % of the best."""
        good = [
            world[scheme] <= 1.06 * min(world.values())
            for (scheme, _, _), world in list(zip(self.steps, self.worlds, strict=True))[first:last]
        ]
        return next((i for i in range(len(good) - 20) if sum(good[i : i + 20]) >= 18), last - first)


def plain_of(world: World) -> int:
    return world[PLAIN]


def best_of(world: World) -> int:
    return min(world.values())


def simulate(phases: Sequence[tuple[int, World]], seed: int, sigma: float = 0.10, bias: float = 0.20) -> Outcome:
    """The law as ranks run it: votes come late and in batches, of another link only probes tell, the model errs by family,
    steps are noisy, one in a hundred is double."""
    rng = random.Random(seed)
    names = list(phases[0][1])
    of_family = {family_of(name): math.exp(rng.gauss(0, bias)) for name in names}
    wrong = {name: of_family[family_of(name)] * math.exp(rng.gauss(0, bias / 3)) for name in names} | {PLAIN: 1.0}
    known = phases[0][1]  # what the last probes of the link found
    n_to_probe = n_probed = 0
    ballot: list[tuple[int, int, int]] = []
    votes: list[tuple[list[tuple[int, int, int]], bool]] = []  # steps that share a vote, and whether it holds a probe
    steps: list[tuple[str, int, float]] = []
    worlds: list[World] = []

    def predict(_: int = 0) -> dict[str, int]:
        return {name: int(known[name] * wrong[name]) for name in names}

    law = Law(predict(), predict_again=predict, family_of=family_of)

    def count(rows: list[tuple[int, int, int]], is_probe: bool, world: World) -> None:
        nonlocal known, n_to_probe, n_probed
        n_probed += is_probe
        is_slower = is_probe and world[PLAIN] > known[PLAIN]
        if is_slower and n_probed < N_PROBES:
            n_to_probe = max(1, n_to_probe)
            is_probe = False
        has_changed = is_probe and known is not world
        if is_probe:
            n_probed, known = 0, world
        for step, took, waited in rows:
            if law.wants_probe(step):
                n_to_probe = 1 if law.is_settled else N_PROBES
            law.observe(step, took, waited, has_changed and step == rows[-1][0])

    for n_steps, world in phases:
        computes = int(0.9 * best_of(world))
        for _ in range(n_steps):
            step = len(steps)
            # Where steps are long the vote is there before the next one begins.
            is_long = sum(s[1] for s in steps) > 200_000 * len(steps)
            while votes and votes[0][0][-1][0] < step - (0 if is_long and law.state != "run" else 2):
                count(*votes.pop(0), world)
            noise = math.exp(rng.gauss(0, sigma)) * (2.0 if rng.random() < 0.01 else 1.0)
            scheme = law.scheme_of(step)
            us = int(world[scheme] * noise)
            steps.append((scheme, us, noise))
            worlds.append(world)
            ballot.append((step, us, max(us // 50, us - computes)))
            is_probe, n_to_probe = n_to_probe > 0, max(0, n_to_probe - 1)
            if law.role_of(step) != "run" or is_probe or len(ballot) == BATCH:
                votes.append((ballot, is_probe))
                ballot = []
    return Outcome(law, steps, worlds)
