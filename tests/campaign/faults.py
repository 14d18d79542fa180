"""Faults: whatever one rank does or suffers, every other one gets a typed error in time, or trains on with equal bits.

The harm comes to one rank (or two) at a drawn step of a drawn training. What is lawful (one rank with other threads, a
NaN on one rank, an error that all ranks catch and recover from) has to end well.
"""

import os
import random
import signal
import subprocess
import threading
import time
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import gradwire
from campaign import models
from campaign.findings import Refused, hash_of, launch, require, require_equal, results_of
from campaign.schemes_drawn import draw_variant, optimizer_of, variant_of
from flipping import flip_what_comes
from ranks import Outcome

TIMEOUT_S = 6.0
# From the harm to the error, beyond the timeout: for a busy machine.
GRACE_S = 60.0


class UsersOwn(Exception):
    """What a user's script raises."""


# What becomes of the rank that suffers: it dies, it ends with an error of its own, it gets a typed one as all others do.
DIES = ("kill", "kill in mid-step", "exit", "kill two", "kill the store's host")
RAISES = ("raise in forward", "raise in backward", "raise in optimizer")
SHARES = ("stop", "sleep", "other scheme", "other options", "count a step too many", "close alone")
LEAVES = ("leave", "skip a step")
HARMLESS = ("destroy the group",)  # may go on: gradwire has a group of its own
LAWFUL = ("other threads", "nan", "caught and attached again", "slow for a moment")
FLIPS = ("flip a bit",)  # of what one rank sends another over the engine, if it sends so much
HARMS = DIES + RAISES + SHARES + LEAVES + HARMLESS + LAWFUL + FLIPS


def draw(choose: random.Random) -> dict[str, Any]:
    harm = choose.choice(HARMS)
    scheme = draw_variant(choose, replicas_may_differ=False, errors_are_ours=True)
    world_size = choose.choice([3, 4] if harm == "kill two" else [2] if harm in FLIPS else [2, 2, 3, 4])
    return {
        "harm": harm,
        "scheme": scheme,
        "world_size": world_size,
        "victim": 0 if harm == "kill the store's host" else choose.randrange(world_size),
        # Not in steps 0 and 1: DDP itself talks there, to agree on its buckets, and its errors are torch's.
        "step": choose.randint(2, 4),
        "delay_ms": choose.choice([0, 1, 3, 10]),
        "width": choose.choice([20, 60, 300]),
        "bucket_cap_mb": choose.choice([0.005, 0.02, 25]),
        "optimizer": choose.choice(["sgd", "momentum", "adamw"]),
        "place": int(45 * 2 ** (9 * choose.random())),
    }


def run(case: dict[str, Any]) -> None:
    outcomes = launch(train, case["world_size"], case, timeout_s=TIMEOUT_S + GRACE_S)
    harm = case["harm"]
    if all(isinstance(one.error, gradwire.Unsupported | gradwire.InvalidArgument) for one in outcomes):
        raise Refused(str(outcomes[0].error))
    if harm in LAWFUL or (harm in HARMLESS + FLIPS and all(outcome.error is None for outcome in outcomes)):
        require_equal([result["hashes"] for result in results_of(outcomes)])
        return
    victims = set() if harm in FLIPS else _victims(case)
    for rank, outcome in enumerate(outcomes):
        if rank in victims:
            _check_victim(harm, rank, outcome)
        else:
            require(outcome.error is not None, f"rank {rank} noticed nothing: {outcome.result}")
            _check_typed(rank, outcome)


def _victims(case: dict[str, Any]) -> set[int]:
    victims = {case["victim"]}
    return victims | {(case["victim"] + 1) % case["world_size"]} if case["harm"] == "kill two" else victims


def _check_typed(rank: int, outcome: Outcome) -> None:
    typed = isinstance(outcome.error, gradwire.GradwireError)
    require(typed, f"rank {rank} got no typed error (exit code {outcome.exit_code}):\n{outcome.traceback}")
    require(len(str(outcome.error)) > 20, f"rank {rank}'s error says nothing: {outcome.error!r}")


def _check_victim(harm: str, rank: int, outcome: Outcome) -> None:
    if harm in DIES:
        require(outcome.exit_code not in (0, None), f"rank {rank} should have died: {outcome}")
    elif harm in RAISES:
        own = isinstance(outcome.error, UsersOwn)
        require(own, f"rank {rank}'s own error was replaced:\n{outcome.traceback}")
    elif harm in SHARES:
        require(outcome.error is not None, f"rank {rank} noticed nothing of its {harm!r}")
        _check_typed(rank, outcome)
    # Who leaves, or ends a step early, or destroys its group under its model, has ended well or with whatever torch says.


