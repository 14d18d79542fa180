"""Buckets reduced on the late device, by emulated kernels and the backend's collectives: the bits of the CPU."""

from __future__ import annotations

import contextlib
import functools
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import emulated
import late as late_device
import pytest
import torch
import torch.distributed as dist
from late_cases import CPU, N_STEPS, Place, adamw, attach, batch, begin, bits_of, build_model
from test_ddp_on_device import accumulate_and_clip, join_with_uneven_inputs, keep_graph_static, mix_dtypes, view_buckets
from test_staged_schemes import counting_waits_of_hooks
from torch import Tensor

import gradwire
from gradwire import schemes
from gradwire.core.site import ResidentBucket, Site
from gradwire.gpu import kernels
from gradwire.schemes import Scheme
from ranks import run_ranks, try_ranks

Maker = Callable[[], Scheme]

SCHEMES: dict[str, Maker] = {
    "plain": lambda: schemes.by_name("plain"),
    "bf16": lambda: schemes.by_name("bf16"),
    "one-bit": lambda: schemes.by_name("one-bit"),
    "one-bit in small messages": lambda: schemes.by_name("one-bit", scale="two-means", chunk_elements=500),
    "one-bit without feedback": lambda: schemes.by_name("one-bit", error_feedback=False),
    "one-bit after plain steps": lambda: schemes.by_name("one-bit", warmup_steps=2),
    "two-bit": lambda: schemes.by_name("two-bit"),
    "qsgd": lambda: schemes.by_name("qsgd"),
}


def begin_with_kernels(library: Path) -> tuple[Any, Place]:
    late, place = begin(library)
    kernels.MAKERS["late"] = functools.partial(emulated.LateKernels, emulated.build(), late)
    kernels._made.clear()
    return late, place


def train(rank: int, place: Place, scheme: Scheme, n_steps: int = N_STEPS) -> Tensor:
    ddp = place.model(build_model())
    optimizer = adamw(ddp)
    attachment = attach(ddp, optimizer, scheme, **placement_on(place))
    for step in range(n_steps):
        optimizer.zero_grad()
        (ddp(batch(rank, step, place)) - 1.0).square().mean().backward()
        optimizer.step()
    attachment.close()
    return bits_of(ddp)


def placement_on(place: Place) -> dict[str, str]:
    return {} if place.device == CPU else {"placement": "device"}


# ---- bits


def train_on_both(rank: int, world_size: int, library: Path, names: list[str], latenesses_us: list[int]) -> None:
    late, device = begin_with_kernels(library)
    for name in names:
        late.set_lateness_us(0)
        expected = train(rank, Place(CPU), SCHEMES[name]())
        for lateness_us in latenesses_us:
            late.set_lateness_us(lateness_us)
            with counting_waits_of_hooks(late) as waits:
                found = train(rank, device, SCHEMES[name]())
            assert not any(waits), f"{name}: autograd's thread waited for the device"
            assert torch.equal(found, expected), f"{name}, {lateness_us} us: off by {(found - expected).abs().max()}"
    assert late.n_waits_with_gil() == 0, "a thread waited for the device and held up all others"


@pytest.mark.parametrize(("world_size", "latenesses_us"), [(1, [1_000]), (2, [0, 5_000]), (3, [1_000])])
def test_bits_are_the_cpus(library: Path, world_size: int, latenesses_us: list[int]) -> None:
    run_ranks(train_on_both, world_size, library, list(SCHEMES), latenesses_us, timeout_s=170)
