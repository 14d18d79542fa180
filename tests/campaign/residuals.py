"""Residuals stay bounded: every scheme and codec that feeds its error back, over 200 steps of gradients made by hand.

Looked at is the mean over the ranks of what is left out, which is what training waits for: Power-SGD's own residuals of each
rank grow, and their mean does not.
"""

import random
from typing import Any

import torch
import torch.distributed as dist

from buckets import Driver
from campaign.findings import launch, require, results_of
from campaign.schemes_drawn import VARIANTS, Variant, variant_of
from gradwire import codecs

N_STEPS = 200
# What a twentieth of the values, or the coarsest codec, leaves for later: in lengths of a gradient.
MOST = 40.0
# Two looks, of which the second is not much above the first.
LOOKS, MOST_GROWTH = (119, 199), 1.3
# In a heavy tail a value waits until the scale, a mean of what waits, has grown to it: slower from look to look, but long.
MOST_GROWTH_IN_TAILS = 1.5


def _slimgc(codec: str) -> Variant:
    options = {"importance": "none"} if codec == "gcomp" else {}
    return Variant("slimgc", {"codec": codec, "threshold_bytes": 0, **options})


# What keeps residuals and needs no model and no optimizer; and every codec in the scheme that takes any.
FED_BACK = [one for one in VARIANTS if one.conserves or one.options == {"share": 0.05}]
FED_BACK += [Variant(name) for name in ("thc",)] + [_slimgc(name) for name in codecs.names()]


def draw(choose: random.Random) -> dict[str, Any]:
    chosen = choose.choice(FED_BACK)
    return {
        "scheme": (chosen.name, dict(chosen.options)),
        "world_size": choose.choice([2, 2, 3]),
        "shapes": [[choose.randint(1, 40) for _ in range(choose.randint(1, 3))] for _ in range(choose.randint(1, 4))],
        "in_common": choose.choice([0.0, 0.3, 1.0]),
        "power": choose.choice([1, 3]),
        "seed": choose.randint(0, 10**6),
    }


def run(case: dict[str, Any]) -> None:
    first, last = results_of(launch(look, case["world_size"], case))[0]
    said = f"a residual of {first:.3g} gradients after {LOOKS[0]} steps and of {last:.3g} after {LOOKS[1]}"
    most_growth = MOST_GROWTH_IN_TAILS if case["power"] > 1 and case["in_common"] == 1.0 else MOST_GROWTH
    require(last <= most_growth * first + 0.5, f"residuals grow: {said}")
    require(last <= MOST, f"residuals are large: {said}")


def look(rank: int, world_size: int, case: dict[str, Any]) -> list[float]:
    """Length of the mean residual / typical length of a gradient, at each look."""
    if case.get("plant") == "fed back":
        codecs.by_name(case["scheme"][1]["codec"]).__class__.feeds_back = True
    driver = Driver(variant_of(case).make(), [torch.zeros(shape) for shape in case["shapes"]])
    ratios, lengths = [], []
    for step in range(N_STEPS):
        gradients = [*_gradients(case, rank, step)]
        driver.reduce(gradients)
        lengths.append(float(torch.cat([one.view(-1) for one in gradients]).norm()))
        if step in LOOKS:
            kept = driver.scheme.state_dict().get("residuals", {})
            mean = torch.cat([torch.zeros(1), *(kept[name].float().reshape(-1) for name in sorted(kept))])
            dist.all_reduce(mean)
            ratios.append(float(mean.norm()) / world_size / (sum(lengths) / len(lengths)))
    return ratios


def _gradients(case: dict[str, Any], rank: int, step: int) -> Any:
    own, common = (torch.Generator().manual_seed(case["seed"] + 7919 * k) for k in (1000 * rank + step, 10**6))
    for shape in case["shapes"]:
        values = torch.randn(shape, generator=own) + case["in_common"] * torch.randn(shape, generator=common)
        yield values ** case["power"]
