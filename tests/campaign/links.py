"""Links: in a lab of real network namespaces a rank's link fails, for a moment or for good, or its host is gone.

What is short is ridden out with equal bits; what lasts is a typed error on every rank that lives, in time. Where the
victim is rank 0 the store is out of reach, or gone, too. Needs the right to make network namespaces.
"""

import json
import os
import random
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import gradwire
from campaign import faults, models
from campaign.findings import Refused, hash_of, require, require_equal
from campaign.schemes_drawn import draw_variant, variant_of
from gradwire_lab.ranks.netlab import Netlab
from ranks import patience

SHORT = ("down and up", "slow for a moment", "lossy for a moment", "far for a moment")
LASTING = ("down", "host gone")
HARMS = SHORT + LASTING
# Until it is ridden out, TCP repeats itself at ever longer intervals: the timeout must be well above the harm.
TIMEOUT_S = {**dict.fromkeys(SHORT, 30.0), **dict.fromkeys(LASTING, 4.0)}
# What a line of this lab can have beside its rate; these harms change it in the middle.
WAYS = ("", "/delay=2ms", "/delay=20ms/jitter=2ms/loss=0.05%", "/delay=5ms/down=50mbit")
DISTANT = {"lossy for a moment": {"loss": "10%"}, "far for a moment": {"delay": "150ms"}}
STEP_S = 0.05
N_STEPS = 40  # after a short harm; a lasting one ends the training


def draw(choose: random.Random) -> dict[str, Any]:
    world_size = choose.choice([2, 2, 3, 4])
    harm = choose.choice(HARMS)
    ways = [way for way in WAYS if way or harm not in DISTANT]
    return {
        "harm": harm,
        "way": choose.choice(ways),
        "scheme": draw_variant(choose, replicas_may_differ=False, errors_are_ours=True),
        "world_size": world_size,
        "victim": choose.randrange(world_size),
        "step": choose.randint(2, 6),
        "delay_ms": choose.choice([0, 3, 30]),
        "down_s": choose.choice([0.02, 0.3, 1.5]),
        "width": choose.choice([20, 300]),
        "bucket_cap_mb": choose.choice([0.005, 25]),
        "optimizer": choose.choice(["sgd", "momentum", "adamw"]),
    }


def run(case: dict[str, Any]) -> None:
    harm, victim = case["harm"], case["victim"]
    told: dict[int, dict[str, Any]] = {}
    began: list[float] = []

    def on_line(rank: int, line: str) -> None:
        found = json.loads(line)
        if "step" not in found:
            told[rank] = found
        elif found["step"] == case["step"] and rank == victim:
            began.append(time.monotonic())

    folders = [str(Path(__file__).parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])]
    variables = {"PYTHONPATH": os.pathsep.join(folders), "TORCH_CPP_LOG_LEVEL": "FATAL"}
    patience_s = (60 + TIMEOUT_S[harm]) * patience()
    try:
        with Netlab(case["world_size"], "200mbit" + case["way"], require_shaping=True) as lab:
            lab.start(
                [sys.executable, "-m", "campaign.links", json.dumps(case)], variables, grace_s=1_000, on_line=on_line
            )
            give_up = time.monotonic() + patience_s
            while not began and len(told) < case["world_size"]:
                require(time.monotonic() < give_up, f"no rank has come to step {case['step']}: {told}")
                time.sleep(0.005)
            time.sleep(case["delay_ms"] / 1e3)
            _do_harm(lab, case)
            result = lab.wait(patience_s)
    except gradwire.Unsupported as error:
        raise Refused(str(error)) from error
    require(not result.timed_out, f"a rank hangs: {result}; {told}")
    _judge(case, told)


def _do_harm(lab: Netlab, case: dict[str, Any]) -> None:
    harm, victim = case["harm"], case["victim"]
    if harm == "host gone":
        lab.link_down(victim)  # nobody hears of the end of its processes
        lab.kill_rank(victim)
    elif harm in DISTANT:
        line = dict(word.split("=") for word in case["way"].split("/")[1:])
        lab.set_line(victim, **DISTANT[harm])
        time.sleep(case["down_s"])
        lab.set_line(victim, **{name: line.get(name, "0%") for name in DISTANT[harm]})
    elif harm == "slow for a moment":
        lab.set_rate(victim, "1mbit")
        time.sleep(case["down_s"])
        lab.set_rate(victim, "200mbit")
    else:
        lab.link_down(victim)
        if harm == "down and up":
            time.sleep(case["down_s"])
            lab.link_up(victim)


def _judge(case: dict[str, Any], told: dict[int, dict[str, Any]]) -> None:
    ranks = set(range(case["world_size"]))
    if all(one.get("refused") for one in told.values()) and told.keys() == ranks:
        raise Refused(told[0]["error"])
    living = ranks - {case["victim"]} if case["harm"] == "host gone" else ranks
    require(told.keys() >= living, f"ranks {sorted(living - told.keys())} ended without a word: {told}")
    if case["harm"] in SHORT:
        for rank in living:
            require("hashes" in told[rank], f"rank {rank} raised, though {case['harm']!r} is ridden out: {told[rank]}")
        require_equal([told[rank]["hashes"] for rank in sorted(living)])
        return
    for rank in living:
        error = told[rank].get("error")
        require(error is not None, f"rank {rank} noticed nothing")
        require(told[rank]["typed"] and len(error) > 20, f"rank {rank} got no typed error:\n{error}")


def _train(case: dict[str, Any], rank: int) -> dict[str, Any]:
    ddp = faults.build(case)
    optimizer = models.OPTIMIZERS[case["optimizer"]](ddp.parameters())
    variant = variant_of(case)
    attachment = gradwire.attach(ddp, optimizer, variant.make(), timeout_s=TIMEOUT_S[case["harm"]])
    hashes = []
    for step in range(case["step"] + N_STEPS if case["harm"] in SHORT else 100_000):
        print(json.dumps({"step": step}), flush=True)
        models.take_step(ddp, models.batch_for(rank, step), optimizer)
        if not variant.owns_step:
            hashes.append(hash_of(ddp.module))
        time.sleep(STEP_S)
    attachment.close()
    return {"hashes": [*hashes, hash_of(ddp.module)]}


def _main() -> None:
    case = json.loads(sys.argv[1])
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    try:
        told = _train(case, rank)
    except Exception as error:
        is_typed = isinstance(error, gradwire.GradwireError) and case.get("plant") != "untyped"
        is_refused = isinstance(error, gradwire.Unsupported | gradwire.InvalidArgument)
        told = {"error": f"{type(error).__name__}: {error}", "typed": is_typed, "refused": is_refused}
        if case.get("plant") == "silent" and rank != case["victim"]:
            told = {"hashes": []}
    print(json.dumps(told), flush=True)
    os._exit(0)


if __name__ == "__main__":
    _main()
