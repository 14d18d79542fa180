"""Nothing is allocated a step once warm: what whole processes ask of malloc, native threads and torch included."""

import ctypes
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import gradwire
from gradwire import schemes
from gradwire.core.bucket import Bucket
from ranks import run_ranks

N_STEPS = 8
# Below it lie Python's objects and the telemetry of a step. A bucket's smallest message here is 40 KB.
COUNTED_BYTES = 1 << 14
N_ELEMENTS = 1_300_000  # of the largest bucket: several chunks a part

compiler = shutil.which("c++")


# SlimGC compresses both buckets: what its table would send raw goes through Gloo, which asks for a block of its own a
# call, and the table is measured by the clock.
OPTIONS = {"slimgc": {"threshold_bytes": 0}}


def count_in_warm_steps(rank: int, world_size: int, name: str) -> tuple[int, int]:
    """Blocks counted in N_STEPS warm steps of two buckets, and in one block that is asked for."""
    torch.manual_seed(1)
    parameters = [nn.Parameter(torch.randn(n)) for n in (N_ELEMENTS, N_ELEMENTS // 4)]
    optimizer = torch.optim.SGD(parameters, lr=0.1)
    scheme = schemes.by_name(name, **OPTIONS.get(name, {}))
    state = gradwire.HookState(scheme, optimizer=optimizer, timeout_s=60)
    torch.manual_seed(2 + rank)
    gradients = [torch.randn(parameter.numel()) for parameter in parameters]

    def take_steps(steps: range) -> None:
        for step in steps:
            state.scheme.begin_step(step)
            for index, (gradient, parameter) in enumerate(zip(gradients, parameters, strict=True)):
                bucket = Bucket(gradient, [parameter], [0], index=index, step=step, is_last=index == 1)
                state.scheme.reduce(bucket).wait()
            state.communicator.submit(state.scheme.end_step, step).wait()

    take_steps(range(1, 25))
    process = ctypes.CDLL(None)
    process.allocations_counted.restype = ctypes.c_uint64
    process.count_allocations_from(ctypes.c_size_t(COUNTED_BYTES))
    take_steps(range(25, 25 + N_STEPS))
    n = process.allocations_counted()
    block = torch.empty(N_ELEMENTS)
    n_control = process.allocations_counted() - n
    assert block.numel()
    state.close()
    return n, n_control


NAMES = ["gcomp", "one-bit", "slimgc"]
Counts = dict[str, list[tuple[int, int]]]  # by scheme and rank


@pytest.fixture(scope="module")
def counted(tmp_path_factory: pytest.TempPathFactory) -> Counts:
    """In processes of their own: where ranks are forked from has been started without the counter."""
    counter = str(tmp_path_factory.mktemp("counter") / "counter.so")
    source = str(Path(__file__).with_name("allocation_counter.cpp"))
    subprocess.run([str(compiler), "-std=c++20", "-O1", "-shared", "-fPIC", source, "-o", counter], check=True)
    folders = os.pathsep.join(filter(None, [*sys.path, str(Path(__file__).parents[1])]))
    environment = {**os.environ, "LD_PRELOAD": counter, "PYTHONPATH": folders}
    command = [sys.executable, str(Path(__file__)), *NAMES]
    answer = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert answer.returncode == 0, answer.stderr
    return json.loads(answer.stdout)


@pytest.mark.skipif(compiler is None, reason="needs a C++ compiler")
@pytest.mark.parametrize("name", NAMES)
def test_warm_steps_ask_malloc_for_no_block(name: str, counted: Counts) -> None:
    assert len(counted[name]) == 2
    for n, n_control in counted[name]:
        assert n_control == 1, "the counter does not count"
        assert n < N_STEPS  # a list of telemetry that is full grows now and then


if __name__ == "__main__":
    print(json.dumps({name: run_ranks(count_in_warm_steps, 2, name, timeout_s=120) for name in sys.argv[1:]}))
