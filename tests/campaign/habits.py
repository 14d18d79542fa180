"""Habits of scripts: what real ones do to a training besides training it, one of them a case, under schemes as drawn.

Checked: nothing ends that DDP alone would train (a refusal by all ranks aside); ranks have equal bits where the scheme
promises it; what must not matter (a default dtype, threads and descriptors of earlier folds) does not.
"""

import gc
import os
import random
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import gradwire
from campaign import models
from campaign.findings import hash_of, launch, require, require_equal, results_of
from campaign.schemes_drawn import draw_variant, optimizer_of, variant_of
from gradwire.schemes.auto.scheme import Auto
from ranks import patience

HABITS = (
    "unfreezes a layer", "sets a default dtype", "sets a default device", "loads a state", "switches to auto and back",
    "trains in a group without rank 0", "has two optimizers", "starts local SGD apart", "makes folds and closes none",
)  # fmt: skip
_DTYPES = {"bfloat16": torch.bfloat16, "float64": torch.float64, "float16": torch.float16}


class RacingAuto(Auto):
    """`auto` in a network in which every scheme is twice as fast as plain, so that it races and switches at once."""

    def end_watched_step(self, step: int, took_ns: int, waited_ns: int, on_device: Any = None) -> None:
        times_us = 100_000 if self.active == "plain" else 50_000
        super().end_watched_step(step, 1_000 * times_us, 800 * times_us)

    def _predict(self, computing_us: int) -> dict[str, int]:
        return {row.spec: 100_000 if row.spec == "plain" else 50_000 for row in self._rows}


def draw(choose: random.Random) -> dict[str, Any]:
    habit = choose.choice(HABITS)
    racing = choose.random() < 0.5 or habit in ("loads a state", "switches to auto and back")
    return {
        "habit": habit,
        "scheme": draw_variant(choose, owns_step=False, replicas_may_differ=False, repeats=True),
        "fidelity": choose.choice(["exact", "close", "any"]) if racing else None,
        "door": choose.choice(["ddp", "module"]) if not racing and habit == "unfreezes a layer" else "ddp",
        "world_size": choose.choice([2, 2, 3]),
        "optimizer": choose.choice(["SGD", "AdamW"]),
        "dtype": choose.choice(sorted(_DTYPES)),
        "steps": choose.choice([8, 16]),
        "at": choose.randint(2, 6),
    }


def run(case: dict[str, Any]) -> None:
    outcomes = launch(train, case["world_size"] + (case["habit"] == "trains in a group without rank 0"), case)
    results = [result for result in results_of(outcomes) if result is not None]
    require_equal([result["hashes"] for result in results])
    for result in results:
        if case["fidelity"] is None and "without" in result:
            require(result["hashes"] == result["without"], "a global default changes what is trained")
        held = result.get("held", [])
        require(not held or held[-1] <= held[2], f"threads and descriptors grow from fold to fold: {held}")


def train(rank: int, world_size: int, case: dict[str, Any]) -> dict[str, Any] | None:
    if case["habit"] == "starts local SGD apart":
        return _local_sgd(rank, case)
    if case["habit"] == "makes folds and closes none":
        held, kept = [], []
        for _ in range(6):
            _train(rank, case)
            if case.get("plant") == "descriptors":
                kept.append(open(os.devnull))  # noqa: SIM115
            gc.collect()
            held.append(len(os.listdir("/proc/self/task")) + len(os.listdir("/proc/self/fd")))
        return {"hashes": [], "held": held}
    group = dist.new_group(list(range(1, world_size))) if "group" in case["habit"] else None
    try:
        found = None if group is not None and rank == 0 else {"hashes": _train(rank, case, group)}
        if found is not None and "default" in case["habit"]:
            found["without"] = _train(rank, {**case, "habit": "none"})
        return found
    finally:
        if group is not None:
            dist.barrier()  # rank 0 has the store


def _model() -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(20, 48), nn.LayerNorm(48), nn.ReLU(), nn.Linear(48, 48), nn.ReLU(), nn.Linear(48, 8))


def _train(rank: int, case: dict[str, Any], group: Any = None) -> list[str]:
    habit, model = case["habit"], _model()
    if habit == "unfreezes a layer":
        model[3].requires_grad_(False)
    is_ddp = case["door"] == "ddp"
    ddp: nn.Module = DistributedDataParallel(model, process_group=group) if is_ddp else model
    made = torch.optim.AdamW if optimizer_of(case) == "adamw" else getattr(torch.optim, case["optimizer"])
    optimizers = [made(model.parameters(), 1e-2)]
    if habit == "has two optimizers":
        matrices = [one for one in model.parameters() if one.dim() == 2]
        others = [one for one in model.parameters() if one.dim() != 2]
        optimizers = [torch.optim.SGD(matrices, 1e-2, momentum=0.9), torch.optim.AdamW(others, 1e-3)]
    given: Any = optimizers if len(optimizers) > 1 else optimizers[0]
    scheme: Any = variant_of(case).make() if case["fidelity"] is None else RacingAuto(case["fidelity"])
    attachment = gradwire.attach(ddp, given, scheme, timeout_s=60 * patience())
    inputs = [models.batch_for(rank, step) for step in range(case["steps"])]
    if habit == "sets a default dtype":
        torch.set_default_dtype(_DTYPES[case["dtype"]])
    elif habit == "sets a default device":
        torch.set_default_device("meta")
    hashes = []
    try:
        for step, batch in enumerate(inputs):
            if step == case["at"]:
                if habit == "loads a state":
                    attachment.load_state_dict(attachment.state_dict())
                elif habit == "switches to auto and back":
                    attachment.switch(variant_of(case).make())
                elif habit == "unfreezes a layer":
                    model[3].requires_grad_(True)
                    if is_ddp:  # as one does with DDP, which looks at what is trained when it is made
                        ddp = DistributedDataParallel(model)
                        attachment = gradwire.attach(ddp, given, "plain", timeout_s=60 * patience())
            elif step == case["at"] + 1 and habit == "switches to auto and back":
                attachment.switch(RacingAuto(case["fidelity"]))
            models.take_step(ddp, batch, *optimizers)
            if (case.get("plant") == "drift" and rank) or (case.get("plant") == "default" and "default" in habit):
                models.nudge(model[0].weight)
            hashes.append(hash_of(model))
    finally:
        torch.set_default_dtype(torch.float32)
        torch.set_default_device(None)
    if habit != "makes folds and closes none":
        attachment.close()
    return hashes


def _local_sgd(rank: int, case: dict[str, Any]) -> dict[str, Any]:
    """The fingerprints after each exchange; a refusal is as good as equal replicas."""
    model = _model()
    if rank:
        with torch.no_grad():
            model[0].weight.add_(1e-3 * rank)
    optimizer = getattr(torch.optim, case["optimizer"])(model.parameters(), 1e-2)
    local = gradwire.LocalSgd(model, optimizer, "plain", every=3, timeout_s=60 * patience())
    hashes = []
    for step in range(9):
        models.take_step(model, models.batch_for(rank, step), optimizer)
        if step % 3 == 2:
            hashes.append(hash_of(model))
    local.close()
    return {"hashes": hashes}
