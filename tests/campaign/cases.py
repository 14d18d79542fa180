"""Cases by name: KIND:SEED:NUMBER stands for everything that is drawn, on any machine."""

import random
import time
import traceback
from types import ModuleType
from typing import Any, NamedTuple

from campaign import comings, faults, habits, hostile, links, placements, residuals, resuming, soak, trainings
from campaign.findings import Refused

# Each has draw(random.Random): a case, as plain values; and run(case), which raises Found or Refused.
KINDS: dict[str, ModuleType] = {
    kind.__name__.removeprefix("campaign."): kind
    for kind in (trainings, faults, habits, resuming, residuals, hostile, soak, links, placements, comings)
}
# The order in which kinds take turns: by what a case of them costs and finds.
TURNS = ("trainings", "faults", "hostile", "habits", "trainings", "faults", "habits", "resuming")
# What takes longer, and in how many rounds of these turns it has one.
SELDOM = {"soak": 8, "links": 4, "comings": 4, "residuals": 2, "placements": 1}


class Case(NamedTuple):
    kind: str
    seed: int
    number: int

    @classmethod
    def parse(cls, text: str) -> "Case":
        kind, seed, number = text.split(":")
        if kind not in KINDS:
            raise ValueError(f"kinds are {', '.join(KINDS)}, not {kind!r}")
        return cls(kind, int(seed), int(number))

    def __str__(self) -> str:
        return f"{self.kind}:{self.seed}:{self.number}"

    @property
    def command(self) -> str:
        return f'make campaign CAMPAIGN_ARGS="--case {self}"'

    def draw(self) -> dict[str, Any]:
        return KINDS[self.kind].draw(random.Random(str(self)))


def run_case(kind: str, drawn: dict[str, Any]) -> dict[str, Any]:
    """The record of one case: verdict "passed", "refused" or "failed", with what was found and how long it took."""
    started = time.monotonic()
    verdict, found = "passed", ""
    try:
        KINDS[kind].run(drawn)
    except Refused as refusal:
        verdict, found = "refused", str(refusal)
    except Exception as error:  # a hang is an AssertionError of the launching helper
        verdict, found = "failed", "".join(traceback.format_exception(error, limit=-3)) or repr(error)
    return {"drawn": drawn, "verdict": verdict, "found": found, "seconds": round(time.monotonic() - started, 2)}
