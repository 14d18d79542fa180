"""Comings: ranks of LocalSgd join, leave and die at outer steps, between exchanges and in them.

Nobody hangs, each process ends as it should, all that are in an exchange hold the same bits after it, and who stays loses a
round at most for each death.
"""

import random
import time
from collections import Counter
from typing import Any

from campaign.findings import require
from elastic import by_step, site

SCHEMES = ("plain", "gcomp:importance=none", "embedded-float:bits=4", "one-bit:error_feedback=false", "top-k")
N_ROUNDS = 40
STAYS = {0: {}, 1: {}}  # so that there is a quorum


def draw(choose: random.Random) -> dict[str, Any]:
    going = {}
    for name in range(2, 2 + choose.randint(2, 5)):
        how = choose.choice(["leaves", "dies", "dies in an exchange", "stays"])
        going[name] = {"starts_s": choose.choice([0, 0, 1, 3, 6]), "how": how, "after": choose.randint(3, N_ROUNDS - 5)}
    return {"scheme": choose.choice(SCHEMES), "fragments": choose.choice([1, 1, 3]), "going": going}


def run(case: dict[str, Any]) -> None:
    going = {int(name): plan for name, plan in case["going"].items()}
    plan = {"scheme": case["scheme"], "fragments": case["fragments"], "n_rounds": N_ROUNDS, "round_s": 0.2}
    with site() as here:
        for name in STAYS:
            here.start(name, **plan)
        started = time.monotonic()
        for name, one in sorted(going.items(), key=lambda item: item[1]["starts_s"]):
            time.sleep(max(0.0, started + one["starts_s"] - time.monotonic()))
            when = {"leaves_at": one["after"]} if one["how"] == "leaves" else {"dies_at": one["after"]}
            when = {} if one["how"] == "stays" else when
            here.start(name, **plan, **when, dies_in_exchange=one["how"] == "dies in an exchange")
        said, statuses = here.end()
    steps = by_step(said)
    came = {told["name"]: told["came"] for told in said if "came" in told}
    for name, status in statuses.items():
        one = going.get(name, {"how": "stays", "after": N_ROUNDS})
        # Who came after its time to go stays, but for one that is to die in an exchange: it dies in the next, be it the one in
        # which it comes. Who came after the others' end had nobody to meet.
        dies = one["how"].startswith("dies") and came.get(name, N_ROUNDS) <= one["after"]
        expected = {9} if dies else {0} if name in came else {0, 3}
        if one["how"] == "dies in an exchange":
            expected = expected | {9}
        require(status in expected, f"rank {name} ended with {status}, not {expected}")
    for step, told in steps.items():
        require(len({one["bits"] for one in told}) == 1, f"after exchange {step} ranks hold different bits")
    deaths = sum(status == 9 for status in statuses.values())
    begun = max(came[name] for name in STAYS)
    counts = Counter(told["name"] for told in said if told.get("step", -1) >= begun)
    for name in STAYS:
        require(
            counts[name] >= N_ROUNDS - begun - deaths,
            f"rank {name} was in {counts[name]} exchanges of {N_ROUNDS - begun}",
        )
