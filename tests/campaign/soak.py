"""Soak: many steps, and many attachments one after another; memory, descriptors and threads stay flat.

The first part of the steps fills what is allocated once; from then on nothing may grow.
"""

import os
import random
import threading
from pathlib import Path
from typing import Any

import torch

import gradwire
from campaign import models, trainings
from campaign.findings import hash_of, launch, require, require_equal, results_of
from campaign.schemes_drawn import draw_variant, optimizer_of, variant_of
from ranks import patience

# What the allocator and torch's caches may still take in thousands of steps.
MAX_GROWTH_BYTES = 6_000_000
_FIXED = {"world_size": 2, "dtype": "float32", "bucket_cap_mb": 0.01, "view": False, "static_graph": False}


def draw(choose: random.Random) -> dict[str, Any]:
    many = choose.random() < 0.7
    return {
        "scheme": draw_variant(choose),
        "model": choose.choice(["mlp", "attention", "branches"]),
        "optimizer": choose.choice(["sgd", "adamw"]),
        **_FIXED,
        "n_attachments": 1 if many else 30,
        "n_steps": choose.choice([1_000, 2_000, 4_000]) if many else 5,
    }


def run(case: dict[str, Any]) -> None:
    results = results_of(launch(wear, case["world_size"], case, timeout_s=400))
    if not variant_of(case).replicas_may_differ:
        require_equal([[result["hash"]] for result in results])
    for rank, result in enumerate(results):
        first, last = result["first"], result["last"]
        said = f"on rank {rank} from {first} to {last}"
        require(last["descriptors"] <= first["descriptors"] + 2, f"descriptors grow {said}")
        require(last["threads"] <= first["threads"] + 1, f"threads grow {said}")
        require(last["bytes"] - first["bytes"] <= MAX_GROWTH_BYTES, f"memory grows {said}")


def wear(rank: int, world_size: int, case: dict[str, Any]) -> dict[str, Any]:
    ddp = trainings.build(case)
    optimizer = models.OPTIMIZERS[optimizer_of(case)](ddp.parameters())
    hoard: list[Any] = []
    n_total, n_done, first = case["n_attachments"] * case["n_steps"], 0, {}
    for _ in range(case["n_attachments"]):
        attachment = gradwire.attach(ddp, optimizer, variant_of(case).make(), timeout_s=60 * patience())
        for _ in range(case["n_steps"]):
            models.take_step(ddp, models.batch_for(rank, n_done % 50), optimizer)
            n_done += 1
            if n_done == n_total // 3:
                first = holdings()
            _leak(case.get("plant"), hoard)
        attachment.close()
    return {"first": first, "last": holdings(), "hash": hash_of(ddp.module)}


def _leak(plant: str | None, hoard: list[Any]) -> None:
    if plant == "memory":
        hoard.append(torch.ones(30_000))
    elif plant == "descriptors":
        hoard.append(os.open("/dev/null", os.O_RDONLY))
    elif plant == "threads":
        hoard.append(threading.Thread(target=threading.Event().wait, daemon=True))
        hoard[-1].start()


def holdings() -> dict[str, int]:
    """What this process holds: resident bytes, open descriptors, threads of the operating system."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return {
        "bytes": pages * os.sysconf("SC_PAGE_SIZE"),
        "descriptors": len(os.listdir("/proc/self/fd")),
        "threads": len(os.listdir("/proc/self/task")),
    }