def build(case: dict[str, Any]) -> DistributedDataParallel:
    torch.manual_seed(1)
    width = case["width"]
    model = nn.Sequential(nn.Linear(20, width), nn.ReLU(), nn.Linear(width, 8), nn.Linear(8, 3))
    return DistributedDataParallel(model, bucket_cap_mb=case["bucket_cap_mb"])


def train(rank: int, world_size: int, case: dict[str, Any]) -> dict[str, Any]:
    """Seven steps on every rank, harm at the drawn one; until it is noticed, where it comes some time later."""
    harm, is_victim = case["harm"], rank in _victims(case)
    plant = case.get("plant") if not is_victim else None
    if harm == "other threads" and is_victim:
        gradwire.set_thread_count(2)
    flipping = flip_what_comes(case["place"]) if harm in FLIPS and rank == 0 else None
    ddp = build(case)
    optimizer = models.OPTIMIZERS[optimizer_of(case)](ddp.parameters())
    variant = variant_of(case)
    scheme: Any = variant.make()
    if is_victim and harm == "other scheme":
        scheme = "zlib" if variant.name == "plain" else "plain"
    elif is_victim and harm == "other options":
        scheme = gradwire.schemes.by_name("gcomp", refresh_every=7)
    elif harm == "other options":
        scheme = "gcomp"
    attachment = gradwire.attach(ddp, optimizer, scheme, timeout_s=TIMEOUT_S)
    n_steps = 1_000_000 if harm == "kill in mid-step" else 7
    hashes, step, harmed = [], 0, False
    while step < n_steps:
        try:
            if step == case["step"] and flipping is not None:
                flipping.set()
            if step == case["step"] and is_victim and not harmed:
                harmed = True
                if harm == "skip a step":
                    step += 1
                if harm == "leave":
                    return {"hashes": hashes}
                do_harm(case, ddp, optimizer, attachment)
            factor = torch.nan if harm == "nan" and is_victim and step == 3 else 1.0
            models.take_step(ddp, models.batch_for(rank, step), optimizer, factor=factor)
        except (gradwire.GradwireError, UsersOwn):
            if plant == "untyped":
                raise RuntimeError("planted") from None
            if plant == "hang":
                time.sleep(3_600)
            if plant == "silent":
                return {"hashes": hashes}
            if harm != "caught and attached again" or step >= 6:
                raise
            # As a script may: all ranks have come to know of it, begin this step anew from the same parameters.
            attachment.close()
            dist.barrier()
            optimizer.zero_grad()
            ddp = build(case)
            optimizer = models.OPTIMIZERS[optimizer_of(case)](ddp.parameters())
            attachment = gradwire.attach(ddp, optimizer, variant.make(), timeout_s=TIMEOUT_S)
            hashes, step = [], 6  # one step of the new life is enough
            continue
        step += 1
        if plant == "drift":
            models.nudge(ddp.module[0].weight)
        if not variant.owns_step:
            hashes.append(hash_of(ddp.module))
    attachment.close()
    return {"hashes": [*hashes, hash_of(ddp.module)]}


def do_harm(case: dict[str, Any], ddp: Any, optimizer: Any, attachment: Any) -> None:
    harm, delay_s = case["harm"], case["delay_ms"] / 1e3
    if harm in ("kill", "kill two", "kill the store's host"):
        time.sleep(delay_s)
        os.kill(os.getpid(), signal.SIGKILL)
    elif harm == "kill in mid-step":
        threading.Timer(delay_s, os.kill, (os.getpid(), signal.SIGKILL)).start()
        while True:  # the timer ends it, sooner or later in one of these
            models.take_step(ddp, models.batch_for(0, 0), optimizer)
            time.sleep(1e-3)
    elif harm == "exit":
        os._exit(3)
    elif harm == "stop":
        subprocess.Popen(["sh", "-c", f"sleep {TIMEOUT_S + 3}; kill -CONT {os.getpid()}"])
        os.kill(os.getpid(), signal.SIGSTOP)
    elif harm == "sleep":
        time.sleep(TIMEOUT_S + 3)
    elif harm == "slow for a moment":
        time.sleep(1.0)
    elif harm in ("raise in forward", "caught and attached again"):
        handle = ddp.module[0].register_forward_pre_hook(_raise)
        try:
            ddp(torch.zeros(1, 20))
        except UsersOwn:
            if harm == "raise in forward":
                raise
            attachment.close()  # the others' exchange ends when this rank's does
            raise
        finally:
            handle.remove()
    elif harm == "raise in backward":
        ddp.module[0].weight.register_hook(_raise)
    elif harm == "raise in optimizer":
        optimizer.register_step_pre_hook(_raise)
    elif harm == "count a step too many":
        state = attachment.state_dict()
        attachment.load_state_dict({**state, "step": state["step"] + 1})
    elif harm == "close alone":
        attachment.close()
    elif harm == "destroy the group":
        dist.destroy_process_group()


def _raise(*_: Any) -> None:
    raise UsersOwn("a bug of the user's own")
